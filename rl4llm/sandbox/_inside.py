"""The body of a process inside the sandbox; its text is handed to a bare Python, which sees no file of the project.

It begins with a line ``{"ready": true}`` and is then told what it is: the candidate, whose functions are called or which is
run as a script; or the tests, which call functions that live in another sandbox. Messages are lines of JSON, written so that
they are Python literals as well: importing `json` would cost as much time as starting Python. Whatever is said here is the
word of model-written code, except where this process holds the tests.
"""

import _ast
import builtins
import os
import resource
import sys
from _sitebuiltins import Quitter

try:
    from _json import encode_basestring_ascii as quoted
except ImportError:
    from json.encoder import py_encode_basestring_ascii as quoted

REQUESTS, REPLIES = int(sys.argv[1]), int(sys.argv[2])
CONSTANTS = {
    "true": True, "false": False, "null": None, "NaN": float("nan"), "Infinity": float("inf"), "__builtins__": {},
}  # fmt: skip
MAX_DEPTH = 64
MAX_REASON = 300
ONLY_AST = 0x400


def encoded(value, depth=0):
    """A literal as JSON. What JSON has no word for is an object with one key, which is the type."""
    if depth > MAX_DEPTH:
        raise RecursionError("the value is nested too deeply")
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return "[" + ",".join([encoded(item, depth + 1) for item in value]) + "]"
    return '{"%s":%s}' % _tagged(value, depth + 1)  # noqa: UP031 - braces


def _tagged(value, depth):
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return kind.__name__, "[" + ",".join([encoded(item, depth) for item in value]) + "]"
    if isinstance(value, dict):
        return "dict", "[" + ",".join([f"[{encoded(key, depth)},{encoded(value[key], depth)}]" for key in value]) + "]"
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, quoted(value.decode("latin-1"))
    if isinstance(value, complex):
        return "complex", f"[{encoded(value.real)},{encoded(value.imag)}]"
    if hasattr(type(value), "__next__"):
        return "iterator", "[" + ",".join([encoded(item, depth) for item in value]) + "]"
    raise TypeError(f"a {type(value).__name__} is not a literal")


def decoded(value):
    """The literal behind what `encoded` made, as read by JSON."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in content}
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(content, "latin-1")
    if kind == "complex":
        return complex(*content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[kind](decoded(content))


class Channel:
    """Lines to and from the trusted side."""

    def __init__(self, source, target):
        self.source = source
        self.target = target
        self.buffer = bytearray()

    def receive(self):
        """The next message; the process ends when there will be none."""
        start = 0
        while (end := self.buffer.find(b"\n", start)) < 0:
            start = len(self.buffer)
            chunk = os.read(self.source, 1 << 16)
            if not chunk:
                os._exit(0)
            self.buffer += chunk
        line = self.buffer[:end].decode()
        del self.buffer[: end + 1]
        return eval(line, dict(CONSTANTS))

    def send(self, line):
        """Write a whole line."""
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self.target, data) :]


def reason_of(error):
    """A short text for an exception, whatever its own methods do."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_REASON]
    except BaseException:  # noqa: BLE001 - the model's own exception class
        return "an exception that cannot be shown"


def limit(limits):
    """Bounds that the kernel keeps; they cannot be raised again."""
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def main():
    """Say that the sandbox stands, take on a role, and play it."""
    channel = Channel(REQUESTS, REPLIES)
    sys.path[:] = [entry for entry in sys.path if entry]
    channel.send('{"ready":true}')
    job = channel.receive()
    limit(job["limits"])
    sys.set_int_max_str_digits(0)
    sys.path.extend(job["packages"])
    add_exits()
    ROLES[job["role"]](channel, job)


def add_exits():
    """Define `exit` and `quit`, which scripts end with; Python adds them to the builtins when it looks for packages."""
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")


def code_of(job):
    """The program, compiled, in the parts to be run; what does not define the entry point continues the prefix."""
    prefix, source = job["prefix"], job["source"]
    if not prefix:
        return [compile(source, "program.py", "exec")]
    try:
        alone = compile(source, "program.py", "exec", ONLY_AST)
        defined = any(getattr(node, "name", None) == job["entry_point"] for node in alone.body)
    except SyntaxError:
        defined = False
    texts = [setup_of(prefix), source] if defined else [prefix + source]
    return [compile(text, "program.py", "exec") for text in texts]


