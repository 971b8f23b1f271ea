"""Programs that do what they should, and must be graded as right; each of those with a wrong twin must be told from it."""

import textwrap
from dataclasses import dataclass

from rl4llm.extensions.sandbox import Asserts, Call, Calls, Program, Stdin, Suite


@dataclass(frozen=True)
class Honest:
    name: str
    program: Program
    status: str
    loopback: bool = False


HONEST = []


def add(name, source, tests, status="ok", loopback=False, **fields):
    if "prefix" not in fields:
        source = textwrap.dedent(source).strip("\n")
    HONEST.append(Honest(name, Program(source, tests, **fields), status, loopback))


def function(name, body, *cases, wrong=None):
    """A function `f` and (arguments, value) pairs; `wrong` is a body that passes not all of them."""
    tests = Calls(tuple(Call("f", args, expected) for args, expected in cases))
    add(name, body, tests)
    if wrong is not None:
        add(f"{name}-wrong", wrong, tests, "wrong")


def one(name, expression, *cases, wrong=None):
    """As `function`, for an expression in x and y."""
    function(
        name,
        f"def f(x, y=None): return {expression}",
        *cases,
        wrong=wrong and f"def f(x, y=None): return {wrong}",
    )


def script(name, source, *pairs, wrong=None):
    add(name, source, Stdin(pairs))
    if wrong is not None:
        add(f"{name}-wrong", wrong, Stdin(pairs), "wrong")


# fmt: off
# Values of every type come back as they are
one("none", "None", ((1,), None), wrong="0")
one("bool", "x > 2", ((3,), True), ((1,), False), wrong="int(x > 2)")
one("int", "x + y", ((2, 3), 5), ((-2, 2), 0), wrong="x - y")
one("big-int", "2 ** x", ((4000,), 2**4000), wrong="2 ** x + 1")
one("huge-int", "3 ** x", ((20_000,), 3**20_000))
one("float", "x / y", ((1, 3), 1 / 3), ((7, 2), 3.5), wrong="x // y")
one("nearly-a-float", "x + y", ((0.1, 0.2), 0.3))
one("infinity", "x * 10", ((1e308,), float("inf")), ((-1e308,), float("-inf")))
one("nan", "x - x", ((float("inf"),), float("nan")), wrong="0.0")
one("complex", "x * x", ((1j,), -1 + 0j))
one("str", "x[::-1]", (("abc",), "cba"), (("",), ""), wrong="x")
one("unicode", "x.upper()", (("straße 🐍 é",), "STRASSE 🐍 É"))
one("control-characters", "x + y", (("a\n\t\0", '"\\/\u2028'), 'a\n\t\0"\\/\u2028'))
one("half-a-surrogate", "x * 2", (("\udc80",), "\udc80\udc80"))
one("bytes", "x + b'\\xff'", ((b"a\x00",), b"a\x00\xff"))
one("bytearray", "bytearray(x)", ((3,), bytearray(3)))
one("list", "sorted(x)", (([3, 1, 2],), [1, 2, 3]), (([],), []), wrong="tuple(sorted(x))")
one("nested-list", "[x, [x, [x]]]", ((1,), [1, [1, [1]]]))
one("tuple", "(x, y)", ((1, "a"), (1, "a")), wrong="[x, y]")
one("set", "x & y", (({1, 2, 3}, {2, 3, 4}), {2, 3}), wrong="x | y")
one("frozenset", "frozenset(x)", (([1, 1, 2],), frozenset({1, 2})))
one("dict", "{key: len(key) for key in x}", ((["a", "bb"],), {"a": 1, "bb": 2}), wrong="{}")
one("dict-of-tuples", "{(a, b): a * b for a in x for b in x}", (([1, 2],), {(1, 1): 1, (1, 2): 2, (2, 1): 2, (2, 2): 4}))
one("dict-in-another-order", "dict(reversed(list(x.items())))", (({"a": 1, "b": [2]},), {"a": 1, "b": [2]}))
one("empty-things", "[[], {}, (), set(), '', None]", ((1,), [[], {}, (), set(), "", None]))
one("counter", "__import__('collections').Counter(x)", (("abca",), {"a": 2, "b": 1, "c": 1}))
one("named-tuple", "__import__('collections').namedtuple('P', 'a b')(x, y)", ((1, 2), (1, 2)))
one("long-list", "list(range(x))", ((50_000,), list(range(50_000))))
one("long-str", "'ab' * x", ((200_000,), "ab" * 200_000))
one("long-argument", "len(x)", (("x" * 500_000,), 500_000))

