"""The roles of tests inside the sandbox: this text follows that of `_inside.py`, whose names it uses."""
# ruff: noqa: F821

import _ast


class CandidateEnded(BaseException):
    """The program has ended; `except Exception` in a test does not catch this."""


class NotALiteral(BaseException):
    """A test passes something that cannot leave its process, which is the test's fault."""


# In a test these have another meaning, such as a failed assert or the end of a loop; the last ones take other arguments.
NEVER_PASSED_ON = (AssertionError, StopIteration, StopAsyncIteration, UnicodeError, ExceptionGroup)


class Proxy:
    """A function of the program, which runs in another sandbox; only literals are passed and returned."""

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
        ordinary = (
            isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NEVER_PASSED_ON)
        )
        raise (kind if ordinary else RuntimeError)(reply["reason"])

    def __eq__(self, other):
        raise TypeError("a function of the program is compared; only what it returns can be")

    __bool__ = __len__ = __iter__ = __hash__ = None


def hold_asserts(channel, job):
    """Run assert statements one by one and report each."""
    namespace = {"__name__": "tests", "__builtins__": __builtins__}
    try:
        exec(compile(setup_of(job["setup"]), "setup", "exec"), namespace)
        if job[
            "entry_point"
        ]:  # some tests of HumanEval call it by name, and the setup has only its signature
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


def units_of(channel, job, namespace):
    """Yield (name, code, namespace, source if it is a test) for every statement of the tests, in order."""
    trees = [compile(text, "tests", "exec", ONLY_AST) for text in job["tests"]]
    leaves = [leaf for tree in trees for leaf in walk(tree)]
    bases = {
        leaf.value.id
        for leaf in leaves
        if isinstance(leaf, _ast.Attribute) and isinstance(leaf.value, _ast.Name)
    }
    unknown = (
        {leaf.id for leaf in leaves if isinstance(leaf, _ast.Name)} - namespace.keys() - set(dir(builtins))
    )
    for name in unknown:
        namespace[name] = __import__(name) if name in LIBRARY & bases else Proxy(channel, name)
    if not job["entry_point"] and not unknown - (LIBRARY & bases) - stored(leaves):
        name = builtin_meant(leaves)
        namespace[name] = Proxy(channel, name)
    checks = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, _ast.FunctionDef) and node.name == "check"
    ]
    number = 0
    for tree, text in zip(trees, job["tests"], strict=True):
        lines = text.splitlines()
        for node in tree.body:
            for part, scope in parts_of(node, checks, channel, job, namespace):
                leaves = [] if is_definition(part) else list(walk(part))
                # HumanEval contains `assert True`, which tests nothing.
                is_test = all(
                    any(isinstance(leaf, kind) for leaf in leaves) for kind in (_ast.Assert, _ast.Name)
                )
                number += is_test
                code = compile(_ast.Module(body=[part], type_ignores=[]), "tests", "exec")
                source = "\n".join(lines[part.lineno - 1 : part.end_lineno]).strip() or "assert"
                yield (
                    f"assert {number}" if is_test else f"line {part.lineno}",
                    code,
                    scope,
                    is_test and source,
                )


def stored(leaves):
    """Return the names that the tests assign."""
    return {leaf.id for leaf in leaves if isinstance(leaf, _ast.Name) and isinstance(leaf.ctx, _ast.Store)}


def builtin_meant(leaves):
    """Return the program's function if it is named like a builtin, such as `sum` in MBPP. Raises ValueError if that is
    unclear.
    """
    called = [
        leaf.func.id for leaf in leaves if isinstance(leaf, _ast.Call) and isinstance(leaf.func, _ast.Name)
    ]
    if len(set(called)) != 1:
        raise ValueError(
            f"the tests call no function of the program but {sorted(set(called))}; name it as entry_point"
        )
    return called[0]


def parts_of(node, checks, channel, job, namespace):
    """Return a statement, or the statements of the function `check` with `candidate` bound."""
    called = node.value.func if isinstance(node, _ast.Expr) and isinstance(node.value, _ast.Call) else None
    if checks and getattr(called, "id", None) == "check":
        return []  # its statements run in its place
    if node not in checks:
        return [(node, namespace)]
    scope = namespace
    scope[node.args.args[0].arg] = Proxy(channel, job["entry_point"])
    if any(
        isinstance(leaf, _ast.Return | _ast.Yield | _ast.YieldFrom | _ast.Nonlocal) for leaf in walk(node)
    ):
        call = compile(f"assert check({node.args.args[0].arg}) is not False", "tests", "exec", ONLY_AST).body[
            0
        ]
        return [(node, scope), (call, scope)]
    return [(part, scope) for part in node.body]


def is_definition(node):
    return type(node).__name__ in ("FunctionDef", "AsyncFunctionDef", "ClassDef")


def walk(node):
    """Yield a node and all nodes below it, without importing `ast`."""
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
    """Send the result of a test; `kind` says whose fault a failure is."""
    kind = "passed" if error is None else "wrong"
    if isinstance(error, CandidateEnded):
        kind = "ended"
    elif isinstance(error, NotALiteral):
        kind = "broken"
    reason = "" if error is None else reason_of(error)
    source = quoted((source or "")[:MAX_REASON])
    channel.send(f'{{"test":{quoted(name)},"kind":"{kind}","reason":{quoted(reason)},"source":{source}}}')


def hold_suite(channel, job):
    """Run test files and report exactly the requested tests."""
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
    """Run one test. An exception is a failure, and so is a test that was skipped or does not exist."""
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


def main():
    """Report that the sandbox is ready, receive a role and run it."""
    channel = MessagePipe(REQUESTS, REPLIES)
    sys.path[:] = [entry for entry in sys.path if entry]
    channel.send('{"ready":true}')
    job = channel.receive()
    limit(job["limits"])
    sys.set_int_max_str_digits(0)
    sys.path.extend(job["packages"])
    add_exits()
    ROLES[job["role"]](channel, job)


ROLES = {"calls": be_called, "scripts": be_run, "asserts": hold_asserts, "suite": hold_suite}

main()
