r"""What the last sentences of a reply conclude with, where no mark says what the answer is.

Sentences are read from the last one backwards until one has an answer. In each the first of these rules counts:

| rule | sentence | answer |
|---|---|---|
| a sentence that is only mathematics, an amount or a word | 5 + 13 = 18 apples | 18 apples |
| in front of a reason, if there is something | It is 18 because 9 is half of it. | 18 |
| behind a verb: mathematics, an amount or a word, a formula | So x is 7, as it must be. | 7 |
| the last formulas | $x = 2$ or $x = 3$ solve it. | x = 2, x = 3 |
| the last number, if it stands alone | She pays $64 for 16 glasses. | $64 |
| what is last in bold, in a sentence without a number | Go on a **Monday** then. | Monday |

Thanks, offers and questions are passed over. A sentence that says that there is no answer, or that its
answer is wrong, ends the search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl4llm.rewards.marks import (
    AMOUNT,
    COMMANDS,
    NUMBER,
    Snippet,
    formulas,
    joined,
    last_number,
    without_dollars,
)
from rl4llm.rewards.quantities import unit

MAX_CHARS = 4000
MAX_SENTENCES = 8
MAX_SENTENCE_CHARS = 1200
MAX_BARE_CHARS = 600
MAX_VERBS = 20


def _one_of(words: str) -> re.Pattern[str]:
    """Return a pattern of whole words and phrases; those with an apostrophe may have a typographic one."""
    return re.compile(rf"\b(?:{words})\b".replace("'", "['\u2019]"), re.IGNORECASE)


_VERBS = "is|are|was|were|be|equals?|gets?|gives?|obtain|have|has|had|yields?|find|becomes?|means?|costs?|takes?|contains?"
_FILLERS = (
    "equal to|exactly|approximately|about|roughly|simply|only|therefore|thus|then|now|still|that|a total of"
)
_VERB = re.compile(rf"(?:\b(?:{_VERBS})\b|:(?!\d)|[=\u2248])(?:\s+(?:{_FILLERS}))*[\s*_]*", re.IGNORECASE)
_PASSED_OVER = _one_of("I hope|Hope|Let me|Let's|Let us|Please|Feel free|Thank|If you|Good luck|Great")
_DECLINED = _one_of(
    "(?:can|could|do|does|did)(?:n?'t| not|not) (?:\\w+ )?"
    "(?:decide|determine|know|tell|say|figure|solve|find|conclude|calculate|compute|proceed|be \\w+)"
    "|not (?:\\w+ )?(?:sure|certain|clear|enough|possible|able)"
    "|unable|impossible|unclear|unsure|uncertain|insufficient|(?:could|might|may) also be"
)
_REFUTED = re.compile(r"\b(?:is|are|was|were) (?:(?!not\b)\w+ )?(?:wrong|incorrect)\W*$", re.IGNORECASE)
_HEADING = _one_of("step|part|case|example|problem|question|note|method|solution|option")
_LAST_CLAUSE = re.compile(
    r".*(?:[,;] ?(?:so|thus|hence|therefore|but|and|which)|\b(?:thus|hence|therefore))\b", re.IGNORECASE
)
_BECAUSE = re.compile(r",? \b(?:because|since)\b", re.IGNORECASE)
_ASIDE = re.compile(rf"{_BECAUSE.pattern}|, (?:as|so|which|where|with|hence|thus)\b", re.IGNORECASE)
_EMPHASIS = re.compile(r"(?<![\w*_`\\)])(\*{1,3}|__?|`)(?=[^\s*_`])([^*`\n$]{0,199}[^\s*_`$])\1(?![\w*_`(])")
_BOLD = re.compile(r"(?<![\w*)])\*\*(?=[^\s*])([^*\n]{1,200}?)(?<=\S)\*\*(?![\w*(])")
_FEW_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?: [A-Za-z'-]+){0,3}")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?:\*\*|[\"')]|\$\$?|\\[\])])?\s+|\n+")
_BARE = re.compile(r"[-+]?[\w\\({\[|.$<>]")
_KNOWN_WORDS = frozenset(
    ("and", "or", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "mod", "pi", "max", "min", "infty", "oo")
)
_OPERATOR = re.compile(r"[-+*/\u00d7\u00f7]")
_TIMES = re.compile(r"(\d) ?[x\u00d7] ?(?=[$\d])")
_UNITS_INSIDE = re.compile(
    r"(?<=\d)(?: ?/ ?[A-Za-z]{2,}| [A-Za-z]{2,}(?: ?/ ?[A-Za-z]{2,})?){1,4} ?(?=[-+*/\u00d7\u00f7\u2013=]|$)"
)
_NAME_INSIDE = re.compile(  # an operand that is a word
    r"(?<![\\A-Za-z])[A-Za-z]{3,}(?= [-+*/\u00d7\u00f7] | ?[*/\u00d7\u00f7])"
    r"|(?:(?<= [-+*/\u00d7\u00f7] )|(?<=[*/\u00d7\u00f7]))[A-Za-z]{3,}"
)
_PLACE = "at|in|from|with|over|on|by"
_REST = r"\b[^\d\n]*[\d.,:/]*[^\d\n]*"  # with one number at most
_BESIDE = re.compile(  # 45 miles at the end of 4 hours, 15 laps in 5 minutes; not 1 in 6 or 5 to 8
    rf"(?:.*[^\w.,$€£¥₹+-])?(?:({NUMBER}(?: [a-z]+){{0,3}}?) "
    rf"(?:(?:for|every|after|if)|(?:{_PLACE}|to|when|during|within|before)(?= [a-z])){_REST}"
    rf"|({NUMBER}(?: [a-z]+){{1,3}}?) (?:{_PLACE}|per|of) (?=\d){_REST})",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"(?:\b(?:not|never|nor|cannot)|n['\u2019]t)\b(?!.*(?:[,;]|\b(?:but|that|only|so)\b))", re.IGNORECASE
)


def concluded(text: str) -> str | None:
    r"""Return a formula, the words after the verb, or a number that stands alone, from the last sentence that has one.

    >>> concluded("So it costs 3 dollars."), concluded("Hence $x = 2$ or $x = 3$."), concluded("x^3 grows")
    ('3 dollars', 'x = 2, x = 3', None)
    """
    text = _EMPHASIS.sub(r"**\2**", text[-MAX_CHARS:])
    if whole := _only_answer(text, _snippets(text)):
        return whole
    for part, own_line in reversed(_sentences(text)):
        if declined := _DECLINED.search(_last_clause(part)):
            return declined[0] if declined[0].endswith(" be determined") else None
        if answer := _of_sentence(part, own_line):
            return None if _REFUTED.search(part.replace(answer, "")) else answer
    return None


def only_mathematics(text: str) -> str | None:
    """Return the formulas that a text consists of; None if it has none or anything else."""
    return only_answer(text) if _snippets(text) else None


def only_answer(text: str) -> str | None:
    """Return a text that is mathematics, an amount or one word, without its marks; None if it is anything else."""
    return _only_answer(text, _snippets(text))


def first_sentence(line: str) -> str:
    """Return the first sentence of a line, up to a reason."""
    return next((part for part, _ in _sentences(_without_aside(line), last=False)), line)


def _sentences(text: str, *, last: bool = True) -> list[tuple[str, bool]]:
    """Return the last sentences, or the first one, and whether each begins a line; a mark inside a formula ends none."""
    inside = _mask(text, _snippets(text))
    breaks = [
        match.end()
        for match in _SENTENCE_END.finditer(text)
        if not (inside[match.start()] and inside[match.end() - 1])
    ]
    places = zip([0, *breaks], [*breaks, len(text)], strict=True)
    parts = [(text[start:end], text[start - 1 : start] in ("", "\n")) for start, end in places]
    kept = [(part, own_line) for part, own_line in parts if part.strip(" *_`#\n\t")]
    return kept[-MAX_SENTENCES:] if last else kept[:1]


class _Sentence(NamedTuple):
    """A sentence, its formulas, and where its verbs end."""

    text: str
    snippets: Sequence[Snippet]
    verbs: Sequence[int]

    @property
    def has_only_words(self) -> bool:
        """Whether neither a formula nor the last clause has a number, so that a word can be the answer."""
        return not self.snippets and not re.search(r"\d", _last_clause(self.text))


def _of_sentence(text: str, own_line: bool) -> str | None:
    """Return the answer of a sentence by the first rule that finds one, see the table of this module."""
    text = text.strip()[-MAX_SENTENCE_CHARS:]
    snippets = _snippets(text)
    if (_PASSED_OVER.match(text) and not snippets) or text.endswith("?"):
        return None
    whole = _only_answer(text, snippets)
    if whole and (not whole.isalpha() or snippets or own_line):
        return whole
    sentence = _Sentence(text, snippets, list(_verbs(text, snippets))[-MAX_VERBS:])
    if end := _before_reason(sentence):
        return _of_sentence(text[:end], own_line)
    return next(filter(None, (rule(sentence) for rule in _RULES)), None)


def _before_reason(sentence: _Sentence) -> int:
    """Return where a reason begins that follows an answer; 0 for a sentence that begins with its reason."""
    reason = _BECAUSE.search(sentence.text)
    if reason is None:
        return 0
    states = re.search(r"[\d\\$]", sentence.text[: reason.start()]) is not None
    return reason.start() if states or 0 < min(sentence.verbs, default=0) <= reason.start() else 0


def _after_verb(sentence: _Sentence) -> str | None:
    """Return what follows a verb: the first tail that is an answer by itself, bold words, or what the last tail holds."""
    text = sentence.text.rstrip("!")
    tails = [(place, _stripped(_without_aside(text[place:]))) for place in sentence.verbs]
    words = sentence.has_only_words
    bare = next((tail for _, tail in tails if _is_answer(tail, words)), None)
    if bare and not sentence.snippets:
        return _result(bare)
    if words and (bold := _emphasised(sentence)):
        return bold
    for place, tail in reversed(tails):
        if after := [snippet for snippet in sentence.snippets if snippet.start >= place]:
            return joined(text, after)[-1]
        if answer := _of_tail(tail, words=words):
            return answer
    return None


def _of_tail(tail: str, *, words: bool) -> str | None:
    """Return what follows a verb: an answer by itself, a number that stands alone in it, or, if `words`, a few words."""
    if not tail or _is_answer(tail, words):
        return tail or None
    return _amount(tail) or (tail if words and len(tail.split()) <= 3 else None)


def _last_formula(sentence: _Sentence) -> str | None:
    """Return the last formula of a sentence."""
    return joined(sentence.text, sentence.snippets)[-1] if sentence.snippets else None


def _emphasised(sentence: _Sentence) -> str | None:
    """Return the last few words in bold of a sentence without a number."""
    words = [match[1] for match in _BOLD.finditer(sentence.text) if _FEW_WORDS.fullmatch(match[1])]
    return words[-1] if words and not re.search(r"\d", _without_aside(sentence.text)) else None


_RULES = (_after_verb, _last_formula, lambda sentence: _amount(sentence.text), _emphasised)
"""Readers of a sentence that is more than its answer, the most certain first."""


def _amount(text: str) -> str | None:
    """Return the number that a text ends on; of two with a preposition between them, the first.

    A number that the text denies is no answer.

    >>> _amount("She pays $64 for 16 glasses"), _amount("I did not use the number 18"), _amount("not 17 but 18")
    ('$64', None, '18')
    """
    beside = _BESIDE.fullmatch(text)
    amount = last_number(text[: max(beside.end(1), beside.end(2))] if beside else text)
    return None if amount and _DENIED.search(text.rpartition(amount.split()[0])[0]) else amount


def _last_clause(sentence: str) -> str:
    """Return what follows the last "so", "but" or the like."""
    found = _LAST_CLAUSE.match(sentence)
    return sentence[found.end() :] if found else sentence


def _without_aside(text: str) -> str:
    """Return a text up to a reason or an aside: "18, as shown" is 18."""
    return _ASIDE.split(text, maxsplit=1)[0]


def _verbs(sentence: str, snippets: Sequence[Snippet]) -> Iterator[int]:
    """Yield where each verb ends, and each "=" after words or plain arithmetic; 2x = 18 does not make 18 an answer."""
    inside = _mask(sentence, snippets)
    for match in _VERB.finditer(sentence):
        equation = match[0][0] == "=" and is_equation(sentence[max(0, match.start() - 200) : match.start()])
        if not equation and not inside[match.start()]:
            yield match.end()


def is_equation(before: str) -> bool:
    """Return whether what stands before "=" is an expression with letters rather than a name, a word or arithmetic.

    A word is the name of a number, as in "price * 2", and a letter that has a factor or a term beside it is an unknown.
    """
    side: list[str] = []
    before = _NAME_INSIDE.sub("1", _UNITS_INSIDE.sub("", _TIMES.sub(r"\1*", before)))
    for token in reversed(before.rpartition("=")[2].split()):
        if not re.search(r"[\d^\\(]", token) and not _OPERATOR.fullmatch(token) and len(token) > 1:
            break
        side.append(token)
    letters = re.search(r"[A-Za-z\\^]", "".join(side)) is not None
    name = len(side) == 1 and side[0].isalpha()
    return bool(side) and ((letters and not name) or _OPERATOR.match(side[-1]) is not None)


def _result(text: str) -> str:
    """Return what plain arithmetic equals, such as 18 for "9 * 2 = 18"; any other text as it is."""
    left, _, right = text.rpartition("=")
    plain = re.fullmatch(r"[^A-Za-z\\^]*\d[^A-Za-z\\^]*", _UNITS_INSIDE.sub("", left.rstrip()))
    return right.strip() if plain else text


def _only_answer(text: str, snippets: Sequence[Snippet]) -> str | None:
    """Return a text without the marks around its formulas if it is mathematics, or one word, and nothing else."""
    if len(text) > 2 * MAX_BARE_CHARS:
        return None
    parts, around, start = [], [], 0
    for snippet in snippets:
        parts += [text[start : snippet.start], snippet.text]
        around.append(text[start : snippet.start])
        start = snippet.end
    whole = _stripped("".join([*parts, text[start:]]))
    words = {word.lower() for word in re.findall("[A-Za-z]{2,}", " ".join([*around, text[start:]]))}
    only_unit = len(around) == 1 and not around[0].strip() and unit(_stripped(text[start:]))
    if around and not words <= {"and", "or"} and not only_unit:
        return None
    return _result(whole) if _is_bare(whole) and ("\n" not in whole or around) else None


def _is_answer(tail: str, words: bool) -> bool:
    """Return whether a tail is an answer by itself; beside numbers, a word such as "left" is none."""
    return _is_bare(tail) and (words or not (tail.isalpha() and tail.islower()))


def _is_bare(text: str) -> bool:
    """Return whether a text is mathematics, an amount with a unit, or one word, and nothing else."""
    if not text or len(text) > MAX_BARE_CHARS or _BARE.match(text) is None:
        return False
    plain = COMMANDS.sub(" ", text)
    words = re.findall(r"[A-Za-z]{3,}" if re.search(r"[\^+=\\]", text) else r"[A-Za-z]{2,}", plain)
    if all(word.lower() in _KNOWN_WORDS for word in words) and re.search(r"\b(?:is|are)\b", plain) is None:
        return True
    if len(words) == 1 and re.fullmatch(r"[A-Za-z]+", text):
        return True
    amount = AMOUNT.match(text)
    return amount is not None and unit(text[amount.end() :]) is not None


def _snippets(text: str) -> list[Snippet]:
    """Return the formulas of a text, and what is bold in it if it is like a formula."""
    found = formulas(text)
    inside = _mask(text, found)
    for match in _BOLD.finditer(text):
        bold = match[1].strip()
        like = re.search(r"\d|\\", bold) and not bold.endswith(":") and not _HEADING.match(bold)
        if like and _is_bare(bold) and not any(inside[match.start() : match.end()]):
            found.append(Snippet(match.start(), match.end(), bold))
    return sorted(found)


def _mask(text: str, snippets: Sequence[Snippet]) -> bytearray:
    """Return for each character whether it is inside a formula."""
    mask = bytearray(len(text))
    for snippet in snippets:
        mask[snippet.start : snippet.end] = b"\1" * (snippet.end - snippet.start)
    return mask


def _stripped(text: str) -> str:
    """Return a text without the marks around it: bold, code, full stop, dollars."""
    return without_dollars(text.strip().strip("*_`").strip().rstrip(".").strip().strip("*_`").strip())
