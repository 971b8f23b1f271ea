"""Read the units after a number, and tell whether two answers name different ones."""

from __future__ import annotations

import re

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
    "pascal": "pa", "mole": "mol", "unit": "",
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
    "until", "before", "after", "squares",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+|[°$€£¥¢₹元円/]|\^ ?\{?(-?[1-9])\}?")
_FULL = re.compile(r"(?:[ -]*(?:[A-Za-z]{1,20}\.?|[°$€£¥¢₹元円/]|\^ ?\{?-?[1-9]\}?)){1,12}[ .]*")
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
    words = [found[0].lower() for found in _WORD.finditer(text)]
    letters = [word for word in words if word.isascii() and word.isalpha()]
    if len(letters) > _MAX_WORDS or not _NO_UNIT.isdisjoint(letters):
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
    measures, others = ([name for name in side if _measure(name)] for side in (one, other))
    if len(measures) != len(others) or not all(map(_alike, measures, others)):
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
