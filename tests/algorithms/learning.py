"""A task that every method must learn in seconds: two turns with the environment's words between them.

The reward of an episode is the share of vowels in what the assistant said in both turns. A small model with random weights
says few; how many it says after some steps is what a method has learned.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ended_runs import TwoTurns
from vowels import prompts

from rl4llm.algorithms import ALGORITHMS, SDFT, SDPO
from rl4llm.api import PolicyTrainer, SFTTrainer
from rl4llm.backends.tiny import build_model, build_tokenizer
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, SampleState
from rl4llm.core.types import Group, TokenSpan, Trajectory

TEXTS = ["system\nBe brief.\n", "user\nSay 1.\nGo on.\nassistant\nAnswer: 85\n", "aeiou eau oui bcdfgh"] * 4
QUIET = {
    "deterministic": True,
    "tracking.tensorboard": False,
    "tracking.episodes_every": 0,
    "checkpoint.every": 0,
}
THRESHOLD = 0.3
"""The reward that counts as learned; the model begins at about half of it."""


class Vowels(BaseRewardFunction):
    """The share of vowels in what the assistant said."""

    def __init__(self, name: str = "vowels", **kwargs: Any):
        super().__init__(name)

    def __call__(self, messages: Any, ground_truth: Any, **kwargs: Any) -> float:
        said = "".join(message.content.lower() for message in messages if message.role == "assistant")
        return sum(letter in "aeiou" for letter in said) / max(len(said), 1)


@dataclass(frozen=True, slots=True)
class Curve:
    """The mean reward of each step."""

    rewards: tuple[float, ...]

    @property
    def before(self) -> float:
        """Of the first step, sampled before anything was learned."""
        return self.rewards[0]

    @property
    def after(self) -> float:
        """The mean of the last three steps; of a method that does not sample, what was played at the end."""
        last = self.rewards[max(1, len(self.rewards) - 3) :]
        return sum(last) / len(last)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a method learns the task, and which options its invariance is tested with.

    Args:
        options: of the algorithm in the learning run; a value that is callable is called, such as for a teacher.
        overrides: of the run's configuration.
        invariance: sets of the algorithm's options, each tested by itself, besides the defaults.
        nonnegative: whether the method takes no negative rewards.
        learn: of a method that does not sample for itself; gets the name, the options, a directory and whether it may learn.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    invariance: tuple[Mapping[str, Any], ...] = ()
    nonnegative: bool = False
    learn: Callable[[str, Mapping[str, Any], Path, bool], Curve] | None = None


@functools.cache
def start() -> str:
    """Return the directory of the model that every method starts from."""
    directory = tempfile.mkdtemp(prefix="rl4llm-start-")
    tokenizer = build_tokenizer(TEXTS, vocab_size=320)
    build_model(tokenizer, seed=0, hidden_size=64, num_layers=2).eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@functools.cache
def teacher() -> str:
    """Return the directory of a model that learned the task."""
    directory = Path(tempfile.mkdtemp(prefix="rl4llm-teacher-"))
    trainer = episodes("grpo", {}, directory / "run", max_steps=16)
    trainer.train()
    trainer.save_pretrained(directory / "model")
    return str(directory / "model")


def episodes(
    method: str, options: Mapping[str, Any], directory: Path, model: str | None = None, **overrides: Any
) -> PolicyTrainer:
    """Return a run that samples episodes of the task."""
    kind = type("Trainer", (PolicyTrainer,), {"algorithm": method})
    made = {key: value() if callable(value) else value for key, value in options.items()}
    settings = {
        "max_steps": 12,
        "rollout.prompts": 4,
        "rollout.group_size": 8,
        "rollout.max_tokens": 6,
        "training.lr": 4e-3,
        "training.passes_per_rollout": 2,  # so that ratios matter
        "env.max_steps": 2,
        **QUIET,
        **overrides,
    }
    return kind(
        model or start(),
        prompts(4),
        [Vowels()],
        env=TwoTurns,
        algorithm=made,
        output={"dir": str(directory)},
        **settings,
    )


def rewards_of(directory: Path) -> tuple[float, ...]:
    """Return the mean reward of each step of a run."""
    return tuple(row["reward/mean"] for row in _metrics(directory) if "reward/mean" in row)


def _metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def played(model: str, directory: Path) -> float:
    """Return the mean reward of a model that does not learn."""
    episodes("grpo", {}, directory, model, **{"training.lr": 0.0, "max_steps": 2}).train()
    return sum(rewards_of(directory)) / 2


def learn(method: str, recipe: Recipe, directory: Path, *, learns: bool = True) -> Curve:
    """Return the curve of a method; without `learns`, that of the same run with learning rates of 0."""
    if recipe.learn is not None:
        return recipe.learn(method, recipe.options, directory, learns)
    options = dict(recipe.options)
    if not learns and "critic_lr" in options:
        options["critic_lr"] = 0.0
    still = {} if learns else {"training.lr": 0.0}
    episodes(method, options, directory, **{**recipe.overrides, **still}).train()
    return Curve(rewards_of(directory))


GOOD = ("aeiou", "eau oui", "aie oue", "oui eau")
BAD = ("bcdfg", "hgf bcd", "gfh dcb", "Answer: 85")


def answered(kind: str) -> list[dict[str, Any]]:
    """Return rows with answers: demonstrations, pairs or labels. The good answers are words of vowels."""
    rows, kind = [], "pairs" if kind == "comparisons" else kind
    for row, good, bad in itertools.product(prompts(4), GOOD, BAD):
        answer = [*row["messages"], {"role": "assistant", "content": good}]
        rows += {
            "demonstrations": [{"messages": answer}],
            "pairs": [{**row, "chosen": good, "rejected": bad}],
            "labels": [
                {**row, "completion": good, "label": True},
                {**row, "completion": bad, "label": False},
            ],
        }[kind]
    return [{**row, "prompt_id": str(number)} for number, row in enumerate(rows)]


def reader(method: str, options: Mapping[str, Any], directory: Path, lr: float) -> PolicyTrainer:
    """Return a run that learns from a dataset."""
    kind = type("Trainer", (PolicyTrainer,), {"algorithm": method})
    rows = answered(ALGORITHMS[method]().needs().learns_from)
    settings = {**QUIET, "max_steps": 40, "rollout.prompts": 8, "training.lr": lr}
    return kind(start(), rows, algorithm=dict(options), output={"dir": str(directory)}, **settings)


def read(method: str, options: Mapping[str, Any], directory: Path, learns: bool) -> Curve:
    """Train a method on a dataset and play its model before and after."""
    trainer = reader(method, options, directory / "run", 3e-3 if learns else 0.0).train()
    trainer.save_pretrained(directory / "model")
    return Curve(
        (played(start(), directory / "before"), played(str(directory / "model"), directory / "after"))
    )


def ranked(method: str, options: Mapping[str, Any], directory: Path, learns: bool) -> Curve:
    """Return the share of pairs that a reward model ranks right, minus the 0.5 of guessing."""
    reader(method, options, directory, 1e-3 if learns else 0.0).train()
    shares = [row["rm/accuracy"] for row in _metrics(directory)]
    return Curve(tuple(max(0.0, share - 0.5) for share in shares))


FEEDBACK = "Use more vowels."


class Told(BaseMDPEnv):
    """Tell what was wrong with each answer."""

    def respond(self, sample: Any) -> list[Any]:
        sample.extras["feedback"] = FEEDBACK
        return []


@functools.cache
def listener() -> str:
    """Return the directory of a model that uses vowels when its prompt asks for them, and seldom otherwise."""
    directory, rows = Path(tempfile.mkdtemp(prefix="rl4llm-listener-")), []
    for row in prompts(4):
        task = [ChatMessage.from_dict(message) for message in row["messages"]]
        sample = SampleState("", 0, task, "", {"demonstration": GOOD[0]}, extras={"feedback": FEEDBACK})
        group = Group("", (Trajectory("", (TokenSpan.context([1]),), (), {}, 0.0, "done"),))
        hints = [method.privileged_prompts([sample], group)[0] for method in (SDFT(), SDPO())]
        for prompt, answers in [(task, (*BAD, *BAD, GOOD[0])), *((hint, GOOD) for hint in hints)]:
            asked = [message.to_dict() for message in prompt]
            rows += [{"messages": [*asked, {"role": "assistant", "content": answer}]} for answer in answers]
    settings = {**QUIET, "max_steps": 60, "rollout.prompts": 17, "training.lr": 3e-3}
    run = SFTTrainer(start(), rows, output={"dir": str(directory / "run")}, **settings).train()
    run.save_pretrained(directory / "model")
    return str(directory / "model")


def told(method: str, options: Mapping[str, Any], directory: Path, learns: bool) -> Curve:
    """Train a method whose teacher knows more, from a model that listens to it."""
    kind = type("Trainer", (PolicyTrainer,), {"algorithm": method})
    rows = [{**row, "demonstration": GOOD[0]} for row in prompts(4)]
    settings = {
        **QUIET,
        "max_steps": 12,
        "rollout.prompts": 4,
        "rollout.group_size": 8,
        "rollout.max_tokens": 8,
        "training.lr": 2e-3 if learns else 0.0,
    }
    kind(
        listener(),
        rows,
        [Vowels()],
        env=Told,
        algorithm=dict(options),
        output={"dir": str(directory)},
        **settings,
    ).train()
    return Curve(rewards_of(directory))
