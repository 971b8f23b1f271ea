"""Environments of Gymnasium that can be played as text.

rl4llm train configs/gymnasium_grpo.yaml env.task=FrozenLake-v1
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import needed
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.adapters.prompts import prompt_row, seeds_of, user
from rl4llm.extensions.adapters.step_rewards import StepsEnv, invalid, note_reward

DEFAULT_LIMIT = 256
COLUMN = "gymnasium"
_import = partial(needed, "gymnasium", "env.name='gymnasium'")
SGR = re.compile(r"\x1b\[[0-9;]*m")  # colours; text renderings mark the player's position with them


def gymnasium_prompts(
    split: str,
    limit: int | None = None,
    *,
    task: str,
    task_options: Mapping[str, Any] | None = None,
    actions: Sequence[str] = (),
    instructions: str | None = None,
    task_seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the first observations of episodes as prompts. Each has a different seed, also across the two splits.

    Returns 256 prompts unless `limit` is given. Raises ConfigError for an environment that is not playable as text.
    """
    seeds = seeds_of(split, limit or DEFAULT_LIMIT, "gymnasium", task, task_seed)
    with closing(_make(task, task_options)) as env:
        names = _action_names(task, env, actions)
        if instructions is None:
            rules = rules_of(env, named=bool(actions), shown=env.render_mode == "ansi")
            instructions = f"{rules}\n\nEach of your turns is one action. {_accepted(env, names)}.".lstrip()
        column = {"task": task, "options": dict(task_options or {}), "actions": names}
        return [
            prompt_row(
                f"{task}-{split}-{number}",
                instructions,
                [user(_text(env, env.reset(seed=seed)[0]))],
                gymnasium=column | {"seed": seed},
            )
            for number, seed in enumerate(seeds)
        ]


class GymnasiumEnv(StepsEnv):
    """Plays an environment of Gymnasium: the policy sees its observations and names one action per turn.

    Text observations are shown unchanged. Others are shown as the environment's text rendering ("ansi") if it has one,
    else printed. Actions are text, or names from a finite set: the last name in a reply counts. A reply without an
    action costs a turn and is answered with the names. The rewards of the steps are the reward `env_steps`. The metrics
    are `env/return` and `env/invalid_actions`.

    Options:
        task: its id, or ``module:id`` if a module registers it.
        task_options: options of ``gymnasium.make``.
        actions: names of a finite set of actions, in their order; by default numbers.
        instructions: the system message; by default the rules, from ``metadata["rules"]`` or the environment's docstring,
            and the actions. "" leaves it out.
        task_seed: seed of the episodes of both splits.
    """

    made_from = COLUMN
    prompts = staticmethod(gymnasium_prompts)

    def __init__(self, *args: Any, max_steps: int = 16, **kwargs: Any):
        super().__init__(*args, **kwargs | {"max_steps": max_steps})

    def make(self, column: Mapping[str, Any]) -> Any:
        return _make(column["task"], column["options"])

    def begin(self, env: Any, column: Mapping[str, Any]) -> list[str]:
        return [_text(env, env.reset(seed=column["seed"])[0])]

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        env, names = self.playing(sample), sample.columns[COLUMN]["actions"]
        sample.extras.setdefault("metrics", {"return": 0.0, "invalid_actions": 0})
        action = _action(env, names, sample.last_message.content)
        if action is None:
            problem = "names no action" if names else "is not an action"
            return invalid(sample, f"That {problem}. {_accepted(env, names)}.")
        observation, reward, terminated, truncated, _ = env.step(action)
        note_reward(sample, reward)
        return [] if terminated or truncated else [ChatMessage("user", _text(env, observation))]


def _make(task: str, options: Mapping[str, Any] | None) -> Any:
    gymnasium = _import()
    options = dict(options or {})
    entry = gymnasium.spec(task).entry_point
    creator = entry if callable(entry) else gymnasium.envs.registration.load_env_creator(entry)
    if "ansi" in getattr(creator, "metadata", {}).get("render_modes", ()):
        options.setdefault("render_mode", "ansi")
    return gymnasium.make(task, **options)