def be_called(channel, job):
    """Load the program and answer calls of its functions."""
    try:
        code = code_of(job)
    except BaseException as error:  # noqa: BLE001 - whatever the compiler makes of the model's text
        return channel.send('{"unparsed":%s}' % quoted(reason_of(error)))  # noqa: UP031
    namespace = {"__name__": "solution", "__builtins__": __builtins__}
    module = type(sys)("solution")
    module.__dict__.update(namespace)
    sys.modules["solution"] = module
    try:
        for part in code:
            exec(part, module.__dict__)
    except BaseException as error:  # noqa: BLE001 - the model's code
        reason = f"{reason_of(error)} ({where(error) or 'somewhere'})"
        return channel.send('{"broken":%s}' % quoted(reason))  # noqa: UP031
    channel.send('{"loaded":true}')
    while True:
        request = channel.receive()
        channel.send('{"id":%d,%s}' % (request["id"], answer(module, request)))  # noqa: UP031
    return None


def answer(module, request):
    """What a call returned or raised, as the inside of a JSON object."""
    try:
        value = function_of(module, request["fn"])(*decoded(request["args"]), **decoded(request["kwargs"]))
        return '"value":' + encoded(value)
    except BaseException as error:  # noqa: BLE001 - the model's code
        name = type(error).__name__
        return f'"error":{quoted(name[:100])},"reason":{quoted(reason_of(error))},"where":{quoted(where(error))}'


def where(error):
    """The line of the program that raised, as far as that is known."""
    try:
        line, step = 0, error.__traceback__
        while step is not None:
            line = step.tb_lineno if step.tb_frame.f_code.co_filename == "program.py" else line
            step = step.tb_next
        return f"line {line:d}" if line else ""
    except BaseException:  # noqa: BLE001 - the model's own exception class
        return ""


def function_of(module, name):
    """A function of the program, or the method of a new object of one of its classes."""
    first, _, method = name.partition(".")
    if first not in module.__dict__:
        raise NameError(f"the program defines no {first!r}")
    found = module.__dict__[first]
    return getattr(found(), method) if method else found


def be_run(channel, job):
    """Run the program as a script, once per request, each time in a process of its own."""
    try:
        code = code_of(job)
    except BaseException as error:  # noqa: BLE001 - whatever the compiler makes of the model's text
        return channel.send('{"unparsed":%s}' % quoted(reason_of(error)))  # noqa: UP031
    channel.send('{"loaded":true}')
    while True:
        request = channel.receive()
        child = os.fork()
        if child == 0:
            run_script(code, request["stdin"])
        _, status = os.waitpid(child, 0)
        end_group(child)
        channel.send('{"id":%d,"exit":%d}' % (request["id"], os.waitstatus_to_exitcode(status)))  # noqa: UP031
    return None


def end_group(pid):
    """Kill what a script left in its process group; what hid elsewhere ends with the sandbox."""
    try:
        os.killpg(pid, 9)
    except OSError:
        return


def run_script(code, text):
    """Be the script, and then end as Python does: with its threads, what it registered for the end, and its open files."""
    os.setsid()
    os.close(REQUESTS)
    os.close(REPLIES)
    read_from(text)
    main_module = type(sys)("__main__")
    main_module.__dict__.update({"__builtins__": __builtins__, "__file__": "program.py"})
    sys.modules["__main__"] = main_module
    sys.argv = ["program.py"]
    try:
        for part in code:
            exec(part, main_module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the model's code
        error.__traceback__ = error.__traceback__.tb_next
        sys.__excepthook__(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    raise SystemExit(0)


def read_from(text):
    """Let standard input be a text, through a file without a name: a pipe would have to be fed."""
    file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(os.dup(file), "wb") as writer:
        writer.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, 0)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - for as long as the script runs


class CandidateEnded(BaseException):
    """The program is gone; no `except Exception` of a test hides that."""


class NotALiteral(BaseException):
    """A test passes something that cannot leave its process: the test's fault, not the program's."""


# In a test these would mean something else: a failed assert, the end of a loop; the last ones take other arguments.
NEVER_PASSED_ON = (AssertionError, StopIteration, StopAsyncIteration, UnicodeError, ExceptionGroup)


class Proxy:
    """A function of the program, which runs in another sandbox. Only literals go there and come back."""

    def __init__(self, channel, name):
        self._channel = channel
        self._name = name

    def __call__(self, *args, **kwargs):
        try:
            content = f'"args":{encoded(list(args))},"kwargs":{encoded(kwargs)}'
        except TypeError as error:
            raise NotALiteral(f"the test calls {self._name} with what is no literal: {error}") from None
        self._channel.send(f'{{"call":{quoted(self._name)},{content}}}')
        reply = self._channel.receive()
        if "value" in reply:
            return decoded(reply["value"])
        if "ended" in reply:
            raise CandidateEnded(reply["ended"])
        kind = getattr(builtins, reply["error"], None)
        ordinary = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NEVER_PASSED_ON)
        raise (kind if ordinary else RuntimeError)(reply["reason"])

    def __eq__(self, other):
        raise TypeError("a function of the program is compared; only what it returns can be")

    __bool__ = __len__ = __iter__ = __hash__ = None


