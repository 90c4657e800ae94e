"""The sandbox confines hostile code, and only correct answers pass its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.sandbox import bubblewrap
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.sandbox.judge import Check, Limits, SandboxKind, run
from asyncrl_cli.sandbox.trial import check_judge
from tests.sandbox import attacks as hostile
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP, NEEDS_ROOT, run_as_ordinary_user

pytestmark = [pytest.mark.slow, NEEDS_BUBBLEWRAP]

LIMITS = Limits(time_s=20.0, memory_mb=512, disk_mb=16, processes=16)
SHORT = Limits(time_s=0.5, memory_mb=512, disk_mb=16, processes=16)
ATTACKS = Path(hostile.__file__)


def passes(code: str, *tests: str, limits: Limits = LIMITS, kind: SandboxKind = "bubblewrap") -> list[bool]:
    return run(code, [Check(test) for test in tests or ("assert f() == 1",)], limits, kind)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = psutil.Process().children(recursive=True)
    yield
    assert [process for process in psutil.Process().children(recursive=True) if process not in before] == []


def test_no_process_is_left_where_orphans_are_adopted() -> None:
    script = (
        "import psutil\nfrom asyncrl_cli.system.process_tree import adopt_orphans\n"
        "from asyncrl_cli.sandbox.judge import Check, Limits, run\nadopt_orphans()\n"
        "print(run('x = 1', [Check('assert x == 1')], Limits(), 'bubblewrap'))\n"
        "print(psutil.Process().children(recursive=True))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[True]\n[]\n"


# -- what code cannot do


def attacks(outside: Path, owner: int) -> str:
    """The attacks as a solution that knows the paths of the machine's files and the pid of its owner."""
    code = ATTACKS.read_text().replace('OUTSIDE = "/"', f"OUTSIDE = {str(outside)!r}")
    return code.replace("OWNER = 1 ", f"OWNER = {owner} ")


def successful_attacks(outside: Path) -> list[str]:
    code = attacks(outside, os.getpid())
    names = [attack.__name__ for attack in hostile.ATTACKS]
    passed = run(code, [Check(f"assert {name}() == ''") for name in names], LIMITS, "bubblewrap")
    successful = [name for name, harmless in zip(names, passed, strict=True) if not harmless]
    for name in (attack.__name__ for attack in hostile.FATAL):
        # The sandbox may have killed it: then it reports no success either.
        if run(code, [Check(f"assert {name}() != ''")], LIMITS, "bubblewrap") == [True]:
            successful.append(name)
    return successful


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    for name in ("secret", "writable"):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o666)
    return tmp_path


def test_no_attack_escapes_as_root(outside: Path) -> None:
    assert successful_attacks(outside) == []
    assert sorted(path.name for path in outside.iterdir()) == ["secret", "writable"]


@NEEDS_ROOT
def test_no_attack_escapes_as_an_ordinary_user() -> None:
    result = run_as_ordinary_user(
        "import os; from pathlib import Path; from tempfile import TemporaryDirectory;"
        "from tests.sandbox.test_judged_code import *;"
        "folder = TemporaryDirectory(dir='/var/tmp'); outside.__wrapped__(Path(folder.name));"
        "assert os.getuid() == 65534; print(successful_attacks(Path(folder.name)))"
    )
    assert result.stdout.strip() == "[]", result.stderr


