"""A custom reward: a class with a name and a score. Everything else is unchanged.

    python examples/custom_reward.py [--model DIRECTORY] [--steps 30]

Without --model a small one with random weights is made. It learns to answer with as many vowels as it can.
"""

from shared import arguments, print_progress, prompts

from rl4llm import BaseRewardFunction, GRPOTrainer


class Vowels(BaseRewardFunction):
    """The share of vowels among the letters of the last message."""

    def __init__(self, name="vowels", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        said = messages[-1].content.lower()
        return sum(letter in "aeiou" for letter in said) / max(len(said), 1)


if __name__ == "__main__":
    options = arguments(__doc__)
    trainer = GRPOTrainer(
        model=options.model,
        dataset=prompts(),
        reward_functions=[Vowels()],
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 8},
        training={"lr": 3e-3},
        output={"dir": options.output},
    )
    trainer.train()
    print_progress(options.output)
