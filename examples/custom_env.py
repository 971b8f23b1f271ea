"""A custom environment: `respond` returns its next messages after each turn; an empty list ends the episode.

    python examples/custom_env.py [--model DIRECTORY] [--steps 30]

A number is to be guessed; the environment says higher or lower, three times.
"""

import re

from shared import arguments, print_progress, prompts

from rl4llm import BaseMDPEnv, BaseRewardFunction, ChatMessage, GRPOTrainer


def guessed(message: ChatMessage) -> int | None:
    """Return the last number in a message."""
    numbers = re.findall(r"\d+", message.content)
    return int(numbers[-1][:3]) if numbers else None


class GuessTheNumber(BaseMDPEnv):
    """Answers each guess with a hint."""

    continue_truncated = True  # a rambling guess is still a guess

    def respond(self, sample):
        guess, secret = guessed(sample.last_message), int(sample.ground_truth)
        if guess == secret:
            return []
        hint = "Say a number." if guess is None else "Higher." if guess < secret else "Lower."
        return [ChatMessage("user", hint)]


class Closeness(BaseRewardFunction):
    """1 for the number itself, less the further away the last guess was, 0 for no number at all."""

    def __init__(self, name="closeness", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        guess = guessed([message for message in messages if message.role == "assistant"][-1])
        return 0.0 if guess is None else 1.0 / (1.0 + abs(guess - int(ground_truth)) / 3)


if __name__ == "__main__":
    options = arguments(__doc__)
    trainer = GRPOTrainer(
        model=options.model,
        dataset=prompts("Guess my number from 0 to 9.", answers=[str(i) for i in range(3, 7)]),
        reward_functions=[Closeness()],
        env=GuessTheNumber,
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 4},
        training={"lr": 3e-3},
        output={"dir": options.output},
        **{"env.max_steps": 3},
    )
    trainer.train()
    print_progress(options.output)
