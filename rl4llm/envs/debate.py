"""Debate: roles argue about a question, and a judge reads the transcript and picks the winner."""

from __future__ import annotations

from rl4llm.core.base_env import EpisodeState
from rl4llm.envs.roles import RolesEnv, lines_since

INSTRUCTION = (
    "You are {role} in a debate about the question that follows. In a few sentences give your answer and your reasons, and "
    "show where the others are wrong, or where you were. End each of your turns with a line 'Answer: ...'."
)


class DebateEnv(RolesEnv):
    """Let each role answer the question, read the other answers, and answer again.

        rl4llm train configs/debate_grpo.yaml env.frozen=[con]

    The default reward is `winner`, which needs a ground truth; without one `llm_judge` can read the transcript. It has the
    options of `RolesEnv`.
    """

    roles = ("pro", "con")
    instruction = INSTRUCTION
    default_rewards = ("winner",)

    def hears(self, role: str, episode: EpisodeState) -> str:
        """Return the lines of the others since the role's last turn, each with its speaker."""
        return "\n\n".join(f"{line.role}: {line.text}" for line in lines_since(role, episode))