def hold_asserts(channel, job):
    """Run assert statements one by one and report each."""
    namespace = {"__name__": "tests", "__builtins__": __builtins__}
    try:
        exec(compile(setup_of(job["setup"]), "setup", "exec"), namespace)
        if job["entry_point"]:  # some tests of HumanEval call it by name; the setup has only its signature
            namespace[job["entry_point"]] = Proxy(channel, job["entry_point"])
        units = list(units_of(channel, job, namespace))
    except BaseException as error:  # noqa: BLE001 - the dataset's code
        return channel.send('{"broken":%s}' % quoted(reason_of(error)))  # noqa: UP031
    channel.send('{"plan":[%s]}' % ",".join(quoted(name) for name, _, _, source in units if source))  # noqa: UP031
    for name, code, scope, source in units:
        try:
            exec(code, scope)
        except BaseException as error:  # noqa: BLE001 - a failed test, or the step before one
            report(channel, name, error, source)
        else:
            if source:
                report(channel, name, None)
    channel.send('{"done":true}')
    return None


def setup_of(text):
    """A prompt that ends in a bare signature is completed, so that the functions before it can be had."""
    try:
        compile(text, "setup", "exec")
    except SyntaxError:
        return text + "\n    pass\n"
    return text


def units_of(channel, job, namespace):
    """(name, code, namespace, text where it is a test) for every statement of the tests, in order."""
    trees = [compile(text, "tests", "exec", ONLY_AST) for text in job["tests"]]
    leaves = [leaf for tree in trees for leaf in walk(tree)]
    bases = {leaf.value.id for leaf in leaves if isinstance(leaf, _ast.Attribute) and isinstance(leaf.value, _ast.Name)}
    unknown = {leaf.id for leaf in leaves if isinstance(leaf, _ast.Name)} - namespace.keys() - set(dir(builtins))
    for name in unknown:
        namespace[name] = __import__(name) if name in LIBRARY & bases else Proxy(channel, name)
    if not job["entry_point"] and not unknown - (LIBRARY & bases) - stored(leaves):
        name = builtin_meant(leaves)
        namespace[name] = Proxy(channel, name)
    checks = [node for tree in trees for node in tree.body if isinstance(node, _ast.FunctionDef) and node.name == "check"]
    number = 0
    for tree, text in zip(trees, job["tests"], strict=True):
        lines = text.splitlines()
        for node in tree.body:
            for part, scope in parts_of(node, checks, channel, job, namespace):
                leaves = [] if is_definition(part) else list(walk(part))
                # `assert True` is found in HumanEval, and is no test of anything.
                is_test = all(any(isinstance(leaf, kind) for leaf in leaves) for kind in (_ast.Assert, _ast.Name))
                number += is_test
                code = compile(_ast.Module(body=[part], type_ignores=[]), "tests", "exec")
                source = "\n".join(lines[part.lineno - 1 : part.end_lineno]).strip() or "assert"
                yield f"assert {number}" if is_test else f"line {part.lineno}", code, scope, is_test and source


def stored(leaves):
    """The names that tests give values to themselves."""
    return {leaf.id for leaf in leaves if isinstance(leaf, _ast.Name) and isinstance(leaf.ctx, _ast.Store)}


