"""The main code of a process inside the sandbox: a bare Python receives this text, and those of
`_inside_objects.py` and `_inside_tests.py`.

It sees no file of the project. It first sends the line ``{"ready": true}`` and then receives its role: the candidate,
whose functions are called or which runs as a script; or the tests, which call functions in another sandbox.

Messages are lines of JSON that are also Python literals, because importing `json` would take as long as starting
Python. Everything that it sends comes from model-written code, except when this process runs the tests.
"""
# ruff: noqa: F821

import os
import resource
import sys

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
RICH = {
    "Decimal": "decimal", "Fraction": "fractions", "datetime": "datetime", "date": "datetime", "time": "datetime",
    "timedelta": "datetime",
}  # fmt: skip
HANDLES = {}  # how objects of the program are sent and received, in tests that are code
LENT = {
    "typing": "Any Callable Deque DefaultDict Dict FrozenSet Generator Iterable Iterator List Mapping Optional Sequence Set"
    " Tuple TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle dropwhile groupby islice pairwise"
    " permutations product repeat starmap takewhile tee zip_longest",
    "math": "acos asin atan atan2 ceil comb cos dist exp fabs factorial floor gcd hypot inf isqrt lcm log log10 log2 nan"
    " perm pi prod sin sqrt tan",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "copy": "deepcopy", "operator": "attrgetter itemgetter mul xor", "random": "choice randint shuffle", "io": "StringIO",
    "statistics": "mean median mode", "": "bisect collections copy datetime fractions functools heapq io itertools json math"
    " operator random re statistics string sys time",
}  # fmt: skip
LENT_RECURSION = 50_000


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
    if HANDLES and isinstance(value, HANDLES["types"]):
        return "object", HANDLES["sent"](value)
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return kind.__name__, "[" + ",".join([encoded(item, depth) for item in value]) + "]"
    if isinstance(value, dict):
        pairs = [f"[{encoded(key, depth)},{encoded(value[key], depth)}]" for key in value]
        return "dict", "[" + ",".join(pairs) + "]"
    if isinstance(value, bytes | bytearray):
        return type(value).__name__, quoted(value.decode("latin-1"))
    if isinstance(value, complex):
        return "complex", f"[{encoded(value.real)},{encoded(value.imag)}]"
    return _of_library(value, depth)


def _of_library(value, depth):
    """Return a number, a date or an array as text; other objects have a number, where tests may hold them."""
    kind = rich_kind(value)
    if kind == "timedelta":
        return kind, f"[{value.days:d},{value.seconds:d},{value.microseconds:d}]"
    if kind:
        return kind, quoted(value.isoformat() if hasattr(value, "isoformat") else str(value))
    if type(value).__module__ == "numpy":
        return "ndarray", f"[{quoted(value.dtype.str)},{encoded(value.tolist(), depth)}]"
    if HANDLES:
        return "object", HANDLES["sent"](value)
    raise TypeError(f"a {type(value).__name__} is not a literal")


def rich_kind(value):
    """Return the name of a value's type if it is a number or a date of the standard library, else None."""
    for kind, module in RICH.items():
        cls = getattr(sys.modules.get(module), kind, None)
        if isinstance(cls, type) and isinstance(value, cls):
            return kind
    return None


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
    if kind in SEQUENCES:
        return SEQUENCES[kind](decoded(content))
    return _library_value(kind, content)


SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _library_value(kind, content):
    if kind == "complex":
        return complex(*content)
    if kind == "object":
        return HANDLES["received"](content)
    if kind == "ndarray":
        return __import__("numpy").array(decoded(content[1]), dtype=content[0])
    cls = getattr(__import__(RICH[kind]), kind)
    return cls(*content) if kind == "timedelta" else getattr(cls, "fromisoformat", cls)(content)


