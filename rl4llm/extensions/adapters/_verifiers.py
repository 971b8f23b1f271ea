"""List the tasks of an environment of the library verifiers, play one of them, or score groups.

    PYTHON -P _verifiers.py list|play|score '{"task": ..., "options": ..., "max_turns": ...}' < WHAT.json > RESULT.json

Run by path, with the Python that has verifiers installed; rl4llm need not be installed there. Modules are also looked
up in the working directory. On an error it exits and prints the reason to standard error.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HELD_OUT_SHARE = 10  # one task in this many is held out


def listed(tasks: Any, split: str, limit: int) -> list[dict[str, Any]]:
    """Return the first tasks of a split, which depends on a task's prompt alone unless the task names it."""
    rows: list[dict[str, Any]] = []
    for row in tasks:
        digest = hashlib.sha256(json.dumps(row["messages"], sort_keys=True).encode()).digest()
        held_out = "test" if digest[0] % HELD_OUT_SHARE == 0 else "train"
        if row.pop("split", held_out) == split:
            rows.append(row)
        if len(rows) == limit:
            break
    return rows


def interface(task: str) -> ModuleType:
    """Return the file beside this one that plays the task: `_verifiers_v0` if its module has `load_environment`."""
    found = importlib.util.find_spec(task.replace("-", "_").split("/")[-1])
    text = Path(found.origin).read_text() if found is not None and found.origin else ""
    old = "load_environment" in text and "verifiers.v1" not in text
    name = "_verifiers_v0" if old else "_verifiers_v1"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None  # the file lies beside this one
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result_of(verb: str, chosen: dict[str, Any], what: dict[str, Any]) -> Any:
    """Return the result of a verb, in the interface that the task is written for."""
    library = interface(chosen["task"])
    env = library.environment(**chosen)
    if verb == "list":
        return listed(library.listed(env, **what), **what)
    if verb == "score":
        return asyncio.run(library.scored(env, what["groups"]))
    return asyncio.run(library.played(env, what["verifiers"]))


def main() -> None:
    """Run the command line; only the result is written to standard output."""
    result_to = os.dup(1)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    # for tool servers
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    chosen, what = json.loads(sys.argv[2]), json.load(sys.stdin)
    try:
        result = result_of(sys.argv[1], chosen, what)
    except Exception as error:  # noqa: BLE001 - a task's own code may raise anything; the caller reports it
        sys.exit(f"{chosen['task']}: {type(error).__name__}: {error}")
    with os.fdopen(result_to, "w") as stream:
        json.dump(result, stream, allow_nan=False)


if __name__ == "__main__":
    main()
