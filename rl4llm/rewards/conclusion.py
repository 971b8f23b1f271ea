"""Find boxes and formulas in a text, and what its last sentences conclude with where no mark says what the answer is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rl4llm.rewards.quantities import rewritten, unit

_FORMULA_CHARS = 600
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(\\?[A-Za-z0-9]))")
_BRACE = re.compile(r"(?<!\\)[{}]")
_FORMULA = re.compile(
    rf"\$\$(.{{1,{_FORMULA_CHARS}}}?)\$\$"
    rf"|(?<![\\$])\$(?!\$)((?=\S)(?:\\\$|[^$]){{0,{_FORMULA_CHARS}}}?(?<![\s\\])|\s(?:\\\$|[^$]){{1,{_FORMULA_CHARS}}}?\s)\$(?!\d)"
    rf"|\\\((.{{1,{_FORMULA_CHARS}}}?)\\\)|\\\[(.{{1,{_FORMULA_CHARS}}}?)\\\]",
    re.DOTALL,
)
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{3,}[ ,]+){3}")
WRAPPED = re.compile(r"\\(?:begin|end|text\w*|math[a-z]+|mbox|operatorname)\s?\{[^{}]*\}|\\[A-Za-z]+")
_JOIN = re.compile(
    r"(?:[\s$,;&~]|\\[()\[\],;:!\\ ]|\\q?quad|\\text\w*\s?\{\s*(?:,|and|or)?\s*\}|\b(?:and|or)\b"
    r"|\b[A-Za-z](?:_\{?\w{1,3}\}?)?\s*=(?!=))*",
)  # fmt: skip
_LINKED = re.compile(r"(?:\\text\w*\s?\{)?[^.:=!?\n]{0,40}\b(?:and|or)\b[^.:=!?\n]{0,20}")
_NO_LINK = re.compile(
    r"\b(?:is|are|was|so|no|not|but|then|thus|hence|that|which|wait|actually|final|answer|therefore|gets?|gives?|since|because"
    r"|simpl\w+|rather|equals?|first|correct\w*)\b",
    re.IGNORECASE,
)


class Snippet(NamedTuple):
    """A box or a formula: where it begins and ends, with its marks, and what it contains."""

    start: int
    end: int
    text: str


def boxes(text: str, max_chars: int) -> list[Snippet]:
    """Return every complete ``\\boxed{...}`` in order of their starts; longer contents come cut, but still longer."""
    closing = _closing_braces(text)
    found: list[Snippet] = []
    for match in _BOX.finditer(text):
        if match[2]:
            found.append(Snippet(match.start(), match.end(), match[2]))
            continue
        start, limit = match.end(), match.end() + max_chars + 1
        end = closing.get(start - 1, limit if limit <= len(text) else start)
        found.append(
            Snippet(match.start(), end + 1, text[start : min(end, limit + 2000)].strip()[: max_chars + 1])
        )
    return [box for box in found if box.text]


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position of the closing brace of each opening brace, if it is closed."""
    opened, closing = [], {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


def formulas(text: str) -> list[Snippet]:
    """Return what stands between dollars or LaTeX's brackets, except prose between two prices."""
    return [
        Snippet(match.start(), match.end(), content)
        for match in _FORMULA.finditer(text)
        if (content := _content(match)) and _PROSE.search(WRAPPED.sub("", content)) is None
    ]


def without_dollars(text: str) -> str:
    """Return the content of a text that is one formula; other text as it is."""
    found = _FORMULA.fullmatch(text)
    return _content(found) if found else text


def leading_formula(text: str) -> str | None:
    """Return the content of the formula that a text begins with, None if it begins with none."""
    found = _FORMULA.match(text)
    return _content(found) if found else None


def _content(match: re.Match[str]) -> str:
    inside = next(group for group in match.groups() if group is not None)
    return inside.strip().rstrip(".,").strip()


def joined(text: str, pieces: Sequence[Snippet]) -> list[str]:
    """Return what pieces contain; those that are one list are joined, without repeats, by commas."""
    lists: list[list[str]] = [[pieces[0].text]] if pieces else []
    for before, piece in pairwise(pieces):
        if piece.start >= before.end and _links(text[before.end : piece.start]):
            lists[-1].append(piece.text)
        else:
            lists.append([piece.text])
    return [", ".join(dict.fromkeys(items)) for items in lists]


def _links(between: str) -> bool:
    if len(between) > 80:
        return False
    return _JOIN.fullmatch(between) is not None or (
        _LINKED.fullmatch(between) is not None and _NO_LINK.search(between) is None
    )


MAX_CHARS = 4000
MAX_SENTENCES = 8
MAX_SENTENCE_CHARS = 1200
MAX_BARE_CHARS = 600
MAX_VERBS = 20
_EMPHASIS = re.compile(r"(?<![\w*_`\\)])(\*{1,3}|__?|`)(?=[^\s*_`])([^*`\n$]{0,199}[^\s*_`$])\1(?![\w*_`(])")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z'-]+){0,3}")
_BOLD = re.compile(r"(?<![\w*)])\*\*(?=[^\s*])([^*\n]{1,200}?)(?<=\S)\*\*(?![\w*(])")
_HEADING = re.compile(
    r"(?:step|part|case|example|problem|question|note|method|solution|option)\b", re.IGNORECASE
)
_SENTENCE = re.compile(r"(?<=[.!?])(?:\*\*|[\"')]|\$\$?|\\[\])])?\s+|\n+")
_VERB = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|gets?|gives?|obtain|have|has|had|yields?|find|becomes?|means?|costs?|takes?|contains?)"
    r"\b|:(?!\d)|[=\u2248])(?:\s+(?:equal to|exactly|approximately"
    r"|about|roughly|simply|only|therefore|thus|then|now|still|that|a total of))*"
    r"[\s*_]*",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    r"(?:I hope|Hope|Let me|Let's|Let us|Please|Feel free|Thank|If you|Good luck|Great)\b", re.IGNORECASE
)
_DECLINED = re.compile(
    r"\b(?:(?:can|could|do|does|did)(?:n['\u2019]t| not|not) (?:\w+ )?"
    r"(?:decide|determine|know|tell|say|figure|solve|find|conclude|calculate|compute|proceed|be \w+)"
    r"|(?:not|n['\u2019]t) (?:\w+ )?(?:sure|certain|clear|enough|possible|able)|unable|impossible|unclear|unsure|uncertain"
    r"|insufficient|(?:could|might|may) also be)\b",
    re.IGNORECASE,
)
_LAST_CLAUSE = re.compile(
    r".*(?:[,;] ?(?:so|thus|hence|therefore|but|and|which)|\b(?:thus|hence|therefore))\b", re.IGNORECASE
)
_REASON = re.compile(r",? (?:because|since)\b|, (?:as|so|which|where|with|hence|thus)\b", re.IGNORECASE)
_BECAUSE = re.compile(r",? \b(?:because|since)\b", re.IGNORECASE)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)"
_MINUS = "\\-\u2212\u2013\u2014\u2010\u2011\uff0d"
_ALONE = (
    rf"(?:[{_MINUS}+] ?)?(?:[$€£¥₹] ?)?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?(?:/\d+)?"
    r"(?: ?%)?[\u00bc-\u00be\u2150-\u215e]?"
)
_SIGNS = "+-\u2212\u2013\u2014\u2010\u2011\uff0d"
_OPERAND = re.compile(r"[\d)}\]] *$|(?:^|[^A-Za-z])[A-Za-z] *$")
_NUMBERS = re.compile(rf"{_ALONE}(?:(?: ?, ?| ?,? and | ?,? or ){_ALONE}){{0,20}}", re.IGNORECASE)
_NOTATION_BEFORE = re.compile(
    rf"[\w!.^_{{}}\\/*+=<>()\[\]|{_MINUS}]$|[\d+*/=^<>(\u00d7\u00f7≤≥≠{_MINUS}] +$"
    r"|[\w)}\]],$|[\d)}\]], +$|\\[A-Za-z]+ *$|\d: *$|(?:\b(?:not|than|least|most)|n't|\d (?:in|to|out of)) +$"
)
_NOTATION_AFTER = re.compile(
    rf"[\w^_{{}}\\(\[/*+=<>|]|!\S|[.:]\d|,\S| ?[*+/^=<>\\(\u00d7\u00f7{_MINUS}] ?[\w\\(]| \d"
)
_UNIT_AFTER = re.compile(r"[ -]?(?:[A-Za-z°€¥元]{1,14}(?:\^?[23]|[²³])?(?: per | ?/ ?| of )?[ -]?){1,4}")
_BARE = re.compile(r"[-+]?[\w\\({\[|.$<>]")
_FRACTION = r"[-+]?\\frac ?(?:\{\d+\}|\d) ?(?:\{\d+\}|\d)"
_AMOUNT = re.compile(rf"\d{{1,2}}:\d\d(?: ?[AaPp]\.?[Mm]\b\.?)?|{_ALONE}|{_FRACTION}")
_PLACE = r"at|in|from|with|over|on|by"
_BESIDE = re.compile(  # 45 miles at the end of 4 hours, 15 laps in 5 minutes; not 1 in 6 or 5 to 8
    rf"({_ALONE}(?: [a-z]+){{0,3}}?) (?:(?:for|every|after|if)|(?:{_PLACE}|to|when|during|within|before)(?= [a-z]))\b.*"
    rf"|({_ALONE}(?: [a-z]+){{1,3}}?) (?:{_PLACE}|per|of) \d.*",
    re.IGNORECASE,
)
_TIMES = re.compile(r"(\d) ?[x\u00d7] ?(?=[$\d])")
_UNITS_INSIDE = re.compile(
    r"(?<=\d)(?: ?/ ?[A-Za-z]{2,}| [A-Za-z]{2,}(?: ?/ ?[A-Za-z]{2,})?){1,4} ?(?=[-+*/\u00d7\u00f7\u2013=]|$)"
)
_OPERATOR = re.compile(r"[-+*/\u00d7\u00f7]")
_KNOWN_WORDS = frozenset(
    ("and", "or", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "mod", "pi", "max", "min", "infty", "oo")
)