FORGED = """
import json, os
from asyncrl_cli.sandbox.wire import packed
def send(*messages):
    data = packed([json.dumps(message).encode() for message in messages])
    for fd in range(3, 64):
        try: os.write(fd, data)
        except OSError: pass
"""
PEER = """
import gc
from asyncrl_cli.sandbox.judged_code import Code
code = [one for one in gc.get_objects() if isinstance(one, Code)][0]
"""
CHEATS = {
    "a replaced exec": "import builtins\nbuiltins.exec = lambda *a, **k: None\ndef f(): return 0",
    "a replaced compile": "import builtins\nbuiltins.compile = lambda *a, **k: ''\ndef f(): return 0",
    "no assertion errors": "import builtins\nbuiltins.AssertionError = None\ndef f(): return 0",
    "equal to everything": "class f:\n    __eq__ = lambda *a: True\n    __hash__ = None",
    "a number equal to everything": "class One(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__\n"
    "def f(): return One(0)",
    "numbers of its own": "class One:\n    __sub__ = __rsub__ = __add__ = __abs__ = lambda *a: 0.0\n"
    "    __le__ = __lt__ = __ge__ = __gt__ = __contains__ = __eq__ = lambda *a: True\ndef f(): return One()",
    "builtins of its own": "def abs(*a): return 0\ndef isinstance(*a): return True\ndef len(*a): return 1\n"
    "def all(*a): return True\ndef f(): return 0",
    "leaving": "import os\ndef f(): os._exit(0)",
    "exiting": "import sys\ndef f(): sys.exit(0)",
    "leaving at once": "import os; os._exit(0)",
    "the report": "import os\nfor fd in range(64):\n    try: os.write(fd, b'b111111')\n    except OSError: pass\n"
    "def f(): return 0",
    "the report, later": "import os\ndef f():\n    for fd in range(64):\n"
    "        try: os.write(fd, b'b111111')\n        except OSError: pass\n    return 0",
    "closed pipes": "import os; os.closerange(0, 64)\ndef f(): return 0",
    "answers in advance": FORGED + "send(['value', 1, None])\ndef f(): raise SystemExit",
    "two answers in a message": FORGED + "def f():\n    send(['value', 1, None], ['value', 1, None])\n    return 0",
    "an empty message": FORGED + "def f():\n    send()\n    return 0",
    "changed arguments": FORGED + "def f():\n    send(['value', 0, ['list', ['list', 1], ['dict']]])\n    return 0",
    "a call of a builtin": FORGED
    + "def f():\n    send(['ask', 'call', ['list', ['builtin', 'exit'], 0], ['dict']])\n    return 0",
    "a call of what was not handed over": FORGED
    + "def f():\n    send(['ask', 'call', ['list', ['yours', -1]], ['dict']])\n    return 0",
    "questions of its own": PEER
    + "def f():\n    for action in ('run', 'getattr', 'update', 'await', 'input', 'next'):\n"
    "        try: return code.ask(action, 'EXPECTED')\n        except BaseException: pass\n    return 0",
    "changed modules of the sandbox": "import asyncrl_cli.sandbox.exchange as e, os\ndef f():\n    try:\n"
    "        for name in os.listdir(os.path.dirname(e.__file__)): open(os.path.dirname(e.__file__) + '/' + name, 'a')\n"
    "    except OSError: return 0\n    return 1",
    "another standard output": "import sys\nclass Out:\n    def write(self, text): return 1\nsys.stdout = Out()\n"
    "def f(): return 0",
    "messages without end": "import os\ndef f():\n    for fd in range(3, 64):\n"
    "        try: os.write(fd, b'\\xff' * 4096)\n        except OSError: pass",
    "frames and objects": "import gc, sys\ndef f():\n"
    "    frame, word = sys._getframe().f_back, ''.join(['EXPEC', 'TED'])\n"
    "    while frame:\n        if word in repr(frame.f_locals) + repr(frame.f_globals): return 1\n"
    "        frame = frame.f_back\n    return int(any(word in o for o in gc.get_objects() if type(o) is dict))",
    "an array at any address": "class Array:\n    __array_interface__ = {'data': (4096, False), 'shape': (1,),"
    " 'typestr': '<i8', 'version': 3}\ndef f(): return Array()",
    "JSON of its own": 'import json\njson.dumps = lambda *a, **k: \'["value", {"a": 1}, null, ""]\'\ndef f(): return 0',
    "functions that it was not given": (
        "import asyncrl_cli.sandbox.judged_code as c\ndef f(): return c.RemoteFunction(None, 0)"
    ),
}
TESTS = (
    "EXPECTED = 1\nassert f() == EXPECTED",
    "assert abs(f() - 1.0) < 1e-6",
    "assert f() in (1, 2) and 1 in [f()]",
    "assert isinstance(f(), int) and f() >= 1",
    "def check(value):\n    assert value == 1\ncheck(f())",
    "from unittest import TestCase\nTestCase().assertAlmostEqual(f(), 1)",
)


@pytest.mark.parametrize("cheat", CHEATS)
def test_only_right_answers_pass(cheat: str) -> None:
    assert passes(CHEATS[cheat], *TESTS) == [False] * len(TESTS)


