"""All checks in their order, and what came of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rl4llm.check import laws, machine, parts
from rl4llm.check.bench import Bench, FreeBytes, NotNeeded, free_bytes
from rl4llm.config import Config
from rl4llm.core.errors import RL4LLMError

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """`run` returns what it measured, and raises an RL4LLMError that says what to do, or NotNeeded with the reason.

    It is not run when one of those that it `needs` did not pass.
    """

    name: str
    run: Callable[[Bench], str]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a check."""

    name: str
    status: Status
    text: str
    seconds: float


CHECKS = (
    Check("data", parts.data),
    Check("tokenizer", parts.tokenizer),
    Check("rewards", parts.rewards, ("data", "tokenizer")),
    Check("environment", parts.environment, ("rewards",)),
    Check("sandbox", parts.sandbox),
    Check("template", parts.template, ("data", "tokenizer", "environment")),
    Check("servers", machine.servers),
    Check("disk", machine.disk),
    Check("model", laws.model, ("template", "servers")),
    Check("episodes", laws.episodes, ("model",)),
    Check("mask", laws.mask, ("model", "episodes")),
    Check("log-probs", laws.logprobs, ("episodes",)),
    Check("publish", laws.publish, ("episodes",)),
    Check("loss", laws.loss, ("model", "episodes")),
)
"""What costs nothing is first."""


def check(
    config: Config, tell: Callable[[Result], None] = lambda result: None, free: FreeBytes = free_bytes
) -> list[Result]:
    """Hold every check against a configuration; `tell` gets each result as it comes.

    Raises ConfigError for a configuration that cannot be anything.
    """
    bench = Bench(config, free)
    results: dict[str, Result] = {}
    try:
        for item in CHECKS:
            results[item.name] = _result(item, bench, results)
            tell(results[item.name])
    finally:
        bench.close()
    return list(results.values())


def _result(item: Check, bench: Bench, before: dict[str, Result]) -> Result:
    broken = [name for name in item.needs if before[name].status == "failed" or _in_vain(before[name])]
    if broken:
        return Result(item.name, "skipped", f"{IN_VAIN}{broken[0]!r} did not pass", 0.0)
    started = time.monotonic()
    status: Status
    try:
        status, text = "passed", item.run(bench)
    except NotNeeded as reason:
        status, text = "skipped", str(reason)
    except (RL4LLMError, OSError) as error:
        status, text = "failed", str(error)
    return Result(item.name, status, text, time.monotonic() - started)


IN_VAIN = "not tried: "


def _in_vain(result: Result) -> bool:
    return result.status == "skipped" and result.text.startswith(IN_VAIN)
