"""The main code of a process inside the sandbox: a bare Python receives this text and that of `_inside_tests.py`.

It sees no file of the project. It first sends the line ``{"ready": true}`` and then receives its role: the candidate,
whose functions are called or which runs as a script; or the tests, which call functions in another sandbox.

Messages are lines of JSON that are also Python literals, because importing `json` would take as long as starting
Python. Everything that it sends comes from model-written code, except when this process runs the tests.
"""

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
    """Return a literal as JSON. A type that JSON does not have becomes an object with one key, the type's name."""
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
        return "dict", "[" + ",".join(
            [f"[{encoded(key, depth)},{encoded(value[key], depth)}]" for key in value]
        ) + "]"
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, quoted(value.decode("latin-1"))
    if isinstance(value, complex):
        return "complex", f"[{encoded(value.real)},{encoded(value.imag)}]"
    if hasattr(type(value), "__next__"):
        return "iterator", "[" + ",".join([encoded(item, depth) for item in value]) + "]"
    raise TypeError(f"a {type(value).__name__} is not a literal")


def decoded(value):
    """Return the literal that `encoded` encoded, after JSON parsing."""
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


class MessagePipe:
    """Lines to and from the trusted side."""

    def __init__(self, source, target):
        self.source = source
        self.target = target
        self.buffer = bytearray()

    def receive(self):
        """Return the next message; exit the process at the end of input."""
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
    """Return a short text for an exception, whatever its own methods do."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_REASON]
    except BaseException:  # noqa: BLE001 - the model's own exception class
        return "an exception that cannot be shown"


def limit(limits):
    """Set resource limits in the kernel; they cannot be raised again."""
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def add_exits():
    """Define `exit` and `quit`, which scripts may use; Python normally adds them when it looks for packages."""
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")


def code_of(job):
    """Return the program as compiled parts; code that does not define the entry point continues the prefix."""
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


def setup_of(text):
    """Complete a prompt that ends in a bare signature, so that the functions before it are defined."""
    try:
        compile(text, "setup", "exec")
    except SyntaxError:
        return text + "\n    pass\n"
    return text


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
    """Return the result or the exception of a call, as the inside of a JSON object."""
    try:
        value = function_of(module, request["fn"])(*decoded(request["args"]), **decoded(request["kwargs"]))
        return '"value":' + encoded(value)
    except BaseException as error:  # noqa: BLE001 - the model's code
        name = type(error).__name__
        return (
            f'"error":{quoted(name[:100])},"reason":{quoted(reason_of(error))},"where":{quoted(where(error))}'
        )


def where(error):
    """Return the line of the program that raised, if known."""
    try:
        line, step = 0, error.__traceback__
        while step is not None:
            line = step.tb_lineno if step.tb_frame.f_code.co_filename == "program.py" else line
            step = step.tb_next
        return f"line {line:d}" if line else ""
    except BaseException:  # noqa: BLE001 - the model's own exception class
        return ""


def function_of(module, name):
    """Return a function of the program, or a method of a new object of one of its classes."""
    first, _, method = name.partition(".")
    if first not in module.__dict__:
        raise NameError(f"the program defines no {first!r}")
    found = module.__dict__[first]
    return getattr(found(), method) if method else found


def be_run(channel, job):
    """Run the program as a script once per request, each time in a separate process."""
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
    """Kill what a script left in its process group; processes elsewhere end with the sandbox."""
    try:
        os.killpg(pid, 9)
    except OSError:
        return


def run_script(code, text):
    """Run as the script, and exit like Python: with its threads, exit handlers and open files."""
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
    """Make a text the standard input, through an unnamed file, since a pipe would have to be fed."""
    file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(os.dup(file), "wb") as writer:
        writer.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, 0)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - for as long as the script runs