# What beginners are asked
function("fibonacci", """
    def f(n):
        a, b = 0, 1
        for _ in range(n):
            a, b = b, a + b
        return a
""", ((10,), 55), ((0,), 0), ((90,), 2880067194370816120), wrong="def f(n): return n if n < 2 else f(n - 1) + 1")
function("factorial", "def f(n): return 1 if n < 2 else n * f(n - 1)", ((5,), 120),
    ((100,), __import__("math").factorial(100)))
function("primes", "def f(n): return [p for p in range(2, n) if all(p % q for q in range(2, int(p**0.5) + 1))]",
    ((20,), [2, 3, 5, 7, 11, 13, 17, 19]), wrong="def f(n): return [p for p in range(2, n) if p % 2]")
function("greatest-common-divisor", "import math\ndef f(a, b): return math.gcd(a, b)", ((12, 18), 6), ((7, 5), 1))
function("palindrome", "def f(s):\n    s = [c.lower() for c in s if c.isalnum()]\n    return s == s[::-1]",
    (("A man, a plan, a canal: Panama",), True), (("no",), False), wrong="def f(s): return True")
function("two-sum", """
    def f(numbers, target):
        seen = {}
        for i, number in enumerate(numbers):
            if target - number in seen:
                return [seen[target - number], i]
            seen[number] = i
""", (([2, 7, 11, 15], 9), [0, 1]), (([3, 3], 6), [0, 1]), (([1], 5), None))
function("brackets", """
    def f(text):
        stack = []
        for c in text:
            if c in "([{": stack.append(c)
            elif not stack or stack.pop() + c not in ("()", "[]", "{}"): return False
        return not stack
""", (("([]{})",), True), (("(]",), False), ((")(",), False), wrong="def f(text): return text.count('(') == text.count(')')")
function("roman", """
    def f(n):
        out = ""
        for value, sign in ((1000,"M"),(900,"CM"),(500,"D"),(400,"CD"),(100,"C"),(90,"XC"),(50,"L"),(40,"XL"),(10,"X"),(9,"IX"),(5,"V"),(4,"IV"),(1,"I")):
            while n >= value: out += sign; n -= value
        return out
""", ((1994,), "MCMXCIV"), ((4,), "IV"))
function("binary-search",
    "from bisect import bisect_left\ndef f(a, x):\n    i = bisect_left(a, x)\n    return i if i < len(a) and a[i] == x else -1",
    (([1, 3, 5], 3), 1), (([1, 3, 5], 4), -1))
function("quick-sort",
    "def f(a): return a if len(a) < 2 else f([x for x in a[1:] if x < a[0]]) + [a[0]] + f([x for x in a[1:] if x >= a[0]])",
    (([3, 1, 2, 3],), [1, 2, 3, 3]))
function("permutations", "from itertools import permutations\ndef f(s): return sorted(''.join(p) for p in permutations(s))",
    (("abc",), ["abc", "acb", "bac", "bca", "cab", "cba"]))
function("matrix", "def f(a, b): return [[sum(x * y for x, y in zip(r, c)) for c in zip(*b)] for r in a]",
    (([[1, 2], [3, 4]], [[0, 1], [1, 0]]), [[2, 1], [4, 3]]))
function("transpose", "def f(m): return [list(r) for r in zip(*m)]", (([[1, 2, 3], [4, 5, 6]],), [[1, 4], [2, 5], [3, 6]]))
function("anagrams",
    "from collections import defaultdict\ndef f(w):\n    d = defaultdict(list)\n    for x in w: d[''.join(sorted(x))].append(x)\n    return d",
    ((["ab", "ba", "c"],), {"ab": ["ab", "ba"], "c": ["c"]}))
function("caesar", "def f(s, k): return ''.join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in s)",
    (("xyz!", 3), "abc!"))
function("flatten", "def f(a): return [y for x in a for y in (f(x) if isinstance(x, list) else [x])]",
    (([1, [2, [3, [4]]]],), [1, 2, 3, 4]))
