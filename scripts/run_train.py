"""What the scripts run_train_*.py share: the options of the training scripts of michaelnny/rl4llm.

    deepspeed --num_gpus 1 scripts/run_train_grpo.py --config-file configs/gsm8k_grpo.yaml --use-infer-server

Further arguments, such as ``training.lr=1e-5``, override keys of the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl4llm.cli import main as rl4llm
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError


def main(method: str, *keys: str, given: Sequence[str] | None = None) -> int:
    """Train with a method, and further keys such as ``env.name=tool``; return the exit code."""
    arguments = _parser(method).parse_args(given)
    file = arguments.config_file
    try:
        named = load_config(file, ["model.path=unused"]).algorithm["name"]
        if named != method:
            raise ConfigError(
                f"{file} has algorithm.name={named}, but this script trains with {method}. Next: "
                f"`rl4llm train {file}`, which accepts every method."
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


def _engine(arguments: argparse.Namespace) -> list[str]:
    if not arguments.use_infer_server:
        return []
    url = f"http://{arguments.infer_host}:{arguments.infer_port}"
    cohost = ["inference.cohost=true"] if arguments.infer_cohost_mode else []
    return ["inference.name=sglang", f"inference.url={url}", *cohost]
