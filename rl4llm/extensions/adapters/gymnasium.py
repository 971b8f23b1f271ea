"""Environments of Gymnasium that can be played as text.

rl4llm train configs/gymnasium_grpo.yaml env.task=FrozenLake-v1
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.schema import accepted_options, takes_any
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.adapters.gymnasium_rules import in_words, rules_of
from rl4llm.extensions.adapters.step_rewards import StepsEnv, note_reward
from rl4llm.runtime.seeds import derive_seed

DEFAULT_LIMIT = 256
COLUMN = "gymnasium"
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

    Returns 256 prompts unless `limit` is given. Raises ConfigError for an environment that does not exist or is not
    playable as text.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data.split={split!r} is not accepted. Accepted: train, test.")
    env = _make(task, task_options)
    try:
        names = _action_names(task, env, actions)
        system = _instructions(env, names, bool(actions)) if instructions is None else instructions
        seeds = [
            derive_seed("gymnasium", task, task_seed, number) for number in range(limit or DEFAULT_LIMIT)
        ]
        rows = [
            {
                "prompt_id": f"{task}-{split}-{number}",
                "messages": [
                    *([{"role": "system", "content": system}] if system else []),
                    {"role": "user", "content": _shown(env, env.reset(seed=seed)[0])},
                ],
                "ground_truth": None,
                COLUMN: {"task": task, "options": dict(task_options or {}), "actions": names, "seed": seed},
            }
            for number, seed in enumerate(seed % 2**30 * 2 + (split == "test") for seed in seeds)
        ]
    finally:
        env.close()
    return rows


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

    def make(self, made: Mapping[str, Any]) -> Any:
        return _make(made["task"], made["options"])

    def begin(self, env: Any, made: Mapping[str, Any]) -> list[str]:
        return [_shown(env, env.reset(seed=made["seed"])[0])]

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        env, names = self.playing(sample), sample.columns[COLUMN]["actions"]
        metrics = sample.extras.setdefault("metrics", {"return": 0.0, "invalid_actions": 0})
        action = _action(env, names, sample.last_message.content)
        if action is None:
            metrics["invalid_actions"] += 1
            accepted = (
                f"names no action. Actions: {', '.join(names)}"
                if names
                else f"is not an action. An action is {in_words(env.action_space)}"
            )
            return [ChatMessage("user", f"That {accepted}.")]
        observation, reward, terminated, truncated, _ = env.step(action)
        note_reward(sample, reward)
        return [] if terminated or truncated else [ChatMessage("user", _shown(env, observation))]


def _make(task: str, options: Mapping[str, Any] | None) -> Any:
    gymnasium = _import()
    options = dict(options or {})
    try:
        entry = gymnasium.spec(task).entry_point
        made = entry if callable(entry) else gymnasium.envs.registration.load_env_creator(entry)
        modes = getattr(made, "metadata", {}).get("render_modes", ())
        _check_options(gymnasium, made, options)
        if "ansi" in modes:
            options.setdefault("render_mode", "ansi")
        return gymnasium.make(task, **options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"env.task={task!r} with env.task_options={options} cannot be made: {error}"
        ) from error


def _check_options(gymnasium: Any, made: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that neither the environment nor `gymnasium.make` accepts."""
    accepted = (accepted_options(made) | accepted_options(gymnasium.make)) - {"id"}
    for name in options:
        if name not in accepted and not takes_any(made):
            raise ConfigError(unknown("env.task_options: the option", name, accepted))


def _instructions(env: Any, names: Sequence[str], named: bool) -> str:
    rules = rules_of(env, named=named, shown=env.render_mode == "ansi")
    actions = f"Actions: {', '.join(names)}" if names else f"An action is {in_words(env.action_space)}"
    return f"{rules}\n\nEach of your turns is one action. {actions}.".lstrip()


def _import() -> Any:
    try:
        import gymnasium  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "env.name='gymnasium' needs the package gymnasium: pip install 'rl4llm[gymnasium]'."
        ) from error
    return gymnasium


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


def _action(env: Any, names: Sequence[str], reply: str) -> Any:
    """Return the action in a reply, or None if there is none."""
    if not names:
        text = reply.strip()
        return text if env.action_space.contains(text) else None
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", reply, re.IGNORECASE)
    if not found:
        return None
    lower = [name.lower() for name in names]
    return int(env.action_space.start) + lower.index(found[-1].lower())


def _shown(env: Any, observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    if env.render_mode == "ansi":
        return SGR.sub("", _marked(env.render())).strip()
    return str(observation)


def _marked(rendered: str) -> str:
    """Replace the colours of a text rendering by brackets."""
    return re.sub(r"\x1b\[[0-9;]+m(.)\x1b\[0m", r"[\1]", rendered)
