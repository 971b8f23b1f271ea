"""Python programs as a tool, run in the sandbox."""

from __future__ import annotations

from rl4llm.core.errors import EnvError, SandboxError
from rl4llm.core.message import shortened
from rl4llm.envs.tools.tool import ToolError, ToolSet, tool
from rl4llm.extensions.sandbox import Limits, Program, Sandbox


class Python(ToolSet):
    """Runs programs of the model, each in a new sandbox without state.

    Raises SandboxError at once if no sandbox can be started.

    Args:
        wall_s: seconds that a program may take.
        memory_bytes: memory of each of its processes, and of all of them together, in bytes.
        sandbox: where programs run; by default the strongest level that this machine supports.
    """

    def __init__(
        self, wall_s: float = 5.0, memory_bytes: int = 512 * 1024**2, sandbox: Sandbox | None = None
    ):
        super().__init__()
        self._limits = Limits(wall_s=wall_s, total_s=wall_s + 5.0, memory_bytes=memory_bytes)
        self._sandbox: Sandbox = sandbox or Sandbox()
        trial = self._sandbox.run(Program("print(6 * 7)"), self._limits)
        if trial.stdout != "42\n":
            raise SandboxError(f"env.tools: python cannot be used: {trial.reason}")

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. Print what you want to see.
        """
        outcome = self._sandbox.run(Program(code), self._limits)
        if outcome.status == "infra_error":
            raise EnvError(f"the tool python: {outcome.reason}")
        if outcome.status != "ok":
            parts = outcome.reason.strip(), shortened(outcome.stdout.strip(), 1000, end=True)
            raise ToolError("\n".join(filter(None, parts)))
        return outcome.stdout or "The program printed nothing."

    def close(self) -> None:
        self._sandbox.close()
