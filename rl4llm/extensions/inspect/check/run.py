"""All checks in their order, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from rl4llm.config import Config
from rl4llm.core.errors import RL4LLMError
from rl4llm.extensions.inspect.check import laws, machine, parts
from rl4llm.extensions.inspect.check.bench import Bench, NotNeeded
from rl4llm.runtime.raised import raised

IN_VAIN = "not run: "  # prefix of the text of a check whose needs did not pass
Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """`run` returns what it measured. It raises an RL4LLMError with the next step, or NotNeeded with the reason.

    It does not run if one of its `needs` did not pass, or if it is `of_episodes` and the method samples none.
    """

    name: str
    run: Callable[[Bench], str]
    needs: tuple[str, ...] = ()
    of_episodes: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A check that ended: its status, the reason as text, and how long it took."""

    name: str
    status: Status
    text: str
    seconds: float


CHECKS = (
    Check("data", parts.data),
    Check("tokenizer", parts.tokenizer),
    Check("rewards", parts.rewards, ("data", "tokenizer"), of_episodes=True),
    Check("environment", parts.environment, ("rewards",), of_episodes=True),
    Check("sandbox", parts.sandbox, of_episodes=True),
    Check("template", parts.template, ("data", "tokenizer", "environment")),
    Check("servers", machine.servers, of_episodes=True),
    Check("disk", machine.disk),
    Check("model", laws.model, ("template", "servers")),
    Check("episodes", laws.episodes, ("model",), of_episodes=True),
    Check("mask", laws.mask, ("model", "episodes")),
    Check("log-probs", laws.logprobs, ("episodes",), of_episodes=True),
    Check("publish", laws.publish, ("episodes",), of_episodes=True),
    Check("merge", laws.merge, ("model", "episodes")),
    Check("loss", laws.loss, ("model", "episodes")),
)
"""Cheap checks come first."""


def check(config: Config, tell: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Run every check on a configuration; `tell` receives each result when it is known.

    Raises ConfigError for a configuration that is not valid.
    """
    results: dict[str, Result] = {}
    with closing(Bench(config)) as bench:
        for item in CHECKS:
            results[item.name] = _result(item, bench, results)
            tell(results[item.name])
    return list(results.values())


def _result(item: Check, bench: Bench, before: dict[str, Result]) -> Result:
    if item.of_episodes and not bench.samples:
        name = bench.config.algorithm["name"]
        return Result(item.name, "skipped", f"algorithm.name={name} samples nothing", 0.0)
    broken = [name for name in item.needs if before[name].status == "failed" or IN_VAIN in before[name].text]
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
    except Exception as error:  # noqa: BLE001 - a part that breaks is what a check is for
        status, text = "failed", raised(f"the check {item.name!r}", error)
    return Result(item.name, status, text, time.monotonic() - started)
