"""List the tasks of an environment of verifiers 0.4 (`verifiers.v1`), a module with a `Taskset`, or play one of them.

    PYTHON -P _verifiers.py list|play '{"task": ..., "options": ..., "max_turns": ...}' < WHAT.json > RESULT.json

Run by path, with the Python that has verifiers installed; rl4llm need not be installed there. Modules are also looked
up in the working directory. On an error it exits and prints the reason to standard error.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import sys
import tomllib
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

HELD_OUT_SHARE = 10  # one task in this many is held out
TRIES = 20  # tasks of an endless set to look at for each task requested
BY_UV = SubprocessRuntime.prepare_uv_script


async def prepare_script(
    runtime: SubprocessRuntime, script: str | bytes, env: Any = None, *, activate: bool = True
) -> list[str]:
    """Return the words that run a harness's script: with this interpreter if it has the packages, else with uv.

    uv makes an environment for each new script, which takes up to a minute and needs a network.
    """
    source = script if isinstance(script, str) else script.decode()
    if not all(map(is_installed, requirements_of(source))):
        return await BY_UV(runtime, script, env, activate=activate)
    path = f"{runtime.workdir}/.scripts/{hashlib.sha256(source.encode()).hexdigest()}.py"  # of this episode alone
    await runtime.write(path, source.encode())
    return [sys.executable, path]


def requirements_of(source: str) -> list[str]:
    """Return the dependencies that a script names in its header (PEP 723)."""
    header = source.partition("# /// script\n")[2].partition("# ///\n")[0]
    lines = (line.removeprefix("#").removeprefix(" ") for line in header.splitlines())
    return list(tomllib.loads("\n".join(lines)).get("dependencies", []))


def is_installed(text: str) -> bool:
    requirement = Requirement(text)
    try:
        return not requirement.extras and requirement.specifier.contains(metadata.version(requirement.name))
    except metadata.PackageNotFoundError:
        return False


def environment(task: str, options: dict[str, Any], max_turns: int) -> Any:
    """Return the environment with one agent, which runs as a subprocess unless the options set another runtime.

    Raises ValueError if the environment has other agents than `agent`.
    """
    SubprocessRuntime.prepare_uv_script = prepare_script
    taskset = {"id": task, **options.get("taskset", {})}
    roles = list(agent_config_fields(env_config_type(task, options.get("id", ""))()))
    if roles != ["agent"]:
        raise ValueError(f"its agents are {', '.join(roles)}, but one policy plays only 'agent'")
    agent = {"runtime": {"type": "subprocess"}, "max_turns": max_turns, **options.get("agent", {})}
    if default_harness_id(task) == "bash":  # the set of tasks has no harness
        agent.setdefault("harness", {"id": "null"})
    return load_environment(resolve_env_config({**options, "taskset": taskset, "agent": agent}))


def listed(env: Any, split: str, limit: int) -> list[dict[str, Any]]:
    """Return the first tasks of a split, which depends on a task's prompt alone."""
    tasks = env.taskset if env.taskset.bounded else itertools.islice(env.taskset, TRIES * limit)
    rows = ({"messages": prompt_of(task.data), "number": task.data.idx, "hash": task.hash} for task in tasks)
    return list(itertools.islice((row for row in rows if split_of(row["messages"]) == split), limit))


def split_of(messages: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()
    return "test" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def prompt_of(data: Any) -> list[dict[str, Any]]:
    """Return a task's prompt as messages. Raises ValueError for a task without a prompt."""
    if not data.prompt:
        raise ValueError(f"its task {data.idx} has no prompt; a user would open the conversation")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt)]


async def play(env: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Play one rollout of a task against the endpoint in the environment variables; return the result of verifiers."""
    number = row["number"]
    task = next(itertools.islice(env.taskset, number, None), None)
    if task is None or task.hash != row["hash"]:
        raise ValueError(f"its task {number} differs from when the tasks were listed")
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_slot(env.slots(task)[0], ModelContext(model="policy", client=client))
    if not episode.ok or len(episode.traces) != 1:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(f"the rollout failed in verifiers, with {len(episode.traces)} traces: {reasons}")
    trace = episode.traces[0]
    rewards = {name: reward and reward.value for name, reward in trace.rewards.items()}
    if not rewards or not all(map(_is_finite, rewards.values())):
        raise RuntimeError(f"no finite rewards, but {rewards}; stop condition: {trace.stop_condition!r}")
    metrics = {name: value for name, value in trace.metrics.items() if _is_finite(value)}
    return {"reward": trace.reward, "rewards": rewards, "metrics": metrics, "stop": trace.stop_condition}


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def main() -> None:
    """Run the command line; only the result is written to standard output."""
    result_to = os.dup(1)
    os.dup2(2, 1)
    chosen, what = json.loads(sys.argv[2]), json.load(sys.stdin)
    directory = chosen.pop("directory")
    os.chdir(directory)
    sys.path.insert(0, directory)
    # for tool servers
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (directory, os.environ.get("PYTHONPATH"))))
    try:
        env = environment(**chosen)
        result = listed(env, **what) if sys.argv[1] == "list" else asyncio.run(play(env, what["verifiers"]))
    except Exception as error:  # noqa: BLE001 - a task's own code may raise anything; the caller reports it
        sys.exit(f"{chosen['task']}: {type(error).__name__}: {error}")
    with os.fdopen(result_to, "w") as stream:
        json.dump(result, stream, allow_nan=False)


if __name__ == "__main__":
    main()
