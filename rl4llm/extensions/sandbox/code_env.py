"""Programs that are run and repaired: run the program, read the error, try again.

rl4llm train configs/code_repair_grpo.yaml data.path=HumanEval.jsonl.gz
"""

from __future__ import annotations

import asyncio
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.errors import DataError, SandboxError
from rl4llm.core.message import shortened
from rl4llm.core.schema import Count, checked
from rl4llm.core.types import ChatMessage
from rl4llm.data.lengths import place
from rl4llm.extensions.sandbox import Limits, Program, Sandbox, Stdin
from rl4llm.extensions.sandbox.code_tests import CodeRun, run_reply, stored_tests, visible_tests
from rl4llm.extensions.sandbox.layouts import Tests

NO_CODE = "The answer holds no code."
AGAIN = "Correct the program, and write all of it in one ```python block."
SHOWN_TRACE = 600


class CodeEnv(BaseMDPEnv):
    """Runs the program of each turn on the tests it may see, and replies with the first failed test.

        Test 2 of 3 failed:
        assert add(2, 2) == 4
        add(2, 2) returned 5
        Correct the program, and write all of it in one ```python block.

    The episode ends when those tests pass, or after `max_steps` programs. The reward `code` then runs the last program
    on the tests in `ground_truth`, which no message contains. The visible tests are the row's column `public_tests`, in
    any layout of `ground_truth`, else the examples in the prompt, see `rl4llm.extensions.sandbox.code_tests`. Without
    visible tests a program is only run, and a program that reads input is not run at all.

    The metrics are `env/runs` (programs run), `env/first_try` (the first program passed) and `env/repaired` (a later
    one passed). A broken sandbox and broken visible tests fail the sample with the class `env/sandbox`.

    Args:
        wall_s: seconds for one call, one script or one statement of the tests.
        total_s: seconds for the whole program.
        memory_bytes: memory of each of its processes, and of all of them together, in bytes.
        max_reply_chars: maximum length of the message about a failed test, in characters.
        sandbox: where programs run; by default the strongest level that this machine supports.
    """

    default_rewards = ("code",)
    respond_timeout_s = 3600.0  # includes waiting for other programs; the sandbox limits the run itself

    @checked("env")
    def __init__(
        self,
        *args: Any,
        max_steps: int = 3,
        wall_s: float = 5.0,
        total_s: float = 20.0,
        memory_bytes: int = 512 * 1024**2,
        max_reply_chars: Count = 1000,
        sandbox: Sandbox | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        self.max_reply_chars = max_reply_chars
        self.sandbox = sandbox or Sandbox()
        self.limits = Limits(wall_s=wall_s, total_s=total_s, memory_bytes=memory_bytes)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        for number, row in enumerate(self.dataset):
            try:
                visible_tests(row, "")
            except DataError as error:
                raise DataError(f"{place(self.dataset, number)}: {error}") from error
        trial = self.sandbox.run(Program("print(6 * 7)"), self.limits)
        if trial.stdout != "42\n":  # for example with too little memory for Python
            raise SandboxError(f"env.name=code cannot run programs: {trial.reason}")

    async def respond(self, sample: SampleState) -> list[ChatMessage]:
        tests = self.known_tests(sample)
        if tests is None and isinstance(stored_tests(sample.ground_truth, sample.columns), Stdin):
            return []
        arguments = self.sandbox, self.limits, self.program_text(sample), tests, sample.columns
        async with self._slot():
            run = await self.off_loop(lambda: run_reply(*arguments))
        status = run.outcome and run.outcome.status
        if run.outcome and status == "infra_error":
            sample.fail(f"the sandbox or the visible tests do not work: {run.outcome.reason}", "env/sandbox")
            return []
        counts = sample.extras.setdefault("metrics", {"runs": 0, "first_try": 0, "repaired": 0})
        counts["runs"] += run.outcome is not None
        counts["first_try" if sample.current_step == 1 else "repaired"] = int(status == "ok")
        if status == "ok":
            return []
        return [ChatMessage("user", f"{shortened(_failure(run), self.max_reply_chars)}\n{AGAIN}")]

    def program_text(self, sample: SampleState) -> str:
        """Return the text with the program of this turn; subclasses may build a program from a reply without a code
        block.
        """
        return sample.last_message.content

    def known_tests(self, sample: SampleState) -> Tests | None:
        """Return the tests that messages may show."""
        return visible_tests(sample.columns, sample.messages[sample.init_msg_size - 1].content)

    def close(self) -> None:
        """Release the sandbox and the rewards."""
        self.sandbox.close()
        super().close()

    def _slot(self) -> asyncio.Semaphore:
        """Return the semaphore of the sandbox's slots in the running event loop; waiting for a slot needs no thread."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.sandbox.slots)
        return self._slots[1]


def _failure(run: CodeRun) -> str:
    outcome = run.outcome
    if outcome is None:
        return NO_CODE if run.note == "no_code" else f"The program was not run: {run.note}."
    for number, test in enumerate(outcome.tests, 1):
        if not test.passed:
            return f"Test {number} of {len(outcome.tests)} failed:\n{test.shown or test.reason}"
    trace = shortened(outcome.stderr.strip(), SHOWN_TRACE, end=True)
    return f"The program failed:\n{trace or outcome.reason}"
