"""Environments as other projects write them, without a class of rl4llm."""

import random
from dataclasses import dataclass, field


@dataclass
class Message:
    role: str
    content: str


@dataclass
class Observation:
    messages: list = field(default_factory=list)
    done: bool = False


@dataclass
class Reward:
    value: float


class Guess:
    """Reset and step, with classes for observations, rewards and messages."""

    def __init__(self, most=9):
        self.most = most

    def reset(self):
        self.number = random.randrange(self.most + 1)
        return Observation([Message("system", f"0 to {self.most}"), Message("user", f"Guess {self.number}.")])

    def step(self, action):
        hit = action.content.strip() == str(self.number)
        return Observation([Message("user", "Again.")], done=hit), Reward(float(hit))


class Plain:
    """Strings and numbers, and the five results of Gymnasium."""

    def reset(self, seed):
        self.turns = seed % 2 + 1
        return f"Say stop in turn {self.turns}.", {}

    def step(self, action):
        self.turns -= 1
        return "Next.", 0.5, self.turns == 0, False, {}


class Sum:
    """An object that a factory creates."""

    system_prompt = "Add."

    def __init__(self, number):
        self.number, self.done, self.reward = number, False, 0

    @property
    def next_query(self):
        return f"{self.number}+1="

    def step(self, response):
        self.reward += response == str(self.number + 1)
        self.number += 1
        self.done = self.reward == 2


class SumFactory:
    def __init__(self, config):
        self.groups = config.algo.kwargs["n_groups"]
        assert config.rollout.n_rollouts == self.groups

    def create(self, rollout_idx):
        return Sum(10 * rollout_idx)


class Drifts:
    """Begins with another message each time."""

    begun = 0

    def reset(self):
        Drifts.begun += 1
        return f"Beginning {Drifts.begun}."

    def step(self, action):
        return "x", 0.0
