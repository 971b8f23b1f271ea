"""Environments of the library verifiers, played by its own rollouts in a separate Python environment.

    rl4llm train configs/verifiers_grpo.yaml env.python=../verifiers/bin/python env.task=my_tasks

The library's dependencies conflict with the trainer's, so it is installed separately: `env.python` is the Python of
that environment. It needs nothing of rl4llm, and verifiers 0.4.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4llm.core.base_env import SampleState
from rl4llm.core.base_reward import BaseBatchReward
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import from_extension
from rl4llm.extensions.adapters.prompts import check_split, prompt_row
from rl4llm.rewards.pool import RewardFailure

RUNNER = Path(__file__).resolve().with_name("_verifiers.py")
COLUMN = "verifiers"
DEFAULT_LIMIT = 1024
AGENT_ENV: Any = from_extension("agent_env", "env.name='verifiers'")
RUN_TIMEOUT_S = 300.0  # tasks may have to be downloaded


def verifiers_prompts(
    split: str, limit: int | None = None, *, task: str, python: str, options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the tasks of a set in its order: 1024 unless `limit` is given, fewer if it has fewer.

    One prompt in ten is held out for the split "test", chosen by its text alone. Raises ConfigError for tasks that
    cannot be listed.
    """
    check_split(split)
    request = {"split": split, "limit": DEFAULT_LIMIT if limit is None else limit}
    command = _command("list", task, python, options, 1)
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode:
        raise ConfigError(f"env.task={task!r} cannot be listed by {python}: {done.stderr.strip()[-2000:]}")
    rows = json.loads(done.stdout)
    if not rows:
        raise ConfigError(
            f"env.task={task!r} has no task for the split {split!r}, since one prompt in ten is held out. Next: "
            "use eval.every=0, with the split that has tasks, or give the set more tasks."
        )
    return [prompt_row(f"{task}-{row['number']}", None, row.pop("messages"), verifiers=row) for row in rows]


class VerifiersEnv(AGENT_ENV):
    """Lets verifiers play its rollouts against the policy, as an agent: one process per episode, exact tokens.

    The reward `verifiers` is the reward of verifiers; its parts and metrics are logged as `env/<name>`. An episode that
    verifiers does not score, for example because a tool broke, fails (`agent/crashed`). One that hit a limit is scored
    as far as it got. For a set of tasks without a harness, verifiers' plain chat loop is used with the tasks' tools; the
    commands of other harnesses run with the rights of this process. Scripts of a harness run with `python` where it has
    their packages, else verifiers makes an environment for them with uv.
    Loading verifiers takes seconds of one core per episode: set `env.processes` to the number of cores.

    Args:
        task: the verifiers name of the set of tasks, a module with a `Taskset` in its `__all__`.
        python: the interpreter of the environment with verifiers.
        options: further configuration of verifiers' environment, such as ``{"taskset": {...}, "agent": {...}}``.
            Its judges need a separate URL and key: `env.env` sets variables for them.
        max_steps: maximum number of turns of an episode.
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
        home = {"HOME": os.path.expanduser("~"), **(kwargs.pop("env", None) or {})}  # its caches are there
        super().__init__(*args, command=command, max_steps=max_steps, env=home, **kwargs)

    def _conclude(self, sample: SampleState, session: Any, outcome: Any) -> None:
        verdict = None
        if outcome is not None and outcome.crash is None:
            verdict = _verdict(outcome.output)
            outcome = type(outcome)(
                crash=None if verdict else f"it returned no reward: {outcome.output!r:.200}"
            )
        super()._conclude(sample, session, outcome)
        if verdict is not None:
            sample.extras[COLUMN] = verdict
            parts = {**verdict["metrics"], **verdict["rewards"]}
            sample.extras["metrics"] = {**parts, **sample.extras["metrics"]}


class VerifiersReward(BaseBatchReward):
    """The reward that verifiers gave an episode of the environment `verifiers`: the weighted sum of its parts."""

    def __init__(self, name: str = "verifiers"):
        super().__init__(name)

    def score_batch(self, samples: Sequence[SampleState]) -> list[float | RewardFailure]:
        """Return one score per sample, or a RewardFailure for a sample that verifiers did not score."""
        verdicts = [sample.extras.get(COLUMN, {}) for sample in samples]
        return [verdict.get("reward", RewardFailure("verifiers gave no reward")) for verdict in verdicts]


def _command(
    verb: str, task: str, python: str, options: Mapping[str, Any] | None, max_turns: int
) -> list[str]:
    # an agent's command has a directory of its own, in which the task's package is not
    directory = os.getcwd()
    chosen = {"task": task, "options": dict(options or {}), "max_turns": max_turns, "directory": directory}
    return [str(python), "-P", str(RUNNER), verb, json.dumps(chosen)]


def _verdict(output: str) -> dict[str, Any] | None:
    """Return the runner's output as a verdict, or None if it is not one."""
    try:
        verdict = json.loads(output)
        return verdict if math.isfinite(verdict["reward"]) else None
    except (ValueError, TypeError, KeyError):
        return None
