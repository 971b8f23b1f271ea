"""Delete extensions from a copy of this checkout, and show that everything else still works.

    python tests/without_extensions.py [EXTENSION ...]                  # all of them at once, and each (or these) alone

Without any extension, every module of the library must import, and it must train and pass some of its tests. Without one of
them, it must find all that the others provide, and what this one provided must be unknown, as a misspelt name is. One
process imports torch; a fork of it checks each copy.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "rl4llm.extensions."
PARTS = "rl4llm.parts"
HEAVY = (
    "pytest", "torch.distributed.fsdp", "torch.utils.tensorboard", "matplotlib.pyplot",
    "matplotlib.backends.backend_agg", "datasets", "omegaconf", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto", "deepspeed", "torch.utils.cpp_extension", "aiohttp.web", "rich.live",
    "rich.table", "grpc", "sqlite3",
)  # fmt: skip
"""What a run or a test imports beside rl4llm; imported once, before the forks."""

PROBE = "view"
"""A command of an extension."""

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


def check_library(root: Path) -> None:
    """Import all of a library that has no extension, train with it, and run its tests."""
    import pytest

    for file in sorted((root / "rl4llm").rglob("*.py")):
        words = file.relative_to(root).with_suffix("").parts
        if not any(word.startswith("_") and word != "__init__" for word in words):  # those run as scripts
            importlib.import_module(".".join(words).removesuffix(".__init__"))
    train(root / "run")
    assert f"COMMAND='{PROBE}' is unknown" in command(PROBE)
    sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *TESTS]))


def check_refusals(root: Path, name: str) -> None:
    """Check that the names of an extension are gone, and that all others are found."""
    from rl4llm.core.registry import manifests, read_manifest

    lost, tables = read_manifest(root / name / "manifest.py"), registries(root / "rl4llm")
    assert lost and name not in manifests(), f"{PREFIX}{name} provides nothing"
    for group, names in lost.items():
        for word, path in names.items():
            assert path.startswith((f"{PREFIX}{name}.", f"{PREFIX}{name}:")), (
                f"{path} belongs to another extension"
            )
            assert_gone(group, word, tables)
    listed = re.findall(r"^    ([a-z-]+)\b", command("--help"), re.MULTILINE)
    for words in manifests().values():
        assert set(words.get("rl4llm.commands", ())) <= set(listed), listed
        for group, names in words.items():
            for word, path in names.items():
                error = refusal(path)
                assert error is None or gone(str(error), lost), f"{group}: {word}: {error}"


def assert_gone(group: str, name: str, tables: dict[str, Any]) -> None:
    """Check that a name is unknown, in a line that lists those that are known and speaks of no module."""
    from rl4llm.core.errors import ConfigError
    from rl4llm.core.registry import from_extension

    if group == "rl4llm.commands":
        said = command(name)
        assert f"COMMAND='{name}' is unknown" in said, said
    else:
        try:
            from_extension(name, "This") if group == PARTS else tables[group][name]
        except ConfigError as error:
            said = str(error)
        else:
            raise AssertionError(f"{group}: {name} is still found")
        assert (f"provides {name!r}, and none does" if group == PARTS else "is unknown. Known: ") in said, (
            said
        )
    assert "Traceback" not in said and "No module named" not in said and "extensions" not in said, said


def registries(package: Path) -> dict[str, Any]:
    """Return the tables of the library by the group that extensions add to."""
    from rl4llm.core.registry import Registry

    found = {}
    for file in package.rglob("*.py"):
        if "Registry(" in file.read_text(encoding="utf-8") and not file.is_relative_to(
            package / "extensions"
        ):
            words = file.relative_to(package.parent).with_suffix("").parts
            module = importlib.import_module(".".join(words).removesuffix(".__init__"))
            found |= {item.group: item for item in vars(module).values() if isinstance(item, Registry)}
    return found


def refusal(path: str) -> Exception | None:
    """Return the error of a path that cannot be imported; a package that is not installed is none of ours."""
    from rl4llm.core.errors import ConfigError
    from rl4llm.core.registry import load

    try:
        load(path)
    except ConfigError as error:
        return error
    return None


def gone(said: str, lost: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether an error says that a part is missing which was lost: an extension may need another."""
    return any(f"provides {name!r}, and none does" in said for name in lost.get(PARTS, ()))


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="EXTENSION", help=f"default: {', '.join(extensions())}")
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
        checks = [("library", extensions(), check_library)]
        checks += [
            (name, [name], partial(check_refusals, name=name)) for name in arguments.names or extensions()
        ]
        for label, without, check in checks:
            broken = broken_without(without, root, check)
            sys.stdout.write(f"{label}: {'works' if broken is None else broken}\n")
            sys.stdout.flush()
            failed += broken is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