def builtin_meant(leaves):
    """The function of the program where it is named like a builtin, as `sum` in MBPP; ValueError where that is not clear."""
    called = [leaf.func.id for leaf in leaves if isinstance(leaf, _ast.Call) and isinstance(leaf.func, _ast.Name)]
    if len(set(called)) != 1:
        raise ValueError(f"the tests call no function of the program but {sorted(set(called))}; name it as entry_point")
    return called[0]


def parts_of(node, checks, channel, job, namespace):
    """A statement; of the function `check` its statements, with `candidate` bound."""
    called = node.value.func if isinstance(node, _ast.Expr) and isinstance(node.value, _ast.Call) else None
    if checks and getattr(called, "id", None) == "check":
        return []  # its statements run where it stands
    if node not in checks:
        return [(node, namespace)]
    scope = namespace
    scope[node.args.args[0].arg] = Proxy(channel, job["entry_point"])
    if any(isinstance(leaf, _ast.Return | _ast.Yield | _ast.YieldFrom | _ast.Nonlocal) for leaf in walk(node)):
        call = compile(f"assert check({node.args.args[0].arg}) is not False", "tests", "exec", ONLY_AST).body[0]
        return [(node, scope), (call, scope)]
    return [(part, scope) for part in node.body]


def is_definition(node):
    return type(node).__name__ in ("FunctionDef", "AsyncFunctionDef", "ClassDef")


def walk(node):
    """A node and all below it, without importing `ast`."""
    yield node
    for name in node._fields:
        value = getattr(node, name, None)
        for item in value if isinstance(value, list) else [value]:
            if hasattr(item, "_fields"):
                yield from walk(item)


LIBRARY = {
    "math", "cmath", "re", "collections", "itertools", "functools", "string", "random", "copy", "heapq", "bisect",
    "datetime", "operator", "sys", "os", "json", "statistics", "decimal", "fractions", "numbers", "typing",
}  # fmt: skip


def report(channel, name, error, source=""):
    """How a test ended; `kind` says whose fault a failure is."""
    kind = "passed" if error is None else "wrong"
    if isinstance(error, CandidateEnded):
        kind = "ended"
    elif isinstance(error, NotALiteral):
        kind = "broken"
    reason = "" if error is None else reason_of(error)
    source = quoted((source or "")[:MAX_REASON])
    channel.send(f'{{"test":{quoted(name)},"kind":"{kind}","reason":{quoted(reason)},"source":{source}}}')


def hold_suite(channel, job):
    """Run test files and report exactly the tests that were asked for."""
    solution = type(sys)("solution")
    solution.__getattr__ = lambda name: Proxy(channel, name) if name[:1] != "_" else missing(name)
    sys.modules["solution"] = solution
    channel.send('{"plan":[%s]}' % ",".join(quoted(name) for name in job["required"]))  # noqa: UP031
    modules = {}
    for name in job["required"]:
        file, *path = name.split("::")
        try:
            if file not in modules:
                modules[file] = {"__name__": file.removesuffix(".py"), "__builtins__": __builtins__}
                exec(compile(job["files"][file], file, "exec"), modules[file])
            run_test(modules[file], path)
        except BaseException as error:  # noqa: BLE001 - a failed test
            modules.setdefault(file, {})
            report(channel, name, error)
        else:
            report(channel, name, None)
    channel.send('{"done":true}')


def missing(name):
    raise AttributeError(name)


def run_test(namespace, path):
    """Run one test; anything raised is a failure, and so is a test that was skipped or that is not there."""
    test = namespace[path[0]]
    if len(path) == 1:
        return test()
    unittest = sys.modules.get("unittest")
    if unittest is None or not issubclass(test, unittest.TestCase):
        return getattr(test(), path[1])()
    result = unittest.TestResult()
    unittest.TestSuite([test(path[1])]).run(result)
    if result.skipped or result.expectedFailures or result.unexpectedSuccesses or result.testsRun != 1:
        raise AssertionError("the test was skipped or not run")
    if not result.wasSuccessful():
        problem = (result.errors + result.failures)[0][1].strip().splitlines()[-1]
        raise (CandidateEnded if "CandidateEnded" in problem.partition(":")[0] else AssertionError)(problem)
    return None


ROLES = {"calls": be_called, "scripts": be_run, "asserts": hold_asserts, "suite": hold_suite}

main()
