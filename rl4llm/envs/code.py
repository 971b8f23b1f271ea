"""Programs that are run, and written again where they fail: run, read the error, try again.

    rl4llm train configs/code_repair_grpo.yaml data.path=HumanEval.jsonl.gz
"""

from __future__ import annotations

import asyncio
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.errors import ConfigError, DataError, SandboxError
from rl4llm.core.types import ChatMessage
from rl4llm.envs.registry import register_env
from rl4llm.rewards.code_run import CodeRun, CodeRunner
from rl4llm.rewards.code_tests import Tests, stored_tests, visible_tests
from rl4llm.sandbox import Limits, Outcome, Program, Runner, Sandbox, Stdin

NO_CODE = "The answer holds no code."
AGAIN = "Correct the program, and write all of it in one ```python block."
SHOWN_TRACE = 600


@register_env("code")
class CodeEnv(BaseMDPEnv):
    """Runs the program of each turn on the tests that it may know, and says what the first failed one expected.

        Test 2 of 3 failed:
        assert add(2, 2) == 4
        add(2, 2) returned 5
        Correct the program, and write all of it in one ```python block.

    The episode ends when those tests pass, or after `max_steps` programs. The reward `code` then runs the last program on
    the tests in `ground_truth`, which no message is made from. Known tests are the row's column `public_tests`, in any
    layout of `ground_truth`, else the examples in the prompt, see `rl4llm.rewards.code_tests`. Where there are none, a
    program is only run, and one that should read something, not even that.

    Logged are `env/runs`, `env/first_try` and `env/repaired`: how many programs were run, and whether the first passed, or a
    later one. A sandbox, or known tests, that do not work fail the sample: `failures/env/sandbox`.

    Args:
        wall_s: seconds of one call, one script or one statement of the tests.
        total_s: seconds of the whole program.
        memory_bytes: of each of its processes, and of all of them.
        max_reply_chars: what is said of a failed test is cut to so many characters.
        sandbox: where programs run; by default the strongest level that this machine has.
    """

    default_rewards = ("code",)
    respond_timeout_s = 3600.0  # of waiting for programs before this one, too; the sandbox limits the run itself

    def __init__(
        self,
        *args: Any,
        max_steps: int = 3,
        wall_s: float = 5.0,
        total_s: float = 20.0,
        memory_bytes: int = 512 * 1024**2,
        max_reply_chars: int = 1000,
        sandbox: Runner | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        if max_reply_chars < 1:
            raise ConfigError(f"env.max_reply_chars={max_reply_chars} is not accepted: at least 1.")
        self.max_reply_chars = max_reply_chars
        limits = Limits(wall_s=wall_s, total_s=total_s, memory_bytes=memory_bytes)
        self.runner = CodeRunner(sandbox or Sandbox(), limits)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._check_known_tests()
        tried = self.runner.sandbox.run(Program("print(6 * 7)"), limits)
        if tried.stdout != "42\n":
            raise SandboxError(f"env.name=code cannot run programs: {tried.reason}")

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        tests = self.known_tests(sample)
        if tests is None and isinstance(stored_tests(sample.ground_truth, sample.columns), Stdin):
            return []
        reply = self.program_text(sample)
        async with self._slot():
            run = await self.off_loop(lambda: self.runner.run(reply, tests, sample.columns))
        if run.outcome is not None and run.outcome.status == "infra_error":
            sample.fail(f"the sandbox or the known tests do not work: {run.outcome.reason}", "env/sandbox")
            return []
        self._measure(sample, run)
        if run.outcome is not None and run.outcome.status == "ok":
            return []
        return [ChatMessage("user", f"{self._shown(_failure(run))}\n{AGAIN}")]

    def program_text(self, sample: SampleState) -> str:
        """What holds the program of this turn; one in no block of code may be made of it here."""
        return sample.last_message.content

    def known_tests(self, sample: SampleState) -> Tests | None:
        """The tests that messages may tell of."""
        return visible_tests(sample.columns, sample.messages[sample.init_msg_size - 1].content)

    def close(self) -> None:
        """Release the sandbox and the rewards."""
        self.runner.sandbox.close()
        super().close()

    def _slot(self) -> asyncio.Semaphore:
        """A slot of the sandbox, in the event loop that runs; waiting for one costs no thread."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.runner.sandbox.slots)
        return self._slots[1]

    def _check_known_tests(self) -> None:
        for number in range(len(self.dataset)):
            row = self.dataset[number]
            try:
                visible_tests(row, "")
            except DataError as error:
                raise DataError(f"Prompt {row.get('prompt_id', number)!r}: {error}") from None

    def _shown(self, text: str) -> str:
        """Short, and without halves of characters, which no tokenizer takes."""
        return text[: self.max_reply_chars].encode(errors="replace").decode()

    @staticmethod
    def _measure(sample: SampleState, run: CodeRun) -> None:
        counts = sample.extras.setdefault("metrics", {"runs": 0, "first_try": 0, "repaired": 0})
        passed = run.outcome is not None and run.outcome.status == "ok"
        counts["runs"] += run.outcome is not None
        counts["first_try" if sample.current_step == 1 else "repaired"] = int(passed)


def _failure(run: CodeRun) -> str:
    """What is said of a program that did not pass."""
    outcome = run.outcome
    if outcome is None:
        return NO_CODE if run.note == "no_code" else f"The program was not run: {run.note}."
    failed = next(((number, test) for number, test in enumerate(outcome.tests, 1) if not test.passed), None)
    if failed is None:
        return _crash(outcome)
    number, test = failed
    return f"Test {number} of {len(outcome.tests)} failed:\n{test.shown or test.reason}"


def _crash(outcome: Outcome) -> str:
    return f"The program failed:\n{outcome.stderr.strip()[-SHOWN_TRACE:] or outcome.reason}"
