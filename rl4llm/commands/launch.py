"""``rl4llm launch``: train on several processes or machines."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.output import say
from rl4llm.core.errors import ConfigError


def add(commands: Any) -> None:
    examples = (
        "rl4llm launch configs/gsm8k_grpo.yaml --nproc 8 --restarts 3",
        "rl4llm launch configs/gsm8k_grpo.yaml --nproc 8 --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:29500",
    )
    about = "train on several processes or machines, started again when one dies"
    command = add_command(commands, "launch", run, about, examples, resumes=True)
    add_config(command)
    command.add_argument("--nproc", type=int, default=1, help="processes here, one per GPU (default: %(default)s)")
    command.add_argument("--nnodes", type=int, default=1, help="machines (default: %(default)s)")
    command.add_argument("--node-rank", type=int, default=0, help="number of this machine, from 0")
    command.add_argument("--rendezvous", help="HOST:PORT of machine 0, which all of them can reach")
    command.add_argument("--restarts", type=int, default=0, help="in a row, without a new checkpoint (default: never)")
    add_force(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.launch import Nodes, launch

    if arguments.nproc < 1 or arguments.nnodes < 1 or arguments.restarts < 0:
        raise ConfigError("--nproc and --nnodes are 1 or above, --restarts 0 or above.")
    if arguments.nnodes > 1 and not arguments.rendezvous:
        raise ConfigError("--nnodes above 1 needs --rendezvous HOST:PORT, the same on every machine.")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise ConfigError(f"--node-rank {arguments.node_rank} is not accepted: 0 to {arguments.nnodes - 1}, by machine.")
    nodes = Nodes(arguments.nproc, arguments.nnodes, arguments.node_rank, arguments.rendezvous)
    return launch(
        arguments.config, arguments.overrides, nodes=nodes, restarts=arguments.restarts, force=arguments.force, say=say
    )
