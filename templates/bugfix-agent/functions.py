"""The functions in the repositories.

They have no recursion and no `while`, because every changed function must still end. An argument's name decides its
values (``repository.KINDS``). Docstrings have one line.
"""


def add(number, other):
    """The sum of number and other."""
    return number + other


def sub(number, other):
    """The difference of number and other."""
    return number - other


def mul(number, other):
    """The product of number and other."""
    return number * other


def div(number, step):
    """How many times step goes into number, rounded down."""
    return number // step


def rest(number, step):
    """The remainder of number divided by step."""
    return number % step


def double(number):
    """Twice the number given as number."""
    return number * 2


def triple(number):
    """Three times number."""
    return number * 3


def half(number):
    """One half of number, rounded down."""
    return number // 2


def inc(number):
    """One more than number."""
    return number + 1


def dec(number):
    """One less than number."""
    return number - 1


def even(number):
    """Whether number can be divided by two."""
    return number % 2 == 0


def less(number, other):
    """Whether number is smaller than other."""
    return number < other


def more(number, other):
    """Whether number is larger than other."""
    return number > other


def same(number, other):
    """Whether number and other are equal."""
    return number == other


def differ(number, other):
    """Whether number and other are different."""
    return number != other


def at_most(number, other):
    """Whether number is other or smaller."""
    return number <= other


def at_least(number, other):
    """Whether number is other or larger."""
    return number >= other


def smallest(numbers):
    """The smallest of numbers."""
    return min(numbers)


def largest(numbers):
    """The largest of numbers."""
    return max(numbers)


def total(numbers):
    """The sum of numbers."""
    return sum(numbers)


def size(numbers):
    """How many numbers there are."""
    return len(numbers)


def first(numbers):
    """The first of numbers."""
    return numbers[0]


def second(numbers):
    """The second of numbers."""
    return numbers[1]


def third(numbers):
    """The third of numbers."""
    return numbers[2]


def last(numbers):
    """The last of numbers."""
    return numbers[-1]


def tail(numbers):
    """All of numbers but the first one."""
    return numbers[1:]


def shout(text):
    """The same text in capital letters."""
    return text.upper()


def whisper(text):
    """The same text in small letters."""
    return text.lower()


def both(flag, switch):
    """Whether flag and switch are both true."""
    return flag and switch


def either(flag, switch):
    """Whether flag or switch is true, or both are."""
    return flag or switch


def between(number, low, high):
    """Whether number is at least low and at most high."""
    return low <= number and number <= high


def spread(numbers):
    """The distance of the largest of numbers from the smallest."""
    return max(numbers) - min(numbers)


def ends(numbers):
    """The first of numbers plus the last."""
    return numbers[0] + numbers[-1]


def distance(number, other):
    """How far number is from other; never negative."""
    return abs(number - other)


def round_down(number, step):
    """The largest multiple of step that is not more than number."""
    return number - number % step


def perimeter(number, other):
    """Of a rectangle with the sides number and other."""
    return 2 * (number + other)


def clamp(number, low, high):
    """The low bound if number is smaller, else the high bound if number is larger, else number."""
    if number < low:
        return low
    if number > high:
        return high
    return number


def count_above(numbers, low):
    """How many of numbers are larger than low."""
    found = 0
    for one in numbers:
        if one > low:
            found += 1
    return found


def largest_gap(numbers):
    """The largest distance between neighbours in numbers."""
    best = 0
    for index in range(1, len(numbers)):
        best = max(best, abs(numbers[index] - numbers[index - 1]))
    return best


def running_total(numbers):
    """The sums of the first one, two, three and more of numbers."""
    so_far = 0
    sums = []
    for one in numbers:
        so_far = so_far + one
        sums.append(so_far)
    return sums


def factorial(count):
    """The product of the integers from 1 to count."""
    product = 1
    for one in range(2, count + 1):
        product = product * one
    return product


def sum_to(count):
    """The sum of the integers from 1 to count."""
    result = 0
    for one in range(1, count + 1):
        result = result + one
    return result


def fibonacci(count):
    """The Fibonacci number with the index count: 0, 1, 1, 2, 3, 5, ..."""
    now, following = 0, 1
    for _ in range(count):
        now, following = following, now + following
    return now


def second_largest(numbers):
    """The second of numbers when they are in falling order."""
    ordered = sorted(numbers)
    return ordered[-2]


def median(numbers):
    """The middle of numbers in rising order; the lower one of the two where there are two."""
    ordered = sorted(numbers)
    middle = (len(ordered) - 1) // 2
    return ordered[middle]


def count_letter(text, letter):
    """How often letter occurs in text, in capital and in small letters."""
    found = 0
    for one in text.lower():
        if one == letter.lower():
            found += 1
    return found


def initials(text):
    """The first letters of the words in text, in capital letters."""
    letters = ""
    for word in text.split():
        letters = letters + word[0].upper()
    return letters


def position(numbers, number):
    """The index of the first of numbers that equals number, or -1 if there is none."""
    for index in range(len(numbers)):
        if numbers[index] == number:
            return index
    return -1


def every_other(numbers):
    """The elements of numbers with an even index."""
    kept = []
    for index in range(len(numbers)):
        if index % 2 == 0:
            kept.append(numbers[index])
    return kept


def grade(number):
    """`high` from 10 on, `middle` from 5 on, else `low`."""
    if number >= 10:
        return "high grade"
    if number >= 5:
        return "middle grade"
    return "no grade"


def fare(count, flag):
    """3 for each of count, 2 with flag; none is free, and the first 2 cost 1 more each."""
    price = 3
    if flag:
        price = 2
    return count * price + min(count, 2)
