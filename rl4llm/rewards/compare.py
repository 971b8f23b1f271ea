"""Compare answers by strings and exact fractions, in the trainer's process.

Most answers are numbers or words and are decided here in microseconds. Undecided ones (None) go to computer algebra in a
worker process. Only short strings are examined, with patterns that cannot backtrack far.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from rl4llm.rewards.quantities import MAX_ANSWER_CHARS, Number, Unit, agree, equal, number, rewritten, unit

MAX_ITEMS = 40
_TEXT = (
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|mathrm|mathbf|mathit|mbox|operatorname)\s?\{([^{}]*)\}"
)
_WRAPPER = re.compile(_TEXT)
_WRAPPED_WORDS = re.compile(rf"\(?{_TEXT}\)?[.,]?")
_DOLLARS = re.compile(r"(?<!\\)\$")
_SPACED = re.compile(r" ?([-+=()\[\]{}*/^<>]) ?")
_SCRIPT = re.compile(r"([\^_])\{(\w)\}")
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "log", "ln", "lg", "exp",
    "sqrt", "max", "min", "gcd", "lcm", "mod", "pi", "det", "deg", "lim", "inf", "sup", "arg", "abs", "and", "or", "in",
    "infty", "oo",
}  # fmt: skip
_PLAIN_TEXT = re.compile(
    r"(?:[A-Za-z]|(?=\d[\d,.]{0,40}(?:st|nd|rd|th| [A-Za-z]{3}| [A-Z][a-z])))"
    r"[A-Za-z0-9'.&]*(?:[ -]+[A-Za-z0-9'.&]+){0,40}[.!]?",
    re.ASCII,
)
_SAID = re.compile(r"[A-Za-z]{2}|[A-Za-z]\d")
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer) ?)?(?:\(([A-Ja-j])\)(.*)|([A-J])(?:\)(.*)|[.:] (.*)|))",
    re.ASCII | re.DOTALL,
)
_NAME = re.compile(r"((?:[A-Za-z]|\\[a-z]+)(?:_ ?(?:\{\w{1,8}\}|\w))?)=(?![=<>])(.+)", re.ASCII | re.DOTALL)
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b)\s*")
_SEMICOLON = re.compile(r"\s*;\s*")
_AND = re.compile(r"\s*+(?:[,;]\s*+)?(?:\\text\s?\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_NO_DECIMALS = re.compile(r"(?<=\d)\.0{1,40}(?![\d])")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d]|,\d)")
_IN_BASE = re.compile(r"\(?([+-]?\d[0-9A-Z.]*)\)?_\{?(\d{1,3})\}?", re.ASCII)
_LAST_UNIT = re.compile(
    r"(.*[\d})A-Za-z]) *\\(?:text\w*|mathrm|mbox) ?\{([^{}]*)\}((?: ?\^ ?\{?[23]\}?)?)[ .$]*", re.DOTALL
)
_BRACKETED = re.compile(r"[(\[][^()\[\]]*(?:[(\[][^()\[\]]*[)\]][^()\[\]]*)*[)\]]")
_ALLOWED_BEFORE = re.compile(r"(?:(?:[A-Za-z\\_{}(),;' ]|(?<=[_{])\d)*(?:=|\\in\b|:))?\s*")
_MATRIX = re.compile(
    r"[(\[]?\\begin\{((?:[pb]|small)?matrix|array)\}(?:\{[lcr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}[)\]]?",
    re.DOTALL,
)
_END_OF_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")
_DECIMAL_COMMA = re.compile(r"([+-]?[$€£]?\d+),(\d.*)", re.ASCII)
_TIME = re.compile(r"(\d{1,2})(?::(\d{2})(?: ?([ap])m)?| ?([ap])m)", re.IGNORECASE | re.ASCII)
_VARIABLE = re.compile(r"[a-z]")
_DATE = re.compile(r"\d{4}([-/])\d\d?\1\d\d?|\d\d?([-/])\d\d?\2\d{4}", re.ASCII)


def same(gold: str, answer: str) -> bool | None:
    """Return whether two answers are equal; None if strings and numbers cannot decide.

    >>> same("1,234", "$1234.00"), same("1/2", "0.5"), same("50%", "50"), same("18", "19"), same("x+1", "1+x")
    (True, True, True, False, None)

    Units and percent signs may be missing on one side; those on both must agree. The order of a list does not count. A
    decimal equals a fraction when it is that fraction rounded to at least six places. A choice equals its letter. Words
    are compared as text. A number in another base equals itself without the base.
    """
    tidy_gold, tidy_answer = tidy(gold), tidy(answer)
    if tidy_gold.text and tidy_gold.text == tidy_answer.text:
        return True
    if len(gold) > MAX_ANSWER_CHARS or len(answer) > MAX_ANSWER_CHARS:
        return None
    if not agree(_with_unit(gold)[1], _with_unit(answer)[1]):
        return False
    decided = _same_choice(tidy_gold, tidy_answer)
    return _same_item(tidy_gold, tidy_answer) if decided is None else decided


def for_algebra(text: str) -> str:
    """Return an answer in the notation that computer algebra reads best, with "," for the "and" and "or" of a list."""
    text = _with_unit(_first_value(_unwrapped(rewritten(text))))[0].replace("°", "")
    _, value = named(text.replace(" ", ""))
    return value if number(value) else _AND.sub(", ", _NO_DECIMALS.sub("", text)).strip()


def _with_unit(text: str) -> tuple[str, Unit]:
    r"""Return what stands before the unit in the text command at the end of an answer, and that unit."""
    match = _LAST_UNIT.fullmatch(text)
    named = unit(f" {match[2]}{match[3]}") if match else None
    return (match[1], named) if match and named else (text, ())


@dataclass(frozen=True, slots=True)
class Tidy:
    """An answer without markup that changes nothing. `words`: it is text rather than mathematics.

    Computer algebra reads "west" as w*e*s*t, which equals "stew", and H2O as OH2. So text in a text command is compared as
    text, and so are letters and digits without an operator where two letters stand together or a digit follows a letter.
    """

    text: str
    words: bool


@lru_cache(maxsize=4096)
def tidy(text: str) -> Tidy:
    """Return an answer in one notation, without text commands, dollars and a full stop; longer ones come back unread."""
    text = text.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return Tidy(text, False)
    text = _first_value(_unwrapped(rewritten(text)))
    wrapped = _WRAPPED_WORDS.fullmatch(text) is not None
    text = re.sub(r"\s+", " ", _WRAPPER.sub(r" \1 ", text))
    text = _SCRIPT.sub(r"\1\2", _SPACED.sub(r"\1", text)).strip().removesuffix(".").strip()
    return Tidy(text, (wrapped and number(text) is None) or _is_text(text))


def _unwrapped(text: str) -> str:
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inside = text.removeprefix(opening).removesuffix(closing)
        if len(inside) == len(text) - len(opening) - len(closing) and opening not in inside:
            text = inside.strip()
    if text[:1] == "{" and text.find("}") == len(text) - 1:
        text = text[1:-1]
    return text.replace("\\$", "$") if len(_DOLLARS.findall(text)) % 2 else text


def _first_value(text: str) -> str:
    r"""Return what stands before "\approx", an exact value; what follows it, where before it is only a name.

    A decimal before it is not exact: unless both are the same number, the text stays two answers.
    """
    before, approximate, after = text.partition("\\approx")
    exact, rounded = number(before.strip()), number(after.strip())
    if not approximate or (exact and exact.decimals >= 0 and not (rounded and equal(exact, rounded))):
        return text
    return before if re.search(r"\d|\\", before) else f"{before}={after}" if before.strip() else after


def _is_text(text: str) -> bool:
    if _PLAIN_TEXT.fullmatch(text) is None or _SAID.search(text) is None:
        return False
    return not set(re.findall("[a-z]{2,}", text)) <= _FUNCTIONS or bool(
        re.search(r"[A-Z]{2}|[A-Z]\d|[A-Z][a-z]", text)
    )


def _words(text: str) -> str:
    text = _WRAPPER.sub(r" \1 ", text)
    return re.sub(r"[\s,;()*\"'!{}$_-]+", " ", text.lower().replace(".", "").replace("\\", " ")).strip()


def _same_choice(gold: Tidy, answer: Tidy) -> bool | None:
    """Compare "(B) 5", "B" and "(B)": by their letters, or by the text if one has no letter."""
    gold_choice, answer_choice = _choice(gold.text), _choice(answer.text)
    if gold_choice and answer_choice:
        return gold_choice[0] == answer_choice[0] and (
            not (gold_choice[1] and answer_choice[1]) or same(gold_choice[1], answer_choice[1]) is not False
        )
    if gold_choice and len(answer.text) == 1 and answer.text.isalpha():
        return answer.text.upper() == gold_choice[0]
    if gold_choice and gold_choice[1]:
        return same(gold_choice[1], answer.text)
    return None


def _choice(text: str) -> tuple[str, str] | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    return (match[1] or match[3]).upper(), (match[2] or match[4] or match[5] or "").strip(" :")


def _same_item(wanted: Tidy, given: Tidy) -> bool | None:
    if (time := _TIME.fullmatch(wanted.text)) and (other_time := _TIME.fullmatch(given.text)):
        return _same_time(time, other_time)
    number_wanted, number_given = number(wanted.text), number(given.text)
    if number_wanted and number_given:
        return equal(number_wanted, number_given)
    (name, value), (other_name, other_value) = named(wanted.text), named(given.text)
    if (name or other_name) and (name == other_name or not (name and other_name)):
        return same(value, other_value)
    if _VARIABLE.fullmatch(name) and _VARIABLE.fullmatch(other_name):
        return False
    if wanted.words and (_words(wanted.text) == _words(given.text) or "," not in wanted.text):
        return _words(wanted.text) == _words(given.text)
    if (number_wanted and _is_text(given.text)) or (number_given and wanted.words):
        return False
    if _DATE.fullmatch(wanted.text):  # not a difference or a quotient
        dates = [re.findall(r"[1-9]\d*", item.text) for item in (wanted, given)]
        return bool(_DATE.fullmatch(given.text)) and dates[0] == dates[1]
    return _same_mathematics(wanted.text, given.text, number_wanted, number_given)


def _same_mathematics(
    wanted: str, given: str, number_wanted: Number | None, number_given: Number | None
) -> bool | None:
    if (cells := _cells(wanted)) and (other_cells := _cells(given)):
        return _same_cells(cells, other_cells)
    items, given_items = split(wanted), split(given)
    if number_wanted and len(given_items) == 2 and "." in wanted and _equal_with_comma(number_wanted, given):
        return True
    if number_given and len(items) == 2 and "." in given and _equal_with_comma(number_given, wanted):
        return True
    if len(items) > 1 or len(given_items) > 1:
        return _same_list(items, given_items)
    if "," in wanted and _BRACKETED.fullmatch(wanted):
        return _same_tuple(wanted, given)
    if "=" in given and "=" not in wanted and _is_equation(given):
        return False
    return _same_in_base(wanted, given, number_wanted)


def _equal_with_comma(wanted: Number, given: str) -> bool:
    """Return whether "3,14" is the number 3.14: a decimal comma, where the other side has a decimal point."""
    value = number(_DECIMAL_COMMA.sub(r"\1.\2", given)) if _DECIMAL_COMMA.fullmatch(given) else None
    return value is not None and equal(wanted, value)


def _same_time(one: re.Match[str], other: re.Match[str]) -> bool:
    """Compare times; the half of the day may be missing on one side, as a unit may."""
    halves = {(time[3] or time[4]).lower() for time in (one, other) if time[3] or time[4]}
    times = [(int(time[1]), int(time[2] or 0)) for time in (one, other)]
    return times[0] == times[1] and len(halves) < 2


def split(text: str) -> list[str]:
    r"""Return the items of a list without brackets, or in the braces of a set: what commas, semicolons, "and", "or" part.

    >>> split("81, 256"), split("1,234"), split("(1, 2), (3, 4)"), split("\\{1,2\\}"), split("x=1 or x=2")
    (['81', '256'], ['1,234'], ['(1, 2)', '(3, 4)'], ['1', '2'], ['x=1', 'x=2'])
    """
    if text.startswith("\\{") and text.endswith("\\}") and text.find("\\}") == len(text) - 2:
        text = _spaced(text[2:-2])
    masked = _THOUSANDS.sub(lambda found: found[0].replace(",", "\0"), text)
    semicolons, marks = ([*_at_top(masked, pattern)] for pattern in (_SEMICOLON, _SEPARATOR))
    items, start = [], 0
    for stop, end in semicolons or marks:
        items.append(masked[start:stop])
        start = end
    items.append(masked[start:])
    return [item.replace("\0", ",").strip() for item in items if item.strip()]


def _spaced(inside: str) -> str:
    """Return what stands in brackets with a space after each comma, unless one has it: (0,100) is a pair of numbers."""
    return inside if re.search(";|, ", inside) else inside.replace(",", ", ")


def _at_top(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield where a mark begins and ends outside brackets."""
    depth, place = 0, 0
    for match in pattern.finditer(text):
        between = text[place : match.start()]
        depth += sum(map(between.count, "([{")) - sum(map(between.count, ")]}"))
        place = match.start()
        if depth == 0:
            yield match.start(), match.end()


