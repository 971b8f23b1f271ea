"""Objects of the program in tests that are code: this text is between those of `_inside.py` and `_inside_tests.py`.

They are kept where the program runs, and something that asks for them stands for them in the process of the tests.
"""
# ruff: noqa: F821

import _operator  # `operator` without the time that its import takes
import _thread


def keep_objects(module):
    """Let tests hold objects of the program: they are kept here, and the tests get their numbers."""
    objects, numbers = [], {}

    def sent(value):
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return f"[{numbers[id(value)]:d},{quoted(type(value).__name__[:100])}]"

    def received(content):
        number, name = content
        return function_of(module, name) if number < 0 else objects[number]

    HANDLES.update(types=(), sent=sent, received=received)


OPERATORS = (
    "contains getitem setitem delitem eq lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor"
)
OPERATIONS = {
    ":call": lambda found, *args, **kwargs: found(*args, **kwargs), ":getattr": getattr, ":setattr": setattr,
    ":isinstance": isinstance, ":bool": bool, ":len": len, ":str": str, ":repr": repr, ":iter": iter,
    ":enter": lambda one: type(one).__enter__(one), ":exit": lambda one: type(one).__exit__(one, None, None, None),
    ":await": lambda one: awaited(one), ":anext": lambda one: awaited(next_items(one)), ":aiter": aiter,
    ":aenter": lambda one: awaited(one.__aenter__()), ":aexit": lambda one: awaited(one.__aexit__(None, None, None)),
    ":next": lambda one, most: [item for _, item in zip(range(most), one, strict=False)],
    ":set": lambda module, name, *args, **named: getattr(__import__(module, fromlist=[name]), name)(*args, **named),
    **{f":{name.strip('_')}": getattr(_operator, name) for name in OPERATORS.split()},
}  # fmt: skip
"""What tests do with objects of the program."""


LOOPS = []


def awaited(one):
    """Return the result of an awaitable, in the one event loop of the program that calls from outside share."""
    import asyncio  # noqa: PLC0415 - for few programs

    async def result():
        return await one

    LOOPS[:] = LOOPS or [asyncio.new_event_loop()]
    return LOOPS[0].run_until_complete(result())


async def next_items(one):
    """Return the next item of an asynchronous iterator in a list, which is empty at its end."""
    async for item in one:
        return [item]
    return []


class CandidateEnded(BaseException):
    """The program has ended; `except Exception` in a test does not catch this."""


class NotALiteral(BaseException):
    """A test passes something that cannot leave its process, which is the test's fault."""


# In a test that does not catch them these have another meaning, such as a failed assert or the end of a loop.
NEVER_PASSED_ON = (AssertionError, StopIteration, StopAsyncIteration, ExceptionGroup)


class Proxy:
    """A function or class of the program, which runs in another sandbox."""

    def __init__(self, channel, name):
        self._channel = channel
        self._name = name

    def __call__(self, *args, **kwargs):
        return trusted(ask(self._channel, self._name, args, kwargs), self._name[:1].isupper())

    def __getattr__(self, name):
        if name[:2] == "__" and name != "__name__":
            raise AttributeError(name)
        if name == "__name__":
            return ask(self._channel, ":getattr", (self, name), {})
        return getattr(self._global(), name)

    def _global(self):
        return trusted(ask(self._channel, ":global", (self._name,), {}), self._name[:1].isupper())

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and ask(self._channel, ":isinstance", (value, self), {}) is True

    def __mro_entries__(self, _):
        raise NotALiteral(f"the test inherits from {self._name}, which is in another process")

    def __bool__(self):
        return bool(self._global())

    __hash__ = object.__hash__


