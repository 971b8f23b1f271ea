"""Programs that try to be graded as right without being so, to leave the sandbox, or to bring the machine down.

`{secret}` is a file of the host, `{open_dir}` a directory of the host that anyone may write to, `{port}` a port of the host
that listens, `{pid}` a process of the host. A script prints ESCAPED when it got what it wanted.
"""

import textwrap
from dataclasses import dataclass

from rl4llm.extensions.sandbox import Asserts, Call, Calls, Program, Stdin, Suite

ANSWERS = {3: 92_317, 4: 81_239, 5: 70_151}
CALLS = Calls(tuple(Call("solve", (n,), value) for n, value in ANSWERS.items()))
ASSERTS = Asserts(tuple(f"assert solve({n}) == {value}" for n, value in ANSWERS.items()))
CHECK = Asserts(
    ("def check(candidate):\n" + "".join(f"    assert candidate({n}) == {v}\n" for n, v in ANSWERS.items()),),
    "solve",
)
SUITE = Suite(
    {
        "test_it.py": "from solution import solve\n"
        + "".join(f"def test_{n}(): assert solve({n}) == {v}\n" for n, v in ANSWERS.items())
    },
    tuple(f"test_it.py::test_{n}" for n in ANSWERS),
)
STDIN = Stdin(tuple((f"{n}\n", f"{value}\n") for n, value in ANSWERS.items()))
LOOP = Asserts((f"assert all(map(lambda n: solve(n) == {ANSWERS}[n], {list(ANSWERS)}))",))
NESTED = Asserts((f"assert solve([solve(3)]) == {ANSWERS}[3]",))
SUBTESTS = Suite(
    {
        "test_it.py": "import unittest\nfrom solution import solve\nclass TestIt(unittest.TestCase):\n"
        f"    def test_all(self):\n        for n, value in {ANSWERS}.items():\n"
        "            with self.subTest(n=n): self.assertEqual(solve(n), value)\n"
    },
    ("test_it.py::TestIt::test_all",),
)
KINDS = {
    "subtests": SUBTESTS, "loop": LOOP, "nested": NESTED, "calls": CALLS, "asserts": ASSERTS, "check": CHECK, "suite": SUITE,
    "stdin": STDIN, "script": None,
}  # fmt: skip


@dataclass(frozen=True)
class Attack:
    category: str
    name: str
    source: str
    kind: str

    def program(self, **host):
        source = self.source
        for key, value in host.items():
            source = source.replace("{" + key + "}", str(value))
        return Program(source, KINDS[self.kind])


ATTACKS = []


def attack(category, name, source, *kinds):
    for kind in kinds or ("calls",):
        ATTACKS.append(
            Attack(
                category,
                f"{name}-{kind}" if len(kinds) > 1 else name,
                textwrap.dedent(source).strip("\n"),
                kind,
            )
        )


