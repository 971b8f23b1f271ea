"""Reasoning tasks of the library reasoning-gym: about a hundred, by name, with prompts and verifiers of their own.

    rl4llm train configs/reasoning_gym_grpo.yaml env.task=countdown
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.core.seeds import derive_seed
from rl4llm.envs.chat import ChatEnv
from rl4llm.envs.registry import register_env
from rl4llm.rewards.pool import Fault, Unavailable, VerifierPool
from rl4llm.rewards.reasoning import COLUMN, VERIFIER

SYSTEM = "Think step by step. Then write the final answer, and nothing else, between <answer> and </answer>."
DEFAULT_LIMIT = 1024
HELD_OUT_SHARE = 10  # one problem in this many is held out
TRIES = 20  # problems that are made for each that is wanted, until a task counts as exhausted


def reasoning_prompts(
    split: str, limit: int | None = None, *, task: str, task_options: Mapping[str, Any] | None = None, task_seed: int = 0
) -> list[dict[str, Any]]:
    """Distinct problems of a task, 1024 unless `limit` says otherwise; fewer where a task has fewer.

    The splits share none: which one a problem belongs to is decided by its question alone. `task_options` are those of the
    library for this task, such as ``{"min_numbers": 3}``. Raises ConfigError for names, options and splits it cannot be.
    """
    if split not in ("train", "test"):
        raise ConfigError(unknown("data.split", split, ("train", "test")))
    limit = DEFAULT_LIMIT if limit is None else limit
    if limit < 1:
        raise ConfigError(f"data.limit={limit} is not accepted: at least 1, or null for {DEFAULT_LIMIT} generated prompts.")
    options = json.dumps({**(task_options or {}), "seed": derive_seed("reasoning_gym", task_seed) % 2**31}, sort_keys=True)
    rows: dict[str, dict[str, Any]] = {}
    for number, problem in enumerate(_problems(task, options, limit)):
        question = problem["question"]
        if (derive_seed("reasoning_gym", question) % HELD_OUT_SHARE == 0) == (split == "test") and question not in rows:
            rows[question] = {
                "prompt_id": f"{task}-{split}-{len(rows)}",
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
                "ground_truth": problem["answer"],
                COLUMN: {"task": task, "options": options, "number": number, "question": question},
            }
        if len(rows) == limit:
            break
    if not rows:
        raise ConfigError(f"env.task={task!r} has no problem for the split {split!r}.")
    return list(rows.values())


@register_env("reasoning_gym")
class ReasoningGymEnv(ChatEnv):
    """One problem, one answer, judged by the verifier of the task.

    Args:
        task: the library's name of it.
        task_options: its own options.
        task_seed: of its problems; another one makes others, in both splits.
    """

    default_rewards = ("reasoning_gym",)
    prompts = staticmethod(reasoning_prompts)


def _problems(task: str, options: str, limit: int) -> Iterator[dict[str, Any]]:
    """Questions and answers, made a batch at a time in a worker, as many as `limit` distinct ones may take."""
    pool = VerifierPool(f"{VERIFIER}:problem", workers=1, timeout_s=60.0, memory_bytes=2 * 1024**3)
    try:
        batch = max(limit, HELD_OUT_SHARE)
        for start in range(0, TRIES * batch, batch):
            for made in pool.map([[task, options, number] for number in range(start, start + batch)]):
                yield _checked(task, options, made)
    finally:
        pool.close()


def _checked(task: str, options: str, made: Any) -> dict[str, Any]:
    """What a worker made; ConfigError where it made no problem."""
    if isinstance(made, Unavailable):
        raise ConfigError(
            f"env.name='reasoning_gym' needs the package reasoning-gym: {made.reason}. Next step: pip install "
            "'rl4llm[reasoning]'"
        )
    if isinstance(made, Fault):
        raise ConfigError(f"env.task={task!r} makes no problem with env.task_options and seed {options}: {made.reason}")
    if "known" in made:
        raise ConfigError(unknown("env.task", task, made["known"]))
    return made
