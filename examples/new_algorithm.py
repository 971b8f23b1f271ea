"""A new algorithm in one file: say how good each trajectory was and what each token loses; the trainer does the rest.

    python examples/new_algorithm.py [--model DIRECTORY] [--steps 30]

From a configuration file it is reached by its place: ``algorithm.name=new_algorithm:Reinforce`` (on the Python path).
"""

from dataclasses import dataclass

import torch
from custom_reward import Vowels
from shared import arguments, print_progress, prompts

from rl4llm import GRPOTrainer, register_algorithm
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs


@register_algorithm("reinforce")
@dataclass(slots=True)
class Reinforce(BaseAlgorithm):
    """REINFORCE (Williams 1992) with the mean of the other samples of the prompt as its baseline."""

    aggregation: str = "token"

    def needs(self) -> Needs:
        return Needs(group=True)

    def credits(self, group) -> torch.Tensor:
        rewards_G, size = group.rewards_G, len(group.trajectories)
        return (rewards_G - rewards_G.mean()) * size / max(size - 1, 1)

    def token_losses(self, batch, logprobs_BT, entropy_BT):
        return -batch.advantages_BT * logprobs_BT, {}


if __name__ == "__main__":
    options = arguments(__doc__)
    trainer = GRPOTrainer(
        model=options.model,
        dataset=prompts(),
        reward_functions=[Vowels()],
        algorithm={"name": "reinforce"},
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 8},
        training={"lr": 3e-3},
        output={"dir": options.output},
    )
    trainer.train()
    print_progress(options.output)
