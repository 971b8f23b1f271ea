r"""Find the final answer in a reply.

It only searches bounded pieces, because it runs in the trainer's process on text that may be hostile. These marks announce
an answer, and the last one of the first kind in a reply counts:

| kind | marks |
|---|---|
| tag | `<answer>`, `<final>`, `<final_answer>`, `<solution>`, `[ANSWER]`, `<\|begin_of_box\|>`, each with its end |
| boxed | `\boxed{}`, `\fbox{}`, `\framebox{}` |
| hash | `####` |
| answer | "answer" in many languages with a colon or a verb, a key of JSON, "option C is correct" |
"""
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from rl4llm.core.message import after_thinking
from rl4llm.rewards.conclusion import bare, concluded, first_sentence, is_equation, stated
from rl4llm.rewards.marks import boxes, formulas, joined, last_number

Extraction = Literal["auto", "tag", "boxed", "hash", "answer", "last_number"]

_SEARCHED_CHARS = 20_000
_LINE_CHARS, _SIDE_CHARS = 1000, 200
_HEADING = re.compile(
    r"\W*(?:(?:step|case|part|question|problem|method|approach)\b.*|\d+[.)] .*[A-Za-z]{2}.*"
    r"|(?:(?:the|final) )*(?:answer|result|solution|explanation|conclusion|summary|verification|check)\W*)",
    re.IGNORECASE,
)
_MINUS = re.compile(r"\b(?:minus|negative) (?=[$\d\\])", re.IGNORECASE)
_TAG = re.compile(
    r"<(/?)(?:answer|final|final_answer|solution)>|\[(/?)(?:final )?answer\]|<\|(?:begin|(end))_of_box\|>",
    re.IGNORECASE,
)
_MARKUP = re.compile(  # HTML, what ends a turn, fences of code, quotations, and decorations
    r"(?P<line></?(?:p|div|br|li|ul|ol|h[1-6]|center)(?: \w+=[^<>\n]{0,99})? ?/?>|<\|\w{1,30}\|>(?:system|user|assistant)?)"
    r"|</?(?:b|i|u|em|strong|mark|code|math|(?:span|font)(?: \w+=[^<>\n]{0,99})?)>|</s>|<(?:eos|end_of_turn)>"
    r"|^[ \t]*(?:```\w*[ \t]*$|(?:> ?)+(?=\S))"
    r"|\$?\\(?:blacksquare|qed|Box|square)\$?\s*$|\bQ\.?E\.?D\b\.?\s*$"
    "|[✅✓✔☑✨🎉■□▢∎\ufe0f]",
    re.MULTILINE,
)
_EMPTY = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,9}\{\s{0,99}\}|<answer>\s{0,99}</answer>")

_NOUNS = (  # an answer
    "answers?|ans|(?:correct|right|best|final) (?:option|choice)|antwort|respuesta|réponse|risposta|resposta|antwoord|svar"
    "|jibu|jawaban|cevap|yanıt|odpowiedź|odpověď|răspuns|válasz|vastaus|đáp án|câu trả lời|ответ|відповідь|απάντηση"
    "|答案|答え|解答|回答|故选|故選|정답|답|উত্তর|उत्तर|సమాధానం|คำตอบ|(?:ال)?جواب|(?:ال)?إجابة|پاسخ|תשובה"
)
_VERBS = (  # between the noun and the answer itself
    "is|are|was|were|equals|(?:would|must|should|will) be|lautet|ist|es|son|est|sont|è|sono|é|são|är|er|jest|ni|adalah|là"
    "|este|это|равен"
)
_LETTER = r"[\s*_]{{0,4}}\(?(?P<{}>(?-i:[A-J]))\)?[\s*_]{{0,4}}"
_ANNOUNCED = re.compile(
    rf"(?<![A-Za-z])(?:{_NOUNS})(?: (?:to|for) [^.:=\n]{{1,60}})?[\s*_\"'`】\])」]{{0,9}}"
    rf"(?:(?:{_VERBS})(?!\w)|[:：=是为為选選はが은는हैคือ]{{1,3}}|(?<=[】选選])|(?= ?can ?not be))[*_]{{0,3}}[\s:：]{{0,9}}"
    rf"|\b(?:option|choice|answer)?{_LETTER.format('right')}(?:is|must be|would be) (?:the )?(?:only |most |best )?"
    r"(?:correct|right|best|answer)\b"
    rf"|\b(?:choose|pick|select|go with) (?:the )?(?:option|choice|answer)?{_LETTER.format('chosen')}(?!\w)",
    re.IGNORECASE,
)