def concluded(text: str) -> str | None:
    r"""Return a formula, the words after the verb, or a number that stands alone, from the last sentence that has one.

    >>> concluded("So it costs 3 dollars."), concluded("Hence $x = 2$ or $x = 3$."), concluded("x^3 grows")
    ('3 dollars', 'x = 2, x = 3', None)
    """
    text = _EMPHASIS.sub(r"**\2**", text[-MAX_CHARS:])
    if whole := _whole(text, _pieces(text)):
        return whole
    for sentence, own_line in reversed(_sentences(text)):
        if declined := _DECLINED.search(_last_clause(sentence)):
            return declined[0] if declined[0].endswith(" be determined") else None
        if answer := _of_sentence(sentence, own_line):
            return answer
    return None


def _last_clause(sentence: str) -> str:
    """Return what follows the last "so", "but" or the like."""
    found = _LAST_CLAUSE.match(sentence)
    return sentence[found.end() :] if found else sentence


def only_mathematics(text: str) -> str | None:
    """Return the formulas that a text consists of; None if it has none or anything else."""
    pieces = _pieces(text)
    return _whole(text, pieces) if pieces else None


def first_sentence(line: str) -> str:
    """Return the first sentence of a line, up to a reason."""
    return next((part for part, _ in _sentences(_REASON.split(line, maxsplit=1)[0], last=False)), line)


