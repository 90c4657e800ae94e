"""All pairs of hosts, in rounds in which every host is in at most one pair, so that no pair slows another down."""

from __future__ import annotations


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts, each once, by the circle method of round-robin tournaments: one host keeps its
    position, and the others rotate by one position in each round."""
    seats = list(range(count + count % 2))  # with an odd number, one host has no partner in each round
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]
