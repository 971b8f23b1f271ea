"""Run a script that imports `trl`: read it first, to refuse before training what would fail after it."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm_compat import trl
from rl4llm_compat.trl import attributes, stand_in
from rl4llm_compat.trl.table import TABLES, Alias

EXTRAS = {"peft": "'rl4llm[lora]'", "accelerate": "accelerate", "math_verify": "math-verify"}
"""What to install for a package that a script imports."""


def run_script(path: Path, arguments: Sequence[str], *, push: bool = True) -> None:
    """Run a script as ``python path arguments`` does, with rl4llm's names in the place of `trl`'s.

    Without `push`, its calls of ``trainer.push_to_hub`` do nothing. Raises ConfigError for names that have no counterpart,
    for scripts that upload, and for a package that is missing.
    """
    found = list(objections(path, push=push))
    if found:
        raise ConfigError(found[0])
    if not push:
        attributes.KNOWN["push_to_hub"] = lambda _: lambda *args, **options: None
        attributes.NOT_HERE.pop("push_to_hub", None)
        for table in TABLES.values():
            table["push_to_hub"] = Alias("inert", False, "--no-push skips it")
    stand_in.install()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or (path.parent / f"{package}.py").exists():
            raise
        raise ConfigError(f"{path}: {_missing(package)}") from error


def objections(path: Path, *, push: bool) -> Iterator[str]:
    """Yield why a script cannot run, with its line; an upload is no objection if it is conditional, or without `push`."""
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not a Python script: {error}.") from error
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _asks(node.test)]
    asked = {id(node) for condition in conditions for node in ast.walk(condition)}
    for node in ast.walk(tree):
        for why in _imports(node):
            yield f"{path}:{node.lineno}: {why}"  # type: ignore[attr-defined]
        if push and _uploads(node) and id(node) not in asked:
            yield (
                f"{path}:{node.lineno}: push_to_hub has no counterpart: nothing is uploaded. "  # type: ignore[attr-defined]
                "Next: `rl4llm run --no-push` skips it; the model is in output_dir."
            )
    for node in tree.body:
        for why in _packages(node, path.parent):
            yield f"{path}:{node.lineno}: {why}"


def _missing(package: str) -> str:
    if package == "unsloth":
        return "unsloth changes trl itself. Use AutoModelForCausalLM and a LoraConfig of peft instead."
    return f"needs the package {package!r}, which is not installed. Next: pip install {EXTRAS.get(package, package)}."


def _packages(node: ast.AST, directory: Path) -> Iterator[str]:
    """Yield which package an import at the top of a script needs in vain."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [item.name for item in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module]
    for package in dict.fromkeys(name.partition(".")[0] for name in names):
        own = (directory / f"{package}.py").exists() or (directory / package).is_dir()
        if package != "trl" and not own and importlib.util.find_spec(package) is None:
            yield _missing(package)


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield why what a line imports from `trl` is refused."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl" and not node.level:
        if node.module not in stand_in.MODULES:
            yield stand_in.refusal(str(node.module))
            return
        for item in node.names:
            known = item.name in trl.__all__ or f"{node.module}.{item.name}" in stand_in.MODULES
            if not known and not item.name.startswith("_"):
                yield stand_in.refusal(f"{node.module}.{item.name}")


def _uploads(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "push_to_hub"
    )


def _asks(test: ast.AST) -> bool:
    """Return whether a condition reads `push_to_hub`, which the configs refuse when it is true."""
    return any(isinstance(node, ast.Attribute) and node.attr == "push_to_hub" for node in ast.walk(test))