def _action_names(task: str, env: Any, names: Sequence[str]) -> list[str]:
    """Return the names of a finite set of actions, or [] if actions are text."""
    spaces = _import().spaces
    if isinstance(env.action_space, spaces.Text):
        return []
    if not isinstance(env.action_space, spaces.Discrete):
        raise ConfigError(
            f"env.task={task!r} has the action space {env.action_space}. Accepted: Discrete, Text."
        )
    start, count = int(env.action_space.start), int(env.action_space.n)
    chosen = list(names) or [str(start + number) for number in range(count)]
    if len(chosen) != count or len({name.lower() for name in chosen}) != count:
        raise ConfigError(
            f"env.actions={chosen} is not accepted. Accepted: {count} different names, one for each action of {task}."
        )
    return chosen


def _accepted(env: Any, names: Sequence[str]) -> str:
    return f"Actions: {', '.join(names)}" if names else f"An action is {in_words(env.action_space)}"


def _action(env: Any, names: Sequence[str], reply: str) -> Any:
    """Return the action in a reply, or None if there is none."""
    if not names:
        text = reply.strip()
        return text if env.action_space.contains(text) else None
    longest_first = sorted(names, key=len, reverse=True)
    words = "|".join(f"({re.escape(name)})" for name in longest_first)
    matches = list(re.finditer(rf"(?<!\w)(?:{words})(?!\w)", reply, re.IGNORECASE))
    if not matches:
        return None
    return int(env.action_space.start) + names.index(longest_first[(matches[-1].lastindex or 0) - 1])


def _text(env: Any, observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if env.render_mode == "ansi":
        player = re.sub(r"\x1b\[[0-9;]+m(.)\x1b\[0m", r"[\1]", env.render())  # in brackets for its colours
        return SGR.sub("", player).strip()
    return str(observation)


HEADING = re.compile(r"^ *#+ +(.+?) *$", re.MULTILINE)
SECTIONS = ("description", "rules", "action space", "observation space", "reward", "rewards", "episode end")
ARGUMENTS = re.compile(r"^(Args|Arguments|Parameters|Attributes)\b:?", re.MULTILINE)
LEGEND = re.compile(r"^ *- \"\S+\" .*$", re.MULTILINE)  # what the letters of a map mean
TAG = re.compile(r"<[^>]+>")


def rules_of(env: Any, *, named: bool, shown: bool) -> str:
    """Return ``metadata["rules"]`` of an environment, otherwise what its docstring says for a player.

    Leaves out the actions if they are `named`, and the observations if a text rendering of them is `shown`; the legend
    of the rendering is kept. Observations that the docstring does not explain are described by their space.
    """
    rules = str(env.metadata.get("rules") or _documented(type(env.unwrapped).__doc__ or "", named, shown))
    space = type(env.observation_space).__name__
    if not shown and space != "Text" and "observation" not in rules.lower():
        rules = f"{rules}\n\nAn observation is {in_words(env.observation_space)}."
    return rules.strip()


def in_words(space: Any) -> str:
    """Describe a space of Gymnasium; one of another kind is printed as Gymnasium prints it."""
    kind = type(space).__name__
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Tuple":
        return f"({', '.join(in_words(part) for part in space.spaces)})"
    if kind == "Dict":
        return ", ".join(f"{name!r}: {in_words(part)}" for name, part in space.spaces.items())
    return str(space)


def _documented(docstring: str, named: bool, shown: bool) -> str:
    text = TAG.sub("", inspect.cleandoc(docstring))
    summary, *rest = HEADING.split(text)
    hidden = {"action space": named, "observation space": shown}
    sections: Sequence[str] = [
        f"{title}:\n{inspect.cleandoc(body)}"
        for title, body in zip(rest[::2], rest[1::2], strict=True)
        if title.lower() in SECTIONS and not hidden.get(title.lower(), False)
    ]
    summary = ARGUMENTS.split(summary)[0].strip()
    legend = "\n".join(line.strip() for line in LEGEND.findall(text)) if shown else ""
    return "\n\n".join(filter(None, (summary, *sections, legend and f"The map:\n{legend}")))
