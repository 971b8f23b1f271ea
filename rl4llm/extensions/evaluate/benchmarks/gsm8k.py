"""GSM8K: grade-school word problems after five worked examples, as in lm-eval's task `gsm8k`.

The examples are the first five rows of the train split, each a user's and an assistant's message.
Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl4llm.core.base_env import BaseRewardFunction, RewardExample
from rl4llm.core.base_reward import final_reply
from rl4llm.core.errors import DataError
from rl4llm.core.message import after_thinking
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.evaluate.benchmarks import Benchmark, Reader, Row

SHOTS = 5


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
    numbers: ClassVar[re.Pattern[str]]
    place: ClassVar[int]  # of the number that counts among those
    known: ClassVar[Mapping[str, float]]  # replies with the answer 1,018 or another, and their scores

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        numbers = self.numbers.findall(after_thinking(final_reply(messages)))
        truth = str(ground_truth).rpartition("#### ")[2]
        return float(bool(numbers) and _plain(numbers[self.place]) == _plain(truth))

    def examples(self) -> Sequence[RewardExample]:
        """Return a right and a wrong answer."""
        truth = "1,000 + 18 = 1,018\n#### 1,018"
        return [
            RewardExample([ChatMessage("assistant", reply)], truth, score)
            for reply, score in self.known.items()
        ]


class Flexible(_Extracted):
    """The last number in a reply counts: lm-eval's `flexible-extract`."""

    numbers, place = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+"), -1
    known: ClassVar = {"It is $1,018.": 1.0, "It is 1017": 0.0}

    def __init__(self, name: str = "flexible"):
        super().__init__(name)


class StrictMatch(_Extracted):
    """The first number after ``####`` counts: lm-eval's `strict-match`."""

    numbers, place = re.compile(r"#### (-?[0-9.,]+)"), 0
    known: ClassVar = {"#### 1018": 1.0, "It is 1018.": 0.0}

    def __init__(self, name: str = "strict"):
        super().__init__(name)


def _plain(number: str) -> str:
    return re.sub(r"[,$]", "", number).removesuffix(".")


HERE = "rl4llm.extensions.evaluate.benchmarks.gsm8k"
GSM8K = Benchmark(
    version=1,
    source="openai/gsm8k:main",
    rows=rows,
    rewards=[{"name": f"{HERE}:Flexible"}, {"name": f"{HERE}:StrictMatch", "weight": 0}],
    max_tokens=256,
    stop=("Question:", "</s>", "<|im_end|>"),
)
