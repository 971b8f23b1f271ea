"""The reward of a program that passes its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl4llm.core.base_env import RewardExample, SampleState
from rl4llm.core.base_reward import BaseBatchReward, final_reply, policy_messages
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.schema import Fraction, checked
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.sandbox import Limits, Outcome, Sandbox
from rl4llm.extensions.sandbox.code_tests import run_reply, stored_tests, unknown_names
from rl4llm.extensions.sandbox.solutions import Solutions
from rl4llm.rewards.pool import RewardFailure

STORED_TESTS = 200
Grade = tuple[float | RewardFailure, str | None, dict[str, Any] | None]
"""The score, a note unless it is simply right or wrong, and what is stored with the episode."""


class CodeReward(BaseBatchReward):
    """1.0 if the program in the last reply passes all its tests, else 0.0.

        rewards: [{name: code, partial: true, format_weight: 0.1}]

    The row contains the tests: asserts as in HumanEval and MBPP, inputs and expected outputs, calls and their return
    values, or test files with the ids that must pass; see `rl4llm.extensions.sandbox.layouts`. Programs run in the
    sandbox and never see the expected results. A program that does not parse, crashes or hangs scores like one that
    passes no test. If the sandbox or the tests do not work, the sample fails instead, and so it does if the row has a
    solution that fails the tests too.

    The result of each test is in ``sample.extras["tests"][name]``, together with the level of the sandbox. A reason
    other than a wrong answer is in ``sample.extras["reward_notes"][name]``: no_code, too_long or model_error.

    Args:
        name: name of the score in the logs.
        partial: whether the share of passed tests counts, instead of all or nothing.
        syntax_weight: share of the score for a program that parses, whatever its tests say.
        format_weight: share of the score for code in a closed ```python block.
        wall_s: seconds for one call, one script or one statement of the tests.
        total_s: seconds for the whole program.
        memory_bytes: memory of each of its processes, and of all of them together, in bytes.
        try_solutions: whether the solution in each row (canonical_solution, solution, solutions, code) runs before the
            training, to leave out rows whose solution fails; without it, one runs when a program of its row fails.
        sandbox: where programs run; by default the strongest level that this machine supports.
    """

    success_at = 1.0
    score_timeout_s = None  # every program has limits, and the supervisor has a deadline

    @checked("rewards.{name}")
    def __init__(
        self,
        name: str = "code",
        *,
        partial: bool = False,
        syntax_weight: Fraction = 0.0,
        format_weight: Fraction = 0.0,
        wall_s: float = 5.0,
        total_s: float = 20.0,
        memory_bytes: int = 512 * 1024**2,
        try_solutions: bool = True,
        sandbox: Sandbox | None = None,
    ):
        super().__init__(name)
        if syntax_weight + format_weight > 1:
            raise ConfigError(f"rewards.{name}: {syntax_weight=} and {format_weight=} have a sum above 1.")
        self.partial = partial
        self.try_solutions = try_solutions
        self.syntax_weight = float(syntax_weight)
        self.format_weight = float(format_weight)
        self.sandbox = sandbox or Sandbox()
        self.limits = Limits(wall_s=wall_s, total_s=total_s, memory_bytes=memory_bytes)
        self.solutions = Solutions(self.sandbox, self.limits)

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Return one score per sample, or a RewardFailure if the sandbox or the tests did not work."""
        with ThreadPoolExecutor(self.sandbox.slots, thread_name_prefix="rl4llm-code") as threads:
            grades = list(threads.map(self._grade, samples))
        for sample, (_, note, tests) in zip(samples, grades, strict=True):
            if note:
                sample.extras.setdefault("reward_notes", {})[self.name] = note
            if tests:
                sample.extras.setdefault("tests", {})[self.name] = tests
        return [score for score, _, _ in grades]

    def check_row(self, ground_truth: Any, columns: Mapping[str, Any]) -> None:
        """Raise DataError for tests in an unknown layout."""
        stored_tests(ground_truth, columns)

    def faulty_rows(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
        """Return the rows whose solutions fail their tests."""
        return self.solutions.of_rows(rows) if self.try_solutions else {}

    def examples(self) -> Sequence[RewardExample]:
        """Return a right and a wrong function for asserts, and a right and a wrong program for inputs and outputs."""
        least = self.syntax_weight + self.format_weight
        asserts = "assert double(2) == 4\nassert double(-1) == -2"
        texts = {"inputs": ["3\n"], "outputs": ["6\n"]}
        cases = [  # the code in a block, its tests and its score
            ("def double(x):\n    return 2 * x", asserts, 1.0),
            ("def double(x):\n    return x * x + 1", asserts, least),
            ("print(2 * int(input()))", texts, 1.0),
            ("print(int(input()))", texts, least),
        ]
        return [
            RewardExample([ChatMessage("assistant", f"```python\n{code}\n```")], tests, score)
            for code, tests, score in cases
        ]

    def close(self) -> None:
        self.sandbox.close()

    def _grade(self, sample: SampleState) -> Grade:
        reply, columns = final_reply(policy_messages(sample)), sample.columns
        try:
            tests = stored_tests(sample.ground_truth, columns)
        except DataError as error:
            return RewardFailure(str(error)), None, None
        run = run_reply(self.sandbox, self.limits, reply, tests, columns)
        if run.outcome is None:
            return 0.0, run.note, None
        if run.outcome.status == "infra_error":
            return RewardFailure(run.outcome.reason), None, _stored(run.outcome)
        if run.outcome.status != "ok":
            prompt = " ".join(message.content for message in sample.messages[: sample.init_msg_size])
            names = unknown_names(tests, run.code, columns, prompt)
            unknown = f"its tests use {', '.join(names)}, which neither they nor the prompt define"
            if fault := self.solutions.fault(tests, columns) or (unknown if names else ""):
                return RewardFailure(f"the row cannot be scored: {fault}"), None, _stored(run.outcome)
        passed = run.outcome.passed_share if self.partial else float(run.outcome.status == "ok")
        score = (1.0 - self.syntax_weight - self.format_weight) * passed
        score += self.syntax_weight * run.outcome.parsed + self.format_weight * run.fenced
        return score, run.note, _stored(run.outcome)


def _stored(outcome: Outcome) -> dict[str, Any]:
    tests = outcome.tests[:STORED_TESTS]
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "sandbox": outcome.level,
        "seconds": round(outcome.wall_s, 3),
        "tests": [{"name": test.name, "status": test.status, "reason": test.reason} for test in tests],
    }
