"""GSM8K: grade-school word problems after five worked examples, as in lm-eval's task `gsm8k`.

The examples are the first five rows of the train split, each a user's and an assistant's message.
Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, RewardExample
from rl4llm.core.base_reward import final_reply
from rl4llm.core.errors import DataError
from rl4llm.core.message import after_thinking
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.evaluate.benchmarks import Benchmark, Reader, Row

SHOTS = 5
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


def rows(read: Reader) -> list[Row]:
    """Return the prompts of the test split; raise DataError if the train split has no examples."""
    shots = read("train")[:SHOTS]
    if len(shots) < SHOTS:
        raise DataError(
            f"gsm8k: the train split has {len(shots)} rows, but the prompt needs {SHOTS} examples."
        )
    worked = [
        message for row in shots for message in (_asked(row), {"role": "assistant", "content": row["answer"]})
    ]
    return [{"messages": [*worked, _asked(row)], "ground_truth": row["answer"]} for row in read("test")]


def _asked(row: Row) -> dict[str, str]:
    return {"role": "user", "content": f"Question: {row['question']}\nAnswer:"}


class _Extracted(BaseRewardFunction):
    """1.0 if the number in a reply is written as the one behind ``####`` in the solution, apart from commas and $."""

    success_at = 1.0

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        said = self.number(after_thinking(final_reply(messages)))
        return float(said is not None and _plain(said) == _plain(str(ground_truth).rpartition("#### ")[2]))

    def number(self, reply: str) -> str | None:
        """Return the number that counts; None without one."""
        raise NotImplementedError


class Flexible(_Extracted):
    """The last number in a reply counts: lm-eval's `flexible-extract`."""

    def __init__(self, name: str = "flexible"):
        super().__init__(name)

    def number(self, reply: str) -> str | None:
        return (_NUMBER.findall(reply) or [None])[-1]

    def examples(self) -> Sequence[RewardExample]:
        """Return a right and a wrong answer."""
        return [_example("It is $1,018.", 1.0), _example("It is 1017", 0.0)]


class StrictMatch(_Extracted):
    """The first number after ``####`` counts: lm-eval's `strict-match`."""

    def __init__(self, name: str = "strict"):
        super().__init__(name)

    def number(self, reply: str) -> str | None:
        return (_MARKED.findall(reply) or [None])[0]

    def examples(self) -> Sequence[RewardExample]:
        """Return an answer in the form of the examples, and one in another form."""
        return [_example("#### 1018", 1.0), _example("It is 1018.", 0.0)]


def _plain(number: str) -> str:
    return re.sub(r"[,$]", "", number).removesuffix(".")


def _example(reply: str, score: float) -> RewardExample:
    return RewardExample([ChatMessage("assistant", reply)], "1,000 + 18 = 1,018\n#### 1,018", score)


HERE = "rl4llm.extensions.evaluate.benchmarks.gsm8k"
GSM8K = Benchmark(
    version=1,
    source="openai/gsm8k:main",
    rows=rows,
    rewards=[{"name": f"{HERE}:Flexible"}, {"name": f"{HERE}:StrictMatch", "weight": 0}],
    max_tokens=256,
    stop=("Question:", "</s>", "<|im_end|>"),
)