def final_answer(text: str, extraction: Extraction = "auto", max_chars: int = 400) -> str | None:
    """Return the model's final answer, None if it has none.

    "tag", "boxed", "hash" and "answer" are the marks of this module's table, "last_number" is the last number that stands
    alone, or that arithmetic or a name equals. "auto" takes the first of the four kinds of marks that a reply has, else
    what its last sentences conclude with. What a mark announces is the answer as a whole; a number inside other notation
    is never taken out of it. Thoughts hold no answer, and a last tag or box that is unfinished neither. An answer longer
    than `max_chars` comes cut, but still longer than that.
    """
    text = _clean(after_thinking(text)[-_SEARCHED_CHARS:])
    extractors = _AUTO if extraction == "auto" else (_EXTRACTORS[extraction],)
    answers = (extractor(text, max_chars) for extractor in extractors)
    return next((answer for answer in answers if answer is not None), None) or None


def boxed_answers(text: str, max_chars: int = 400) -> list[str]:
    r"""Return the boxed answers near the end of `text`, in order. Boxes that only "and", "or", commas or names part are one.

    >>> boxed_answers("\\boxed{5}, so $x = \\boxed{1}$ and $x = \\boxed{-2}$"), boxed_answers("\\boxed{5} or \\boxed{6")
    (['5', '1, -2'], [])
    """
    text = _EMPTY.split(text[-_SEARCHED_CHARS:])[-1]
    snippets = boxes(text, max_chars)
    return joined(text, snippets) if snippets and snippets[-1].text else []


def _clean(text: str) -> str:
    """Return a reply with one kind of tags, without markup and up to the last mark that announces nothing."""
    opening = {"<": "<answer>", "[": "<answer>" if "[/" in text else "answer: "}
    text = _TAG.sub(lambda tag: "</answer>" if any(tag.groups()) else opening[tag[0][0]], text)
    text = _MARKUP.sub(lambda mark: "\n" if mark["line"] else "", text)
    return _EMPTY.split(_MINUS.sub("-", text))[-1]


def _tag(text: str, max_chars: int) -> str | None:
    _, opened, rest = text.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return _inside(inside, max_chars) if opened and closed else "" if opened else None


def _boxed(text: str, max_chars: int) -> str | None:
    answers = boxed_answers(text, max_chars)
    return answers[-1] if answers else "" if boxes(text, max_chars) else None


def _hash(text: str, max_chars: int) -> str | None:
    """Return what the last mark announces, unless that is the heading of what stands below it."""
    _, mark, rest = text.rpartition("####")
    line, _, below = rest.strip().partition("\n")
    heading = below.strip() and _HEADING.fullmatch(line)
    return None if heading or not mark else _first_line(rest.lstrip(" \t*:"), max_chars)


def _answer(text: str, max_chars: int) -> str | None:
    """Return what the last "answer" announces; the bare word, as in "to answer this", announces nothing."""
    announcements = [*_ANNOUNCED.finditer(text)]
    if not announcements:
        return None
    match = announcements[-1]
    rest = text[match.end() :]
    if re.search(r'"\s*:\s*$', match[0]):
        return _json_value(rest.lstrip())
    return match["right"] or match["chosen"] or _first_line(rest, max_chars)


def _json_value(text: str) -> str | None:
    """Return the value of a key, as JSON or, if its backslashes were not doubled, unchanged."""
    literal = re.match(r'"((?:[^"\\\n]|\\.){0,2000})"', text)
    if literal and re.search(r"(?<!\\)(?:\\\\){0,9}\\[A-Za-z]", literal[1]):
        return literal[1]
    try:
        value, _ = json.JSONDecoder().raw_decode(text[:_LINE_CHARS])
    except (ValueError, RecursionError):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _first_line(text: str, max_chars: int) -> str | None:
    """Return what the first line announces; None when it is empty."""
    text = text[: max(_LINE_CHARS, max_chars + 1)].strip()
    line = text.partition("\n")[0]
    if line.strip() in ("$", "$$", "\\(", "\\["):  # a formula over several lines
        return next((formula.text for formula in formulas(text)), None)
    return _inside(first_sentence(line), max_chars)


def _inside(text: str, max_chars: int) -> str | None:
    """Return the box in a text, what a text in it announces, what it states if it is a sentence, else the whole."""
    whole = text[: max(_LINE_CHARS, max_chars + 1)]
    return _boxed(text, max_chars) or _answer(text, max_chars) or stated(text) or bare(whole) or None


def _last_number(text: str, max_chars: int) -> str | None:
    """Return the last number that stands alone, or equals arithmetic or a name: 19 in "12 + 7 = 19", not 18 in "2x = 18"."""
    text = text[-_LINE_CHARS:]
    side, equals, right = text.rpartition("=")
    result = equals and side[-1:] not in tuple("<>!=:") and not is_equation(side[-_SIDE_CHARS:])
    return (last_number(right) if result else None) or last_number(text)


_EXTRACTORS: dict[str, Callable[[str, int], str | None]] = {
    "tag": _tag,
    "boxed": _boxed,
    "hash": _hash,
    "answer": _answer,
    "last_number": _last_number,
}
_AUTO = (_tag, _boxed, _hash, _answer, lambda text, max_chars: concluded(text))
