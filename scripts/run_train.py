"""What the scripts run_train_*.py share: the options of the training scripts of michaelnny/rl4llm.

    deepspeed --num_gpus 1 scripts/run_train_grpo.py --config-file configs/gsm8k_grpo.yaml --use-infer-server

The file is a configuration of rl4llm, or one of michaelnny/rl4llm, which is converted as `rl4llm import` does. Further
arguments, such as ``training.lr=1e-5``, override keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl4llm.cli import main as rl4llm
from rl4llm.config import Config, flatten, load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.convert import convert
from rl4llm.extensions.migration.original import ORIGINAL
from rl4llm.extensions.migration.row import DataFacts

SECTIONS = {field.name for field in dataclasses.fields(Config)}


def main(method: str, *keys: str, given: Sequence[str] | None = None) -> int:
    """Train with a method, and further keys such as ``env.name=tool``; return the exit code."""
    arguments = _parser(method).parse_args(given)
    with tempfile.TemporaryDirectory() as directory:
        try:
            file = _ours(arguments.config_file, method, Path(directory))
            named = load_config(file, ["model.path=none"]).algorithm["name"]
            if named != method:
                raise ConfigError(
                    f"{arguments.config_file} has algorithm.name={named}, but this script trains with {method}. Next: "
                    f"`rl4llm train {arguments.config_file}`, which accepts every method."
                )
        except (ConfigError, OSError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
        return rl4llm(["train", str(file), *keys, *_engine(arguments), *arguments.overrides])


def _parser(method: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Train with the method {method}.")
    parser.add_argument("--config-file", type=Path, required=True, help="a YAML file")
    parser.add_argument("--use-infer-server", action="store_true", help="sample from an SGLang server")
    parser.add_argument("--infer-host", default="localhost", help="its host (default: %(default)s)")
    parser.add_argument("--infer-port", type=int, default=30000, help="its port (default: %(default)s)")
    parser.add_argument("--infer-cohost-mode", action="store_true", help="it shares the GPU of the trainer")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # of DeepSpeed's launcher
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="override a key")
    return parser


def _ours(path: Path, method: str, directory: Path) -> Path:
    """Return the file, or a converted one if it has keys of michaelnny/rl4llm in sections that rl4llm does not have."""
    values = flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    if not any(
        name.partition(".")[0] not in SECTIONS and ORIGINAL.row(name) for name in ORIGINAL.prepare(values)
    ):
        return path
    made = convert(ORIGINAL, {"method.name": method} | values, DataFacts())
    for line in made.open:
        print(f"{path}: {line}", file=sys.stderr)
    file = directory / path.name
    file.write_text(made.text(f"Converted from {path}."), encoding="utf-8")
    return file


def _engine(arguments: argparse.Namespace) -> list[str]:
    if not arguments.use_infer_server:
        return []
    url = f"http://{arguments.infer_host}:{arguments.infer_port}"
    cohost = ["inference.cohost=true"] if arguments.infer_cohost_mode else []
    return ["inference.name=sglang", f"inference.url={url}", *cohost]
