"""Debate: roles argue about one question, and a judge who reads all of it says who won."""

from __future__ import annotations

from rl4llm.core.base_env import EpisodeState
from rl4llm.envs.registry import register_env
from rl4llm.envs.roles import RolesEnv, lines_since

INSTRUCTION = (
    "You are {role} in a debate about the question that follows. In a few sentences give your answer and your reasons, and "
    "show where the others are wrong, or where you were. End each of your turns with a line 'Answer: ...'."
)


@register_env("debate")
class DebateEnv(RolesEnv):
    """Each role answers the question, hears the others, and answers again.

        rl4llm train configs/debate_grpo.yaml env.frozen=[con]

    The reward is by default `winner`, which needs a ground truth; without one `llm_judge` reads the transcript. Options are
    those of `RolesEnv`.
    """

    roles = ("pro", "con")
    instruction = INSTRUCTION
    default_rewards = ("winner",)

    def hears(self, role: str, episode: EpisodeState) -> str:
        """What the others said since the role's last turn, each line with its speaker."""
        return "\n\n".join(f"{line.role}: {line.text}" for line in lines_since(role, episode))
