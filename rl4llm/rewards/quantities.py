"""Rewrite answers in one notation, and read and compare the numbers and units in them exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from unicodedata import normalize

MAX_ANSWER_CHARS = 500
_PLAIN = {
    **dict.fromkeys(("\\left", "\\right", "\\bigl", "\\bigr", "\\Bigl", "\\Bigr", "\\big", "\\displaystyle"), ""),
    **dict.fromkeys(("\\!", "\u200b", "\u200c", "\u2060", "\ufeff", "\\limits"), ""),
    **dict.fromkeys(("\\qquad", "\\quad", "\\;", "\\:", "\\,", "\\ ", "~"), " "),
    **dict.fromkeys("\xa0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe63\u02d7", "-"),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("^{\\circ}", "^\\circ", "^{o}", "\\degree"), "°"),
    "\u2044": "/", "\u2215": "/", "\u00d7": "\\times ", "\u22c5": "\\cdot ", "\u00b7": "\\cdot ", "\u2217": "*",
    "\u00f7": "/", "\\div": "/", "\u03c0": "\\pi ", "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ",
    "\u2260": "\\ne ", "\u00b1": "\\pm ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ",
    "\\varnothing": "\\emptyset", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\leq": "\\le", "\\geq": "\\ge",
    "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "<=": "\\le ", ">=": "\\ge ", " != ": " \\ne ", "{,}": ",", "{:}": ":",
    "{.}": ".",
    "\\%": "%", "\\$": "$", "\\&": "&", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\colon": ":",
    "\\langle": "(", "\\rangle": ")", "\\underline": "", "\\bf": "",
}  # fmt: skip
_COMMANDS = re.compile(r"\\\\|" + "|".join(
    re.escape(old) + (r"(?![A-Za-z])" if old[-1].isalpha() and old[0] == "\\" else "")
    for old in sorted(_PLAIN, key=len, reverse=True)
))  # fmt: skip
_COMPOSED = re.compile(
    "([\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207f]+)|([\u2080-\u2089\u2099]+)|[\u00bc-\u00be\u2150-\u215e]"
)
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_ROOT = re.compile("([\u221a\u221b\u221c]) ?(?:\\(([^()]*)\\)|(\\w+))")
_ROOTS = {"\u221a": "\\sqrt", "\u221b": "\\sqrt[3]", "\u221c": "\\sqrt[4]"}
_ESCAPED = re.compile(r"\\\\(?=[A-Za-z])")  # a backslash that was escaped twice
_PHANTOM = re.compile(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^\s\\{}]|\\[A-Za-z]+)")
_SPREAD = re.compile(r",\s*\\!\s*(?=\d{3})")
_ATTACHED = re.compile("(?<=\\d)(?=[a-z]{1,2}[\u00b2\u00b3])")  # 5cm\u00b2
_OTHER_NOTATION = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^([\s$]{0,9})~", r"\1\\sim "),  # about; elsewhere a tilde is a space
        (r"\\(?:text)?color\s?\{\w{1,20}\}", ""),
        (r"(?i)\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"\*\* ?(?:(-?[\w.]{1,40})|\(([^()]{1,40})\))", r"^{\1\2}"),  # Python's
        (r"(?<![A-Za-z\\])(?:math\.|np\.|sp\.)?(exp|log|ln|sin|cos|tan)(?=\()", r"\\\1"),
        (r"\\exp\(([^()]{1,40})\)", r"e^{\1}"),
        (r"(?<![A-Za-z\\])(?:math\.|np\.|sp\.)?sqrt ?\(([^()]{1,80})\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(?:math\.|np\.|sp\.)?pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty "),
        (r"(?<=[\d)]) ?\* ?I\b", "i"),
        (r"\+ ?-(?=[\d.])", "-"),
        (r"(?<![\d.])1(?:\.0{1,20})?i\b", "i"),
    )
)
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d,])(?!\.\d* \d)")


def rewritten(text: str) -> str:
    r"""Return an answer in one notation; texts of more than 500 characters come back unread.

    >>> rewritten("\u22125\u00bd"), rewritten("x\u00b2 \u2264 12 000"), rewritten("\\dfrac{1}{2}\\,\\%")
    ('-5\\frac{1}{2}', 'x^{2} \\le  12000', '\\frac{1}{2} %')
    """
    if len(text) > MAX_ANSWER_CHARS:
        return text
    if not text.isascii():
        text = _without_unicode(text)
    for pattern, replacement in _OTHER_NOTATION:
        text = pattern.sub(replacement, text)
    if "&" not in text and "\\begin" not in text:
        text = _ESCAPED.sub("\\\\", text)
    text = _COMMANDS.sub(
        lambda found: _PLAIN.get(found[0], found[0]), _SPREAD.sub(",", _PHANTOM.sub("", text))
    )
    return _GROUPS.sub(lambda found: found[1] + found[2].replace(" ", ""), text).strip()


def _without_unicode(text: str) -> str:
    text = _ATTACHED.sub(" ", text)
    text = _ROOT.sub(lambda root: f"{_ROOTS[root[1]]}{{{root[2] or root[3]}}}", text.translate(_WIDE))
    return _COMPOSED.sub(_plain, text)


def _plain(signs: re.Match[str]) -> str:
    """Return raised or lowered signs, or a fraction in one sign, as LaTeX."""
    plain = normalize("NFKC", signs[0]).translate({0x2212: "-", 0x2044: "/"})
    return (
        f"{'^' if signs[1] else '_'}{{{plain}}}"
        if signs[1] or signs[2]
        else "\\frac{{{}}}{{{}}}".format(*plain.split("/"))
    )


Unit = tuple[str, ...]
"""Names of measures and of things, in order, such as ("mile", "/", "hour") or ("inch^2",) or ("red", "marble")."""

_NAMES = {
    "second": "s sec secs", "minute": "min mins", "hour": "h hr hrs", "day": "", "week": "wk", "month": "", "year": "yr yrs",
    "meter": "m metre metres", "centimeter": "cm cms centimetre centimetres", "millimeter": "mm millimetre millimetres",
    "kilometer": "km kms kilometre kilometres", "inch": "in inches", "foot": "ft feet", "yard": "yd yds", "mile": "mi",
    "gram": "g gm grammes", "kilogram": "kg kgs", "milligram": "mg", "tonne": "", "pound": "lb lbs", "ounce": "oz",
    "liter": "l litre litres", "milliliter": "ml millilitre millilitres", "gallon": "gal", "quart": "qt", "pint": "pt",
    "cup": "", "acre": "", "hectare": "ha", "degree": "° deg", "radian": "rad rads", "celsius": "c", "fahrenheit": "f",
    "kelvin": "", "dollar": "$ usd", "cent": "¢", "euro": "€ eur", "sterling": "£ gbp", "yuan": "元 rmb cny",
    "rupee": "rs ₹", "yen": "¥ 円", "newton": "", "joule": "", "watt": "", "volt": "", "ampere": "", "hertz": "hz",
    "pascal": "pa", "mole": "mol", "unit": "", "am": "", "pm": "",
    "people": "persons person", "man": "men", "woman": "women", "child": "children", "mouse": "mice", "die": "dice",
}  # fmt: skip
_MEASURE = {alias: name for name, others in _NAMES.items() for alias in (name, f"{name}s", *others.split())}
_COUNTED = {"people", "man", "woman", "child", "mouse", "die"}  # only irregular plurals
_MEASURES = set(_NAMES) - _COUNTED
_SQUARE = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3", "squared": "^2", "cubed": "^3"}
_PER = {"per", "/", "an", "a", "each"}
_ALSO = {"mph": ("mile", "/", "hour"), "kph": ("kilometer", "/", "hour"), "kmh": ("kilometer", "/", "hour")}
_EMPTY = {"of", "the", "total", "about", "approximately", "exactly", "altogether"}
_NO_UNIT = {
    "and", "not", "but", "plus", "minus", "times", "over", "mod", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp",
    "sqrt", "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves", "third", "thirds",
    "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths", "eighth",
    "eighths", "ninth", "ninths", "tenth", "tenths", "hundredth", "hundredths", "factorial", "is", "are", "was", "were",
    "be", "has", "have", "had", "if", "then", "because", "since", "when", "where", "which", "that", "so", "more", "less",
    "than", "who", "does", "did", "can", "cannot", "should", "would", "will", "infinity", "wrong", "right", "correct",
    "incorrect", "maybe", "neither", "nor", "except", "instead", "rather", "versus", "either", "otherwise", "unless",
    "until", "before", "after", "squares", "fold",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+|[°$€£¥¢₹元円/]|\^ ?\{?(-?[1-9])\}?")
_FULL = re.compile(r"(?:[ -]*+(?:[A-Za-z]{1,20}+\.?|[°$€£¥¢₹元円/]|\^ ?\{?-?[1-9]\}?)){1,12}+[ .]*")
_MAX_WORDS = 6


def unit(text: str) -> Unit | None:
    r"""Return the unit that a text after a number names, () for an empty text, None if it is not a unit.

    >>> unit(" square inches"), unit(" miles per hour"), unit("cm^2"), unit(" apples"), unit(" million"), unit("xy")
    (('inch^2',), ('mile', '/', 'hour'), ('centimeter^2',), ('apple',), None, None)
    """
    if not text.strip(" ."):
        return ()
    if len(text) > 120 or _FULL.fullmatch(text) is None:
        return None
    words = [match[0].lower() for match in _WORD.finditer(text)]
    letters = [word for word in words if word.isascii() and word.isalpha()]
    names = [
        word for word in re.findall(r"\b[A-Z][a-z]+", text) if word.lower() not in _KNOWN
    ]  # 7 Up, 3 Doors Down
    if names or len(letters) > _MAX_WORDS or not _NO_UNIT.isdisjoint(letters):
        return None
    if text[0].isalpha() and (len(words[0]) < 2 or words[0] not in _KNOWN):  # 2xy, 18m
        return None
    if any(len(word) < 3 and word not in _KNOWN for word in letters):
        return None
    named = _canonical(words)
    return None if named and (named[0][0] == "^" or named[-1] == "/") else named


def agree(one: Unit, other: Unit) -> bool:
    """Return whether two answers may be of the same unit: one names none, the same, or only fewer words of it."""
    if not one or not other or one == other:
        return True
    measures, other_measures = ([name for name in side if _measure(name)] for side in (one, other))
    if len(measures) != len(other_measures) or not all(map(_alike, measures, other_measures)):
        return False
    things, other_things = ({name for name in side if not _measure(name)} for side in (one, other))
    return things <= other_things or other_things <= things


_KNOWN = {*_MEASURE, *_SQUARE, *_PER, *_ALSO, *_EMPTY}


def _canonical(words: list[str]) -> Unit:
    names: list[str] = []
    power = ""
    for place, word in enumerate(words):
        if word in _EMPTY or (word == "in" and place + 1 < len(words)):  # 5 in total, not 5 in
            continue
        if word in _ALSO:
            names += _ALSO[word]
        elif word in _PER:
            names.append("/")
        elif word in ("square", "sq", "cubic", "cu"):
            power = _SQUARE[word]
        elif word in _SQUARE or word.startswith("^"):
            raised = _SQUARE.get(word) or "^" + re.sub(r"[^-\d]", "", word)
            names[-1:] = [names[-1] + raised] if names else [raised]
        else:
            named = _MEASURE.get(word, _singular(word)) + power
            names += [named] if named not in names else []
            power = ""
    names += [power] if power else []
    return tuple(name for name in names if name != "degree" or not {"celsius", "fahrenheit"} & {*names})


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def _measure(name: str) -> bool:
    return name == "/" or name.partition("^")[0] in _MEASURES or "^" in name


def _alike(one: str, other: str) -> bool:
    """Return whether two measures are the same; "units" are of any kind, and degrees of any scale."""
    (name, _, power), (other_name, _, other_power) = one.partition("^"), other.partition("^")
    any_kind = "unit" in (name, other_name) or (
        "degree" in (name, other_name) and {"celsius", "fahrenheit"} & {name, other_name}
    )
    return power == other_power and (name == other_name or bool(any_kind))


MAX_NUMBER_CHARS = 120
MAX_DIGITS = 50
MAX_EXPONENT = 400
SIGNIFICANT_DIGITS = 6

_WHOLE = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_POWER = r"10 ?\^ ?(?:\{ ?([+-]?\d{1,3}) ?\}|(\d))"
_SIGN = r"([+-]?) ?"
_CURRENCY = r"([$€£¥₹]?) ?"
_ALONE = re.compile(r"^([+-]?) ?(?=10 ?\^)")  # a power of ten without a factor
_FRAC = r"\\frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(-?\d+) ?\}|(\d))"
_FORMS = {
    "decimal": re.compile(
        rf"{_SIGN}{_CURRENCY}{_SIGN}({_DECIMAL})(?:[eE]([+-]?\d{{1,3}})| ?(?:\\times|\\cdot|\*) ?{_POWER})?"
        r"(?![\d^_]|,\d|\.\d)(.*)",
        re.ASCII,
    ),
    "frac": re.compile(rf"{_SIGN}{_CURRENCY}(\d{{0,20}}) ?{_FRAC}(?![\d^_])(.*)", re.ASCII),
    "slash": re.compile(rf"{_SIGN}{_CURRENCY}(?:(\d{{1,20}}) )?({_WHOLE}) ?/ ?({_WHOLE})(?![\d^_.,])(.*)", re.ASCII),
}  # fmt: skip
_REPEATING = re.compile(
    r"([+-]?) ?(\d{0,20})\.(\d{0,20}) ?(?:\\(?:overline|bar|dot) ?(?:\{(\d{1,20})\}|(\d))|\((\d{1,20})\))(.*)",
    re.ASCII,
)
_PERCENT = re.compile(r" ?(?:%|(?:percent|per cent)\b)(?:age points?| points?)?")
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf" ?({'|'.join(_LARGE)})\b")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value. `decimals` counts the digits written after the point, -1 for a fraction."""

    value: Fraction
    percent: bool = False
    decimals: int = -1
    unit: Unit = ()