class Remote:
    """An object of the program, which stays in its sandbox: what it does there is asked for.

    It never equals a value of the tests. An object that a class made, whose name begins with a capital letter, is trusted
    like its methods' results: it may say whether it is true and what it contains, and answer as a text or a list does.
    """

    _trusted = _doubted = False
    _most = 1

    def __init__(self, channel, number, name):
        for key, value in {"_channel": channel, "_number": number, "_name": name, "_ahead": []}.items():
            object.__setattr__(self, key, value)

    def _ask(self, name, *args):
        return trusted(ask(self._channel, name, (self, *args), {}), self._trusted)

    def __call__(self, *args, **kwargs):
        value = ask(self._channel, ":call", (self, *args), kwargs)
        if self._doubted and isinstance(value, bool):
            raise TypeError(f"a {self._doubted} of a function cannot say whether the test passes")
        return trusted(value, self._trusted)

    def __getattr__(self, name):
        if name[:2] == "__":
            raise AttributeError(f"{self._name}.{name}")
        value = self._ask(":getattr", name)
        if isinstance(value, Remote) and not self._trusted and any(hasattr(kind, name) for kind in LITERALS):
            object.__setattr__(value, "_doubted", self._name)
        return value

    def __setattr__(self, name, value):
        self._ask(":setattr", name, value)

    def __bool__(self):
        return self._only_trusted(":bool")

    def __contains__(self, item):
        return self._only_trusted(":contains", item)

    def _only_trusted(self, name, *args):
        if not self._trusted:
            raise TypeError(f"a {self._name} of a function cannot say whether the test passes")
        return self._ask(name, *args) is True

    def __eq__(self, other):
        if stays_there(self, type(other)):
            raise NotALiteral(f"the test compares a {self._name}, which cannot leave the program")
        if not isinstance(other, Remote):
            return False
        return self._number == other._number or self._ask(":eq", other) is True

    def __hash__(self):
        return self._number

    def __reduce_ex__(self, _):
        raise NotALiteral(f"the test copies a {self._name}, which cannot leave the program")

    def __next__(self):
        if not self._ahead:
            self._ahead.extend(self._ask(":next", self._most))
            # other iterators have a state that tests may read
            most = 2 * self._most if self._name in PLAIN_ITERATORS else 1
            object.__setattr__(self, "_most", min(most, MOST_ITEMS))
        if not self._ahead:
            raise StopIteration
        return self._ahead.pop(0)

    def __enter__(self):
        return self._ask(":enter")

    def __exit__(self, *_):
        self._ask(":exit")

    async def __aenter__(self):
        return self._ask(":aenter")

    async def __aexit__(self, *_):
        self._ask(":aexit")

    async def __aiter__(self):
        items = self._ask(":aiter")
        while item := items._ask(":anext"):
            yield item[0]


class Coroutine(Remote):
    """A coroutine of the program, which runs there as a whole when the tests await it."""

    def __next__(self):
        raise StopIteration(self._ask(":await"))

    def send(self, _):
        return next(self)

    def throw(self, error, *_):
        raise error

    def close(self):
        return

    def __await__(self):
        return (yield from ()) or self._ask(":await")


def stays_there(value, kind):
    """Return whether a value of the program may be of a class that no message can contain, which only it can tell."""
    named = isinstance(value, Remote) and not issubclass(kind, Remote) and kind.__name__ == value._name
    return named and kind not in LITERALS and kind.__name__ not in (*RICH, "ndarray")


PLAIN_ITERATORS = ("generator", "map", "filter", "zip", "enumerate", "list_iterator", "islice", "chain")
MOST_ITEMS = 1000  # that are asked for at once
LITERALS = (
    str, bytes, bytearray, list, tuple, dict, set, frozenset, int, bool, float, complex, type(None),
)  # fmt: skip
COMPARED = ("lt", "le", "gt", "ge")
COMBINED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
ASKED = ("len", "str", "repr", "iter", "getitem", "setitem", "delitem")


def add_operators():
    """Give `Remote` its operators: whole numbers and texts that it returns are values as any other."""

    def asked(name):
        return lambda self, *args: self._ask(f":{name}", *args)

    def compared(name):
        return lambda self, other: (
            self._ask(f":{name}", other) is True if isinstance(other, Remote) else NotImplemented
        )

    def combined(name):
        def operate(self, other):
            if not (self._trusted or isinstance(other, Remote)):  # `other` may be the expected value
                return NotImplemented
            value = self._ask(f":{name}", other)
            return value if isinstance(value, Remote) else NotImplemented

        return operate

    for names, make in ((ASKED, asked), (COMPARED, compared), (COMBINED, combined)):
        for name in names:
            setattr(Remote, f"__{name}__", make(name))


def delegate(name, operate):
    """Give `Proxy` an operator of the value that the program has under its name."""
    setattr(Proxy, f"__{name}__", lambda self, *args: operate(self._global(), *args))
    setattr(Proxy, f"__r{name}__", lambda self, other: operate(other, self._global()))