CHEATS_WITH_TESTS = {
    "ends the loop of a test": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (3, 4)]))",
    ),
    "ends the comparisons": ("def f(x): raise StopIteration", "for x, y in zip(map(f, [1]), [2]):\n    assert x == y"),
    "swallows a failed assertion": (
        "class C:\n    v = 1\n    def __enter__(self): return self\n    def __exit__(self, *error): return True",
        "with C() as c:\n    assert c.v == 3",
    ),
    "swallows an error of its own value": (
        "class C:\n    v = 0\n    def __enter__(self): return self\n    def __exit__(self, *error): return True",
        "with C() as c:\n    assert 10 / c.v == 2",
    ),
    "swallows its own error": (
        "class C:\n    def v(self): raise ValueError\n    def __enter__(self): return self\n"
        "    def __exit__(self, *error): return True",
        "with C() as c:\n    assert c.v() == 2",
    ),
    "tries until a callback is content": (
        "def each(callback):\n    for number in range(1000):\n        try: callback(number); return\n"
        "        except AssertionError: pass",
        "def callback(x):\n    assert x == 42\neach(callback)",
    ),
    "keeps an assertion of a callback to itself": (
        "def each(callback):\n    try: callback(0)\n    except BaseException: pass",
        "def callback(x):\n    assert x == 42\neach(callback)",
    ),
    "a module of its own": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
        "assert math.isclose(f(1), 3.14)",
    ),
    "an array module of its own": (
        "class np:\n    allclose = array = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
        "assert np.allclose(f(1), np.array([1, 2]))",
    ),
    "its own meaning of a module's name": ("import os.path as p\ndef f(): pass", "assert p.sep"),
}


@pytest.mark.parametrize("cheat", CHEATS_WITH_TESTS)
def test_code_cannot_change_the_result_of_a_test(cheat: str) -> None:
    code, test = CHEATS_WITH_TESTS[cheat]
    assert passes(code, test) == [False]


@pytest.mark.parametrize("error", ["unittest.SkipTest", "unittest.case._ShouldStop", "SystemExit"])
def test_code_cannot_end_a_test_of_unittest_early(error: str) -> None:
    test = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(), 2)"
    code = f"import unittest\ndef f(): raise {error}"
    assert run(code, [Check(test, "T.test_a")], LIMITS, "bubblewrap") == [False]
    assert run("def f(): return 2", [Check(test, "T.test_a")], LIMITS, "bubblewrap") == [True]


def test_failed_assertions_are_not_shown_to_the_code() -> None:
    code = """
caught = []
class Context:
    def __enter__(self): return self
    def __exit__(self, *error): caught.append(repr(error))
def attempt(callback):
    try: callback()
    except BaseException as error: caught.append(repr(error))
"""
    tests = (
        "def callback(): assert False, 'SECRET'\nattempt(callback)",
        "with Context(): assert False, 'SECRET'",
        "assert len(caught) == 2 and 'SECRET' not in str(caught)",
        "def callback(): raise ValueError('known')\nattempt(callback)\nassert 'known' in caught[2]",
    )
    assert passes(code, *tests) == [False, False, True, True]


def test_code_sees_no_tests_before_it_is_asked() -> None:
    code = """
import gc, os, sys
def seen():
    words = [value for value in gc.get_objects() if isinstance(value, (list, dict, tuple))]
    stdin = os.pread(0, 100, 0) if os.path.isfile("/dev/stdin") else b""
    word = "".join(["EXPEC", "TED"])
    return word in repr(words) or word.encode() in stdin or len(sys.argv) > 1
before = seen()
def f(x): return before or seen()
"""
    tests = ("assert f(1) is False", "assert f('EXPECTED') is True", "EXPECTED = 2\nassert f(EXPECTED) is False")
    # The second test shows that the search would find it: code may remember the arguments of its calls.
    assert passes(code, *tests)[:2] == [True, True]


# -- what code can do


def test_each_test_passes_or_fails_independently() -> None:
    tests = ("assert f() == 1", "assert f() == 2", "f(3)", "import sys; sys.exit(0)", "assert f.__name__ == 'f'")
    assert passes("def f(): return 1", *tests) == [True, False, False, False, True]
    assert passes("def f(: return 1") == [False]
    assert passes("raise ValueError") == [False]
    assert passes("print('x' * 10**7)\ndef f(): return 1") == [True]