function("collatz",
    "def f(n):\n    k = 0\n    while n != 1:\n        n = 3 * n + 1 if n % 2 else n // 2\n        k += 1\n    return k",
    ((27,), 111))
function("hanoi", "def f(n, a='A', b='B', c='C'): return [] if n == 0 else f(n - 1, a, c, b) + [(a, c)] + f(n - 1, b, a, c)",
    ((2,), [("A", "B"), ("A", "C"), ("B", "C")]))
function("knapsack",
    "def f(w, v, c):\n    best = [0] * (c + 1)\n    for a, b in zip(w, v):\n        for i in range(c, a - 1, -1): best[i] = max(best[i], best[i - a] + b)\n    return best[c]",
    (([1, 3, 4, 5], [1, 4, 5, 7], 7), 9))
function("edit-distance",
    "from functools import lru_cache\n@lru_cache(None)\ndef f(a, b):\n    if not a or not b: return len(a) + len(b)\n    return f(a[1:], b[1:]) if a[0] == b[0] else 1 + min(f(a[1:], b), f(a, b[1:]), f(a[1:], b[1:]))",
    (("kitten", "sitting"), 3), (("", "ab"), 2))
function("shortest-path",
    "import heapq\ndef f(g, s, t):\n    q, seen = [(0, s)], set()\n    while q:\n        d, n = heapq.heappop(q)\n        if n == t: return d\n        if n in seen: continue\n        seen.add(n)\n        for m, w in g.get(n, {}).items(): heapq.heappush(q, (d + w, m))\n    return -1",
    (({"a": {"b": 1, "c": 5}, "b": {"c": 1}}, "a", "c"), 2), (({}, "a", "b"), -1))

# Whatever Python can do
function("keyword-arguments", "def f(*args, **kwargs): return [args, kwargs]", ((1, 2), [(1, 2), {}]))
add("keywords", "def f(a, *, b): return a - b", Calls((Call("f", (5,), 3, {"b": 2}),)))
add("method", "class Solution:\n    def two(self, x): return 2 * x", Calls((Call("Solution.two", (4,), 8),)))
add("callable-object", "class F:\n    def __call__(self, x): return x + 1\nf = F()", Calls((Call("f", (1,), 2),)))
add("state-between-calls", "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
    Calls((Call("f", (), 1), Call("f", (), 2))))
add("two-functions", "def f(x): return g(x) + 1\ndef g(x): return 2 * x", Calls((Call("f", (2,), 5), Call("g", (2,), 4))))
function("decorator",
    "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(x): return g(g(x))\n    return h\n@twice\ndef f(x): return x + 1",
    ((1,), 3))
function("dataclass",
    "from dataclasses import dataclass, astuple\n@dataclass\nclass P:\n    a: int\n    b: int = 2\ndef f(x): return astuple(P(x))",
    ((1,), (1, 2)))
function("enum", "import enum\nclass C(enum.IntEnum):\n    A = 1\ndef f(): return C.A", ((), 1))
function("regex", "import re\ndef f(s): return re.findall(r'[a-z]+', s)", (("ab1cd",), ["ab", "cd"]))
function("json", "import json\ndef f(s): return json.loads(s)", (('{"a": [1, null]}',), {"a": [1, None]}))
function("datetime",
    "from datetime import date, timedelta\ndef f(y, m, d): return (date(y, m, d) + timedelta(1)).isoformat()",
    ((2024, 2, 28), "2024-02-29"))
function("decimal", "from decimal import Decimal\ndef f(a, b): return str(Decimal(a) + Decimal(b))", (("0.1", "0.2"), "0.3"))
function("fractions", "from fractions import Fraction\ndef f(a, b): return str(Fraction(a, b))", ((6, 4), "3/2"))
function("random-with-a-seed", "import random\ndef f(): return random.Random(1).randint(1, 10) in range(1, 11)", ((), True))
function("exceptions", "def f(s):\n    try: return int(s)\n    except ValueError: return None\n    finally: pass",
    (("12",), 12), (("x",), None))
function("files", "def f(text):\n    with open('a.txt', 'w') as h: h.write(text)\n    return open('a.txt').read()",
    (("hello\n",), "hello\n"))
