"""A custom tool: methods marked `@tool`, with an object for each episode, and a custom format of calls.

    python examples/custom_tool.py [--model DIRECTORY] [--steps 30]

A number is to be guessed; the tool says higher or lower, three times. Instruct models call tools in the format of their
chat template, and need no other; a small one with random weights calls this one by saying a number.
"""

import re

from shared import arguments, print_progress, prompts

from rl4llm import BaseRewardFunction, GRPOTrainer, ToolMDPEnv, ToolSet, register_tool, tool
from rl4llm.envs.tools.formats import FORMATS, CallFormat, ToolCall


@register_tool("guessing")
class Guessing(ToolSet):
    """Knows the number of an episode."""

    def open(self, sample):
        opened = Guessing()
        opened.secret = int(sample.ground_truth)
        return opened

    @tool
    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 0 to 9.
        """
        return "Right." if number == self.secret else "Higher." if number < self.secret else "Lower."


def numbers(text: str) -> list[ToolCall]:
    """Read the last number in a turn as a call."""
    return [ToolCall("guess", {"number": int(found[:3])}) for found in re.findall(r"\d+", text)[-1:]]


FORMATS.register("number")(CallFormat(numbers))


class Rambling(ToolMDPEnv):
    """Takes a turn that was cut short as it is."""

    continue_truncated = True


class Closeness(BaseRewardFunction):
    """1 for the number itself, less the further away the last guess was, 0 for no number at all."""

    def __init__(self, name="closeness", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        guesses = [
            call for message in messages if message.role == "assistant" for call in numbers(message.content)
        ]
        return 1.0 / (1.0 + abs(guesses[-1].arguments["number"] - int(ground_truth)) / 3) if guesses else 0.0


if __name__ == "__main__":
    options = arguments(__doc__)
    trainer = GRPOTrainer(
        model=options.model,
        dataset=prompts("Guess my number from 0 to 9.", answers=[str(i) for i in range(3, 7)]),
        reward_functions=[Closeness()],
        env=Rambling,
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 4},
        training={"lr": 3e-3},
        output={"dir": options.output},
        **{
            "env.tools": ["guessing"],
            "env.format": "number",
            "env.max_steps": 3,
            "env.describe_tools": False,
        },
    )
    trainer.train()
    print_progress(options.output)