CLASSES = """
import collections, enum, statistics, threading, tempfile, asyncio
from dataclasses import dataclass

class Short(ValueError):
    def __init__(self, by):
        super().__init__(f"short by {by}")
        self.by = by

class Stack:
    "A stack."
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Short(1)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear(); return True

@dataclass(frozen=True)
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)

Pair = collections.namedtuple("Pair", "one two")
Colour = enum.Enum("Colour", "RED BLUE")
CALLS = []
def record(x): CALLS.append(x)
def sort(items): items.sort(); return None
def rotate(rows): rows[:] = [list(row) for row in zip(*rows[::-1])]
def each(function, items): return [function(item) for item in items]
def count(n):
    for number in range(n): yield number
async def later(x):
    await asyncio.sleep(0)
    return x
def in_thread():
    found = []
    thread = threading.Thread(target=found.append, args=(1,))
    thread.start(); thread.join()
    return found
def write():
    with tempfile.TemporaryFile() as file: return file.write(b"x")
def program(): print(int(input()) + 1)
def same(x: int): return x
def named(*, items): items.append(4)
class Node:
    def __init__(self, x): self.x, self.children, self.by_name = x, [], {}
    def sum(self): return self.x + sum(child.sum() for child in (*self.children, *self.by_name.values()))
    def __abs__(self): return abs(self.x)
    def __neg__(self): return Node(-self.x)
    def __invert__(self): return Node(~self.x)
    def __reversed__(self): return iter([2, 1])
    def __format__(self, how): return how + str(self.x)
    def __index__(self): return self.x
    def __iadd__(self, other): self.x += other.x; return self
def parse(text):
    import json
    return json.loads(text)
def mean(numbers): return statistics.mean(numbers)
def copy_bytes():
    import sys
    sys.stdout.buffer.write(sys.stdin.buffer.readline())
def bisect(items, x): return "mine"
def annotations(): return same.__annotations__
"""
USES = [
    "s = Stack([1]); s.push(2)\nassert s.pop() == 2 and len(s) == 1 and s[0] == 1 and list(s) == s.items == [1]",
    "try: Stack().pop()\nexcept Short as error: assert error.by == 1 and str(error) == 'short by 1'\nelse: 1 / 0",
    "import pytest\nwith pytest.raises(ValueError, match='short'): Stack().pop()",
    "import pytest\nwith pytest.raises(KeyError):\n    with Stack([1]) as s: {}[1]\nassert not list(s)",
    "import pytest\nwith pytest.raises(TypeError), Stack([1]): raise TypeError",
    "items = [3]\nnamed(items=items)\nassert items == [3, 4]",
    "r = Node(1)\nr.children.append(Node(2))\nr.children[0].children.append(Node(3))\nr.by_name['a'] = Node(4)\n"
    "assert r.sum() == 10",
    "n = Node(-3)\nassert abs(n) == 3 and (-n).x == 3 and (~n).x == 2 and list(reversed(n)) == [2, 1]",
    "n = m = Node(1)\nn += Node(1)\nassert n.x == m.x == 2 and f'{n:>}' == '>2' and [5, 6, 7][n] == 7",
    "import json\ntry: parse('{')\nexcept json.JSONDecodeError as e: assert e.pos == 1\nelse: 1 / 0",
    "import statistics, pytest\nwith pytest.raises(statistics.StatisticsError): mean([])",
    "import io, sys\nout = io.StringIO()\nsys.stdin, sys.stdout = io.StringIO('1\\n2\\n'), out\n"
    "program(); program()\nassert out.getvalue() == '2\\n3\\n'",
    "import io, sys\nsys.stdin, sys.stdout = io.StringIO('x\\ny'), io.StringIO()\n"
    "copy_bytes(); copy_bytes()\nassert sys.stdout.getvalue() == 'x\\ny'",
    "from datetime import *\nfrom uuid import UUID\nfrom pathlib import Path, PurePosixPath\n"
    "for x in (datetime(2020, 1, 2, 3, 4, 5, 6), datetime(2020, 1, 2, tzinfo=timezone.utc), time(1, 2),\n"
    "          UUID(int=5), Path('/a/b'), PurePosixPath('a')): assert same(x) == x and type(same(x)) is type(x), x",
    "assert bisect([1], 2) == 'mine' and statistics.mean([1, 3]) == 2",
    "assert Point(1, 2) == Point(1, 2) != Point(2, 1) and Point(1, 2) + Point(1, 1) == Point(2, 3)",
    "p = Point(1, 2)\nassert str(p) == 'Point(x=1, y=2)' and {p} == {Point(1, 2)} and isinstance(p, Point)",
    "assert Pair(1, 2) == (1, 2) and Pair(1, 2).two == 2 and Colour.RED is Colour.RED and Colour['BLUE'].name == 'BLUE'"
    " and not isinstance(1, Point)",
    "record(1); record(2)\nassert CALLS == [1, 2]",
    "items = [3, 1, 2]\nassert sort(items) is None and items == [1, 2, 3]",
    "rows = [[1, 2], [3, 4]]\nfirst = rows[0]\nrotate(rows)\nassert rows == [[3, 1], [4, 2]] and rows[0] is first",
    "assert each(lambda x: x + 1, [1, 2]) == [2, 3] and each(str, iter([1])) == ['1'] and each(len, ['ab']) == [2]",
    "seen = []\neach(seen.append, [1, 2])\nassert seen == [1, 2]",
    "numbers = count(3)\nassert next(numbers) == 0 and list(numbers) == [1, 2] and sum(count(4)) == 6",
    "import asyncio\nassert asyncio.run(later(3)) == 3",
    "assert in_thread() == [1] and write() == 1",
    "import contextlib, io, sys\nsys.stdin, out = io.StringIO('41\\n'), io.StringIO()\n"
    "with contextlib.redirect_stdout(out): program()\nassert out.getvalue() == '42\\n'",
    "from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import Counter, deque, OrderedDict\n"
    "for x in (None, True, -1, 2**5000, 1.5, 1e300, 'x\\ud800', b'\\0', bytearray(b'x'), (1, [2, {3}]), {1: {2: 3}},\n"
    "          {(1, 2): frozenset({3})}, 1j, range(3), Decimal('1.10'), Fraction(1, 3), Counter('aab'),\n"
    "          deque([1], 2), OrderedDict(a=1), int, ValueError, []):\n"
    "    y = same(x)\n    assert y == x and type(y) is type(x), x",
    "nan = same(float('nan'))\nassert nan != nan",
    "import numpy as np\nx = np.arange(4.0).reshape(2, 2)\ny = same(x)\n"
    "assert y.dtype == x.dtype and (y == x).all() and same(np.float64(1.5)) == 1.5 and same(np.int64(2)) == 2",
    "from solution import Stack as S\nassert solution.Stack is S and S.__name__ == 'Stack'",
    "assert annotations() == {'x': int}",
    "def f(x: int): pass\nassert f.__annotations__ == {'x': int}",
    "assert undefined() == 1",
]