function("temporary-files",
    "import tempfile\ndef f(t):\n    with tempfile.NamedTemporaryFile('w+') as h:\n        h.write(t); h.seek(0)\n        return h.read()",
    (("abc",), "abc"))
function("threads",
    "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    with ThreadPoolExecutor(4) as e: return list(e.map(lambda x: x * x, range(n)))",
    ((5,), [0, 1, 4, 9, 16]))
function("processes",
    "import multiprocessing as m\ndef g(x): return x * x\ndef f(n):\n    with m.get_context('fork').Pool(2) as p: return p.map(g, range(n))",
    ((4,), [0, 1, 4, 9]))
function("subprocess",
    "import subprocess, sys\ndef f(): return subprocess.run([sys.executable, '-S', '-c', 'print(6*7)'], capture_output=True, text=True).stdout",
    ((), "42\n"))
function("shared-values",
    "import multiprocessing as m\ndef g(v): v.value += 1\ndef f():\n    c = m.get_context('fork')\n    v = c.Value('i', 1)\n    p = c.Process(target=g, args=(v,))\n    p.start(); p.join()\n    return v.value",
    ((), 2))
function("shell", "import os\ndef f(): return os.popen('echo hello').read()", ((), "hello\n"))
function("asyncio",
    "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x + 1\ndef f(x): return asyncio.run(g(x))",
    ((1,), 2))
function("sockets-of-its-own",
    "import socket\ndef f():\n    a, b = socket.socketpair()\n    a.send(b'hi')\n    return b.recv(2)", ((), b"hi"))
function("sockets-with-a-name",
    "import socket\ndef f():\n    s = socket.socket(socket.AF_UNIX)\n    s.bind('/tmp/s'); s.listen()\n    c = socket.socket(socket.AF_UNIX)\n    c.connect('/tmp/s')\n    c.send(b'x')\n    return s.accept()[0].recv(1)",
    ((), b"x"))
SERVER = """
    import asyncio
    async def answer(reader, writer):
        writer.write((await reader.readline()).upper())
        writer.close()
    async def talk(host):
        server = await asyncio.start_server(answer, host, 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            writer.write(b"hello\\n")
            return await reader.readline()
    def f(host): return asyncio.run(talk(host))
"""
LOOPBACK = Calls((Call("f", ("127.0.0.1",), b"HELLO\n"),))
add("loopback", SERVER, LOOPBACK, loopback=True)
add("loopback-unasked", SERVER, LOOPBACK, "model_error")
function("many-sockets-and-files",
    "import socket\ndef f():\n    held = [socket.socketpair() for _ in range(25)] + [open('/dev/null') for _ in range(50)]\n    return len(held)",
    ((), 75))
function("prints-a-lot", "def f(x):\n    for i in range(20_000): print('line', i)\n    return x", ((1,), 1))
function("deep-recursion", "import sys\nsys.setrecursionlimit(20_000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
    ((9000,), 9000))
function("much-memory", "def f(n): return len(bytearray(n))", ((200_000_000,), 200_000_000))
function("match",
    "def f(x):\n    match x:\n        case [a, *_]: return a\n        case {'k': v}: return v\n        case _: return None",
    (([5, 6],), 5), (({"k": 7},), 7))
function("walrus-and-f-strings", "def f(x): return f'{(y := x + 1)}-{y:>4}-{x!r}'", ((1,), "2-   2-1"))
function("names-itself-solution", "import solution\ndef g(): return 3\ndef f(): return solution.g()", ((), 3))
function("guarded-main", "def f(x): return x\nif __name__ == '__main__':\n    raise SystemExit(1)", ((1,), 1))
function("ctypes", "import ctypes\ndef f(x): return ctypes.c_uint8(x).value", ((300,), 44))
function("hashes", "import hashlib, zlib\ndef f(s): return hashlib.md5(s).hexdigest()[:8], zlib.crc32(s)",
    ((b"a",), ("0cc175b9", 3904355907)))

# Programs that read and print
script("echo", "print(input())", ("hello\n", "hello\n"))
script("sum-of-lines", "import sys\nprint(sum(map(int, sys.stdin)))", ("1\n2\n3\n", "6"), ("", "0"), wrong="print(6)")
script("two-numbers", "a, b = map(int, input().split())\nprint(a * b)", ("3 4\n", "12\n"), ("-1 5", "-5"),
    wrong="a, b = map(int, input().split())\nprint(a + b)")
