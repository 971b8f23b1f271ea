"""Tests that are code: what they share with a program reaches it, or their row is refused; a right program never gets 0."""

import pytest

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.sandbox import Sandbox
from rl4llm.extensions.sandbox.code_reward import CodeReward
from rl4llm.extensions.sandbox.code_tests import stored_tests
from rl4llm.rewards import RewardFailure


@pytest.fixture(scope="module")
def reward(_bubblewrap):
    made = CodeReward(sandbox=Sandbox(packages=["pytest"]), wall_s=20, total_s=40)
    yield made
    made.close()


def scores(reward, tests, *programs, prompt="Write it.", **columns):
    samples = [SampleState("p", 0, [ChatMessage("user", prompt)], tests, columns) for _ in programs]
    for sample, program in zip(samples, programs, strict=True):
        sample.messages.append(ChatMessage("assistant", f"```python\n{program}\n```"))
    return reward.score_batch(samples)


HELLO = ("def f(): print('hi')", "def f(): print('ho')")
PLUS = ("async def f(x): return x + 1", "async def f(x): return x")
RAISES = "class Low(ValueError):\n    def __init__(s, m, x):\n        super().__init__(m); s.x = x\n"
CLIENT = """import asyncio
class Client:
    closed = False
    async def __aenter__(self):
        self.lock = asyncio.Lock()
        return self
    async def __aexit__(self, *_): self.closed = True
    async def get(self, n):
        async with self.lock: return n + {}
    async def items(self, n):
        for i in range(n): yield i
"""
WORK = {  # tests, with a right and a wrong program
    "message and attribute": (
        "import pytest\nfrom solution import f, Low\ndef test_a():\n    with pytest.raises(Low) as e: f(-1)\n"
        "    assert str(e.value) == 'negative' and e.value.x == -1\n    with pytest.raises(ValueError, match='^neg'): f(-2)",
        RAISES + "def f(x): raise Low('negative', x)", RAISES + "def f(x): raise Low('positive', x)"),
    "arguments": ("try:\n    f('x')\n    assert False\nexcept KeyError as e:\n    assert e.args == ('x',)",
        "def f(x): return {}[x]", "def f(x): return {}['y']"),
    "exit": ("import pytest\ndef test_a():\n    with pytest.raises(SystemExit) as e: f()\n    assert e.value.code == 2",
        "def f(): raise SystemExit(2)", "def f(): raise SystemExit(1)"),
    "assertion": ("import pytest\ndef test_a():\n    with pytest.raises(AssertionError): f(-1)\n    assert f(1) == 1",
        "def f(x):\n    assert x > 0\n    return x", "def f(x): return x"),
    "error of a library": ("import json, pytest\ndef test_a():\n    with pytest.raises(json.JSONDecodeError): f('{')",
        "import json\ndef f(x): return json.loads(x)", "def f(x): raise ValueError"),
    "star": ("from solution import *\nfrom math import *\ndef test_a(): assert f(1) == sqrt(4)",
        "def f(x): return x + 1", "def f(x): return x"),
    "globals": ("assert PRIMES == [2, 3] and len(PRIMES) == 2 and PRIMES[0] + LIMIT == 7 and 4 < LIMIT and 1 + LIMIT == 6\n"
        "assert [c.value for c in Color] == [1] and f.__name__ == 'f'",
        "import enum\nPRIMES, LIMIT = [2, 3], 5\nclass Color(enum.Enum): A = 1\ndef f(): ...",
        "import enum\nPRIMES, LIMIT = [2, 3], 4\nclass Color(enum.Enum): A = 1\ndef f(): ..."),
    "redirected": ("import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): f()\n"
        "assert out.getvalue() == 'hi\\n'", *HELLO),
    "replaced": ("import sys, io\ndef test_a():\n    old, sys.stdout = sys.stdout, io.StringIO()\n    f()\n"
        "    out, sys.stdout = sys.stdout.getvalue(), old\n    assert out == 'hi\\n'", *HELLO),
    "patched output": ("import unittest, io\nfrom unittest.mock import patch\nclass T(unittest.TestCase):\n"
        "    @patch('sys.stdout', new_callable=io.StringIO)\n    def test_a(self, out):\n        f()\n"
        "        self.assertEqual(out.getvalue(), 'hi\\n')", *HELLO),
    "errors": ("import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stderr(out): f()\n"
        "assert out.getvalue() == 'hi\\n'", "import sys\ndef f(): sys.stderr.write('hi\\n')", HELLO[0]),
    "seed": ("from random import seed, random\nseed(3)\na = random()\nseed(3)\nassert f() == a",
        "import random\ndef f(): return random.random()", "def f(): return 0.5"),
    "recursion": ("import sys\nsys.setrecursionlimit(9000)\nassert f(4000) == 4000",
        "def f(n): return 1 + f(n - 1) if n else 0", "def f(n): return 0"),
    "awaited": ("import asyncio\nassert asyncio.run(f(1)) == 2", *PLUS),
    "gathered": ("import asyncio\ndef test_a():\n    async def main(): return await asyncio.gather(f(1), f(2))\n"
        "    assert asyncio.run(main()) == [2, 3]", *PLUS),
    "asynchronous function": ("import pytest\n@pytest.mark.asyncio\nasync def test_a(): assert await f(1) == 2", *PLUS),
    "asynchronous case": ("import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_a(self): self.assertEqual(await f(1), 2)", *PLUS),
    "asynchronous objects": ("import asyncio\nasync def go():\n    async with Client() as c:\n        n = await c.get(1)\n"
        "        out = [i async for i in c.items(2)]\n    return n, out, c.closed\n"
        "assert asyncio.run(go()) == (4, [0, 1], True)", CLIENT.format(3), CLIENT.format(4)),
    "threads": ("from concurrent.futures import ThreadPoolExecutor\ndef test_a():\n"
        "    with ThreadPoolExecutor(8) as e: assert list(e.map(f, range(50))) == list(range(1, 51))",
        "def f(x): return x + 1", "def f(x): return x"),
    "endless": ("import itertools\nassert list(itertools.islice(f(), 2000))[9] == 34\nfor n in f():\n    if n > 5: break\n"
        "assert n == 8", "def f():\n    a, b = 0, 1\n    while True:\n        yield a\n        a, b = b, a + b",
        "def f():\n    while True: yield 8"),
    "iterators with a state": ("c = Down(3)\nassert next(c) == 3 and c.left == 2 and list(c) == [2, 1]",
        "class Down:\n    left = 3\n    def __init__(s, n): ...\n    def __iter__(s): return s\n    def __next__(s):\n"
        "        if not s.left: raise StopIteration\n        s.left -= 1\n        return s.left + 1",
        "class Down:\n    def __init__(s, n): s.left = n"),
    "prepared": ("def setup_module():\n    global data\n    data = [2]\nclass TestA:\n    def setup_method(self, method):\n"
        "        self.x = 2\n    @classmethod\n    def setup_class(cls): cls.y = 1\n"
        "    def test_a(self): assert f(self.x) == self.y == f(data[0])", "def f(x): return x - 1", "def f(x): return 3"),
    "class": ("a = A(1)\nassert repr(a) == 'A(1)' and type(a).__name__ == 'A'",
        "class A:\n    def __init__(s, x): s.x = x\n    def __repr__(s): return f'A({s.x})'",
        "class A:\n    def __init__(s, x): ..."),
    "names like those of modules": ("input = ['a']\ndoor = Door()\ndoor.open()\nassert patch(*input) == 'ab' and door.up",
        "class Door:\n    def open(s): s.up = True\ndef patch(a): return a + 'b'",
        "class Door:\n    def open(s): s.up = True\ndef patch(a): return a"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_what_tests_share_with_a_program_reaches_it(name, reward):
    assert scores(reward, *WORK[name]) == [1.0, 0.0]


REFUSED = [
    "import unittest\nfrom unittest.mock import patch\nclass T(unittest.TestCase):\n"
    "    @patch('random.randint', return_value=4)\n    def test_a(self, m): self.assertEqual(f(), 4)",
    "from unittest import mock\ndef test_a():\n    with mock.patch('builtins.input', return_value='3'): assert f() == 3",
    "import unittest.mock as m, os\ndef test_a():\n    with m.patch.dict(os.environ, {'A': '1'}): assert f() == '1'",
    "import random\ndef test_a():\n    random.randint = lambda a, b: 4\n    assert f() == 4",
    "import builtins\nsetattr(builtins, 'input', lambda: '3')\nassert f() == 3",
    "import solution\ndef test_a():\n    solution.LIMIT = 9\n    assert solution.f() == 9",
    "import sys, io\nsys.stdin = io.StringIO('3')\nassert f() == 3",
    "import os\nos.environ['A'] = '1'\nassert f() == '1'",
    "with open('a.txt', 'w') as file: file.write('x')\nassert f('a.txt') == 'x'",
    "f('a.txt')\nassert open('a.txt').read() == 'x'",
    "import os\nf('x')\nassert os.path.exists('x')",
    "from pathlib import Path\nPath('x').write_text('x')\nassert f('x') == 'x'",
    "import tempfile\ndef test_a():\n    with tempfile.TemporaryDirectory() as d: assert f(d) == []",
    "import subprocess, sys\nassert subprocess.run([sys.executable, 'solution.py']).returncode == f()",
    "from freezegun import freeze_time\n@freeze_time('2020-01-01')\ndef test_a(): assert f() == 1",
    "import warnings\nwith warnings.catch_warnings(record=True) as w: f()\nassert len(w) == 1",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertLogs(): f()",
    "from decimal import getcontext\ngetcontext().prec = 5\nassert f() == 1",
    "import inspect\nassert list(inspect.signature(f).parameters) == ['x']",
    "import pytest\n@pytest.fixture(autouse=True)\ndef data(): ...\ndef test_a(): assert f() == 2",
    "assert f(int(input())) == 1",
]


@pytest.mark.parametrize("tests", REFUSED)
def test_tests_that_need_one_process_are_refused_before(tests):
    for stored in (tests, {"files": {"t.py": tests}, "required": ["t.py::test_a"]}):
        with pytest.raises(DataError):
            stored_tests(stored, {})


@pytest.mark.parametrize(
    "column", ["checker", "generated_checker", "interaction_format", "is_interactive", "input_mode"]
)
def test_outputs_that_a_row_does_not_compare_are_refused(column):
    cases = [{"input": "3", "output": "1 2 3"}]
    for value in ("file", "print(1)"):
        with pytest.raises(DataError):
            stored_tests(cases, {column: value})
    for value in (None, "", False, "stdio"):
        stored_tests(cases, {column: value})


CHECK = "def check(candidate):\n    assert candidate([]) is None\n    assert candidate(['y']) == x\n"
ADDED = "assert add(1, 2) == 3\nassert sub(3, 1) == 2"
SUITE = {
    "files": {"t.py": "from solution import f\ndef test_a(): assert f(1) == y"},
    "required": ["t.py::test_a"],
}


@pytest.mark.parametrize(
    ("tests", "columns", "program", "masked"),
    [
        (CHECK, {"entry_point": "first"}, "def first(items): return items[0] if items else None", True),
        (CHECK, {"entry_point": "first"}, "def other(items): return None", False),
        ("assert f(1) == helper(1)", {}, "def f(x): return x", True),
        ("assert np.allclose(f(1), 1)", {}, "def f(x): return x", True),
        (SUITE, {}, "def f(x): return x", True),
        (ADDED, {"prompt": "Write add and sub."}, "def add(a, b): return a + b", False),
        (ADDED, {"prompt": "Write add."}, "def add(a, b): return a + b", True),
        (ADDED, {"prompt": "Write add."}, "def mul(a, b): return a * b", False),
        ("try: r = f(1)\nexcept ZeroDivisionError: pass\nassert r == 1", {}, "def f(x): return 1 / 0", False),
        ("from collections import deque\nassert f(1) == deque([1])", {},
         "from collections import deque\ndef f(x): return deque([x])", True),
        ("from collections import deque\nassert isinstance(f(1), deque)", {},
         "from collections import deque\ndef f(x): return deque([x])", True),
        ("import copy\na = A()\nassert copy.deepcopy(a) == a", {}, "class A: ...", True),
        ("assert f(1) == 1\nimport sqlite4", {}, "def f(x): return 2", True),
        ("assert A().x == 1\nclass B(A): ...\nassert B().x == 1", {}, "class A: x = 1", True),
        ("assert f(1) == 1", {}, "class int: ...\ndef f(x): return int()", False),
        ("assert isinstance(f(1), list)", {}, "class list: ...\ndef f(x): return list()", False),
    ],
)  # fmt: skip
def test_faults_of_tests_are_not_those_of_programs(tests, columns, program, masked, reward):
    prompt = columns.get("prompt", "Write it.")
    (score,) = scores(reward, tests, program, **{"prompt": prompt, **columns})
    assert isinstance(score, RewardFailure) if masked else score == 0.0, score