def named(item: str) -> tuple[str, str]:
    """Return the name before a single "=" and the value after it; the name is "" without one."""
    match = _NAME.fullmatch(item)
    return (re.sub(r"[{} ]", "", match[1]), match[2].strip()) if match and "=" not in match[2] else ("", item)


def _same_list(golds: Sequence[str], answers: Sequence[str]) -> bool | None:
    """Compare lists without order, except where names on one side tell what the places on the other mean."""
    if any("\\pm" in item or "\\mp" in item for item in (*golds, *answers)):
        return None
    golds, answers = map(_without_repeats, (golds, answers))
    if len(golds) != len(answers):
        return _same_named_tuple(golds, answers) if 1 in (len(golds), len(answers)) else False
    if len(golds) > MAX_ITEMS:
        return None
    names, values = zip(*map(named, golds), strict=True)
    given_names, given_values = zip(*map(named, answers), strict=True)
    told_apart = len({*names, ""}) > 2 or len({*given_names, ""}) > 2
    if told_apart and sorted(names) == sorted(given_names):
        given_values = tuple(given_values[given_names.index(name)] for name in names)
    elif told_apart and any(names) and any(given_names):
        return None
    elif not told_apart:
        return _matched(values, given_values)
    return _all(map(same, values, given_values))


def _same_tuple(wanted: str, given: str) -> bool | None:
    """Compare pairs, points and intervals place by place; one with something around it, such as a sign, is another thing."""
    match = deque(_BRACKETED.finditer(given), maxlen=1).pop() if _BRACKETED.search(given) else None
    if match is None or "," not in match[0]:
        return None
    if match.end() == len(given) and _ALLOWED_BEFORE.fullmatch(given[: match.start()]):
        if _in_other_order(given[: match.start()]):
            return False
        items, given_items = split(_spaced(wanted[1:-1])), split(_spaced(match[0][1:-1]))
        brackets = wanted[0] + wanted[-1], match[0][0] + match[0][-1]
        # [1,2) is an interval
        if len(items) != len(given_items) or (len(items) == 2 and brackets[0] != brackets[1]):
            return False
        return _all(map(same, items, given_items))
    return None if re.search(r"\\cup|\\cap|\\begin", given) else False


