r"""What the last sentence of a reply concludes with, where no mark says what the answer is.

In the last sentence that has one of these the first rule counts:

| rule | sentence | answer |
|---|---|---|
| a sentence that is only mathematics, an amount or a word | 5 + 13 = 18 apples | 18 apples |
| behind "is", "are", "=" or ":": mathematics, an amount, a word or a name | So the day is Monday. | Monday |
| what is last in bold | It falls on a **Monday**. | Monday |
| the last formulas | $x = 2$ or $x = 3$ solve it. | x = 2, x = 3 |
| the only number, if it stands alone | She pays 18 dollars. | 18 dollars |

Questions, wishes and sentences with nothing of all this are passed over. A sentence that has several numbers or a "not", and
no rule, ends the search: which number is meant would be a guess.
"""
# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from rl4llm.rewards.marks import AMOUNT, COMMANDS, NUMBERS, Snippet, formulas, joined, last_number
from rl4llm.rewards.quantities import unit

MAX_CHARS = 4000
MAX_SENTENCES = 8
MAX_SENTENCE_CHARS = 1200
MAX_BARE_CHARS = 600
MAX_VERBS = 20

_VERB = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals)\b|:(?!\d)|[=≈])(?:\s+(?:equal to|exactly|about|then|only|a total of))?[\s*_]*"
)
_PASSED_OVER = re.compile(r"I hope|Hope|Let|Please|Feel free|Thank|If you|Good luck|Great", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:never|cannot|whether|wrong|incorrect|un(?:able|sure|clear|certain)|impossible"
    r"|not (?:sure|certain|clear|enough|true)|(?:could|might|may) also)\b|n['’]t\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(  # a pronoun and a verb: what is announced is no name
    r"(?:(?:so|thus|hence|then|therefore),? )?(?:she|he|they|there|we|it|you|this|that|i) [a-z]",
    re.IGNORECASE,
)
_STATED = re.compile(
    r"((?:so|thus|hence|therefore|the|its?)\b)?.{0,200}?\b(?:is|are|equals) (?:equal to |exactly )?(.{1,200})",
    re.IGNORECASE,
)
_REASON = re.compile(r"[,;]? \b(?:because|since)\b")
_ASIDE = re.compile(rf"{_REASON.pattern}|[,;] (?!and\b|or\b)(?=[a-z]{{2,}} )")
_EMPHASIS = re.compile(r"(?<![\w*_`\\)])(\*{1,3}|__?|`)(?=[^\s*_`])([^*`\n$]{0,199}[^\s*_`$])\1(?![\w*_`(])")
_BOLD = re.compile(r"(?<![\w*)])\*\*(?=[^\s*])([^*\n]{1,200}?)(?<=[^\s:*])\*\*(?![\w*(])")
_NAME = re.compile(r"[A-Z\d][^\W_]*[\w.,'\u2019&-]*(?: (?:(?:of|the|and|de) )?[A-Z\d][\w.,'\u2019&-]*){0,5}")
_OPENER = "(?:The|This|That|It|I|He|She|They|We|So|Thus|Hence|Then|There(?:fore)?|Because|Since|As|If|In|Let|Thanks?|Add)\\b"
_LONG_WORD = r"(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)(?<!\b(?!Yes)[A-Z][a-z][a-z]\.)"  # no initial, St. or No.
_SENTENCE_END = re.compile(
    rf"(?:(?<=[!?])|(?<=\.)(?:{_LONG_WORD}|(?=\W{{0,4}}\s{_OPENER})))(?:\*\*|[\"')]|\$\$?|\\[\])])?\s+"
    r"|(?<=[。！？।])\s*(?=\S)|\n+"
)
_BARE = re.compile(r"[-+]?[\w\\({\[|.$<>∀-⏿±~¬€£]")
_KNOWN_WORDS = frozenset(
    ("and", "or", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "mod", "pi", "max", "min", "infty", "oo")
)
_UNKNOWN = re.compile(  # a letter beside a digit or an operator, or what only formulas have
    r"\d ?[A-Za-z](?![A-Za-z])|(?<![A-Za-z])[A-Za-z] ?[-+*/(]|[-+*/] ?[A-Za-z](?![A-Za-z])|[\\^_]"
)
_CHAIN = re.compile(r"[^=]*[^=<>!:]=(?P<sides>[^=,;]*(?:=[^=,;]*)*)=(?P<last>[^=]+)", re.DOTALL)


def concluded(text: str) -> str | None:
    r"""Return what the last sentences conclude with, by the table of this module.

    >>> concluded("So it costs 3 dollars."), concluded("Hence $x = 2$ or $x = 3$."), concluded("x^3 grows")
    ('3 dollars', 'x = 2, x = 3', None)
    """
    text = _EMPHASIS.sub(r"**\2**", text[-MAX_CHARS:])
    if whole := only_answer(text):
        return whole
    for part, own_line in _sentences(text)[: -MAX_SENTENCES - 1 : -1]:
        part = part.strip()[-MAX_SENTENCE_CHARS:]
        snippets = formulas(part)
        if part.endswith("?") or (_PASSED_OVER.match(part) and not snippets):
            continue
        answer = _of_sentence(_REASON.split(part, maxsplit=1)[0], own_line)
        if answer or snippets or re.search(r"\d|\bnot\b", part) or _DENIED.search(part):
            return answer
    return None


