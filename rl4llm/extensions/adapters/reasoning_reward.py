"""The reward of the library reasoning-gym: each task's own verifier."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl4llm.core.base_env import SampleState
from rl4llm.core.base_reward import BaseBatchReward, final_reply, policy_messages
from rl4llm.core.errors import DataError
from rl4llm.core.registry import from_extension
from rl4llm.core.schema import checked
from rl4llm.rewards.extract import final_answer
from rl4llm.rewards.pool import Crash, Fault, RewardFailure, Timeout, Unavailable, VerifierPool

VERIFIER = Path(__file__).with_name("_reasoning_gym.py")
COLUMN, OF_PROBLEM = "reasoning", ("task", "options", "number", "question")
EVALUATES = "evaluates"  # what a worker returns for an answer that only the sandbox may evaluate
START_S = 120.0  # for the import of reasoning-gym in a sandbox
PATIENCE = 10  # as in the verifier's file
FAULTS = {"timeout": Timeout, "crash": Crash}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningReward(BaseBatchReward):
    """Scores the answer in the last reply with the verifier of the prompt's task.

    Verifiers run in worker processes with a time limit, and those that evaluate an answer in the sandbox. If 0.0 is not
    the verifier's verdict, its reason is in ``sample.extras["reward_notes"][name]``: no_answer, refused (too long),
    timeout or crash of the verifier. A sample fails if no worker or sandbox can be started.

    Args:
        name: name of the score in the logs.
        extract: "answer" is the text in the last ``<answer>...</answer>``, "last_number" the last number. "any" is the
            first of these that the reply has: that text, what `rl4llm.rewards.extract.final_answer` finds, all of it.
        workers: number of verifier processes.
        timeout_s: time limit of one answer, in seconds.
        memory_bytes: address space of one worker, in bytes.
        max_answer_chars: longer answers score 0.0 without being verified.
        sandbox: where answers are evaluated; by default the strongest level that this machine supports.
    """

    success_at = 1.0

    @checked("rewards.{name}")
    def __init__(
        self,
        name: str = "reasoning_gym",
        *,
        extract: Literal["answer", "last_number", "any"] = "answer",
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_bytes: int = 2 * 1024**3,
        max_answer_chars: int = 4000,
        sandbox: Any = None,
    ):
        super().__init__(name)
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        places = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        self.sandbox = (sandbox or from_extension("sandbox", f"rewards.{name}")()).importing(places)
        self.extract = extract
        self.max_answer_chars = max_answer_chars
        self.pool = VerifierPool(
            f"{VERIFIER}:score", workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes
        )

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Return one score per sample, or a RewardFailure for a sample without a verdict."""
        answers = [self._answer(sample) for sample in samples]
        scores: list[float | RewardFailure] = [0.0] * len(samples)
        notes = [note for _, note in answers]
        numbers = [number for number, (answer, _) in enumerate(answers) if answer is not None]
        tasks = [
            [*(samples[number].columns[COLUMN][name] for name in OF_PROBLEM), answers[number][0]]
            for number in numbers
        ]
        for number, verdict in zip(numbers, self._verdicts(tasks), strict=True):
            scores[number], notes[number] = _grade(verdict)
        for sample, note in zip(samples, notes, strict=True):
            if note:
                sample.extras.setdefault("reward_notes", {})[self.name] = note
        return scores

    def check_row(self, ground_truth: Any, columns: Mapping[str, Any]) -> None:
        """Raise DataError for a row without a problem, SandboxError if no sandbox can be used to evaluate answers."""
        problem = columns.get(COLUMN)
        if not isinstance(problem, Mapping) or not problem.keys() >= {*OF_PROBLEM}:
            raise DataError(f"the column {COLUMN!r} must be an object with {', '.join(OF_PROBLEM)}.")
        if problem.get("evaluates"):
            self.sandbox.probe()

    def close(self) -> None:
        self.pool.close()
        self.sandbox.close()

    def _verdicts(self, tasks: Sequence[Sequence[Any]]) -> list[Any]:
        """Return what the verifiers return in workers, and in the sandbox where they evaluate the answer."""
        verdicts = self.pool.map([[*task, False] for task in tasks])
        inside = iter(self._in_sandbox([t for t, v in zip(tasks, verdicts, strict=True) if v == EVALUATES]))
        return [next(inside) if verdict == EVALUATES else verdict for verdict in verdicts]

    def _in_sandbox(self, tasks: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the verdicts of verifiers that evaluate the answers."""
        if not tasks:
            return []
        outcome = self.sandbox.run_script(
            f"{VERIFIER.read_text()}\nscore_each({self.timeout_s}, {self.memory_bytes})\n",
            json.dumps(tasks),
            wall_s=START_S + PATIENCE * self.timeout_s * len(tasks),
            memory_bytes=2 * self.memory_bytes,  # one process makes the problems, and one evaluates
        )
        if outcome.status == "ok":
            verdicts = json.loads(outcome.stdout.splitlines()[-1])
            return [FAULTS[item[0]](item[1]) if isinstance(item, list) else item for item in verdicts]
        if outcome.status == "infra_error" or len(tasks) == 1:
            return [Unavailable(outcome.reason)] * len(tasks)
        # one answer must not cost the others their scores
        return [verdict for task in tasks for verdict in self._in_sandbox([task])]

    def _answer(self, sample: SampleState) -> tuple[str | None, str | None]:
        """Return the answer, or None and the reason why there is nothing to verify."""
        answer = self._extracted(final_reply(policy_messages(sample)))
        if not answer:
            return None, "no_answer"
        if len(answer) > self.max_answer_chars:
            return None, f"refused: more than {self.max_answer_chars} characters"
        return answer, None

    def _extracted(self, reply: str) -> str:
        if self.extract == "last_number":
            return final_answer(reply, "last_number") or ""
        tagged = _ANSWER.findall(reply)
        if tagged or self.extract == "answer":
            return tagged[-1].strip() if tagged else ""
        return final_answer(reply, max_chars=self.max_answer_chars) or reply.strip()


def _grade(verdict: Any) -> tuple[float | RewardFailure, str | None]:
    if isinstance(verdict, Unavailable):
        return RewardFailure(verdict.reason), None
    if isinstance(verdict, Fault):
        return 0.0, f"{type(verdict).__name__.lower()}: {verdict.reason}"
    if verdict is None:
        return RewardFailure(
            "the task makes a different problem from the same seed and number in another process"
        ), None
    return verdict, None
