"""About a hundred reasoning tasks of the library reasoning-gym, with their prompts and verifiers.

rl4llm train configs/reasoning_gym_grpo.yaml env.task=countdown
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from rl4llm.core.errors import ConfigError
from rl4llm.envs.chat import ChatEnv
from rl4llm.extensions.adapters.prompts import check_split, prompt_row, user
from rl4llm.extensions.adapters.reasoning_reward import VERIFIER
from rl4llm.rewards.pool import Fault, Unavailable, VerifierPool
from rl4llm.runtime.seeds import derive_seed

SYSTEM = "Think step by step. Then write the final answer, and nothing else, between <answer> and </answer>."
DEFAULT_LIMIT = 1024
HELD_OUT_SHARE = 10  # one problem in this many is held out
TRIES = 20  # problems to make for each one requested before a task counts as exhausted


def reasoning_prompts(
    split: str,
    limit: int | None = None,
    *,
    task: str,
    task_options: Mapping[str, Any] | None = None,
    task_seed: int = 0,
    system_prompt: str | None = SYSTEM,
) -> list[dict[str, Any]]:
    """Return distinct problems of a task: 1024 unless `limit` is given, fewer if the task has fewer.

    The splits share no problem: the split of a problem depends on its question alone. `task_options` are the library's
    options for this task, such as ``{"min_numbers": 3}``. Without a `system_prompt` (None or "") the question is the only
    message. Raises ConfigError for unknown names, options and splits.
    """
    check_split(split)
    limit = DEFAULT_LIMIT if limit is None else limit
    options = json.dumps(
        {**(task_options or {}), "seed": derive_seed("reasoning_gym", task_seed) % 2**31}, sort_keys=True
    )
    rows: dict[str, dict[str, Any]] = {}
    for number, problem in enumerate(_problems(task, options, limit)):
        question = problem["question"]
        held_out = derive_seed("reasoning_gym", question) % HELD_OUT_SHARE == 0
        if held_out == (split == "test") and question not in rows:
            column = {"task": task, "options": options, "number": number, "question": question}
            column["evaluates"] = problem["evaluates"]
            row = prompt_row(f"{task}-{split}-{len(rows)}", system_prompt, [user(question)], reasoning=column)
            rows[question] = row | {"ground_truth": problem["answer"]}
        if len(rows) == limit:
            break
    if not rows:
        raise ConfigError(f"env.task={task!r} has no problem for the split {split!r}.")
    return list(rows.values())


class ReasoningGymEnv(ChatEnv):
    """One problem, one answer, scored by the verifier of the task.

    Options:
        task: the library's name of the task.
        task_options: the library's options of the task.
        task_seed: seed of the problems of both splits.
        system_prompt: text before each question; by default it asks for <answer> tags. See `extract` of the reward.
    """

    default_rewards = ("reasoning_gym",)
    prompts = staticmethod(reasoning_prompts)


def _problems(task: str, options: str, limit: int) -> Iterator[dict[str, Any]]:
    """Make questions and answers in a worker, a batch at a time, until `limit` distinct ones should be found."""
    pool = VerifierPool(f"{VERIFIER}:problem", workers=1, timeout_s=60.0, memory_bytes=2 * 1024**3)
    with closing(pool):
        batch = max(limit, HELD_OUT_SHARE)
        for start in range(0, TRIES * batch, batch):
            for problem in pool.map([[task, options, number] for number in range(start, start + batch)]):
                if isinstance(problem, Unavailable | Fault):
                    raise ConfigError(f"env.task={task!r} makes no problem with {options}: {problem.reason}")
                if problem["blind"]:
                    raise ConfigError(
                        f"env.task={task!r} is not accepted: its verifier pays the answers of other problems, so one "
                        "constant reply earns every reward. Choose another task."
                    )
                yield problem
