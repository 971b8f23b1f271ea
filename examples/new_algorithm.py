"""A new algorithm: say how good each trajectory was and what each token loses; the trainer does the rest.

    python examples/new_algorithm.py [--model DIRECTORY] [--steps 30]

A configuration reaches it by its place: ``algorithm.name=new_algorithm:Reinforce`` (with examples/ on the Python path).
"""

from dataclasses import dataclass

from custom_reward import Vowels
from shared import arguments, print_progress, prompts

from rl4llm import GRPOTrainer, register_algorithm
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs


@register_algorithm("reinforce")
@dataclass(slots=True)
class Reinforce(BaseAlgorithm):
    """REINFORCE (Williams 1992); its baseline is the mean reward of the prompt."""

    aggregation: str = "token"

    def needs(self):
        return Needs(group=True)

    def credits(self, group):
        return group.rewards_G - group.rewards_G.mean()

    def token_losses(self, batch, logprobs_BT, entropy_BT):
        return -batch.advantages_BT * logprobs_BT, {}


if __name__ == "__main__":
    options = arguments(__doc__)
    sizes = {"rollout": {"prompts": 4, "group_size": 16, "max_tokens": 8}, "training": {"lr": 3e-3}}
    kept = {"output": {"dir": options.output}, "max_steps": options.steps}
    GRPOTrainer(
        options.model, prompts(), [Vowels()], algorithm={"name": "reinforce"}, **sizes, **kept
    ).train()
    print_progress(options.output)