def number(text: str) -> Number | None:
    r"""Return the number in a short rewritten text, with or without currency, percent sign and unit.

    >>> number("1,234.50").value, number("3e2").value, number("1\\frac{1}{2}").value, number("2 million").value
    (Fraction(2469, 2), Fraction(300, 1), Fraction(3, 2), Fraction(2000000, 1))
    """
    if not text or len(text) > MAX_NUMBER_CHARS or sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    for parse in (_fraction, _decimal, _repeating):
        if (value := parse(text)) is not None:
            return value
    return None


def equal(gold: Number, answer: Number) -> bool:
    """Return whether two numbers are equal, of no different units, and both percentages or neither.

    A percent sign may be missing from the answer: 50% is 0.5 and 50. One that the ground truth lacks makes the answer a
    hundredth, except for a ground truth above 1, where 50% is 50 too: 0.5% is not 0.5, and 1% is not 1.
    """
    if not agree(gold.unit, answer.unit):
        return False
    if gold.percent == answer.percent:
        return _close(gold, answer)
    percentage, plain = (gold, answer) if gold.percent else (answer, gold)
    hundredth = Number(
        percentage.value / 100, decimals=percentage.decimals + 2 if percentage.decimals >= 0 else -1
    )
    bare = gold.percent or abs(gold.value) > 1
    return _close(hundredth, plain) or (bare and _close(percentage, plain))