def stated(text: str) -> str | None:
    """Return what a sentence or paragraph inside a mark states; None for a name, an amount or mathematics."""
    text = text.strip()
    if "\n" in text or _SENTENCE.match(text):
        return concluded(text)
    if (sentence := _STATED.fullmatch(text)) is None:
        return None
    answer = _of_tail(sentence[2])
    return answer if answer and (sentence[1] or re.search(r"[\d\\]", answer)) else None


def bare(text: str) -> str:
    """Return a text without the marks around it and around its formulas."""
    text = _EMPHASIS.sub(r"\2", text.strip())
    pieces = zip(_around(text), [snippet.text for snippet in formulas(text)] + [""], strict=True)
    return _result(_stripped("".join(chain.from_iterable(pieces))))


def only_mathematics(text: str) -> str | None:
    """Return the formulas that a text consists of; None if it has none or anything else."""
    return only_answer(text) if formulas(text) else None


def only_answer(text: str) -> str | None:
    """Return a text that is mathematics, an amount or one word, without its marks; None if it is anything else."""
    if len(text) > 2 * MAX_BARE_CHARS:
        return None
    around = _around(text)
    words = {word.lower() for word in re.findall("[A-Za-z]{2,}", " ".join(around))}
    only_unit = len(around) == 2 and not around[0].strip() and unit(_stripped(around[1]))
    if len(around) > 1 and not words <= {"and", "or"} and not only_unit:
        return None
    whole = bare(text)
    return whole if _is_bare(whole) and ("\n" not in whole or len(around) > 1) else None


def _around(text: str) -> list[str]:
    """Return what stands before, between and after the formulas of a text."""
    snippets = formulas(text)
    starts, ends = [snippet.start for snippet in snippets], [snippet.end for snippet in snippets]
    return [text[start:end] for start, end in zip([0, *ends], [*starts, len(text)], strict=True)]


def first_sentence(line: str) -> str:
    """Return the first sentence of a line, up to a reason or an aside."""
    sentence = next((part for part, _ in _sentences(line)), line)
    inside = _mask(sentence, formulas(sentence))
    aside = next(
        (place.start() for place in _ASIDE.finditer(sentence) if not inside[place.start()]), len(sentence)
    )
    return sentence[:aside]


def _sentences(text: str) -> list[tuple[str, bool]]:
    """Return the sentences, and whether each begins a line; a mark inside a formula ends none."""
    inside = _mask(text, formulas(text))
    ends = _SENTENCE_END.finditer(text)
    breaks = [end.end() for end in ends if not (inside[end.start()] and inside[end.end() - 1])]
    places = zip([0, *breaks], [*breaks, len(text)], strict=True)
    parts = [(text[start:end], text[start - 1 : start] in ("", "\n")) for start, end in places]
    return [(part, own_line) for part, own_line in parts if part.strip(" *_`#\n\t")]


def _of_sentence(text: str, own_line: bool) -> str | None:
    """Return the answer of a sentence by the first rule that applies, see the table of this module."""
    snippets = formulas(text)
    whole = only_answer(text)
    if whole and (not whole.isalpha() or snippets or own_line):
        return whole
    if _DENIED.search(text):
        return None
    ends = [*_verbs(text, snippets)][-MAX_VERBS:]
    words = not snippets and not re.search(r"\d", text)  # so that a word can be the answer
    for end in ends:
        answer = _of_tail(text[end:])
        if answer and (words or not (answer.isalpha() and answer.islower())):
            return answer
    if re.search(r"\b(?:not|nor)\b", text):
        return None
    if bold := _BOLD.findall(text):
        return bare(bold[-1])
    if snippets:
        return _result(joined(text, snippets)[-1])
    result = text[max((end for end in ends if text[:end].rstrip(" *_")[-1:] in ("=", "≈")), default=0) :]
    return last_number(result) if len(NUMBERS.findall(result)) == 1 else None


def _of_tail(text: str) -> str | None:
    """Return what follows a verb if it is an answer alone or a name."""
    return only_answer(text) or (name if _NAME.fullmatch(name := bare(text)) else None)


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
    side = re.split(r"[=,;:]|\b(?:is|are|so|and)\b", before)[-1]
    return _UNKNOWN.search(re.sub(r"(?<=\d) ?[x×] ?(?=[$\d])", "*", side)) is not None


def _result(text: str) -> str:
    """Return what arithmetic or a chain of equations ends in, 18 for "9 * 2 = 18" or "V = ab = 18"; other text unchanged."""
    side, _, right = text.rpartition("=")
    if (equal := _CHAIN.fullmatch(text)) and not re.search(r"\b(?:and|or)\b|\{[^{}]*=", text):
        name = equal["sides"].rpartition("=")[2].strip()
        return f"{name} = {right.strip()}" if re.fullmatch("-?[A-Za-z]", name) else right.strip()
    arithmetic = re.match(r"[-+(\[$€£.]{0,3}\d", side) and not is_equation(side)
    return right.strip() if arithmetic or re.search(r"\\[cl]?dots|\.\.\.|…|⋯", side) else text


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


def _mask(text: str, snippets: Sequence[Snippet]) -> bytearray:
    """Return for each character whether it is inside a formula."""
    mask = bytearray(len(text))
    for snippet in snippets:
        mask[snippet.start : snippet.end] = b"\1" * (snippet.end - snippet.start)
    return mask


def _stripped(text: str) -> str:
    """Return a text without the marks around it: bold, code, the end of a sentence, quotes, dollars; 18! is a factorial."""
    text = text.strip(" \t\n*_`\"'‘’“”「」").rstrip(".,;:。！，। ")
    return re.sub(r"(?:(?<=[a-z]{2})|(?<=[A-Z]))!+$", "", text).rstrip('*_`"” ')
