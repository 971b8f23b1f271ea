"""Environments written for verifiers before 0.4: a module with `load_environment`; `_verifiers.py` loads this file."""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import pickle
import sys
import zlib
from collections.abc import Iterator
from typing import Any

try:
    from openai import AsyncOpenAI, BadRequestError
    from verifiers import load_environment
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError
except (ImportError, AttributeError) as error:
    sys.exit(
        f"{sys.executable} has no verifiers for an environment with `load_environment`: {error}. "
        "Next step: pip install 'verifiers>=0.1.14,<0.4' there."
    )

GATEWAY = {name: os.environ.pop(name, "") for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY")}  # not for judges
UNSENT = ("client", "usage", "usage_tracker")  # of a state; the others score it


class PolicyClient(OpenAIChatCompletionsClient):
    """verifiers' client, for which an empty answer is an answer, and a full context ends the rollout."""

    async def raise_from_native_response(self, response: Any) -> None:
        """Do nothing: the base class refuses an empty answer."""

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().get_native_response(*args, **kwargs)
        except BadRequestError as error:
            if error.code == "context_length_exceeded":
                raise OverlongPromptError from error
            raise


class _Faults(logging.Handler):
    """What verifiers logs instead of raising it: a reward function that raised would count as 0."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger("verifiers").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "reward function" in record.getMessage():
            self.lines.append(record.getMessage())


def environment(task: str, options: dict[str, Any], max_turns: int) -> Any:
    """Return the environment; `options` are the arguments of its `load_environment`.

    Raises ValueError for one that is not a chat, or that computes advantages.
    """
    env = load_environment(task, **options)
    if getattr(env, "message_type", "chat") != "chat":
        raise ValueError("it completes plain text (message_type='completion'); only chats are played")
    if any(each.provides_advantages for each in _all(env)):
        raise ValueError("its rubric computes advantages, but env.name=verifiers takes only rewards")
    for each in _all(env):
        given = getattr(each, "max_turns", -1)
        each.max_turns = min(given, max_turns) if given > 0 else max_turns
    return env


def listed(env: Any, split: str, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the tasks with their rows, which may differ the next time that the environment is loaded.

    Tasks of an environment with a separate set for evaluation name their split. Raises ValueError for a row that is not
    JSON.
    """
    data, evaluated = env.build_dataset(), env.build_eval_dataset()
    if data is None:
        data, evaluated = evaluated, None
    held_out = evaluated.to_list() if evaluated is not None else []
    kept = {json.dumps(row["prompt"], default=str) for row in held_out}
    train = [row for row in data.to_list() if json.dumps(row["prompt"], default=str) not in kept]
    for number, row in enumerate([*train, *held_out]):
        named = {"split": "train" if number < len(train) else "test"} if held_out else {}
        try:
            yield {"messages": _messages(row), "number": number, "row": json.loads(json.dumps(row))} | named
        except TypeError as error:
            raise ValueError(f"a row is not JSON: {error}: {row!r:.200}") from error


async def played(env: Any, made: dict[str, Any]) -> dict[str, Any]:
    """Play one rollout of a task; return its rewards, or its state if verifiers scores whole groups."""
    client = AsyncOpenAI(
        base_url=GATEWAY["OPENAI_BASE_URL"], api_key=GATEWAY["OPENAI_API_KEY"], timeout=None, max_retries=0
    )
    state = await env.rollout(made["row"], PolicyClient(client), "policy", {})
    if state.get("error") is not None:
        raise RuntimeError(f"the rollout failed in verifiers: {state['error']!r}")
    if any(each.requires_group_rollouts for each in _all(env)):
        for name in UNSENT:
            state.pop(name, None)
        return {"group": _packed(state)}
    return (await _scored(env, [state]))[0]


async def scored(env: Any, groups: list[list[str]]) -> list[list[dict[str, Any]]]:
    """Return the rewards of the rollouts of each task, or why they `failed`, from what `played` returned for them."""
    result: list[list[dict[str, Any]]] = []
    for group in groups:
        states = [pickle.loads(zlib.decompress(base64.b64decode(state))) for state in group]
        try:
            result.append(await _scored(env, states))
        except RuntimeError as error:
            result.append([{"failed": str(error)}] * len(states))
    return result


async def _scored(env: Any, states: list[Any]) -> list[dict[str, Any]]:
    faults = _Faults()
    await env.rubric.score_group(states)
    for state in states:
        await env.rubric.cleanup(state)
    if faults.lines:
        raise RuntimeError("; ".join(faults.lines))
    for state in states:
        if not math.isfinite(state["reward"]):
            raise RuntimeError(f"verifiers returned no finite reward but {state['metrics']}")
    return [
        {
            "reward": state["reward"],
            "rewards": {},
            "metrics": {name: value for name, value in state["metrics"].items() if math.isfinite(value)},
            "stop": state.get("stop_condition"),
        }
        for state in states
    ]


def _all(env: Any) -> list[Any]:
    """Return the environment, and those that it consists of."""
    return [env, *getattr(env, "envs", ())]


def _packed(state: Any) -> str:
    try:
        return base64.b64encode(zlib.compress(pickle.dumps(state))).decode()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"its rewards compare episodes, but their states cannot be sent: {error}") from error


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(row["prompt"], list) or not row["prompt"]:
        raise ValueError(f"a prompt is not a list of messages: {row['prompt']!r:.200}")
    return [
        {name: value for name, value in message.items() if value is not None} for message in row["prompt"]
    ]
