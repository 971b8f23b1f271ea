"""The roles of tests inside the sandbox: this text is the last, and uses the names of the others."""
# ruff: noqa: F821

import _ast
import builtins
from _sitebuiltins import Quitter


def tree_of(text, file):
    """Parse a text of the tests, and note where it drops what a call returns and which names it catches."""
    tree = compile(text, file, "exec", ONLY_AST)
    for leaf in walk(tree):
        match leaf:
            case _ast.Expr(value=_ast.Call()):
                DROPPED.add((file, leaf.lineno))
            case (
                _ast.ExceptHandler(type=_ast.expr() as caught)
                | _ast.Call(
                    func=_ast.Attribute(attr="raises" | "assertRaises" | "assertRaisesRegex"),
                    args=[caught, *_],
                )
            ):
                CAUGHT.update(item.id for item in walk(caught) if isinstance(item, _ast.Name))
    return tree


DEFINITIONS = (_ast.FunctionDef, _ast.AsyncFunctionDef, _ast.ClassDef)


def at_fault(channel, error):
    """Return whether a failure is the tests' own: before they called the program, or a module that is missing."""
    missing, step = isinstance(error, ImportError), error.__traceback__
    while step is not None:
        missing &= (
            step.tb_frame.f_code is not ask.__code__
        )  # the program raised it, or returned what needs the module
        step = step.tb_next
    return missing or isinstance(error, NotALiteral) or not channel.asked


def broken(channel, error):
    channel.send('{"broken":%s}' % quoted(reason_of(error)))  # noqa: UP031


def begin_tests(channel):
    """Let values contain objects of the program, for which the tests have numbers."""
    add_operators()
    HANDLES["types"], HANDLES["sent"] = (Remote, Proxy), handle_of
    HANDLES["received"] = lambda content: Remote(channel, *content)


def handle_of(value):
    if isinstance(value, Remote):
        return f"[{value._number:d},{quoted(value._name)}]"
    if isinstance(value, Proxy):
        return f"[-1,{quoted(value._name)}]"
    raise TypeError(f"a {type(value).__name__} is not a literal")


def hold_asserts(channel, job):
    """Run assert statements one by one and report each."""
    begin_tests(channel)
    namespace = {"__name__": "tests", "__builtins__": __builtins__}
    try:
        exec(compile(setup_of(job["setup"]), "setup", "exec"), namespace)
        # some tests of HumanEval call it by name, and the setup has only its signature
        if job["entry_point"]:
            namespace[job["entry_point"]] = Proxy(channel, job["entry_point"])
        units = list(units_of(channel, job, namespace))
    except BaseException as error:  # noqa: BLE001 - the dataset's code
        return broken(channel, error)
    channel.send('{"plan":[%s]}' % ",".join(quoted(name) for name, _, _, source in units if source))  # noqa: UP031
    for name, code, scope, source in units:
        try:
            exec(code, scope)
        except BaseException as error:  # noqa: BLE001 - a failed test, or the step before one
            if at_fault(channel, error):
                return broken(channel, error)
            report(channel, name, error, source)
        else:
            if source:
                report(channel, name, None)
    channel.send('{"done":true}')
    return None


def units_of(channel, job, namespace):
    """Yield (name, code, namespace, source if it is a test) for every statement of the tests, in order."""
    trees = [tree_of(text, f"tests {number}") for number, text in enumerate(job["tests"])]
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
        namespace[name] = __import__(name) if name in LIBRARY & bases else of_program(channel, name)
    if not job["entry_point"] and not unknown - (LIBRARY & bases) - stored(leaves):
        name = builtin_meant(leaves)
        namespace[name] = Proxy(channel, name)
    checks = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, _ast.FunctionDef) and node.name == "check"
    ]
    asserting = asserting_functions([*leaves, *walk(tree_of(setup_of(job["setup"]), "setup"))])
    number = 0
    for file, (tree, text) in enumerate(zip(trees, job["tests"], strict=True)):
        lines = text.splitlines()
        for node in tree.body:
            for part, scope in parts_of(node, checks, channel, job, namespace):
                leaves = [] if isinstance(part, DEFINITIONS) else list(walk(part))
                # HumanEval contains `assert True`, which tests nothing.
                is_test = any(isinstance(leaf, _ast.Name) for leaf in leaves) and any(
                    asserts(leaf, asserting) for leaf in leaves
                )
                number += is_test
                code = compile(_ast.Module(body=[part], type_ignores=[]), f"tests {file}", "exec")
                source = "\n".join(lines[part.lineno - 1 : part.end_lineno]).strip() or "assert"
                yield (
                    f"assert {number}" if is_test else f"line {part.lineno}",
                    code,
                    scope,
                    is_test and source,
                )


def asserts(leaf, functions):
    """Return whether a node of the tests can fail as a test: an assert, or a call of a function that contains one."""
    called = leaf.func if isinstance(leaf, _ast.Call) else None
    return (
        isinstance(leaf, _ast.Assert)
        or (isinstance(called, _ast.Name) and called.id in functions)
        or (isinstance(called, _ast.Attribute) and called.attr.startswith("assert"))
    )


def asserting_functions(leaves):
    """Return the names of the tests' own functions that contain an assert, or call one that does."""
    found, before = set(), None
    definitions = [(leaf.name, list(walk(leaf))) for leaf in leaves if isinstance(leaf, _ast.FunctionDef)]
    while found != before:
        before = set(found)
        found |= {name for name, inner in definitions if any(asserts(leaf, before) for leaf in inner)}
    return found


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
    begin_tests(channel)
    solution = type(sys)("solution")
    solution.__getattr__ = lambda name: of_program(channel, name) if name[:1] != "_" else missing(name)
    sys.modules["solution"] = solution
    channel.send('{"plan":[%s]}' % ",".join(quoted(name) for name in job["required"]))  # noqa: UP031
    modules = {}
    for name in job["required"]:
        file, *path = name.split("::")
        try:
            if file not in modules:
                channel.asked = False
                namespace = {"__name__": file.removesuffix(".py"), "__builtins__": __builtins__}
                exec(compile(tree_of(job["files"][file], file), file, "exec"), namespace)
                modules[file] = namespace, channel.asked
            channel.asked = modules[file][1]
            run_test(modules[file][0], path)
        except BaseException as error:  # noqa: BLE001 - a failed test
            if at_fault(channel, error):
                return broken(channel, error)
            modules.setdefault(file, ({}, True))
            report(channel, name, error)
        else:
            report(channel, name, None)
    channel.send('{"done":true}')
    return None


def missing(name):
    raise AttributeError(name)


def run_test(namespace, path):
    """Run one test. An exception is a failure, and so is a test that was skipped or does not exist."""
    test = namespace[path[0]]
    if len(path) == 1:
        return run_function(test)
    unittest = sys.modules.get("unittest")
    if unittest is None or not issubclass(test, unittest.TestCase):
        instance = test()
        getattr(instance, "setup_method", lambda: None)()
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


def run_function(test):
    """Run a test function once for each combination of the arguments that `pytest.mark.parametrize` gives it."""
    rows = [{}]
    for mark in getattr(test, "pytestmark", ()):
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
    wanted = code.co_varnames[hasattr(test, "__self__") : code.co_argcount] if code else ()
    if rows and (unset := set(wanted) - rows[0].keys()):
        raise NotALiteral(f"the fixtures {sorted(unset)} of pytest are not supported")
    for row in rows:
        test(**row)


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


ROLES = {"calls": be_called, "scripts": be_run, "asserts": hold_asserts, "suite": hold_suite}

main()
