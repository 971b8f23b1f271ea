"""The math reward, which compares the final answer with the ground truth."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rl4llm.core.base_env import RewardExample, SampleState
from rl4llm.core.base_reward import BaseBatchReward, final_reply, number_text, policy_messages
from rl4llm.core.errors import DataError
from rl4llm.core.message import after_thinking
from rl4llm.core.schema import Count, Positive, checked
from rl4llm.core.types import ChatMessage
from rl4llm.rewards.compare import for_algebra, same
from rl4llm.rewards.extract import Extraction, boxed_answers, final_answer
from rl4llm.rewards.pool import Fault, RewardFailure, Unavailable, VerifierPool
from rl4llm.rewards.prefilter import MAX_CHARS, refuse

_VERIFIER = f"{Path(__file__).with_name('_verify_math.py')}:same_answer"
_WARM_UP = [
    ["\\frac{1}{2}", "0.5x"],
    ["(1, 2]", "\\{1, \\sqrt{2}\\}"],
    ["\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "x = 3"],
    ["x(x+2)", "x^2 + 2x"],
    ["\\frac{x+1}{x-1}", "\\log_2 8"],
    ["\\frac{\\sqrt{3}}{2}", "\\sin(\\frac{\\pi}{3})"],
    ["y = 2x", "e^{x}"],
]
SeveralBoxed = Literal["last", "first", "all", "none"]
MAX_BOXES = 8
Grade = tuple[float, str | None]
Question = tuple[str, str]
_TEMPLATES = {
    "tag": "<answer>{}</answer>",
    "boxed": "\\boxed{{{}}}",
    "hash": "#### {}",
    "answer": "The answer is {}.",
    "last_number": "It is {}.",
}
_FORMS = ("\\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>")
MAX_GOLD_CHARS = 4000
MAX_WORDS = 8
_COMMANDS = re.compile(r"\\[a-z]+\s?\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_ANNOUNCED = re.compile(r"^\W*(?:(?:the|final|correct) )*answer(?: is\b|:)[\s:]*", re.IGNORECASE)
_NUMBERED = re.compile(r"(?:^|[;,.\s])\(?1[).]\s.*[;,.\s]\(?2[).]\s", re.DOTALL)
_INSIDE = r"((?:[^{}]|\{[^{}]*\})+)"
_MARKUP = re.compile(
    rf"\\(?:underline|framebox|fbox|(?:text)?color\s*\{{\w+\}})\s*\{{{_INSIDE}\}}|\{{\\(?:bf|it|rm|sf|tt)\b{_INSIDE}\}}"
    r"|\*\*([^*]+)\*\*|`([^`]+)`|\"([^\"]+)\"|'([^']+)'|(?:&?=|\\therefore\b)(.+)|(.+)(?:[;,]|\\\\|(?<=[\d})])\.)",
    re.DOTALL,
)
"""What may stand around a ground truth without a meaning: emphasis, quotes, the sign before a result, the end of a line."""
_REMARK = re.compile(r"(.*[\d}$]) ?\(((?!mod\b|or\b)[A-Za-z]{2}[A-Za-z .]*)\)", re.DOTALL)
_TEXT = re.compile(r"\\text\w*\s?\{([^{}]*)\}")
_FORMULA = re.compile(r"(?<!\\)\$(.*?)(?<!\\)\$", re.DOTALL)
_LIST_OF_TEXTS = re.compile(r"\[\s*(?:'[^']*'|\"[^\"]*\")(?:\s*,\s*(?:'[^']*'|\"[^\"]*\"))*\s*\]")
_TAGGED = re.compile(
    r"<(\w*answer|final|solution)>(.*?)</\1>|\[(answer)\](.*?)\[/answer\]|<\|(begin)_of_box\|>(.*?)<\|end_of_box\|>",
    re.DOTALL | re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"(?:None|NA|\[\]|[-\u2013\u2014_?.\u2026]+|(?i:nan|null|#?n/a|<na>|tbd|todo|(?:see )?(?:the )?proof(?: omitted)?|"
    r"not ?found|not (?:available|applicable|given|provided)|no (?:answer|solution) (?:given|provided)|"
    r"see (?:the )?(?:answer|solution)))\W*"
)
_ACCEPTED = (
    f"Accepted: an answer of 1 to {MAX_GOLD_CHARS} characters, a number, a solution with a \\boxed{{answer}} or a line "
    "'#### answer', or a list of accepted answers. Next: set data.answer_column to the column of the answer, or "
    "data.answer_pattern to what finds it."
)


class MathReward(BaseBatchReward):
    """1.0 when the final answer equals the ground truth, else 0.0.

    Numbers and words are compared in place; everything else goes to math-verify in worker processes with a time limit. A
    text that hangs or crashes a worker scores 0.0; when no worker can be started the sample fails instead. Every 0.0 that
    is not a plain wrong answer leaves its reason in ``sample.extras["reward_notes"][name]``: no_answer, several_answers,
    refused, timeout or crash.

    Args:
        name: under which the score is logged.
        extract: where the answer is looked for, see `rl4llm.rewards.extract.final_answer`.
        several_boxed: what counts where a reply has several different boxed answers: the "last", the "first", none of them
            ("none"), or each, so that all must be right ("all").
        workers: verifier processes.
        timeout_s: time limit of one comparison; on a busy machine it may be longer, see `VerifierPool`.
        memory_bytes: address space of one worker.

    The ground truth is a string or number, or a list of accepted ones; solutions with a ``#### 18`` line or a
    ``\\boxed{18}`` are reduced to that.
    """

    success_at = 1.0

    @checked("rewards.{name}")
    def __init__(
        self,
        name: str = "math",
        *,
        extract: Extraction = "auto",
        several_boxed: SeveralBoxed = "last",
        workers: Count = 2,
        timeout_s: Positive = 1.5,
        memory_bytes: Count = 1024**3,
    ):
        super().__init__(name)
        self.extract = extract
        self.several_boxed = several_boxed
        self.pool = VerifierPool(
            _VERIFIER, workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes, warm_up=_WARM_UP
        )

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Return one score per sample, or a RewardFailure if no worker could be started."""
        replies = [(final_reply(policy_messages(sample)), sample.ground_truth) for sample in samples]
        grades = self._grade_all(replies)
        for sample, (_, note) in zip(samples, grades, strict=True):
            if note:
                sample.extras.setdefault("reward_notes", {})[self.name] = note
        return [score for score, _ in grades]

    def check_row(self, ground_truth: Any, columns: Mapping[str, Any]) -> None:
        """Raise DataError for a ground truth that is no answer, or that scores 0 against itself in every form."""
        golds = accepted_answers(ground_truth)
        forms = _FORMS if self.extract == "auto" else [_TEMPLATES[self.extract]]
        replies = [form.format(gold) for gold in golds for form in forms]
        answers = (answer for reply in replies for answer in self.answers_in(reply)[0])
        if all(self._settle_one(answer, golds)[0] == 0.0 for answer in answers):
            raise DataError(
                f"ground_truth={ground_truth!r:.200} is an answer that no reply can give. Correct it."
            )

    def answers_in(self, reply: str) -> tuple[list[str], str | None]:
        """Return the answers of a reply that count; if there are none, also the reason, as in the notes."""
        answer = final_answer(reply, self.extract, MAX_CHARS)
        if answer is None:
            return [], "no_answer"
        boxes = self._different_boxes(reply)
        answers = boxes if answer in boxes[-1:] else [answer]  # a tag may hold another answer
        chosen = {
            "last": [answer],
            "first": answers[:1],
            "all": answers if len(answers) <= MAX_BOXES else [],
            "none": answers if len(answers) == 1 else [],
        }[self.several_boxed]
        return chosen, None if chosen else f"several_answers: {len(answers)} different boxed answers"

    def examples(self) -> Sequence[RewardExample]:
        """Return numbers and, if expressions can be extracted, a pair that only a worker can compare."""
        pairs = [("18", "18", 1.0), ("18", "17", 0.0)]
        if self.extract != "last_number":
            pairs += [("2\\sqrt{2}", "\\sqrt{8}", 1.0), ("2\\sqrt{2}", "\\sqrt{7}", 0.0)]
        template = _TEMPLATES.get(self.extract, _TEMPLATES["boxed"])
        return [
            RewardExample([ChatMessage("assistant", template.format(answer))], gold, score)
            for gold, answer, score in pairs
        ]

    def close(self) -> None:
        self.pool.close()

    def _grade_all(
        self, replies: Sequence[tuple[str, Any]]
    ) -> list[tuple[float | RewardFailure, str | None]]:
        """Score and note for each (reply, ground truth); equal questions are asked once."""
        settled = [self._settle(reply, ground_truth) for reply, ground_truth in replies]
        unsettled = [item for items in settled for item in items if isinstance(item, list)]
        questions = list(dict.fromkeys(question for some in unsettled for question in some))
        verdicts = dict(zip(questions, self.pool.map(questions), strict=True))
        return [_worst([_verdict(verdicts, item) for item in items]) for items in settled]

    def _settle(self, reply: str, ground_truth: Any) -> list[Grade | list[Question]]:
        """For each answer that counts, a grade where none of the workers is needed, else the questions for them."""
        golds = accepted_answers(ground_truth)
        answers, reason = self.answers_in(reply)
        return [self._settle_one(item, golds) for item in answers] or [(0.0, reason)]

    def _settle_one(self, answer: str, golds: list[str]) -> Grade | list[Question]:
        if len(answer) > MAX_CHARS:
            return 0.0, f"refused: more than {MAX_CHARS} characters"
        compared = {gold: same(gold, answer) for gold in golds}
        if any(compared.values()):
            return 1.0, None
        undecided = [for_algebra(gold) for gold, equal in compared.items() if equal is None]
        if not undecided:
            return 0.0, None
        answer = for_algebra(answer)
        refused = refuse(answer, " ".join(undecided))
        return (0.0, f"refused: {refused}") if refused else [(gold, answer) for gold in undecided]

    def _different_boxes(self, reply: str) -> list[str]:
        """Return the boxed answers, without those that equal the one before them."""
        if self.extract not in ("auto", "boxed"):
            return []
        boxes = boxed_answers(after_thinking(reply), MAX_CHARS)
        repeats = (len(box) <= MAX_CHARS and same(previous, box) is True for previous, box in pairwise(boxes))
        return boxes[:1] + [box for box, again in zip(boxes[1:], repeats, strict=True) if not again]


