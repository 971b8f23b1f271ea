"""Environments of Gymnasium that can be played in words.

    rl4llm train configs/gymnasium_grpo.yaml env.task=FrozenLake-v1
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv, SampleState
from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.seeds import derive_seed
from rl4llm.core.types import ChatMessage
from rl4llm.envs.adapters.step_rewards import note_reward
from rl4llm.envs.registry import register_env

DEFAULT_LIMIT = 256
COLUMN = "gymnasium"
SGR = re.compile(r"\x1b\[[0-9;]*m")  # colours, in which text renderings show where the player is


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
    """The beginnings of episodes, each with a seed of its own; no two have the same, in both splits together.

    256 of them unless `limit` says otherwise. Raises ConfigError for an environment that is not there, or not for words.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data.split={split!r} is not accepted: train or test.")
    env = _make(task, task_options)
    try:
        names = _action_names(task, env, actions)
        system = _instructions(env, names) if instructions is None else instructions
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
            for number, seed in enumerate(_seeds(split, limit or DEFAULT_LIMIT, task, task_seed))
        ]
    finally:
        env.close()
    return rows


@register_env("gymnasium")
class GymnasiumEnv(BaseMDPEnv):
    """Plays an environment of Gymnasium: it shows its observations, the policy names an action in each turn.

    Observations are shown as they are where they are texts, as the environment renders itself in text ("ansi") where it
    does, else printed. Actions are texts, or the names of a finite set: the last one in a reply counts. A reply without
    one is answered with the names, and costs a turn. The steps' rewards are the reward `env_steps`. The metrics are
    `env/return` and `env/invalid_actions`.

    Args:
        task: its id, or ``module:id`` of one that a module registers.
        task_options: of ``gymnasium.make``.
        actions: names of a finite set of actions, in their order; by default numbers.
        instructions: the system message; by default it names the actions, "" leaves it out.
        task_seed: another one makes other episodes, in both splits.
    """

    default_rewards = ("env_steps",)
    prompts = staticmethod(gymnasium_prompts)

    def __init__(self, *args: Any, max_steps: int = 16, **kwargs: Any):
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        self._playing: dict[int, tuple[SampleState, Any]] = {}  # by id of the sample

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        env, names = self._env(sample), sample.columns[COLUMN]["actions"]
        metrics = sample.extras.setdefault("metrics", {"return": 0.0, "invalid_actions": 0})
        action = _action(env, names, sample.last_message.content)
        if action is None:
            metrics["invalid_actions"] += 1
            accepted = f"names no action. Actions: {', '.join(names)}" if names else f"is no action: {env.action_space}"
            return [ChatMessage("user", f"That {accepted}.")]
        observation, reward, terminated, truncated, _ = env.step(action)
        note_reward(sample, reward)
        metrics["return"] += float(reward)
        return [] if terminated or truncated else [ChatMessage("user", _shown(env, observation))]

    def end_episode(self, sample: SampleState) -> None:
        """Close the sample's own environment."""
        _, env = self._playing.pop(id(sample), (sample, None))
        if env is not None:
            env.close()

    def _env(self, sample: SampleState) -> Any:
        """The sample's own environment, which must begin as its prompt says."""
        if id(sample) not in self._playing:
            made = sample.columns[COLUMN]
            env = _make(made["task"], made["options"])
            self._playing[id(sample)] = (sample, env)
            first = _shown(env, env.reset(seed=made["seed"])[0])
            if first != sample.messages[sample.init_msg_size - 1].content:
                raise EnvError(f"{made['task']} begins otherwise than its prompt with the same seed: {first!r:.200}")
        return self._playing[id(sample)][1]


def _make(task: str, options: Mapping[str, Any] | None) -> Any:
    gymnasium = _import()
    options = dict(options or {})
    try:
        entry = gymnasium.spec(task).entry_point
        made = entry if callable(entry) else gymnasium.envs.registration.load_env_creator(entry)
        modes = getattr(made, "metadata", {}).get("render_modes", ())
        if "ansi" in modes:
            options.setdefault("render_mode", "ansi")
        return gymnasium.make(task, **options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"env.task={task!r} with env.task_options={options} cannot be made: {error}") from error


def _import() -> Any:
    try:
        import gymnasium  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("env.name='gymnasium' needs the package gymnasium: pip install 'rl4llm[gymnasium]'.") from error
    return gymnasium


def _action_names(task: str, env: Any, names: Sequence[str]) -> list[str]:
    """Of a finite set; none where actions are texts."""
    spaces = _import().spaces
    if isinstance(env.action_space, spaces.Text):
        return []
    if not isinstance(env.action_space, spaces.Discrete):
        raise ConfigError(f"env.task={task!r} has actions {env.action_space}; accepted are Discrete and Text.")
    start, count = int(env.action_space.start), int(env.action_space.n)
    chosen = list(names) or [str(start + number) for number in range(count)]
    if len(chosen) != count or len({name.lower() for name in chosen}) != count:
        raise ConfigError(f"env.actions={chosen} is not accepted: {count} different names, one for each action of {task}.")
    return chosen


def _instructions(env: Any, names: Sequence[str]) -> str:
    return " ".join(["Each of your turns is one action.", *([f"Actions: {', '.join(names)}."] if names else [])])


def _action(env: Any, names: Sequence[str], reply: str) -> Any:
    """What a reply asks for; None when that is no action."""
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
    """A text rendering with brackets in the place of colours."""
    return re.sub(r"\x1b\[[0-9;]+m(.)\x1b\[0m", r"[\1]", rendered)


def _seeds(split: str, count: int, task: str, task_seed: int) -> Iterator[int]:
    """Seeds that differ within a split, and between the splits by whether they are even."""
    seen: set[int] = set()
    number = 0
    while len(seen) < count:
        seed = derive_seed("gymnasium", task, task_seed, number) % 2**30 * 2 + (split == "test")
        number += 1
        if seed not in seen:
            seen.add(seed)
            yield seed