def _close(one: Number, other: Number) -> bool:
    """Return whether two values are equal, or one is the other, a fraction, rounded to at least six decimals and digits."""
    if one.value == other.value:
        return True
    if (one.decimals < 0) == (other.decimals < 0):
        return False
    decimal, fraction = (one, other) if other.decimals < 0 else (other, one)
    rounded = (
        decimal.decimals >= SIGNIFICANT_DIGITS and round(fraction.value, decimal.decimals) == decimal.value
    )
    return rounded and abs(decimal.value - fraction.value) * 10 ** (SIGNIFICANT_DIGITS - 1) <= abs(
        fraction.value
    )


def _decimal(text: str) -> Number | None:
    match = _FORMS["decimal"].fullmatch(_ALONE.sub(r"\1 1*", text))
    if match is None or (match[1] and match[3]):
        return None
    sign, (whole, _, decimals) = match[1] + match[3], match[4].replace(",", "").partition(".")
    exponent = int(match[5] or match[6] or match[7] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) * Fraction(10) ** exponent
    exact = match[5] is not None or match[6] is not None or match[7] is not None
    return _with_rest(-value if sign == "-" else value, -1 if exact else len(decimals), match[2], match[8])


def _repeating(text: str) -> Number | None:
    """Return a repeating decimal, such as 0.1\\overline{6} or 0.1(6), which is a fraction."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    fixed, period = match[3], match[4] or match[5] or match[6]
    value = Fraction(int(match[2] + fixed or "0"), 10 ** len(fixed))
    value += Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    return _with_rest(-value if match[1] == "-" else value, -1, "", match[7])


def _fraction(text: str) -> Number | None:
    if match := _FORMS["frac"].fullmatch(text):
        above, below, rest = match[4] or match[5], match[6] or match[7], match[8]
    elif match := _FORMS["slash"].fullmatch(text):
        above, below, rest = match[4].replace(",", ""), match[5].replace(",", ""), match[6]
    else:
        return None
    if int(below) == 0 or (match[3] and (int(above) < 0 or int(below) <= int(above))):
        return None  # a mixed number has a fraction below one: 2 3/2 and 2\frac{-1}{2} are none
    value = int(match[3] or 0) + Fraction(int(above), int(below))
    return _with_rest(-value if match[1] == "-" else value, -1, match[2], rest)


def _with_rest(value: Fraction, decimals: int, currency: str, rest: str) -> Number | None:
    """Return the number with what follows its digits: a percent sign, a word like "million", a unit."""
    if scale := _SCALE.match(rest):
        value, decimals, rest = value * _LARGE[scale[1]], -1, rest[scale.end() :]
    if percent := _PERCENT.match(rest):
        rest = rest[percent.end() :]
    named = unit(currency + rest) if not currency else unit(f" {currency}{rest}")
    return None if named is None else Number(value, percent is not None, decimals, named)