def _verdict(
    verdicts: Mapping[Question, Any], item: Grade | list[Question]
) -> tuple[float | RewardFailure, str | None]:
    if not isinstance(item, list):
        return item
    answers = [verdicts[question] for question in item]
    if True in answers:
        return 1.0, None
    if missing := [answer for answer in answers if isinstance(answer, Unavailable)]:
        return RewardFailure(missing[0].reason), None
    faults = [answer for answer in answers if isinstance(answer, Fault)]
    return 0.0, f"{type(faults[0]).__name__.lower()}: {faults[0].reason}" if faults else None


def _worst(
    grades: list[tuple[float | RewardFailure, str | None]],
) -> tuple[float | RewardFailure, str | None]:
    """Return the worst grade, for a reply in which all of several answers must be right; one that is wrong decides."""
    order = {0.0: 0, 1.0: 2}
    return min(grades, key=lambda grade: 1 if isinstance(grade[0], RewardFailure) else order[grade[0]])


def accepted_answers(ground_truth: Any) -> list[str]:
    r"""Return each answer that a ground truth accepts; raises DataError for one that is no answer.

    >>> accepted_answers("9 * 2 = 18\n#### 18"), accepted_answers("$x = \\boxed{1}$ or \\boxed{2}"), accepted_answers([0.5])
    (['18'], ['1, 2'], ['0.5'])
    """
    if isinstance(ground_truth, str) and _LIST_OF_TEXTS.fullmatch(ground_truth.strip()):
        ground_truth = ast.literal_eval(ground_truth.strip())
    several = isinstance(ground_truth, list | tuple) and len(ground_truth) > 0
    return [_answer(item) for item in (ground_truth if several else [ground_truth])]