def _in_other_order(before: str) -> bool:
    """Return whether neighbours in the alphabet name the places of a tuple in another order, as (y,x) does."""
    names = (
        re.findall("[a-z]", before) if re.fullmatch(r"\(?[a-z](?:, ?[a-z])+\)? ?=", before.strip()) else []
    )
    return names != sorted(names) and ord(max(names)) - ord(min(names)) == len(names) - 1


def _without_repeats(items: Sequence[str]) -> list[str]:
    """Return items without those that are the same text or number as an earlier one: "3/4, or 0.75" is one answer."""
    unique: dict[object, str] = {}
    for item in items:
        value = number(item)
        unique.setdefault((value.value, value.percent, value.unit) if value else item.replace(" ", ""), item)
    return [*unique.values()]


def _cells(text: str) -> list[list[str]] | None:
    r"""Return the rows of a matrix or vector, None for anything else. A determinant (vmatrix) is a number."""
    match = _MATRIX.fullmatch(text)
    rows = _END_OF_ROW.split(match[2].replace("\\hline", "").strip()) if match else []
    return [[cell.strip() for cell in row.split("&")] for row in rows if row.strip()] or None


def _same_cells(wanted: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> bool | None:
    if [*map(len, wanted)] != [*map(len, given)]:
        return False
    return _all(
        cell == given_cell or same(cell, given_cell)
        for cell, given_cell in zip(chain(*wanted), chain(*given), strict=True)
    )


def _same_named_tuple(wanted: Sequence[str], given: Sequence[str]) -> bool | None:
    """Compare "p=5, q=2" with "(5, 2)" or "(q,p)=(2,5)"; of "5, 2" and "(5, 2)" computer algebra tells if they are the same.

    The places of a tuple without names are x, y and z, or those of other names in the order of the list.
    """
    (whole,), items = (wanted, given) if len(wanted) == 1 else (given, wanted)
    inside = re.fullmatch(r"(?:\(([^()=]*)\)=)?\(([^()=]*)\)", whole)
    values = split(_spaced(inside[2])) if inside else []
    if inside is None or not items or len(values) != len(items):
        return False
    names, item_values = zip(*map(named, items), strict=True)
    if "" in names or len({*names}) < len(items):
        return None
    order = split(inside[1]) if inside[1] else sorted(names) if {*names} <= {*"xyz"} else names
    if sorted(order) != sorted(names):
        return None
    item_values = tuple(item_values[names.index(name)] for name in order)
    return _all(map(same, item_values, values) if len(given) == 1 else map(same, values, item_values))


def _matched(wanted: Sequence[str], given: Sequence[str]) -> bool | None:
    """Return whether each item equals another one of the other side; None if that depends on undecided pairs."""
    unmatched, undecided = list(given), False
    for item in wanted:
        verdicts = [same(item, candidate) for candidate in unmatched]
        if True in verdicts:
            unmatched.pop(verdicts.index(True))
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    values = list(verdicts)
    return False if False in values else None if None in values else True


def _is_equation(text: str) -> bool:
    """Return whether the left side of the last "=" is more than a name: computer algebra takes "2x-18=0" for 0."""
    side = re.sub(r"\\[A-Za-z]+|_\{?\w*\}?", "", text.rpartition("=")[0])
    return re.search(r"[A-Za-z][-+*/^]|[-+*/^]\d*[A-Za-z]|\d[A-Za-z]", side) is not None


def _same_in_base(gold: str, answer: str, gold_number: Number | None) -> bool | None:
    """Compare numbers in a base as written: computer algebra drops the subscript of 413_5."""
    gold_base, answer_base = _IN_BASE.fullmatch(gold), _IN_BASE.fullmatch(answer)
    if gold_base is None:
        return False if answer_base and gold_number else None
    if answer_base is None:
        return answer == gold_base[1]
    return gold_base.groups() == answer_base.groups()