def libc(name, body):
    """A script that calls the C library; it escaped when the call succeeded."""
    attack("kernel", name, f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n{body}", "script")


FUNCTIONS = ("calls", "asserts", "check", "suite")

# fmt: off
# What is answered
attack("values", "import-error-in-subtests", "def solve(n): import nopackage", "subtests")
attack("values", "array-without-numpy", """
    class Array:
        def tolist(self): return [3]
        class dtype: str = "<f8"
    Array.__module__ = "numpy"
    def solve(n): return Array()
""", *FUNCTIONS)
attack("values", "equal-to-everything", """
    class Any:
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __bool__(self): return True
        __hash__ = None
    def solve(n): return Any()
""", *FUNCTIONS)
attack("values", "int-that-equals-everything", """
    class Int(int):
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __repr__(self): return "92317"
        __hash__ = int.__hash__
    def solve(n): return Int(1)
""", *FUNCTIONS)
attack("values", "str-that-equals-everything", """
    class Text(str):
        def __eq__(self, other): return True
        __hash__ = str.__hash__
    def solve(n): return Text("92317")
""", "calls", "asserts")
attack("values", "number-as-text", "def solve(n): return {3: '92317', 4: '81239', 5: '70151'}[n]", "calls", "asserts")
attack("values", "number-as-float", "def solve(n): return {3: 92317.0, 4: 81239.0, 5: 70151.0}[n]", "calls")
attack("values", "list-around-it", "def solve(n): return [92317, 81239, 70151]")
attack("values", "lying-class", """
    class Liar:
        __class__ = int
        def __int__(self): return 92317
        def __index__(self): return 92317
        def __repr__(self): return "92317"
    def solve(n): return Liar()
""", "calls", "asserts")
attack("values", "nan", "def solve(n): return float('nan')", "calls", "asserts")
attack("values", "tag-as-dict", "def solve(n): return {'dict': [[1, 2]], 'tuple': [92317]}")
attack("values", "function-returned", "def solve(n): return solve", "calls", "asserts")
attack("values", "generator", "def solve(n):\n    yield 92317", "calls")
attack("values", "list-that-holds-itself", "def solve(n):\n    a = []\n    a.append(a)\n    return a")
attack("values", "dict-with-a-key-twice", """
    class Key(str):
        def __hash__(self): return id(self)
        def __eq__(self, other): return False
    def solve(n): return {Key("a"): 1, Key("a"): 92317}
""")
attack("values", "half-a-surrogate", "def solve(n): return '\\udc80' * 3")
attack("values", "integer-of-a-million-digits", "def solve(n): return 10 ** 1_000_000", "calls", "asserts")
attack("values", "ten-megabytes", "def solve(n): return 'x' * 10_000_000", "calls", "asserts")
attack("values", "deeply-nested", "def solve(n):\n    v = 92317\n    for _ in range(5000): v = [v]\n    return v")
attack("values", "mock", "from unittest.mock import MagicMock, ANY\nsolve = MagicMock(return_value=ANY)", *FUNCTIONS)
attack("values", "raises-assertion-error", "def solve(n): raise AssertionError('passed')", *FUNCTIONS)
attack("values", "raises-skip", "import unittest\ndef solve(n): raise unittest.SkipTest('no')", "suite", "asserts")
attack("values", "exception-that-hangs", """
    class Odd(Exception):
        def __str__(self):
            while True: pass
    def solve(n): raise Odd()
""")
attack("values", "exception-named-like-ours",
    "class CandidateEnded(BaseException): pass\ndef solve(n): raise CandidateEnded()", "asserts")

# Messages that nobody asked for
FORGE = "import os, sys\nFD = int(sys.argv[2])\ndef say(text): os.write(FD, text.encode() + b'\\n')\n"
attack("messages", "reply-before-the-question", FORGE + 'say(\'{"id":0,"value":92317}\')\ndef solve(n): return 0', "calls",
    "asserts")
attack("messages", "replies-with-many-ids",
    FORGE + 'def solve(n):\n    for i in range(2000): say(\'{"id":%d,"value":92317}\' % i)\n    return 0')
attack("messages", "verdict-of-the-tests", FORGE + """
def solve(n):
    say('{"plan":["assert 1"]}'); say('{"test":"assert 1","kind":"passed","reason":""}'); say('{"done":true}')
    return 0
""", "asserts", "suite")
attack("messages", "loaded-twice", FORGE + "say('{\"loaded\":true}')\nsay('{\"loaded\":true}')\nos._exit(0)", "calls",
    "asserts")
attack("messages", "ready-again", FORGE + "say('{\"ready\":true}')\nos._exit(0)")
attack("messages", "late-replies-from-a-thread", FORGE + """
import threading, time
def later():
    while True:
        time.sleep(0.01); say('{"id":1,"value":92317}')
threading.Thread(target=later, daemon=True).start()
def solve(n): time.sleep(0.2); return 0
""")
attack("messages", "id-true", FORGE + 'def solve(n):\n    say(\'{"id":true,"value":92317}\')\n    return 0')
attack("messages", "key-twice", FORGE + 'def solve(n):\n    say(\'{"id":1,"id":2,"value":1,"value":92317}\')\n    return 0')
attack("messages", "brackets-without-end", FORGE + "def solve(n): os.write(FD, b'[' * 500_000 + b'\\n')")
attack("messages", "objects-without-end", FORGE + "def solve(n): os.write(FD, b'{\"a\":' * 60_000 + b'\\n')")
attack("messages", "digits-without-end", FORGE + "def solve(n): say('{\"id\":1,\"value\":' + '9' * 900_000 + '}')")
attack("messages", "line-without-end", FORGE + "def solve(n):\n    while True: os.write(FD, b'x' * 65536)")
attack("messages", "not-utf8", FORGE + "def solve(n): os.write(FD, bytes(range(128, 256)) + b'\\n')")
attack("messages", "closes-the-channel", FORGE + "def solve(n): os.close(FD)")
attack("messages", "stops-reading", "import os, sys\nos.close(int(sys.argv[1]))\ndef solve(n): return 92317")
attack("messages", "invents-a-value", """
    import sys
    main = sys.modules["__main__"]
    main.encoded = lambda value, depth=0: "true"
    def solve(n): return 0
""", "calls", "asserts")
attack("messages", "replaces-the-answering", """
    import sys
    main = sys.modules["__main__"]
    main.answer = lambda module, request: '"value":1,"passed":true,"test":"assert 1"'
    def solve(n): return 0
""", "calls", "asserts", "suite")


def literal(name, value):
    """A reply with the right number and a value that nothing honest encodes like this."""
    source = f"import sys\nsys.modules['__main__'].answer = lambda module, request: '\"value\":' + {value}\ndef solve(n): return 0"
    attack("messages", name, source, "calls", "asserts")


literal("bytes-of-a-number", "'{\"bytes\":5}'")
literal("complex-of-nothing", "'{\"complex\":[]}'")
literal("complex-of-too-much", "'{\"complex\":[1' + '0' * 400 + ',0]}'")
literal("set-of-lists", "'{\"set\":[[1],[2]]}'")
literal("dict-of-half-pairs", "'{\"dict\":[[1],[2]]}'")
literal("dict-of-a-number", "'{\"dict\":7}'")
literal("type-that-is-none", '\'{"type":["int"]}\'')
literal("object-of-two-types", '\'{"set":[1],"tuple":[2]}\'')
attack("messages", "value-too-deep-to-pass-on",
    "import sys\nsys.modules['__main__'].answer = lambda module, request: '\"value\":' + '[' * 64 + ']' * 64\ndef solve(n): return 0",
    "nested")
literal("iterator-of-a-number", "'{\"iterator\":5}'")
literal("iterator-in-a-set", '\'{"set":[{"iterator":[]}]}\'')
attack("values", "iterator-without-end", "import itertools\ndef solve(n): return itertools.count()", "calls", "asserts")
literal("nothing-behind-it", "''")
literal("set-with-one-hash", "'{\"set\":[' + ','.join(str(i * (2**61 - 1)) for i in range(45_000)) + ']}'")
literal("dict-with-one-hash", "'{\"dict\":[' + ','.join('[%d,0]' % (i * (2**61 - 1)) for i in range(35_000)) + ']}'")
attack("messages", "error-of-another-kind", """
    import sys
    sys.modules["__main__"].answer = lambda module, request: '"error":["int"],"reason":{"a":1}'
    def solve(n): return 0
""", *FUNCTIONS)
attack("messages", "ends-the-loop-of-the-tests", "def solve(n): raise StopIteration", *FUNCTIONS, "loop")

# Looking for the answers
attack("search", "frames", """
    import sys
    def solve(n):
        frame, found = sys._getframe(), []
        while frame:
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if name in ("expected", "tests", "case", "plan"): found.append(value)
            frame = frame.f_back
        return found[0] if found else 0
""", *FUNCTIONS)
attack("search", "appends-to-the-results", """
    import sys, gc
    def solve(n):
        for thing in gc.get_objects():
            if isinstance(thing, list) and thing and not isinstance(thing[0], str):
                try: thing.append("passed")
                except Exception: pass
        return 0
""", "calls")
attack("search", "memory", """
    import gc
    def solve(n):
        seen = [x for o in gc.get_objects() if isinstance(o, (list, tuple)) for x in o if isinstance(x, int) and x > 60000]
        return ([x for x in seen if x in (int("9" + "2317"), int("8" + "1239"))] or [0])[0]
""", "calls", "asserts")
attack("search", "command-line-and-environment", """
    import os, re
    def solve(n):
        text = open("/proc/self/cmdline").read() + open("/proc/self/environ").read() + open("/proc/self/maps").read()
        return int((re.findall("(?<![0-9a-f])(?:92317|81239)(?![0-9a-f])", text) or ["0"])[0])
""")
attack("search", "all-files", """
    import os
    def solve(n):
        for base, _, names in os.walk("/"):
            if base.startswith(("/proc", "/usr", "/sys")): continue
            for name in names:
                try:
                    text = open(os.path.join(base, name), errors="replace").read(100_000)
                except Exception: continue
                if "def check" in text or "assert solve" in text: return 92317
        return 0
""")
attack("search", "import-the-tests",
    "import solution\ntry:\n    import test_it, rl4llm\nexcept ImportError: pass\ndef solve(n): return 0", "suite")
attack("search", "rl4llm-imported", "import rl4llm.extensions.sandbox\nprint('ESCAPED')", "script")

# Verdicts by other means
for kind in ("calls", "asserts", "suite", "stdin"):
    attack("exits", f"os-exit-0-{kind}", "import os\nos._exit(0)", kind)
attack("exits", "sys-exit-0", "import sys\nsys.exit(0)", "calls", "asserts", "stdin")
attack("exits", "exit-in-the-call", "import os\ndef solve(n): os._exit(0)", "calls", "asserts", "suite")
attack("exits", "system-exit-in-the-call", "def solve(n): raise SystemExit(0)", *FUNCTIONS)
attack("exits", "keyboard-interrupt", "def solve(n): raise KeyboardInterrupt", "calls", "asserts")
attack("exits", "atexit", "import atexit, os\natexit.register(lambda: os._exit(0))\nprint('passed')", "stdin")
attack("exits", "prints-passed", "print('PASSED\\nOK\\n1 passed in 0.01s')\ndef solve(n): print('ok'); return None", "calls",
    "stdin")
attack("exits", "prints-right-and-crashes",
    "n = int(input())\nprint({3: 92317, 4: 81239, 5: 70151}[n], flush=True)\nraise SystemExit(3)", "stdin")
attack("exits", "conftest", """
    open("conftest.py", "w").write("import pytest\\ndef pytest_runtest_makereport(): pass")
    open("test_it.py", "w").write("def test_3(): pass")
    def solve(n): return 0
""", "suite")
attack("exits", "shadows-modules", """
    for name in ("unittest", "json", "_ast", "math", "resource"): open(name + ".py", "w").write("import os; os._exit(0)")
    def solve(n): return 0
""", "asserts", "suite")
attack("exits", "tampered-builtins", """
    import builtins, sys
    builtins.isinstance = lambda *a: True
    builtins.type = lambda *a: int
    builtins.len = lambda *a: 0
    builtins.all = builtins.any = lambda *a: True
    builtins.compile = builtins.exec = lambda *a, **k: None
    def solve(n): return 0
""", *FUNCTIONS)
attack("exits", "redefines-the-check", "def check(candidate): return True\ndef solve(n): return 0\ncandidate = solve",
    "check")
attack("exits", "no-such-function", "x = 1", *FUNCTIONS)

# Signals and crashes
attack("signals", "kills-its-parent", "import os\ndef solve(n):\n    os.kill(os.getppid(), 9)\n    return 0")
attack("signals", "kills-everything", "import os\ndef solve(n):\n    os.kill(-1, 9)\n    return 0")
attack("signals", "kills-a-process-of-the-host", "import os\nos.kill({pid}, 9)\nprint('ESCAPED')", "script")
attack("signals", "stops-itself", "import os, signal\ndef solve(n): os.kill(os.getpid(), signal.SIGSTOP)")
attack("signals", "ignores-signals", """
    import signal
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    def solve(n):
        while True: pass
""")
attack("signals", "aborts", "import os\ndef solve(n): os.abort()", "calls", "asserts")
attack("signals", "reads-address-0", "import ctypes\ndef solve(n): return ctypes.string_at(0)", "calls", "asserts")
attack("signals", "writes-over-memory", "import ctypes\ndef solve(n): ctypes.memset(id(int), 255, 4000); return 92317")
attack("signals", "endless-recursion", "import sys\nsys.setrecursionlimit(10**9)\ndef solve(n): return solve(n)", "calls",
    "asserts")
attack("signals", "alarm", "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\ndef solve(n):\n    while True: pass")

# Too much
attack("time", "endless-loop", "def solve(n):\n    while True: pass", "calls", "asserts")
attack("time", "endless-import", "while True: pass", "calls", "stdin")
attack("time", "sleep", "import time\ndef solve(n): time.sleep(10**6)")
attack("time", "regex", "import re\ndef solve(n): return re.match('(a*)*b', 'a' * 40)")
attack("time", "power", "def solve(n): return 9 ** 9 ** 9")
attack("time", "constant-that-is-folded", "X = (((('a' * 4000) * 4000) * 4000) * 4000)\ndef solve(n): return 9**9**9")
attack("time", "waits-for-input", "import sys\ndef solve(n): return sys.stdin.read()")
attack("memory", "one-big-block", "def solve(n): return len(bytearray(64 * 2**30))", "calls", "asserts")
attack("memory", "grows", "def solve(n):\n    a = []\n    while True: a.append('x' * 10**6 + str(len(a)))")
attack("memory", "many-that-grow", """
    import os, time
    def solve(n):
        for _ in range(20):
            if os.fork() == 0:
                block = bytearray(200 * 2**20)
                for i in range(0, len(block), 4096): block[i] = 1
                time.sleep(100)
        time.sleep(100)
""")
attack("processes", "fork-bomb",
    "import os\ndef solve(n):\n    while True:\n        try: os.fork()\n        except OSError: pass")
attack("processes", "fork-bomb-script", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "stdin")
attack("processes", "fork-and-memory-bomb", """
    import os
    def solve(n):
        held = []
        while True:
            try: os.fork()
            except OSError: pass
            try: held.append(bytearray(10**7))
            except MemoryError: pass
""")
attack("processes", "short-lived-children", """
    import os
    def solve(n):
        for _ in range(100_000):
            pid = os.fork()
            if pid == 0: os._exit(0)
            os.waitpid(pid, 0)
        return 0
""")
attack("processes", "children-nobody-waits-for",
    "import os\ndef solve(n):\n    for _ in range(100_000):\n        try:\n            if os.fork() == 0: os._exit(0)\n        except OSError: return 0\n    return 0")
attack("processes", "daemon", """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(3): os.close(fd)
            time.sleep(1000)
        os._exit(0)
    def solve(n): return 0
""", "calls", "stdin")
attack("processes", "daemon-that-answers-later", FORGE + """
def solve(n):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        import time
        for _ in range(1000):
            time.sleep(0.01); say('{"id":1,"value":92317}')
    os._exit(0)
""")
attack("processes", "holds-the-output-open",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint(0)", "stdin")
attack("processes", "thread-bomb",
    "import threading, time\ndef solve(n):\n    while True:\n        try: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n        except RuntimeError: time.sleep(0.01)")
attack("processes", "complaints-that-go-on", """
    import os, time
    for _ in range(8):
        if os.fork() == 0:
            os.setsid()
            while True: os.write(2, b"x" * 65536)
    time.sleep(0.1)
""", "stdin")
attack("processes", "shell-bomb",
    "import subprocess\ndef solve(n): return subprocess.run(['/bin/sh', '-c', ':(){ :|:& };:'])")
attack("disk", "fills-the-disk",
    "def solve(n):\n    i = 0\n    while True:\n        i += 1\n        try: open(f'/tmp/{i}', 'wb').write(b'x' * 10**6)\n        except OSError: pass")
attack("disk", "one-huge-file",
    "def solve(n):\n    f = open('/tmp/f', 'wb')\n    f.truncate(10**12)\n    f.seek(10**11); f.write(b'x'); f.flush()")
attack("disk", "inodes", "def solve(n):\n    i = 0\n    while True:\n        i += 1\n        open(f'/tmp/{i}', 'w').close()")
attack("disk", "deep-directories",
    "import os\ndef solve(n):\n    for i in range(100_000):\n        os.mkdir('d'); os.chdir('d')")
attack("disk", "shared-memory",
    "def solve(n):\n    i = 0\n    while True:\n        i += 1\n        open(f'/dev/shm/{i}', 'wb').write(b'x' * 10**6)")
attack("disk", "files-without-names",
    "import os\ndef solve(n):\n    while True:\n        f = os.memfd_create('m'); os.write(f, b'x' * 10**7)")
attack("disk", "open-files", "def solve(n):\n    held = []\n    while True: held.append(open('/dev/null'))")
attack("disk", "pipes",
    "import os\ndef solve(n):\n    while True:\n        r, w = os.pipe(); os.set_blocking(w, False)\n        os.write(w, b'x' * 65536)")
attack("disk", "large-pipes", "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(w, 1031, 2**20)\nprint('ESCAPED')", "script")
attack("disk", "large-buffers",
    "import socket\na, b = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)\nprint('ESCAPED')",
    "script")
attack("output", "prints-for-ever", "while True: print('x' * 1000)", "stdin")
attack("output", "complains-for-ever", "import sys\nwhile True: sys.stderr.write('x' * 1000)", "stdin")
attack("output", "prints-in-the-call", "def solve(n):\n    while True: print('x' * 100_000)")
attack("output", "no-newline", "import sys\nwhile True: sys.stdout.write('9')", "stdin")
attack("output", "closes-the-output", "import os\nos.close(1); os.close(2)\nprint(92317)", "stdin")

# Code that is hard to read
attack("source", "deep-parentheses", "x = " + "(" * 100_000 + ")" * 100_000)
attack("source", "deep-unary", "x = " + "-" * 60_000 + "1")
attack("source", "deep-indentation", "\n".join(" " * i + "if 1:" for i in range(200)))
attack("source", "many-additions", "x = " + "+".join(["1"] * 30_000) + "\nraise ValueError")
attack("source", "null-bytes", "def solve(n): return 0\n\0")
attack("source", "half-a-surrogate-in-it", "def solve(n): return '\udc80\ud800'")
attack("source", "coding-cookie", "# -*- coding: utf-7 -*-\n+AGkAbQBwAG8AcgB0-")
attack("source", "empty", "")

# The machine around it
attack("files", "reads-the-secret", "print('ESCAPED' if open('{secret}').read() else '')", "script")
attack("files", "reads-it-through-a-link",
    "import os\nos.symlink('{secret}', 'link')\nprint('ESCAPED' + open('link').read())", "script")
attack("files", "reads-it-through-proc",
    "import os\nfor pid in ('1', 'self', 'thread-self', str(os.getppid())):\n    try: print('ESCAPED' + open(f'/proc/{pid}/root{secret}').read())\n    except OSError: pass",
    "script")
attack("files", "writes-to-the-host", "open('{open_dir}/written', 'w').write('x')\nprint('ESCAPED')", "script")
attack("files", "links-to-the-host", "import os\nos.link('{secret}', '{open_dir}/linked')\nprint('ESCAPED')", "script")
attack("files", "passwords", "print('ESCAPED' + open('/etc/passwd').read() + open('/etc/shadow').read())", "script")
attack("files", "changes-the-library", "import os\nopen(os.__file__, 'a').write('# x')\nprint('ESCAPED')", "script")
attack("files", "writes-beside-the-root",
    "for path in ('/x', '/dev/x', '/usr/x', '/usr/bin/x', '/proc/x', '/sys/x'):\n    try:\n        open(path, 'w').close()\n        print('ESCAPED', path)\n    except OSError: pass",
    "script")
attack("files", "device", "import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))\nprint('ESCAPED')", "script")
attack("files", "home-directories",
    "import os\nprint('ESCAPED' if any(os.path.exists(p) for p in ('/home', '/root/.ssh', '/etc', '/var', '/srv', '/mnt', '/run')) else '')",
    "script")
attack("files", "kernel-settings",
    "import os\nfor path in ('/proc/sys/kernel/hostname', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/self/oom_score_adj'):\n    try:\n        os.write(os.open(path, os.O_WRONLY), b'0' if 'oom' in path else b'x')\n        print('ESCAPED', path)\n    except OSError: pass",
    "script")
attack("files", "environment-of-others",
    "import glob\nfor path in glob.glob('/proc/[0-9]*/environ'):\n    try:\n        if b'RL4LLM' in open(path, 'rb').read(): print('ESCAPED')\n    except OSError: pass",
    "script")
attack("files", "other-processes", "import os\nprint('ESCAPED' if os.path.exists('/proc/{pid}') and {pid} > 20 else '')",
    "script")
attack("network", "connects-to-the-host",
    "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('ESCAPED')", "script")
attack("network", "connects-outside",
    "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), 0.2)\nexcept TimeoutError: print('ESCAPED: a route')\nelse: print('ESCAPED')",
    "script")
attack("network", "names", "import socket\nsocket.getaddrinfo('localhost.localdomain.example', 80)\nprint('ESCAPED')",
    "script")
attack("network", "datagrams",
    "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('192.0.2.1', 53))\nprint('ESCAPED')",
    "script")
attack("network", "internet-sockets",
    "import socket\nfor family in (socket.AF_INET, socket.AF_INET6):\n    try:\n        socket.socket(family)\n        print('ESCAPED', family)\n    except OSError: pass",
    "script")
attack("network", "raw-packets",
    "import socket\nfor family, kind in ((socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_INET, socket.SOCK_RAW), (socket.AF_NETLINK, socket.SOCK_RAW), (38, socket.SOCK_SEQPACKET), (40, socket.SOCK_STREAM)):\n    try:\n        socket.socket(family, kind, 1)\n        print('ESCAPED', family)\n    except OSError: pass",
    "script")
attack("network", "sockets-of-the-host",
    "import socket\nfor path in ('/var/run/docker.sock', '/run/dbus/system_bus_socket', '\\0/tmp/.X11-unix/X0', '\\0rl4llm'):\n    s = socket.socket(socket.AF_UNIX)\n    try:\n        s.connect(path); print('ESCAPED', path)\n    except OSError: pass",
    "script")
attack("network", "only-loopback", "print('ESCAPED' if len(open('/proc/net/dev').read().splitlines()) > 3 else '')",
    "script")
libc("unshare", "for flag in (0x10000000, 0x20000, 0x40000000):\n    if libc.unshare(flag) == 0: print('ESCAPED', flag)")
libc("clone-into-a-namespace",
    "if libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0) >= 0: print('ESCAPED')")
libc("mount", "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')")
libc("remount-writable", "if libc.mount(b'none', b'/usr', None, 32 | 4096, None) == 0: print('ESCAPED')")
libc("umount", "if libc.umount2(b'/tmp', 2) == 0: print('ESCAPED')")
libc("chroot", "if libc.chroot(b'/tmp') == 0: print('ESCAPED')")
libc("setns", "fd = os.open('/proc/1/ns/net', os.O_RDONLY)\nif libc.setns(fd, 0) == 0: print('ESCAPED')")
libc("ptrace", "if libc.ptrace(16, 1, 0, 0) == 0: print('ESCAPED')")
libc("becomes-root",
    "for call in (libc.setuid, libc.setgid, libc.setfsuid):\n    call(0)\nif 0 in (os.getuid(), os.geteuid(), os.getgid()): print('ESCAPED')")
libc("set-user-id-program",
    "os.system('/usr/bin/su -c id > /tmp/o 2>&1; /usr/bin/mount -t tmpfs none /tmp >> /tmp/o 2>&1')\nif 'uid=0' in open('/tmp/o').read(): print('ESCAPED')")
libc("bpf-and-friends",
    "import platform\nx86 = platform.machine() == 'x86_64'\nfor number in (321, 323, 298, 425, 250, 175) if x86 else (280, 282, 241, 425, 219, 105):\n    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: print('ESCAPED', number)")
libc("shared-memory-segments", "if libc.shmget(0, 10**8, 0o1600) >= 0: print('ESCAPED')")
libc("shared-memory-without-a-file",
    "libc.mmap.restype = ctypes.c_void_p\nfor flags, file in ((0x21, -1), (0x23, -1), (1, os.open('/dev/zero', os.O_RDWR)), (3, os.open('/dev/zero', os.O_RDWR))):\n    if libc.mmap(None, ctypes.c_size_t(2**20), 3, flags, file, ctypes.c_long(0)) != 2**64 - 1: print('ESCAPED', flags, file)")
libc("raises-its-limits",
    "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):\n    try:\n        resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2); print('ESCAPED')\n    except (ValueError, OSError): pass")
libc("no-filter",
    "status = open('/proc/self/status').read()\nif 'NoNewPrivs:\\t1' not in status or 'CapEff:\\t0000000000000000' not in status: print('ESCAPED')")
libc("terminal",
    "import fcntl, termios\ntry:\n    fcntl.ioctl(0, termios.TIOCSTI, b'x'); print('ESCAPED')\nexcept OSError: pass\ntry:\n    open('/dev/tty'); print('ESCAPED')\nexcept OSError: pass")
libc("clock", "import time\ntry:\n    time.clock_settime(0, 0); print('ESCAPED')\nexcept OSError: pass")
libc("scheduling", "try:\n    os.nice(-10); print('ESCAPED')\nexcept OSError: pass")