def _answer(item: Any) -> str:
    text = number_text(item)
    text = _without_solution(text) if isinstance(text, str) else ""
    kinds = {
        "not an answer": not 1 <= len(text) <= MAX_GOLD_CHARS,
        "not an answer but a missing value": _PLACEHOLDER.fullmatch(_TEXT.sub(r"\1", text).strip()),
        "several numbered parts, which no single answer equals": _NUMBERED.search(text),
        "a sentence": len(_words(text)) >= MAX_WORDS,
    }
    if reasons := [kind for kind, holds in kinds.items() if holds]:
        raise DataError(f"ground_truth={item!r:.200} is {reasons[0]}. {_ACCEPTED}")
    return text


def _without_solution(text: str) -> str:
    text = after_thinking(text).strip()
    _, marked, rest = text.rpartition("####")
    if marked:
        return _bare(rest.strip().partition("\n")[0])
    if tagged := [match[match.lastindex or 0] for match in _TAGGED.finditer(text)]:
        return _without_solution(tagged[-1])
    boxes = boxed_answers(text, MAX_GOLD_CHARS)
    if boxes:
        return _bare(boxes[-1])
    announced = final_answer(text, "answer", MAX_GOLD_CHARS) if len(_words(text)) >= MAX_WORDS else None
    return _bare(announced or _ANNOUNCED.sub("", text, count=1))


def _bare(text: str) -> str:
    """Return an answer without markup around it; a remark in brackets becomes the unit of its number."""
    text = _FORMULA.sub(r"\1", text).strip()
    while match := _MARKUP.fullmatch(text):
        text = str(match[match.lastindex or 0]).strip()
    return _REMARK.sub(r"\1 \2", text) if _REMARK.fullmatch(text) else text


def _words(text: str) -> list[str]:
    return _WORD.findall(_COMMANDS.sub(" ", text))
