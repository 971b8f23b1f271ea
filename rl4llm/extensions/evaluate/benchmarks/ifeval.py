"""IFEval: instructions whose fulfilment a program can check, such as "use no comma"; lm-eval grades the answers.

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.base_reward import final_reply
from rl4llm.core.message import after_thinking
from rl4llm.core.registry import needed
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.evaluate.benchmarks import Benchmark, Reader, Row


def rows(read: Reader) -> list[Row]:
    """Return the prompts; the only split is called train. The ground truth is the row as lm-eval reads it."""
    return [
        {
            "prompt_id": str(row["key"]),
            "messages": [{"role": "user", "content": row["prompt"]}],
            "ground_truth": {name: row[name] for name in ("key", "prompt", "instruction_id_list", "kwargs")},
        }
        for row in read("train")
    ]


class _Followed(BaseRewardFunction):
    """1.0 if lm-eval finds that an answer follows every instruction of its prompt."""

    success_at = 1.0
    score_timeout_s = None  # the detection of languages and sentences loads data at its first use

    def __init__(self, name: str, metric: str):
        super().__init__(name)
        self._metric = metric
        grader = needed("lm_eval.tasks.ifeval.utils", "The benchmark ifeval", "ifeval")
        self._grade = grader.process_results

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        return float(self._grade(ground_truth, [after_thinking(final_reply(messages))])[self._metric])


class Strict(_Followed):
    """Grades the answer as it is: lm-eval's `prompt_level_strict_acc`."""

    def __init__(self, name: str = "strict"):
        super().__init__(name, "prompt_level_strict_acc")


class Loose(_Followed):
    """Also accepts the answer without its first or last line, or without asterisks: lm-eval's `prompt_level_loose_acc`."""

    def __init__(self, name: str = "loose"):
        super().__init__(name, "prompt_level_loose_acc")


HERE = "rl4llm.extensions.evaluate.benchmarks.ifeval"
IFEVAL = Benchmark(
    version=1,
    source="google/IFEval",
    rows=rows,
    rewards=[{"name": f"{HERE}:Strict"}, {"name": f"{HERE}:Loose", "weight": 0}],
    max_tokens=1280,
)
