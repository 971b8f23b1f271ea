"""Environments with `reset` and `step`, or `next_query` and `step`, as other projects have them.

    rl4llm train configs/gymnasium_grpo.yaml env.name=stepped env.task=guess:Guess

A class is played unchanged, whatever it is a subclass of.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rl4llm.core.base_env import SampleState
from rl4llm.core.registry import imported
from rl4llm.core.types import ROLES, ChatMessage
from rl4llm.extensions.adapters.prompts import check_split, prompt_row
from rl4llm.extensions.adapters.step_rewards import StepsEnv, note_reward
from rl4llm.runtime.seeds import derive_seed

COLUMN = "stepped"
DEFAULT_LIMIT = 256
_BUILDING = threading.RLock()
_MADE: dict[tuple[Any, ...], list[_Begun]] = {}


class _Begun(NamedTuple):
    """An environment after its reset, and its first messages; each sample plays a copy of it."""

    env: Any
    messages: list[ChatMessage]


def stepped_prompts(
    split: str,
    limit: int | None = None,
    *,
    task: str,
    options: Mapping[str, Any] | None = None,
    task_seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the first messages of environments as prompts, each with a different seed; 256 unless `limit` is given."""
    check_split(split)
    column = {"task": task, "options": dict(options or {}), "task_seed": task_seed, "split": split}
    column["limit"] = limit or DEFAULT_LIMIT
    return [
        prompt_row(
            f"{split}-{number}",
            None,
            [{"role": message.role, "content": message.content} for message in begun.messages],
            stepped=column | {"number": number},
        )
        for number, begun in enumerate(_begun(column))
    ]


class SteppedEnv(StepsEnv):
    """Play a class with `reset` and `step`, or a factory of objects with `next_query` and `step`.

        class Guess:                                    # env.name=stepped env.task=guess:Guess
            def reset(self):                            # -> a string, a message, messages, or (one of them, info)
                self.number = random.randrange(10)
                return "Guess my number."

            def step(self, action):                     # -> observation, reward[, done[, ...]]
                hit = action.content.strip() == str(self.number)
                return "Yes!" if hit else "No.", float(hit), hit

    `reset` gets a `seed` if it accepts one; random numbers of Python and NumPy are seeded in any case. `step` gets the
    policy's message, which has `role` and `content`. An observation may have `messages` and `done`, a reward `value`. A
    factory has ``create(index)``; its objects have `system_prompt`, `next_query`, `done` and `reward`, and their `step` gets
    the text alone. Samples of a prompt play copies of one object. The rewards of the steps are the reward `env_steps`.

    Options:
        task: the class or factory, ``package.module:Class``.
        options: arguments of its constructor.
        task_seed: seed of the prompts of both splits.
    """

    made_from = COLUMN
    prompts = staticmethod(stepped_prompts)

    def __init__(self, *args: Any, max_steps: int = 8, **kwargs: Any):
        super().__init__(*args, **kwargs | {"max_steps": max_steps})

    def make(self, column: Mapping[str, Any]) -> Any:
        return copy.deepcopy(_begun(column)[column["number"]].env)

    def begin(self, env: Any, column: Mapping[str, Any]) -> list[str]:
        return [message.content for message in _begun(column)[column["number"]].messages]

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        messages, reward = _stepped(self.playing(sample), sample.last_message)
        note_reward(sample, reward)
        return messages


def _begun(column: Mapping[str, Any]) -> list[_Begun]:
    """Return the environments of a split after their reset; the same settings give the same ones in every process."""
    key = (column["task"], repr(column["options"]), column["task_seed"], column["split"], column["limit"])
    with _BUILDING:
        if key not in _MADE:
            _MADE[key] = _build(column)
        return _MADE[key]


def _build(column: Mapping[str, Any]) -> list[_Begun]:
    task, options, limit = column["task"], dict(column["options"]), column["limit"]
    cls = imported("env.task", task, "'package.module:Class'")
    begun = []
    with _seeded(derive_seed("stepped", task, column["task_seed"], column["split"])):
        factory = _factory(cls, options, limit) if hasattr(cls, "create") else None
        for number in range(limit):
            seed = derive_seed("stepped", task, column["task_seed"], column["split"], number) % 2**31
            env = factory.create(number) if factory else cls(**options)
            with _seeded(seed):
                begun.append(_Begun(env, _opening(env, seed)))
    return begun


def _factory(cls: Any, options: dict[str, Any], limit: int) -> Any:
    """Return a factory; one that asks for a config gets the numbers of groups and rollouts, one rollout for each prompt."""
    accepted = signature(cls).parameters if isinstance(cls, type) else {}
    if "config" not in accepted or "config" in options:
        return cls(**options) if isinstance(cls, type) else cls
    algo = SimpleNamespace(kwargs={"n_groups": limit}, n_groups=limit)
    config = SimpleNamespace(
        rollout=SimpleNamespace(n_rollouts=limit), algo=algo, env=SimpleNamespace(kwargs=options)
    )
    return cls(config)


def _opening(env: Any, seed: int) -> list[ChatMessage]:
    """Begin an episode; return its first messages."""
    if hasattr(env, "next_query"):
        system = getattr(env, "system_prompt", "")
        head = [ChatMessage("system", str(system))] if system else []
        return [*head, ChatMessage("user", str(env.next_query))]
    accepted = signature(env.reset).parameters.values()
    takes_seed = any(item.name == "seed" or item.kind is Parameter.VAR_KEYWORD for item in accepted)
    observation = env.reset(seed=seed) if takes_seed else env.reset()
    return _messages(observation[0] if isinstance(observation, tuple) else observation)


def _stepped(env: Any, action: ChatMessage) -> tuple[list[ChatMessage], float]:
    """Take a step; return the messages that follow, none at the end of the episode, and the reward."""
    if hasattr(env, "next_query"):
        before = float(env.reward or 0.0)
        env.step(action.content)
        messages = [] if env.done else [ChatMessage("user", str(env.next_query))]
        return messages, float(env.reward or 0.0) - before
    observation, reward, *ends = env.step(action)
    done = any(end is True for end in ends[:2]) or any(
        bool(getattr(owner, "done", False)) for owner in (observation, env)
    )
    return [] if done else _messages(observation), float(getattr(reward, "value", reward))


def _messages(observation: Any) -> list[ChatMessage]:
    """Return an observation as messages: of the user, unless it names another role."""
    if observation is None:
        return []
    inside = getattr(observation, "messages", observation)
    items = inside if isinstance(inside, Sequence) and not isinstance(inside, str) else [inside]
    return [_message(item) for item in items]


def _message(item: Any) -> ChatMessage:
    if isinstance(item, Mapping):
        role, content = item.get("role", "user"), item.get("content", "")
    else:
        role, content = getattr(item, "role", "user"), getattr(item, "content", item)
    role = str(getattr(role, "value", role))
    return ChatMessage(role if role in ROLES and role != "assistant" else "user", str(content))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's random numbers, and restore them afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