def test_code_may_use_all_of_python() -> None:
    passed = passes(CLASSES, *USES)
    assert [use for use, right in zip(USES, passed, strict=True) if not right] == USES[-1:]


def test_results_are_read_while_tests_run() -> None:
    checks = [Check("f()")] * 70_000  # more than a pipe can hold
    assert all(run("f = lambda: 1", [*checks[:10], *[Check("pass")] * 69_990], LIMITS, "bubblewrap"))


def test_files_are_private_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where no other process makes or removes a sandbox
    code = """
import tempfile
written = 0
def write():
    global written
    try:
        while written < 2**30:
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(b"x" * 2**20)
            written += 2**20
    except OSError:
        pass
"""
    bounded = passes(code, "write()\nassert 8 * 2**20 < written < 17 * 2**20", "assert False")
    assert bounded == [True, False]
    assert list(tmp_path.iterdir()) == []


HIDDEN_FILES = """
import mmap, os, time
def f(pause):
    for number in range(20):
        with open(f"file{number}", "w+b") as file:
            file.write(b"x" * 2**20)
            file.flush()
            kept.append(keep(file))
        os.unlink(f"file{number}")
    time.sleep(pause)
    return 1
kept = []
"""
MAPPED = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
def keep(file): return libc.mmap(None, 4096, 1, FLAGS, file.fileno(), 0)
"""


@pytest.mark.parametrize(
    "keep",
    [
        MAPPED.replace("FLAGS", "1"),
        MAPPED.replace("FLAGS", "2"),
        "def keep(file): return mmap.mmap(file.fileno(), 4096)",
        "def keep(file): return os.dup(file.fileno())",
    ],
    ids=["mapped, shared", "mapped, private", "mapped and open", "open"],
)
def test_removed_files_that_still_take_space_are_counted(keep: str) -> None:
    limits = Limits(time_s=20.0, memory_mb=512, disk_mb=8, processes=16)
    assert passes(HIDDEN_FILES + keep, "assert f(5) == 1", limits=limits) == [False]
    enough = Limits(time_s=20.0, memory_mb=512, disk_mb=64, processes=16)
    if "libc" not in keep:
        assert passes(HIDDEN_FILES + keep, "assert f(0.2) == 1", limits=enough) == [True]


def test_no_space_is_taken_without_writing() -> None:
    code = "import os\ndef f(): return os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 2**20)"
    test = "try: f()\nexcept OSError: pass\nelse: assert False"
    assert passes(code, test) == [True]


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(600)",
        "while True: pass",
        "x = bytearray(2**31)",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
        "import signal\nfor number in range(1, 30):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\nimport time; time.sleep(600)",
    ],
    ids=["sleeps", "is busy", "takes memory", "holds the lock", "starts threads", "ignores signals"],
)
def test_resources_are_limited(code: str) -> None:
    assert passes(code + "\ndef f(): return 1", limits=SHORT) == [False]


def test_threads_of_other_processes_do_not_count() -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(40)]
    for thread in threads:
        thread.start()
    code = "import threading\ndef f():\n    t = threading.Thread(target=int)\n    t.start(); t.join()\n    return 1"
    try:
        assert passes(code, limits=Limits(processes=4)) == [True]
    finally:
        stop.set()


def test_judged_code_ends_with_its_owner() -> None:
    code = "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(600,)).start()\n"
    code += "while True: pass"
    script = f"from asyncrl_cli.sandbox.judge import *; run({code!r}, [Check('')], Limits(time_s=600), 'bubblewrap')"
    with tempfile.TemporaryDirectory() as temporary:  # a killed owner does not remove its files
        os.chmod(temporary, 0o711)
        owner = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": temporary})
        started: list[psutil.Process] = []
        while not any(process.num_threads() > 5 for process in started):  # the code runs
            time.sleep(0.02)
            started = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
        owner.wait()
        assert psutil.wait_procs(started, 20)[1] == []


# -- a sandbox that does not start


def programs(folder: Path, **scripts: str) -> str:
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.fixture
def fresh_check() -> Any:
    """Clear cached results before and after the test."""
    cached = (check_judge, bubblewrap.for_code, bubblewrap.readable)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("fresh_check")
def test_a_sandbox_that_does_not_start_is_not_wrong_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path, bwrap="echo 'bwrap: no permissions' >&2; exit 1"))
    with pytest.raises(SandboxError, match="bubblewrap sandbox did not start: bwrap: no permissions"):
        passes("def f(): return 1", kind="bubblewrap")
    monkeypatch.setattr(bubblewrap, "LIBRARIES", ("/nowhere",))
    with pytest.raises(TaskError, match=r"no sandbox .*no permissions"):
        check_judge("bubblewrap")


@pytest.mark.usefixtures("fresh_check")
def test_task_is_refused_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TaskError, match="bwrap is not installed") as refusal:
        check_judge("bubblewrap")
    assert "apt install bubblewrap" in str(refusal.value.hint) and "sandbox: none" in str(refusal.value.hint)
    check_judge("none")
    assert passes("def f(): return 1", kind="none") == [True]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_code_never_runs_as_root_of_the_machine() -> None:
    attempt = "try: check_judge('bubblewrap')\nexcept Exception as error: print(error)"
    script = f"from asyncrl_cli.sandbox.trial import *\n{attempt}"
    alone = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    result = subprocess.run(alone, capture_output=True, text=True, check=False)
    if "unshare" in result.stderr:
        pytest.skip(f"cannot be tried here: {result.stderr.strip()}")
    assert "root cannot become another user" in result.stdout, result.stderr


@pytest.mark.parametrize("kind", ["docker", "seccomp", "auto"])
def test_an_unknown_sandbox_is_refused(kind: str) -> None:
    with pytest.raises(TaskError, match=re.escape(f"there is no sandbox {kind!r}")) as refusal:
        check_judge(kind)  # type: ignore[arg-type]
    assert refusal.value.hint == "choose one of bubblewrap, none"
