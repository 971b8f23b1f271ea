"""``rl4llm plan``: what a run will do and need, before anything is loaded."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import show, write_json
from rl4llm.core.errors import ConfigError

GPUS = {
    "3060": 12_288, "t4": 15_360, "4060ti": 16_380, "a10": 23_028, "l4": 23_034, "4090": 24_564, "3090": 24_576,
    "5090": 32_607, "a100-40": 40_960, "h100": 81_559, "a100-80": 81_920, "h200": 143_771, "b200": 183_359,
}  # fmt: skip
"""MiB of memory that `nvidia-smi` reports, with ECC where it is on by default; `4060ti` has 16 GB."""


def add(commands: Any) -> None:
    examples = (
        "rl4llm plan configs/gsm8k_grpo.yaml",
        "rl4llm plan configs/gsm8k_grpo.yaml --gpu 4090",
        "rl4llm plan configs/gsm8k_grpo.yaml backend.shard=fsdp2 --devices 8 --device-memory 24GiB",
    )
    about = "show what a step does and how much memory each phase takes; exit code 1 when it does not fit"
    command = add_command(commands, "plan", run, about, examples)
    add_config(command)
    command.add_argument(
        "--devices", type=int, default=1, help="devices, one process on each (default: %(default)s)"
    )
    memory = command.add_mutually_exclusive_group()
    memory.add_argument(
        "--gpu",
        type=str.lower,
        choices=GPUS,
        metavar="NAME",
        help=f"plan for one of these GPUs: {', '.join(GPUS)}",
    )
    memory.add_argument(
        "--device-memory",
        type=size,
        metavar="SIZE",
        help="memory of one GPU, here or on another machine, such as 24GiB; with model.device=cpu, of the machine "
        "(default: this machine's)",
    )
    command.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="take every prompt to have N tokens; then only the model's config.json is read, neither tokenizer nor rows",
    )
    add_json(command)


def size(text: str) -> int:
    """Return the bytes of a size such as 24GiB or 80GB; argparse reports a ValueError."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT])(I?)B", text.strip().upper())
    if match is None:
        raise ValueError
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2]))


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.compose.choices import rate_warnings
    from rl4llm.config import load_config
    from rl4llm.extensions.inspect.plan.advice import changes
    from rl4llm.extensions.inspect.plan.plan import make_plan, on_target
    from rl4llm.extensions.inspect.plan.show import as_json, tables, verdict

    if arguments.devices < 1:
        raise ConfigError(f"--devices {arguments.devices} is not accepted. Accepted: 1 or more.")
    memory = GPUS[arguments.gpu] * 2**20 if arguments.gpu else arguments.device_memory
    config = on_target(load_config(arguments.config, arguments.overrides), memory)
    plan = make_plan(config, arguments.devices, memory, arguments.prompt_tokens)
    smaller = [] if plan.fits else changes(plan)
    if arguments.json:
        write_json(as_json(plan, smaller))
    else:
        show(*tables(plan), *verdict(plan, smaller), *rate_warnings(config))
    return 0 if plan.fits else 1