script("many-lines-out", "for i in range(int(input())): print(i, i * i)", ("3\n", "0 0\n1 1\n2 4\n"))
script("no-newline-at-the-end", "print(input(), end='')", ("x\n", "x\n"))
script("blanks-at-the-ends", "print('a  ')\nprint()\nprint()", ("", "a\n"))
script("windows-lines", "print('a\\r\\nb')", ("", "a\nb\n"))
script("unicode-text", "print(input()[::-1])", ("äöü🐍\n", "🐍üöä\n"))
script("bytes-of-input", "import sys\nprint(len(sys.stdin.buffer.read()))", ("ä" * 10, "20"))
script("long-input", "print(len(input()))", ("x" * 400_000 + "\n", "400000"))
script("longer-output", "print('x ' * 1_500_000)", ("", "x " * 1_500_000), wrong="print('x ' * 1_500_001)")
script("long-output", "print('x' * 500_000)", ("", "x" * 500_000))
script("sys-exit", "import sys\nprint(1)\nsys.exit()", ("", "1"))
script("exit-0", "print(1)\nexit(0) if False else None\nraise SystemExit(0)", ("", "1"))
script("names-its-own-file", "import os\nprint(os.path.basename(__file__))", ("", "program.py"))
script("exit-and-quit", "n = int(input())\nprint(n)\nif n > 1: quit()\nexit(0)", ("1", "1"), ("2", "2"))
script("thread-that-nobody-joins",
    "import threading, time\ndef main():\n    time.sleep(0.05)\n    print(input())\nthreading.Thread(target=main).start()",
    ("a", "a"), wrong="import threading\nthreading.Thread(target=print).start()")
script("prints-at-the-end",
    "import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(3)",
    ("", "3"))
script("file-that-nobody-closes", "out = open(1, 'w')\nout.write('7\\n')", ("", "7"))
script("main-function", "def main():\n    print(int(input()) + 1)\n\nif __name__ == '__main__':\n    main()", ("1", "2"),
    ("41\n", "42\n"))
script("complains-too", "import sys\nprint('warning', file=sys.stderr)\nprint(5)", ("", "5"))
script("one-run-forgets-the-last",
    "import os\nprint(os.path.exists('mark'))\nglobals().setdefault('n', 0)\nn += 1\nprint(n)", ("", "False\n1"),
    ("", "False\n1"))
script("reads-to-the-end", "n = int(input())\nprint(max(int(input()) for _ in range(n)))", ("3\n1\n9\n2\n", "9"))
script("end-of-file", "try:\n    while True: input()\nexcept EOFError: print('end')", ("a\nb", "end"))

# Tests that are code
add("mbpp", "def similar_elements(a, b): return tuple(set(a) & set(b))",
    Asserts(("assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))", "assert set(similar_elements((1, 2),(3,))) == set()")))
add("mbpp-with-math", "import math\ndef area(r): return math.pi * r * r",
    Asserts(("assert math.isclose(area(1), 3.14159265, rel_tol=1e-6)",)))
add("mbpp-wrong", "def f(x): return x", Asserts(("assert f(1) == 1", "assert f(2) == 4")), "wrong")
add("asserts-with-loops", "def f(x): return x * 2",
    Asserts(("for i in range(20):\n    assert f(i) == 2 * i", "values = [f(i) for i in (1, 2)]\nassert values == [2, 4]")))
add("asserts-on-exceptions", "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
    Asserts(("try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)\nassert f(1) == 1",)))
add("check-function", "def f(x): return sorted(x)",
    Asserts(("METADATA = {}\ndef check(candidate):\n    assert candidate([2, 1]) == [1, 2]\n    assert True, 'fine'\n    assert candidate([]) == []\n",), "f"))
add("helper-in-the-setup", "def f(x): return x - 1",
    Asserts(("def check(candidate):\n    assert inverse(candidate(3)) == 3\n",), "f", "def inverse(x): return x + 1"))
add("check-that-is-called", "def f(x): return x",
    Asserts(("def check(candidate):\n    assert candidate(1) == 1\n\ncheck(f)\n",), "f"))
