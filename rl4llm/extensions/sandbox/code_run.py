"""Run the program of a reply against tests, for the reward `code` and the environment `code`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl4llm.extensions.sandbox import Limits, Outcome, ProgramRunner
from rl4llm.extensions.sandbox.code_tests import code_in, program_of
from rl4llm.extensions.sandbox.layouts import Tests

MAX_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class CodeRun:
    """The result of a reply: an outcome, or a note why nothing was run. `fenced`: its code was in a closed block."""

    outcome: Outcome | None
    note: str | None = None
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class CodeRunner:
    """Runs programs in `sandbox` within `limits`; code of more than MAX_CHARS characters is not run."""

    sandbox: ProgramRunner
    limits: Limits

    def run(self, reply: str, tests: Tests | None, columns: Mapping[str, Any]) -> CodeRun:
        """Run the program in a reply, whose row has `columns`, against tests, or alone if there are none. It blocks."""
        if len(reply) > 4 * MAX_CHARS:
            return CodeRun(None, f"too_long: the reply has {len(reply)} characters")
        code, fenced = code_in(reply, columns.get("entry_point") or "")
        if not code.strip():
            return CodeRun(None, "no_code", fenced)
        if len(code) > MAX_CHARS:
            why = f"too_long: the code has {len(code)} characters, accepted are {MAX_CHARS}"
            return CodeRun(None, why, fenced)
        outcome = self.sandbox.run(program_of(code, tests, columns), self.limits)
        note = f"model_error: {outcome.reason}" if outcome.status == "model_error" else None
        return CodeRun(outcome, note, fenced)
