"""The roles of tests inside the sandbox: this text is the last, and uses the names of the others."""
# ruff: noqa: F821

import builtins
from _sitebuiltins import Quitter


def at_fault(channel, error):
    """Return whether a failure is the tests' own: before they called the program, or a module or file that is missing."""
    missing, step = isinstance(error, ImportError | OSError | EOFError), error.__traceback__
    while step is not None:  # the program raised it, or returned what needs the module
        missing &= step.tb_frame.f_code is not ask.__code__
        step = step.tb_next
    return missing or isinstance(error, NotALiteral) or not channel.asked


def broken(channel, error):
    channel.send('{"broken":%s}' % quoted(reason_of(error)))  # noqa: UP031


class Names(dict):
    """The builtins of tests, with the names that they do not define: their libraries', and the program's."""

    def __init__(self, channel, libraries):
        super().__init__(vars(builtins), isinstance=is_instance)
        self.channel, self.libraries = channel, libraries

    def __missing__(self, name):
        if name[:2] == "__":
            raise KeyError(name)
        return __import__(name) if name in self.libraries else of_program(self.channel, name)


def is_instance(value, kinds):
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if isinstance(kind, type) and stays_there(value, kind):
            raise NotALiteral(f"the test asks whether an object of the program is a {value._name}")
    return isinstance(value, kinds)


def begin_tests(channel, job):
    """Let values contain objects of the program, for which the tests have numbers."""
    CAUGHT.update(job["caught"])
    DROPPED.update(map(tuple, job["dropped"]))
    texts = "".join([job["setup"], *job["files"].values()])
    for module, name in SHARED:
        if f"{name}(" in texts and module.partition(".")[0] in texts:
            share(channel, __import__(module, fromlist=[name]), name)
    add_operators()
    for name in (*OPERATORS.replace("_", "").split(), "len", "str", "repr", "iter"):
        delegate(name, OPERATIONS[f":{name}"])
    HANDLES["types"], HANDLES["sent"] = (Remote, Proxy), handle_of
    HANDLES["received"] = lambda content: remote_of(channel, *content)


SHARED = (("random", "seed"), ("numpy.random", "seed"), ("sys", "setrecursionlimit"))


def share(channel, module, name):
    """Let what the tests set in a module be set for the program too."""
    here = getattr(module, name)

    def both(*values, **named):
        here(*values, **named)
        try:
            ask(channel, ":set", (module.__name__, name, *values), named)
        except CandidateEnded:  # the next call says so
            return

    setattr(module, name, both)


REMOTES = {}


def remote_of(channel, number, name):
    """Return what stands for an object of the program, with the name of its class."""
    if name not in REMOTES:
        REMOTES[name] = type(name, (Coroutine if name == "coroutine" else Remote,), {})
    return REMOTES[name](channel, number, name)


def handle_of(value):
    if isinstance(value, Remote):
        return f"[{value._number:d},{quoted(value._name)}]"
    if isinstance(value, Proxy):
        return f"[-1,{quoted(value._name)}]"
    raise TypeError(f"a {type(value).__name__} is not a literal")


def hold_tests(channel, job):
    """Run tests one by one, and report each: whole files, which share their names, or functions in them."""
    names = Names(channel, job["libraries"])
    shared = {"__name__": "tests", "__builtins__": names}
    solution = type(sys)("solution")
    solution.__getattr__ = lambda name: of_program(channel, name) if name[:1] != "_" else missing(name)
    sys.modules["solution"] = solution
    try:
        begin_tests(channel, job)
        exec(compile(setup_of(job["setup"]), "setup", "exec"), shared)
    except BaseException as error:  # noqa: BLE001 - the dataset's code
        return broken(channel, error)
    # some tests of HumanEval call it by name, and the setup has only its signature
    shared.update((name, Proxy(channel, job["entry_point"])) for name in job["names"])
    channel.send('{"plan":[%s]}' % ",".join(quoted(name) for name, is_test, *_ in job["units"] if is_test))  # noqa: UP031
    modules = {"": shared}
    for name, is_test, file, path, source in job["units"]:
        try:
            run_unit(channel, job, modules, file, path)
        except BaseException as error:  # noqa: BLE001 - a failed test, or the step before one
            if at_fault(channel, error):
                return broken(channel, error)
            report(channel, name, error, source)
        else:
            if is_test:
                report(channel, name, None)
    channel.send('{"done":true}')
    return None


