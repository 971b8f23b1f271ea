"""One small part of each kind. Each keeps the contract of its base class, so a run can name it like one of rl4llm's."""

from dataclasses import dataclass

from rl4llm import BaseMDPEnv, ChatMessage
from rl4llm.core.base_algorithm import BaseAlgorithm, Needs
from rl4llm.inference.local import LocalClient


class Echo(BaseMDPEnv):
    """Repeats what the policy said, for two turns."""

    continue_truncated = True

    def __init__(self, *args, max_steps=2, greeting="You said:", **kwargs):
        super().__init__(*args, max_steps=max_steps, **kwargs)
        self.greeting = greeting

    def respond(self, sample):
        return [ChatMessage("user", f"{self.greeting} {sample.last_message.content}")]


def vowels(completions, **columns):
    """Return the share of vowels in the last reply."""
    return [sum(letter in "aeiou" for letter in text.lower()) / max(1, len(text)) for text in completions]


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


class CountingClient(LocalClient):
    """The embedded engine, which counts its requests."""

    requests = 0

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        self.requests += 1
        return await super().generate(prompt_ids, sampling_params, session=session)
