"""``rl4llm launch``: train on several processes or machines."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force
from rl4llm.commands.output import say, show
from rl4llm.core.errors import ConfigError

ROLES = ("trainer", "server", "router", "env")


def add(commands: Any) -> None:
    examples = (
        "rl4llm launch configs/gsm8k_grpo.yaml --nproc 8 --restarts 3",
        "rl4llm launch configs/gsm8k_grpo.yaml --nproc 8 --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:29500",
        "rl4llm launch configs/gsm8k_grpo.yaml launch.servers=2 --on local --dry-run",
        "rl4llm launch configs/gsm8k_grpo.yaml launch.servers=2 launch.nproc=8 --on slurm --option partition=gpu --submit",
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
    add_engines(command)


def add_engines(command: argparse.ArgumentParser) -> None:
    """``--on slurm --submit`` for a whole run, ``--as server`` for one process of it."""
    command.add_argument(
        "--on", metavar="ENGINE", help="start the whole run, as its section `launch` says: local, slurm, ..."
    )
    command.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of that engine; again for more")
    command.add_argument("--out", type=Path, metavar="DIR", help="for its files (default: output.dir with -ENGINE)")
    command.add_argument("--submit", action="store_true", help="submit the files, too")
    command.add_argument("--as", dest="role", choices=ROLES, help="be one process of such a run, as its environment says")
    command.add_argument("--dry-run", action="store_true", help="with --on local and --as: print commands, and run none")


def run(arguments: argparse.Namespace) -> int:
    if arguments.on or arguments.role:
        return _elsewhere(arguments)
    from rl4llm.launch.ranks import Nodes, launch

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


def _elsewhere(arguments: argparse.Namespace) -> int:
    """Start a whole run on an engine, or be one process of it."""
    if arguments.on and arguments.role:
        raise ConfigError("--on starts the processes of a run, --as is one of them: give one of the two.")
    if arguments.on == "local":
        from rl4llm.launch.local import launch_here

        return launch_here(arguments.config, arguments.overrides, dry_run=arguments.dry_run, say=say)
    if arguments.on:
        from rl4llm.launch.engines import launch_on

        place = {"options": arguments.option, "out": arguments.out, "submit": arguments.submit}
        return launch_on(arguments.on, arguments.config, arguments.overrides, **place, say=say)
    from rl4llm.launch.part import part

    words = part(arguments.config, arguments.overrides, arguments.role, os.environ)
    if arguments.dry_run:
        show(f"rl4llm {shlex.join(words)}")
        return 0
    say(f"rl4llm {shlex.join(words)}")
    from rl4llm.cli import main

    return main(words)