def last_number(text: str) -> str | None:
    """Return the last number, or list of numbers, with its unit; None if it does not stand alone."""
    numbers = list(_NUMBERS.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    after = _UNIT_AFTER.match(text, last.end())
    named = after[0].rstrip() if after else ""
    while named and not unit(f" {rewritten(named)}"):
        named = named.rpartition(" ")[0]
    if not _stands_alone(text, last.start(), last.end() + len(named)):
        return None
    return f"{last[0].strip()} {named.strip()}" if named else last[0].strip()


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Return whether a number is no part of other notation, such as a power, a fraction, a pair or an equation."""
    before, after = text[max(0, start - 16) : start], text[end : end + 4]
    if text[start] in _SIGNS and (_OPERAND.search(before) or (text[start + 1] == " " and before.strip())):
        return False
    return _NOTATION_BEFORE.search(before) is None and _NOTATION_AFTER.match(after) is None


def _pieces(text: str) -> list[Snippet]:
    """Return the formulas of a text, and what is bold in it if it is like a formula."""
    found = formulas(text)
    inside = _mask(text, found)
    for match in _BOLD.finditer(text):
        bold = match[1].strip()
        like = re.search(r"\d|\\", bold) and not bold.endswith(":") and not _HEADING.match(bold)
        if like and _is_bare(bold) and not any(inside[match.start() : match.end()]):
            found.append(Snippet(match.start(), match.end(), bold))
    return sorted(found)


def _mask(text: str, pieces: Sequence[Snippet]) -> bytearray:
    """Return for each character whether it is inside a formula."""
    mask = bytearray(len(text))
    for piece in pieces:
        mask[piece.start : piece.end] = b"\1" * (piece.end - piece.start)
    return mask


def _sentences(text: str, *, last: bool = True) -> list[tuple[str, bool]]:
    """Return the last sentences, or the first one, and whether each begins a line; a mark inside a formula ends none."""
    inside = _mask(text, _pieces(text))
    breaks = [
        match.end()
        for match in _SENTENCE.finditer(text)
        if not (inside[match.start()] and inside[match.end() - 1])
    ]
    places = zip([0, *breaks], [*breaks, len(text)], strict=True)
    parts = [(text[start:end], text[start - 1 : start] in ("", "\n")) for start, end in places]
    kept = [(part, own_line) for part, own_line in parts if part.strip(" *_`#\n\t")]
    return kept[-MAX_SENTENCES:] if last else kept[:1]


def _of_sentence(sentence: str, own_line: bool) -> str | None:
    sentence = sentence.strip()[-MAX_SENTENCE_CHARS:]
    pieces = _pieces(sentence)
    if (_CLOSING.match(sentence) and not pieces) or sentence.endswith("?"):
        return None
    whole = _whole(sentence, pieces)
    if whole and (not whole.isalpha() or pieces or own_line):
        return whole
    verbs = list(_verbs(sentence, pieces))[-MAX_VERBS:]
    reason = _BECAUSE.search(sentence)
    if reason and (
        re.search(r"[\d\\$]", sentence[: reason.start()]) or 0 < min(verbs, default=0) <= reason.start()
    ):
        return _of_sentence(sentence[: reason.start()], own_line)
    if answer := _after_verb(sentence.rstrip("!"), verbs, pieces):
        return answer
    return joined(sentence, pieces)[-1] if pieces else last_number(sentence) or _emphasised(sentence)


def _emphasised(sentence: str) -> str | None:
    """Return the last few words in bold of a sentence without a number."""
    words = [match[1] for match in _BOLD.finditer(sentence) if _WORDS.fullmatch(match[1])]
    return words[-1] if words and not re.search(r"\d", _REASON.split(sentence, maxsplit=1)[0]) else None


def _after_verb(sentence: str, verbs: Sequence[int], pieces: Sequence[Snippet]) -> str | None:
    tails = [(place, _stripped(_REASON.split(sentence[place:], maxsplit=1)[0])) for place in verbs]
    words = not pieces and not re.search(r"\d", _last_clause(sentence))
    if not pieces and (bare := next((tail for _, tail in tails if _is_answer(tail, words)), None)):
        return _result(bare)
    if words and (bold := _emphasised(sentence)):
        return bold
    for place, tail in reversed(tails):
        if after := [piece for piece in pieces if piece.start >= place]:
            return joined(sentence, after)[-1]
        if answer := _of_tail(tail, words=words):
            return answer
    return None


def _verbs(sentence: str, pieces: Sequence[Snippet]) -> Iterator[int]:
    """Yield where each verb ends, and each "=" after words or plain arithmetic; 2x = 18 does not make 18 an answer."""
    inside = _mask(sentence, pieces)
    for match in _VERB.finditer(sentence):
        equation = match[0][0] == "=" and _is_equation(sentence[max(0, match.start() - 200) : match.start()])
        if not equation and not inside[match.start()]:
            yield match.end()


def _is_equation(before: str) -> bool:
    """Return whether what stands before "=" is an expression with letters rather than a name, a word or arithmetic."""
    side: list[str] = []
    before = _UNITS_INSIDE.sub("", _TIMES.sub(r"\1*", before))
    for token in reversed(before.rpartition("=")[2].split()):
        if not re.search(r"[\d^\\(]", token) and not _OPERATOR.fullmatch(token) and len(token) > 1:
            break
        side.append(token)
    letters = re.search(r"[A-Za-z\\^]", "".join(side)) is not None
    name = len(side) == 1 and side[0].isalpha()
    return bool(side) and ((letters and not name) or _OPERATOR.match(side[-1]) is not None)


def _whole(text: str, pieces: Sequence[Snippet]) -> str | None:
    """Return a text without the marks around its formulas if it is mathematics, or one word, and nothing else."""
    if len(text) > 2 * MAX_BARE_CHARS:
        return None
    parts, around, start = [], [], 0
    for piece in pieces:
        parts += [text[start : piece.start], piece.text]
        around.append(text[start : piece.start])
        start = piece.end
    whole = _stripped("".join([*parts, text[start:]]))
    words = {word.lower() for word in re.findall("[A-Za-z]{2,}", " ".join([*around, text[start:]]))}
    only_unit = len(around) == 1 and not around[0].strip() and unit(_stripped(text[start:]))
    if around and not words <= {"and", "or"} and not only_unit:
        return None
    return _result(whole) if _is_bare(whole) and ("\n" not in whole or around) else None


def _result(text: str) -> str:
    """Return what plain arithmetic equals, such as 18 for "9 * 2 = 18"; any other text as it is."""
    left, _, right = text.rpartition("=")
    plain = re.fullmatch(r"[^A-Za-z\\^]*\d[^A-Za-z\\^]*", _UNITS_INSIDE.sub("", left.rstrip()))
    return right.strip() if plain else text


def _of_tail(tail: str, *, words: bool) -> str | None:
    """What stands after a verb: an answer by itself, a number that stands alone in it, or, if `words`, a word or two."""
    if not tail:
        return None
    if _is_answer(tail, words):
        return tail
    beside = _BESIDE.fullmatch(tail)
    return last_number(beside[1] or beside[2] if beside else tail) or (
        tail if words and len(tail.split()) <= 3 else None
    )


def _is_answer(tail: str, words: bool) -> bool:
    """Return whether a tail is an answer by itself; beside numbers, a word such as "left" is none."""
    return _is_bare(tail) and (words or not (tail.isalpha() and tail.islower()))


def _is_bare(text: str) -> bool:
    """Return whether a text is mathematics, or one word, and nothing else."""
    if not text or len(text) > MAX_BARE_CHARS or _BARE.match(text) is None:
        return False
    plain = WRAPPED.sub(" ", text)
    words = re.findall(r"[A-Za-z]{3,}" if re.search(r"[\^+=\\]", text) else r"[A-Za-z]{2,}", plain)
    if all(word.lower() in _KNOWN_WORDS for word in words) and re.search(r"\b(?:is|are)\b", plain) is None:
        return True
    if len(words) == 1 and re.fullmatch(r"[A-Za-z]+", text):
        return True
    amount = _AMOUNT.match(text)
    return amount is not None and unit(text[amount.end() :]) is not None


def _stripped(text: str) -> str:
    """Return a text without the marks around it: bold, code, full stop, dollars."""
    return without_dollars(text.strip().strip("*_`").strip().rstrip(".").strip().strip("*_`").strip())
