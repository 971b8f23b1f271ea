"""Environments of OpenEnv: programs that are reset and stepped over a WebSocket, on any machine.

    rl4llm train configs/openenv_grpo.yaml env.url=http://127.0.0.1:8000

The package is called openenv; it was called openenv-core before.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, EnvError, unknown
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.adapters.step_rewards import StepsEnv, note_reward
from rl4llm.runtime.seeds import derive_seed

DEFAULT_LIMIT = 64
CONNECT_TIMEOUT_S = 10.0
COLUMN = "openenv"
NOT_SHOWN = ("done", "reward", "metadata")
THE_POLICYS_FAULT = ("VALIDATION_ERROR", "INVALID_JSON")


def openenv_prompts(
    split: str,
    limit: int | None = None,
    *,
    url: str,
    instructions: str = "",
    observation: str | None = None,
    reset_options: Mapping[str, Any] | None = None,
    task_seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the first observations of episodes as prompts. Each has a different seed, also across the two splits.

    Returns 64 prompts unless `limit` is given. Raises ConfigError if the server is not available.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data.split={split!r} is not accepted. Accepted: train, test.")
    client = _connected(url)
    rows = []
    try:
        for number in range(limit or DEFAULT_LIMIT):
            seed = derive_seed("openenv", task_seed, number) % 2**30 * 2 + (split == "test")
            made = {"seed": seed, "options": dict(reset_options or {})}
            begin = _shown(client.reset(seed=seed, **(reset_options or {})).observation, observation)
            system = [{"role": "system", "content": instructions}] if instructions else []
            messages = [*system, {"role": "user", "content": begin}]
            rows.append(
                {"prompt_id": f"{split}-{number}", "messages": messages, "ground_truth": None, COLUMN: made}
            )
    except (RuntimeError, OSError, TimeoutError) as error:
        raise ConfigError(f"env.url={url}: the environment could not be reset: {error}") from error
    finally:
        client.close()
    return rows


class OpenEnv(StepsEnv):
    """Plays an environment of OpenEnv: the policy sees its observations, and each reply is an action.

    If actions have exactly one required text field, the reply itself is the action; otherwise the JSON object in the
    reply is. An action that the server refuses costs a turn and is answered with the reason. The rewards of the steps
    are the reward `env_steps`. The metrics are `env/return` and `env/invalid_actions`. Each episode opens its own
    connection, so the server must allow as many sessions (`max_concurrent_envs`) as episodes run at once.

    Options:
        url: URL of the server.
        instructions: a system message; the server does not explain the task.
        observation: the field of observations to show; by default their only text field, else all fields as JSON.
        action: the field of actions that a reply goes into; by default the only required text field.
        reset_options: further fields of a reset, beside the seed. The server ignores those that its environment lacks.
        task_seed: seed of the episodes of both splits.
        message_timeout_s: seconds that the server may take for a step.
    """

    made_from = COLUMN
    prompts = staticmethod(openenv_prompts)

    def __init__(
        self,
        *args: Any,
        url: str,
        observation: str | None = None,
        action: str | None = None,
        max_steps: int = 8,
        message_timeout_s: float = 60.0,
        **kwargs: Any,
    ):
        self.url, self.observation, self.message_timeout_s = url, observation, message_timeout_s
        self.respond_timeout_s = 2 * message_timeout_s + CONNECT_TIMEOUT_S  # a first turn resets, and steps
        self.action, self.fields = _action_fields(url, action)
        super().__init__(*args, **kwargs | {"max_steps": max_steps})

    def make(self, made: Mapping[str, Any]) -> Any:
        return _connected(self.url, self.message_timeout_s)

    def begin(self, env: Any, made: Mapping[str, Any]) -> list[str]:
        return [_shown(env.reset(seed=made["seed"], **made["options"]).observation, self.observation)]

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        metrics = sample.extras.setdefault("metrics", {"return": 0.0, "invalid_actions": 0})
        client = self.playing(sample)
        try:
            result = client.step(self._action(sample.last_message.content))
        except _NoActionError as error:
            metrics["invalid_actions"] += 1
            return [ChatMessage("user", f"Error: {error}")]
        except RuntimeError as error:
            if not any(f"(code: {code})" in str(error) for code in THE_POLICYS_FAULT):
                raise EnvError(f"{self.url}: {error}") from error
            metrics["invalid_actions"] += 1
            return [ChatMessage("user", f"Error: {error}")]
        note_reward(sample, result.reward or 0.0)
        return [] if result.done else [ChatMessage("user", _shown(result.observation, self.observation))]

    def end_episode(self, sample: SampleState) -> None:
        """Close the connection in a thread, since the server may take long to close it."""
        threading.Thread(
            target=super().end_episode, args=(sample,), name="rl4llm-openenv-close", daemon=True
        ).start()

    def _action(self, reply: str) -> dict[str, Any]:
        if self.action is not None:
            return {self.action: reply.strip()}
        found = re.search(r"\{.*\}", reply, re.DOTALL)
        try:
            action = json.loads(found.group()) if found else None
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise _NoActionError(f"an action is a JSON object with {', '.join(self.fields)}")
        return action


class _NoActionError(Exception):
    """A reply without an action."""


def _connected(url: str, message_timeout_s: float = 60.0) -> Any:
    try:
        from openenv.core import GenericEnvClient  # noqa: PLC0415 - installed in a separate environment
    except ImportError as error:
        raise ConfigError(
            "env.name='openenv' needs the package openenv, whose dependencies conflict with the trainer's. Run pip install "
            "'rl4llm[openenv,remote]' in a separate environment, and host it from there: rl4llm serve env --env openenv."
        ) from error
    client = GenericEnvClient(
        base_url=url, connect_timeout_s=CONNECT_TIMEOUT_S, message_timeout_s=message_timeout_s
    ).sync()
    try:
        return client.connect()
    except (OSError, ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise ConfigError(f"env.url={url}: cannot connect to an OpenEnv server: {error}") from error


def _action_fields(url: str, chosen: str | None) -> tuple[str | None, list[str]]:
    """Return the field that replies go into (None if there is none) and all fields of an action, from the server's
    schema.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=CONNECT_TIMEOUT_S) as answer:
            schema = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"env.url={url}: the server returned no schema of its actions: {error}") from error
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    if chosen is not None:
        if chosen not in properties:
            raise ConfigError(unknown("env.action", chosen, properties))
        return chosen, list(properties)
    needed = [name for name in schema.get("required", ()) if name in properties]
    texts = [name for name in needed if properties[name].get("type") == "string"]
    return (texts[0] if len(texts) == len(needed) == 1 else None), list(properties)


def _shown(observation: Mapping[str, Any], field: str | None) -> str:
    shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
    if field is not None:
        if field not in shown:
            raise ConfigError(unknown("env.observation", field, shown))
        value = shown[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    texts = [value for value in shown.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(shown) == 1 else json.dumps(shown, ensure_ascii=False)
