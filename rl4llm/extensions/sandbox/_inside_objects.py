"""Objects of the program in tests that are code: this text is between those of `_inside.py` and `_inside_tests.py`.

They are kept where the program runs, and something that asks for them stands for them in the process of the tests.
"""
# ruff: noqa: F821

import _operator  # `operator` without the time that its import takes


def keep_objects(module):
    """Let tests hold objects of the program: they are kept here, and the tests get their numbers."""
    kept, numbers = [], {}

    def sent(value):
        if id(value) not in numbers:
            numbers[id(value)] = len(kept)
            kept.append(value)
        return f"[{numbers[id(value)]:d},{quoted(type(value).__name__[:100])}]"

    def received(content):
        number, name = content
        return function_of(module, name) if number < 0 else kept[number]

    HANDLES.update(types=(), sent=sent, received=received)


OPERATORS = (
    "contains getitem setitem delitem eq lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor"
)
OPERATIONS = {
    ":call": lambda found, *args, **kwargs: found(*args, **kwargs), ":getattr": getattr, ":setattr": setattr,
    ":isinstance": isinstance, ":bool": bool, ":len": len, ":str": str, ":repr": repr, ":iter": iter,
    ":enter": lambda one: type(one).__enter__(one), ":exit": lambda one: type(one).__exit__(one, None, None, None),
    **{f":{name.strip('_')}": getattr(_operator, name) for name in OPERATORS.split()},
}  # fmt: skip
"""What tests do with objects of the program."""


class CandidateEnded(BaseException):
    """The program has ended; `except Exception` in a test does not catch this."""


class NotALiteral(BaseException):
    """A test passes something that cannot leave its process, which is the test's fault."""


# In a test these have another meaning, such as a failed assert or the end of a loop; the last ones take other arguments.
NEVER_PASSED_ON = (AssertionError, StopIteration, StopAsyncIteration, UnicodeError, ExceptionGroup)


class Proxy:
    """A function or class of the program, which runs in another sandbox."""

    def __init__(self, channel, name):
        self._channel = channel
        self._name = name

    def __call__(self, *args, **kwargs):
        return trusted(ask(self._channel, self._name, args, kwargs), self._name[:1].isupper())

    def __getattr__(self, name):
        if name[:2] == "__":
            raise AttributeError(name)
        found = ask(self._channel, ":global", (self._name,), {})
        return getattr(trusted(found, self._name[:1].isupper()), name)

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and ask(self._channel, ":isinstance", (value, self), {}) is True

    def __eq__(self, other):
        raise TypeError("a function of the program is compared; only what it returns can be")

    __bool__ = __len__ = __iter__ = __hash__ = None


class Remote:
    """An object of the program, which stays in its sandbox: what it does there is asked for.

    It never equals a value of the tests. An object that a class made, whose name begins with a capital letter, is trusted
    like its methods' results: it may say whether it is true and what it contains, and answer as a text or a list does.
    """

    def __init__(self, channel, number, name):
        for key, value in (("channel", channel), ("number", number), ("name", name)):
            object.__setattr__(self, f"_{key}", value)
        for key in ("_trusted", "_doubted"):
            object.__setattr__(self, key, False)

    def _ask(self, name, *args):
        return trusted(ask(self._channel, name, (self, *args), {}), self._trusted)

    def __call__(self, *args, **kwargs):
        made = ask(self._channel, ":call", (self, *args), kwargs)
        if self._doubted and isinstance(made, bool):
            raise TypeError(
                f"a function returned a {self._doubted}, which cannot say whether the test passes"
            )
        return trusted(made, self._trusted)

    def __getattr__(self, name):
        if name[:2] == "__":
            raise AttributeError(f"{self._name}.{name}")
        made = self._ask(":getattr", name)
        if isinstance(made, Remote) and not self._trusted and any(hasattr(kind, name) for kind in LITERALS):
            object.__setattr__(made, "_doubted", self._name)
        return made

    def __setattr__(self, name, value):
        self._ask(":setattr", name, value)

    def __bool__(self):
        return self._only_trusted(":bool")

    def __contains__(self, item):
        return self._only_trusted(":contains", item)

    def _only_trusted(self, name, *args):
        if not self._trusted:
            raise TypeError(f"a function returned a {self._name}, which cannot say whether the test passes")
        return self._ask(name, *args) is True

    def __eq__(self, other):
        return isinstance(other, Remote) and (
            self._number == other._number or self._ask(":eq", other) is True
        )

    def __hash__(self):
        return self._number

    def __enter__(self):
        return self._ask(":enter")

    def __exit__(self, *_):
        self._ask(":exit")


LITERALS = (str, bytes, list, dict, set, int, float, complex)
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
            made = self._ask(f":{name}", other)
            return made if isinstance(made, Remote) else NotImplemented

        return operate

    for names, make in ((ASKED, asked), (COMPARED, compared), (COMBINED, combined)):
        for name in names:
            setattr(Remote, f"__{name}__", make(name))


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
    channel.send(f'{{"call":{quoted(name)},"changes":{changes},{content}}}')
    reply = channel.receive()
    if "value" in reply:
        if "args" in reply:
            restore(list(args), decoded(reply["args"]))
            restore(kwargs, decoded(reply["kwargs"]))
        return decoded(reply["value"])
    if "ended" in reply:
        raise CandidateEnded(reply["ended"])
    raise error_of(reply["error"].split(","))(reply["reason"])


ERRORS = {}  # exceptions of the program that the tests name
CAUGHT = set()  # names that the tests catch, which are exceptions


def of_program(channel, name):
    """Return what stands for a name of the program in its tests."""
    if name in CAUGHT or name.endswith(("Error", "Exception")):
        return ERRORS.setdefault(name, type(name, (Exception,), {}))
    return Proxy(channel, name)


def error_of(kinds):
    """Return the exception for one of the program, whose class and base classes have these names."""
    never = {kind.__name__ for kind in NEVER_PASSED_ON}
    found = [ERRORS.get(name, getattr(builtins, name, None)) for name in kinds]
    ordinary = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)]
    return RuntimeError if never & set(kinds) or not ordinary else ordinary[0]


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
