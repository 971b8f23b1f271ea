"""Environments of OpenEnv: programs that are reset and stepped over a WebSocket, on any machine.

    rl4llm train configs/openenv_grpo.yaml env.url=http://127.0.0.1:8000

The package is called openenv; it was called openenv-core before.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, EnvError, unknown
from rl4llm.core.registry import needed
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.adapters.prompts import prompt_row, seeds_of, user
from rl4llm.extensions.adapters.step_rewards import StepsEnv, invalid, note_reward

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

    Returns 64 prompts unless `limit` is given.
    """
    options = dict(reset_options or {})
    with closing(_connected(url)) as client:
        return [
            prompt_row(
                f"{split}-{number}",
                instructions,
                [user(_text(client.reset(seed=seed, **options).observation, observation))],
                openenv={"seed": seed, "options": options},
            )
            for number, seed in enumerate(seeds_of(split, limit or DEFAULT_LIMIT, COLUMN, task_seed))
        ]


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

    def make(self, column: Mapping[str, Any]) -> Any:
        return _connected(self.url, self.message_timeout_s)

    def begin(self, env: Any, column: Mapping[str, Any]) -> list[str]:
        return [_text(env.reset(seed=column["seed"], **column["options"]).observation, self.observation)]

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        sample.extras.setdefault("metrics", {"return": 0.0, "invalid_actions": 0})
        client, action = self.playing(sample), self._action(sample.last_message.content)
        if action is None:
            return invalid(sample, f"Error: an action is a JSON object with {', '.join(self.fields)}")
        try:
            result = client.step(action)
        except RuntimeError as error:
            if not any(f"(code: {code})" in str(error) for code in THE_POLICYS_FAULT):
                raise EnvError(f"{self.url}: {error}") from error
            return invalid(sample, f"Error: {error}")
        note_reward(sample, result.reward or 0.0)
        return [] if result.done else [ChatMessage("user", _text(result.observation, self.observation))]

    def end_episode(self, sample: SampleState) -> None:
        """Close the connection in a thread, since the server may take long to close it."""
        threading.Thread(
            target=super().end_episode, args=(sample,), name="rl4llm-openenv-close", daemon=True
        ).start()

    def _action(self, reply: str) -> dict[str, Any] | None:
        if self.action is not None:
            return {self.action: reply.strip()}
        try:
            action = json.loads(reply[reply.index("{") : reply.rindex("}") + 1])
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None


def _connected(url: str, message_timeout_s: float = 60.0) -> Any:
    # Its dependencies conflict with the trainer's.
    what = "env.name='openenv', hosted from a separate environment with `rl4llm serve env`,"
    client = needed("openenv.core", what, "openenv,remote").GenericEnvClient(
        base_url=url, connect_timeout_s=CONNECT_TIMEOUT_S, message_timeout_s=message_timeout_s
    )
    return client.sync().connect()


def _action_fields(url: str, chosen: str | None) -> tuple[str | None, list[str]]:
    """Return the field that replies go into, None if there is none, and all fields of an action, as the server says."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=CONNECT_TIMEOUT_S) as answer:
        schema = json.load(answer)["action"]
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    if chosen is not None and chosen not in properties:  # the server would refuse each action of the policy
        raise ConfigError(unknown("env.action", chosen, properties))
    required = [name for name in schema.get("required", ()) if name in properties]
    texts = [name for name in required if properties[name].get("type") == "string"]
    return chosen or (texts[0] if len(texts) == len(required) == 1 else None), list(properties)


def _text(observation: Mapping[str, Any], field: str | None) -> str:
    fields = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
    texts = [value for value in fields.values() if isinstance(value, str)]
    value = fields[field] if field else texts[0] if len(texts) == len(fields) == 1 else fields
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