def trusted(made, value):
    """Return what the program made; an object of it is trusted if what made it is."""
    if isinstance(made, Remote) and value:
        object.__setattr__(made, "_trusted", True)
    return made


def ask(channel, name, args, kwargs):
    """Have the program call a function, or do something with an object, and return or raise what comes of it."""
    try:
        content = f'"args":{encoded(list(args))},"kwargs":{encoded(kwargs)}'
    except TypeError as error:
        raise NotALiteral(f"the test calls {name} with what is no literal: {error}") from None
    changes = changes_wanted(sys._getframe(2), args, kwargs)
    channel.asked = True
    with LOCK:
        channel.send(f'{{"call":{quoted(name)},"changes":{changes},{content}}}')
        reply = channel.receive()
    for file, text in zip((sys.stdout, sys.stderr), reply.get("printed", ()), strict=False):
        if file is not sys.__stdout__ and file is not sys.__stderr__:
            file.write(text)
    if "value" in reply:
        if "args" in reply:
            restore(list(args), decoded(reply["args"]))
            restore(kwargs, decoded(reply["kwargs"]))
        return decoded(reply["value"])
    if "ended" in reply:
        raise CandidateEnded(reply["ended"])
    raise error_of(reply)


LOCK = _thread.allocate_lock()  # tests may call from several threads
ERRORS = {}  # exceptions of the program that the tests name
CAUGHT = set()  # names that the tests catch, which are exceptions


def of_program(channel, name):
    """Return what stands for a name of the program in its tests."""
    if name in CAUGHT or name.endswith(("Error", "Exception")):
        return ERRORS.setdefault(name, type(name, (Exception,), {}))
    return Proxy(channel, name)


def error_of(reply):
    """Return the exception for one of the program: of all its classes that the tests know, else a RuntimeError."""
    kinds = [kind.rpartition(".") for kind in reply["error"].split(",")]
    never = {kind.__name__ for kind in NEVER_PASSED_ON} - CAUGHT
    classes = [ERRORS[name] for _, _, name in kinds if name in ERRORS]
    classes += [kind for kind in map(python_error, kinds) if kind is not None][:1]
    error, values = reply.get("made"), decoded(reply.get("values", []))
    if error is None or not classes or never & {name for _, _, name in kinds}:
        return RuntimeError(reply["reason"])
    if len(classes) > 1:
        text = reply["reason"].partition(": ")[2]
        methods = {"__str__": lambda _: text, "__getattr__": lambda _, name: getattr(decoded(error), name)}
        classes = [type(kinds[0][2], tuple(classes), methods)]
    try:
        return classes[0](*values)
    except Exception:  # noqa: BLE001 - its class takes others
        return classes[0].__new__(classes[0], *values)


def python_error(kind):
    """Return an exception of Python, or one of its modules that the tests catch."""
    module, _, name = kind
    cls = getattr(builtins, name, None) or (name in CAUGHT and getattr(sys.modules.get(module), name, None))
    passed = (Exception, SystemExit) if name in CAUGHT else Exception
    return cls if isinstance(cls, type) and issubclass(cls, passed) and name not in ERRORS else None


CHANGEABLE = (list, dict, set, bytearray)
DROPPED = set()  # (file, line) of the calls whose result the tests drop


def changes_wanted(frame, args, kwargs):
    """Return when a call must report what became of its arguments: "always", "none" (if it returns None) or never.

    Elsewhere a program could change what its result is compared with.
    """
    if not any(isinstance(value, CHANGEABLE) for value in (*args, *kwargs.values())):
        return "null"
    return '"always"' if (frame.f_code.co_filename, frame.f_lineno) in DROPPED else '"none"'


def restore(old, new):
    """Change a container of the tests into what the program made of its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, list) and len(old) == len(new):
        for index, item in enumerate(new):
            old[index] = restored(old[index], item)
    elif isinstance(old, dict):
        items = {key: restored(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    else:
        old[:] = new


def restored(old, new):
    if type(old) is type(new) and isinstance(old, CHANGEABLE):
        restore(old, new)
        return old
    return old if type(old) is type(new) and encoded(old) == encoded(new) else new
