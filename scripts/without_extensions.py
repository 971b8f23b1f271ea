"""Delete extensions from a copy of this checkout, and show that everything else still works.

    python scripts/without_extensions.py                                # all of them at once, and each alone
    python scripts/without_extensions.py view trl --tests tests/core tests/trainers

Without any extension, the library must import, train and pass its tests. Without one of them, it must import, list its
commands, find all that the others offer, and refuse what this one offered in one line that names the missing folder. One
process imports torch; a fork of it checks each copy.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "rl4llm.extensions."
HEAVY = (
    "pytest", "torch.distributed.fsdp", "torch.utils.tensorboard", "matplotlib.pyplot",
    "matplotlib.backends.backend_agg", "datasets", "omegaconf", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto", "deepspeed", "torch.utils.cpp_extension", "aiohttp.web", "rich.live",
    "rich.table", "grpc", "sqlite3",
)  # fmt: skip
"""What a run or a test imports beside rl4llm; imported once, before the forks."""

TESTS = ["tests/core/test_registry.py", "tests/data/test_mixture.py", "tests/envs/test_roles.py"]


def extensions() -> list[str]:
    """Return the names of all extensions: the packages in their folder."""
    return sorted(file.parent.name for file in (ROOT / "rl4llm" / "extensions").glob("*/__init__.py"))


def copy_to(directory: Path) -> None:
    """Copy the files of the checkout that git knows or would add, and what Python compiled of them."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for file in [ROOT / name for name in names if name]:
        if file.is_file():
            target = directory / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
    for cache in (ROOT / "rl4llm").rglob("__pycache__"):
        shutil.copytree(cache, directory / cache.relative_to(ROOT), dirs_exist_ok=True)


def broken_without(names: list[str], root: Path, check: Callable[[Path], None]) -> str | None:
    """Check a copy without some extensions in a separate process; return what went wrong, None when nothing did."""
    log, fork = root / "check.log", multiprocessing.get_context("fork").Process
    log.write_text("")
    for name in names:
        (root / "rl4llm" / "extensions" / name).rename(root / name)
    process = fork(target=in_copy, args=(root, log, check))
    process.start()
    process.join()
    for name in names:
        (root / name).rename(root / "rl4llm" / "extensions" / name)
    return log.read_text() if process.exitcode else None


def in_copy(root: Path, log: Path, check: Callable[[Path], None]) -> None:
    """Check that the copy is what Python imports, and use it; raise or exit with an error code when something is broken."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.dont_write_bytecode = False  # into the copy: the next fork need not compile it again
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    import rl4llm

    assert Path(rl4llm.__file__).is_relative_to(root), rl4llm.__file__
    check(root)


def check_library(root: Path, tests: list[str]) -> None:
    """Train with a library that has no extension, and run its tests."""
    import pytest

    train(root / "run")
    sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests]))


def check_refusals(root: Path, name: str) -> None:
    """Check that what an extension offered is refused by name, and that all else is found."""
    missing = f"rl4llm/extensions/{name}"
    assert f"({missing} is missing)" in command("--help") or not any(commands_of(name))
    for word in commands_of(name):
        assert_refused(command(word), missing)
    lost = 0
    for path, look_up in offered(root / "rl4llm"):
        error = refusal(look_up)
        if path.startswith((f"{PREFIX}{name}.", f"{PREFIX}{name}:")):
            lost += 1
            assert error, f"{path} is still found"
        if error:  # another extension may need this one
            assert_refused(str(error), missing)
    assert lost, f"no table of the library names {PREFIX}{name}"


def train(directory: Path) -> None:
    """Train one step of GRPO through the Python API."""
    from rl4llm import GRPOTrainer
    from rl4llm.backends.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(["user\nSay 1.\n"], vocab_size=300)
    rows = [{"prompt_id": str(n), "messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(4)]
    rewards = [{"name": "length", "unit": "chars", "max_length": 1, "margin": 10}]
    GRPOTrainer(
        build_model(tokenizer, seed=0, hidden_size=16, num_layers=1),
        [row | {"ground_truth": "1"} for row in rows],
        tokenizer=tokenizer,
        rewards=rewards,
        rollout={"prompts": 2, "group_size": 2, "max_tokens": 4},
        output={"dir": str(directory)},
        max_steps=1,
    ).train()
    assert (directory / "model" / "model.safetensors").exists()


def command(*words: str) -> str:
    """Run a command of the copy; return what it printed."""
    from rl4llm.cli import main

    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed), suppress(SystemExit):
        main(words)
    return printed.getvalue()


def commands_of(name: str) -> Iterator[str]:
    """Yield the commands that an extension brings."""
    from rl4llm.cli import COMMANDS

    return (word for word in COMMANDS.builtin if COMMANDS.path_of(word).startswith(f"{PREFIX}{name}."))


def offered(package: Path) -> Iterator[tuple[str, Any]]:
    """Yield where everything is that the library's tables name, with the function that looks it up as users do."""
    from rl4llm.core.registry import Registry, load

    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if PREFIX not in text or file.is_relative_to(package / "extensions"):
            continue
        parts = file.relative_to(package.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        for table in [item for item in vars(module).values() if isinstance(item, Registry)]:
            yield from ((table.path_of(key), lambda table=table, key=key: table[key]) for key in table)
        for key, home in getattr(module, "_HOMES", {}).items():
            yield f"{home}:{key}", lambda module=module, key=key: getattr(module, key)
        for node in ast.walk(ast.parse(text)):
            path = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(path, str) and path.startswith(PREFIX) and ":" in path:
                yield path, lambda path=path: load(path, "This")


def refusal(look_up: Any) -> Exception | None:
    """Return the error of a name that cannot be used; a package that is not installed is none of ours."""
    from rl4llm.core.errors import ConfigError

    try:
        look_up()
    except (
        ConfigError,
        AttributeError,
    ) as error:  # a module of lazy names raises AttributeError from the ConfigError
        return error.__cause__ if isinstance(error.__cause__, ConfigError) else error
    return None


def assert_refused(text: str, missing: str) -> None:
    assert f"needs {missing}, which is missing. Next:" in " ".join(text.split()), text
    assert "Traceback" not in text, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="EXTENSION", help=f"default: {', '.join(extensions())}")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, help="test files to run without any extension (default: a few)"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for heavy in HEAVY:
        with suppress(ImportError):
            importlib.import_module(heavy)
    gc.freeze()  # the forks' garbage collector leaves what is imported here alone
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        copy_to(root)
        checks = [("library", extensions(), partial(check_library, tests=arguments.tests))]
        checks += [
            (name, [name], partial(check_refusals, name=name)) for name in arguments.names or extensions()
        ]
        for label, without, check in checks:
            broken = broken_without(without, root, check)
            print(f"{label}: {'works' if broken is None else broken}", flush=True)
            failed += broken is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