add("named-like-a-module", "def string(x): return str(x)\ndef copy(x): return x",
    Asserts(("assert string(1) == '1'", "assert copy(2) == 2")))
YIELDED = Asserts(("assert list(f(3)) == [0, 1, 4]", "assert sum(f(3)) == 5", "assert next(f(2)) == 0"))
add("yields", "def f(n):\n    for i in range(n): yield i * i", YIELDED)
add("yields-wrong", "def f(n): yield n", YIELDED, "wrong")
add("returns-a-map", "def f(n): return map(lambda i: i * i, range(n))", YIELDED)
add("yields-where-a-list-is-meant", "def f(n): yield from range(n)", Asserts(("assert f(2) == [0, 1]",)), "wrong")
add("named-like-a-builtin", "def sum(a, b): return a * b",
    Asserts(("assert sum(10, 15) == 150", "n = sum(2, 2)\nassert n == 4")))
add("named-like-a-builtin-wrong", "def total(a, b): return a * b", Asserts(("assert sum([10, 15]) == 25",)), "wrong")
add("long-argument-of-a-test", "def f(x): return len(x)", Asserts(("assert f(list(range(300_000))) == 300_000",)))
add("long-answers", "def f(n): return list(range(n))", Calls((Call("f", (200_000,), list(range(200_000))),)))
add("check-that-returns", "def f(x): return x",
    Asserts(("def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i\n    return True\n",), "f"))
add("continues-the-prompt", "    return x + 1\n", Asserts(("assert f(1) == 2",), "f"),
    prefix='def f(x):\n    """One more."""\n', entry_point="f")
PROMPTED = Asserts(("assert f(1) == 1",), "f", "def f(x):\n")
add("repeats-a-bare-signature", "def f(x):\n    return x\n", PROMPTED, prefix="def f(x):\n", entry_point="f")
add("continues-a-bare-signature", "    return x\n", PROMPTED, prefix="def f(x):\n", entry_point="f")
add("future-after-the-prompt", "from __future__ import annotations\ndef f(x: N) -> N:\n    return g(x)\n", PROMPTED,
    prefix="def g(x): return x\ndef f(x):\n", entry_point="f")
add("uses-the-prompt", "def f(x): return helper(x) + 1\n", Asserts(("assert f(1) == 3",), "f"),
    prefix='def helper(x): return 2 * x\n\ndef f(x):\n    """Doc."""\n', entry_point="f")
SUITE = {
    "test_a.py": "import unittest\nfrom solution import f\n\ndef test_plain():\n    assert f(1) == 2\n\nclass Plain:\n    def test_two(self): assert f(2) == 3\n\nclass Cases(unittest.TestCase):\n    def setUp(self): self.x = 3\n    def test_three(self): self.assertEqual(f(self.x), 4)\n    def test_raises(self):\n        with self.assertRaises(TypeError): f('a')\n"
}
IDS = (
    "test_a.py::test_plain",
    "test_a.py::Plain::test_two",
    "test_a.py::Cases::test_three",
    "test_a.py::Cases::test_raises",
)
add("suite", "def f(x): return x + 1", Suite(SUITE, IDS))
add("suite-wrong", "def f(x): return x + 2", Suite(SUITE, IDS), "wrong")
add("suite-imports-module", "def f(x): return x + 1",
    Suite({"test_b.py": "import solution\ndef test_it(): assert solution.f(1) == 2\n"}, ("test_b.py::test_it",)))
add("suite-skipped", "def f(x): return x",
    Suite({"t.py": "import unittest\nfrom solution import f\nclass C(unittest.TestCase):\n    @unittest.skip('later')\n    def test_a(self): pass\n"}, ("t.py::C::test_a",)),
    "infra_error")
add("suite-missing", "def f(x): return x", Suite({"t.py": "from solution import f\n"}, ("t.py::test_none",)), "infra_error")
add("does-not-parse", "def f(x) return x", Calls((Call("f", (1,), 1),)), "model_error")
add("raises", "def f(x): return 1 / 0", Calls((Call("f", (1,), 1),)), "model_error")
add("script-that-raises", "print(1)\n1 / 0", Stdin((("", "1"),)), "model_error")
