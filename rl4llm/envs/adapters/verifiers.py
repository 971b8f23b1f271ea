"""Environments of the library verifiers, played by its own rollouts in an environment of its own.

    rl4llm train configs/verifiers_grpo.yaml env.python=../verifiers/bin/python env.task=my_tasks

The library wants other versions of other packages than the trainer does, so that it is installed elsewhere: `env.python` is
the Python of there. It needs verifiers 0.4, and nothing of rl4llm.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import BaseRewardFunction, SampleState
from rl4llm.core.errors import ConfigError
from rl4llm.core.types import ChatMessage
from rl4llm.envs.agent import AgentEnv
from rl4llm.envs.agent.runs import Outcome
from rl4llm.envs.agent.session import Session
from rl4llm.envs.registry import register_env
from rl4llm.rewards.pool import RewardFailure
from rl4llm.rewards.registry import register_reward

RUNNER = Path(__file__).resolve().with_name("_verifiers.py")
COLUMN = "verifiers"
DEFAULT_LIMIT = 1024
LIST_TIMEOUT_S = 300.0  # a set of tasks may have to be downloaded


def verifiers_prompts(
    split: str, limit: int | None = None, *, task: str, python: str, options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The tasks of a set, in its order, 1024 unless `limit` says otherwise; fewer where it has fewer.

    One prompt in ten is held out for the split "test", by its text alone. Raises ConfigError for what cannot be listed.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"data.split={split!r} is not accepted: train or test.")
    limit = DEFAULT_LIMIT if limit is None else limit
    if limit < 1:
        raise ConfigError(f"data.limit={limit} is not accepted: at least 1, or null for {DEFAULT_LIMIT}.")
    rows = _listed(_command("list", task, python, options, 1), {"split": split, "limit": limit})
    if not rows:
        raise ConfigError(
            f"env.task={task!r} has no task for the split {split!r}, which gets one prompt in ten if it is test."
        )
    return [
        {
            "prompt_id": f"{task}-{row['number']}",
            "messages": row["messages"],
            "ground_truth": None,
            COLUMN: {"number": row["number"], "hash": row["hash"]},
        }
        for row in rows
    ]


@register_env("verifiers")
class VerifiersEnv(AgentEnv):
    """Has verifiers play its rollouts against the policy, as an agent: a process for each episode, exact tokens.

    The reward `verifiers` is what verifiers gives, its parts and metrics are logged as `env/<name>`. An episode that it does
    not score, as one in which something but the model broke, fails (`agent/crashed`); one that ran into a limit is scored as
    far as it came. Where a set of tasks brings no harness of its own, verifiers' plain chat loop is used, with the tasks'
    tools. Loading verifiers takes seconds of one core for each episode: give `env.processes` what the machine has.

    Args:
        task: the name that verifiers has for the set of tasks, of a module with a `Taskset` in its `__all__`.
        python: the interpreter that verifiers is installed for.
        options: further configuration of verifiers' environment, such as ``{"taskset": {...}, "agent": {...}}``.
        max_steps: turns of an episode.
    """

    default_rewards = ("verifiers",)
    prompts = staticmethod(verifiers_prompts)

    def __init__(
        self,
        *args: Any,
        task: str,
        python: str,
        options: Mapping[str, Any] | None = None,
        max_steps: int = 32,
        **kwargs: Any,
    ):
        command = _command("play", task, python, options, max_steps)
        super().__init__(*args, command=command, max_steps=max_steps, **kwargs)

    def _conclude(self, sample: SampleState, session: Session, outcome: Outcome | None) -> None:
        verdict = None
        if outcome is not None and outcome.crash is None:
            verdict = _verdict(outcome.output)
            outcome = Outcome(crash=None if verdict else f"it told no reward: {outcome.output!r:.200}")
        super()._conclude(sample, session, outcome)
        sample.extras[COLUMN] = verdict
        if verdict is not None:
            sample.extras["metrics"] = {**verdict["metrics"], **verdict["rewards"], **sample.extras["metrics"]}


@register_reward("verifiers")
class VerifiersReward(BaseRewardFunction):
    """The reward that verifiers gave for an episode of the environment `verifiers`, the weighted sum of its parts."""

    def __init__(self, name: str = "verifiers"):
        super().__init__(name)

    def __call__(self, messages: Sequence[ChatMessage], ground_truth: Any, **kwargs: Any) -> float:
        raise RewardFailure("the reward 'verifiers' is known for whole episodes of env.name=verifiers only")

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """One score per sample; a RewardFailure stands where verifiers gave none."""
        verdicts = [sample.extras.get(COLUMN) for sample in samples]
        return [verdict["reward"] if verdict else RewardFailure("verifiers gave no reward") for verdict in verdicts]


def _command(verb: str, task: str, python: str, options: Mapping[str, Any] | None, max_turns: int) -> list[str]:
    if not isinstance(task, str) or not task:
        raise ConfigError(f"env.task={task!r} is not accepted: the name of a set of tasks of verifiers.")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"env.options={options!r} is not accepted: a mapping, such as {{taskset: {{split: train}}}}.")
    chosen = {"task": task, "options": dict(options or {}), "max_turns": max_turns}
    return [str(python), "-P", str(RUNNER), verb, json.dumps(chosen)]


def _listed(command: Sequence[str], what: Mapping[str, Any]) -> list[dict[str, Any]]:
    where = f"env.python={command[0]!r}"
    try:
        done = subprocess.run(command, input=json.dumps(what), capture_output=True, text=True, timeout=LIST_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{where}: the tasks were not listed within {LIST_TIMEOUT_S:g} s.") from error
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be started: {error}. Next step: python -m venv ../verifiers && ../verifiers/bin/pip install "
            "'verifiers>=0.4', and env.python=../verifiers/bin/python."
        ) from error
    if done.returncode:
        raise ConfigError(f"{where} lists no tasks: {done.stderr.strip()[-2000:] or f'exit code {done.returncode}'}")
    return json.loads(done.stdout)


def _verdict(output: str) -> dict[str, Any] | None:
    """What the runner told, if it is a verdict."""
    try:
        verdict = json.loads(output)
        return verdict if math.isfinite(verdict["reward"]) else None
    except (ValueError, TypeError, KeyError):
        return None