def run_unit(channel, job, modules, file, path):
    """Run a file of the tests, unless it was run before, and a function in it if there is a path to one."""
    if file not in modules:
        channel.asked &= not path
        namespace = {**modules[""], "__name__": file.removesuffix(".py")} if path else modules[""]
        modules[file] = namespace
        namespace["__asked__"] = True
        exec(compile(job["files"][file], file, "exec"), namespace)
        call_hook(namespace.get("setUpModule") or namespace.get("setup_module"), None)
        namespace["__asked__"] = channel.asked
    if path:
        channel.asked = modules[file]["__asked__"]
        run_test(modules[file], path.split("::"))


def report(channel, name, error, source=""):
    """Send the result of a test; its status says whose fault a failure is."""
    status = "ok" if error is None else "model_error" if isinstance(error, CandidateEnded) else "wrong"
    reason = "" if error is None else reason_of(error)
    texts = f'"status":"{status}","reason":{quoted(reason)},"source":{quoted(source[:MAX_REASON])}'
    channel.send(f'{{"test":{quoted(name)},{texts}}}')


def missing(name):
    raise AttributeError(name)


def run_test(namespace, path):
    """Run one test. An exception is a failure, and so is a test that was skipped or does not exist."""
    test = namespace[path[0]]
    if len(path) == 1:
        call_hook(namespace.get("setup_function"), test)
        return run_function(test)
    unittest = sys.modules.get("unittest")
    if unittest is None or not issubclass(test, unittest.TestCase):
        call_hook(getattr(test, "setup_class", None))
        instance = test()
        call_hook(getattr(instance, "setup_method", None), getattr(instance, path[1]))
        return run_function(getattr(instance, path[1]))
    result, failures = unittest.TestResult(), []
    result.addError = result.addFailure = lambda test, failure: failures.append(failure[1])
    result.addSubTest = lambda test, part, failure: failures.extend(failure[1:2] if failure else ())
    unittest.TestSuite([test(path[1])]).run(result)
    if failures:
        raise failures[0]
    if result.skipped or result.expectedFailures or result.unexpectedSuccesses or result.testsRun != 1:
        raise AssertionError("the test was skipped or not run")
    return None


def call_hook(hook, *given):
    """Call a function that prepares tests, if there is one, with as many arguments as it takes."""
    if hook:
        hook(*given[: hook.__code__.co_argcount - hasattr(hook, "__self__")])


def run_function(test):
    """Run a test function once for each combination of the arguments that `pytest.mark.parametrize` gives it."""
    rows = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name in ("asyncio", "anyio", "timeout"):
            continue
        if mark.name != "parametrize":
            raise NotALiteral(f"pytest.mark.{mark.name} is not supported")
        names, values = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        # a set of arguments may be in a `pytest.param`
        sets = [
            value.values if hasattr(value, "marks") else value if names[1:] else (value,) for value in values
        ]
        rows = [{**row, **dict(zip(names, values, strict=True))} for row in rows for values in sets]
    code = getattr(test, "__code__", None)
    arguments = code.co_varnames[hasattr(test, "__self__") : code.co_argcount] if code else ()
    if rows and (unset := set(arguments) - rows[0].keys()):
        raise NotALiteral(f"the fixtures {sorted(unset)} of pytest are not supported")
    for row in rows:
        if coroutine := test(**row):
            __import__("asyncio").run(coroutine)


def main():
    """Report that the sandbox is ready, receive a role and run it."""
    channel = MessagePipe(REQUESTS, REPLIES)
    sys.path[:] = [entry for entry in sys.path if entry]
    channel.send('{"ready":true}')
    job = channel.receive()
    limit(job["limits"])
    sys.set_int_max_str_digits(0)
    sys.path.extend(job["packages"])
    # which scripts may use; Python normally adds them when it looks for packages
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")
    ROLES[job["role"]](channel, job)


ROLES = {"calls": be_called, "scripts": be_run, "tests": hold_tests}

main()
