"""A game that the policy plays against itself: the environment sets whose turn it is and scores both sides.

    python examples/self_play.py [--model DIRECTORY] [--steps 30]

Two players speak in turn, two times each. Vowels are worth something, and having more of them than the other is too.
"""

from shared import arguments, print_progress, prompts

from rl4llm import GRPOTrainer, RolesEnv
from rl4llm.extensions.judges.judges import BaseJudge


class WordDuel(RolesEnv):
    """Two turns each; left begins in one half of the episodes, right in the other."""

    roles = ("left", "right")
    instructions = {"left": "You are {role}.", "right": "You are {role}, and speak of {ground_truth}."}

    def next_role(self, episode):
        turn = len(episode.said)
        return self.roles[(turn + episode.seed) % 2] if turn < 2 * self.max_steps else None


class Vowels(BaseJudge):
    """Half for the share of vowels, half for having more of them than the other."""

    def __init__(self, name="vowels", **kwargs):
        super().__init__(name)

    def judge(self, transcript, ground_truth, **columns):
        said = {
            role: "".join(line.text.lower() for line in transcript if line.role == role)
            for role in WordDuel.roles
        }
        share = {
            role: sum(letter in "aeiou" for letter in text) / max(len(text), 1) for role, text in said.items()
        }
        return {role: share[role] / 2 + (share[role] >= max(share.values())) / 2 for role in said}


if __name__ == "__main__":
    options = arguments(__doc__)
    trainer = GRPOTrainer(
        model=options.model,
        dataset=prompts(answers=["cats", "dogs", "tea", "rain"]),
        reward_functions=[Vowels()],
        env=WordDuel,
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 6},
        training={"lr": 3e-3},
        output={"dir": options.output},
    )
    trainer.train()
    print_progress(options.output)