class MessagePipe:
    """Lines to and from the trusted side."""

    def __init__(self, source, target):
        self.source = source
        self.target = target
        self.buffer = bytearray()
        self.asked = False  # whether the tests have called the program

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


def code_of(job):
    """Return the program as compiled parts; code that does not define the entry point continues the prefix."""
    prefix, source = job["prefix"], job["source"]
    if not prefix:
        return [compile(source, "program.py", "exec")]
    name = job["entry_point"].partition(".")[0]
    try:
        alone = compile(source, "program.py", "exec", ONLY_AST)
        defined = any(getattr(node, "name", None) == name for node in alone.body)
    except SyntaxError:
        defined = False
    apart = defined or (f"def {name}" not in prefix and f"class {name}" not in prefix)
    texts = [setup_of(prefix), source] if apart else [prefix + source]
    return [compile(text, "program.py", "exec") for text in texts]


def lend(job, code, namespace):
    """Give a program the names of the standard library that it uses, where the judge of its set imports them."""
    if not job["lends"]:
        return
    sys.setrecursionlimit(LENT_RECURSION)
    used = names_in(code)
    for module, names in LENT.items():
        for name in used & set(names.split()):
            namespace[name] = getattr(__import__(module), name) if module else __import__(name)


def names_in(parts):
    names = set()
    for part in parts:
        functions = [item for item in part.co_consts if isinstance(item, type(part))]
        names |= {*part.co_names, *names_in(functions)}
    return names


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
        lend(job, code, module.__dict__)
        for part in code:
            exec(part, module.__dict__)
    except BaseException as error:  # noqa: BLE001 - the model's code
        reason = f"{reason_of(error)} ({where(error) or 'somewhere'})"
        return channel.send('{"broken":%s}' % quoted(reason))  # noqa: UP031
    if job["objects"]:
        keep_objects(module)
    channel.send('{"loaded":true}')
    while True:
        request = channel.receive()
        reply = answer(module, request)
        for file in (sys.stdout, sys.stderr):  # tests may capture what is printed
            try:
                file.flush()
            except BaseException:  # noqa: BLE001 - the model may have put anything in its place
                continue
        channel.send('{"id":%d,%s}' % (request["id"], reply))  # noqa: UP031
    return None


def answer(module, request):
    """Return the result or the exception of a call, as the inside of a JSON object.

    A test may ask for what became of the arguments: always, or if the function returns None.
    """
    try:
        args, kwargs = decoded(request["args"]), decoded(request["kwargs"])
        name = request["fn"]
        if name == ":global":
            return '"value":' + encoded(function_of(module, *args))
        value = (OPERATIONS.get(name) or function_of(module, name))(*args, **kwargs)
        reply = '"value":' + encoded(value)
        if request.get("changes") == "always" or (request.get("changes") and value is None):
            reply += f',"args":{encoded(args)},"kwargs":{encoded(kwargs)}'
        return reply
    except BaseException as error:  # noqa: BLE001 - the model's code
        kinds = ",".join(f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__)[:MAX_REASON]
        reply = f'"error":{quoted(kinds)},"reason":{quoted(reason_of(error))},"where":{quoted(where(error))}'
        try:
            return f'{reply},"values":{encoded(list(error.args))},"made":{encoded(error)}'
        except BaseException:  # noqa: BLE001 - arguments that are no literals
            return reply


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
    """Return a function of the program, or a method of a new object of one of its classes.

    A function that the program does not define may be a method of its class `Solution`.
    """
    base, _, method = name.partition(".")
    names, solution = module.__dict__, module.__dict__.get("Solution")
    if base not in names and not method and isinstance(solution, type) and hasattr(solution, base):
        return getattr(solution(), base)
    if base not in names:
        raise NameError(f"the program defines no {base!r}")
    item = names[base]
    return getattr(item(), method) if method else item


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
            run_script(job, code, request["stdin"])
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


def run_script(job, code, text):
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
        lend(job, code, main_module.__dict__)
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
