"""``rl4llm launch``: train on several processes or machines."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_force, add_sweep
from rl4llm.commands.output import say, show
from rl4llm.core.errors import ConfigError

ROLES = ("trainer", "server", "router", "env")
OF_RANKS, OF_FILES = ("nproc", "nnodes", "node_rank", "rendezvous", "restarts"), ("option", "out", "submit")
NO_EFFECT = {
    "with --on local": (*OF_RANKS, *OF_FILES),
    "with --on": (*OF_RANKS, "force", "dry_run"),
    "with --as": (*OF_RANKS, *OF_FILES),
    "without --on or --as": (*OF_FILES, "dry_run"),
    "with --sweep": ("role", "out", "option", "submit", "dry_run"),
}
"""Options that each way to launch would ignore."""


def add(commands: Any) -> None:
    examples = (
        "rl4llm launch configs/gsm8k_grpo.yaml --nproc 8 --restarts 3",
        "rl4llm launch configs/gsm8k_grpo.yaml --nproc 8 --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:29500",
        "rl4llm launch configs/gsm8k_grpo.yaml launch.servers=2 --on local --dry-run",
        "rl4llm launch configs/gsm8k_grpo.yaml launch.servers=2 launch.nproc=8 --on slurm --option partition=gpu --submit",
    )
    about = "train on several processes or machines, with restarts when one dies"
    command = add_command(commands, "launch", run, about, examples, resumes=True)
    add_config(command)
    command.add_argument(
        "--nproc", type=int, help="processes on this machine, one per GPU (default: launch.nproc)"
    )
    command.add_argument("--nnodes", type=int, help="number of machines (default: 1)")
    command.add_argument("--node-rank", type=int, help="number of this machine, from 0")
    command.add_argument("--rendezvous", help="HOST:PORT of machine 0, reachable from all machines")
    command.add_argument(
        "--restarts", type=int, metavar="N", help="restarts in a row without a new checkpoint (default: 0)"
    )
    add_force(command)
    add_sweep(command)
    ways = command.add_mutually_exclusive_group()
    ways.add_argument(
        "--on",
        metavar="LAUNCHER",
        help="start all processes of the section `launch` with a launcher: local, slurm, ...",
    )
    command.add_argument(
        "--option",
        action="append",
        type=key_value,
        default=[],
        metavar="KEY=VALUE",
        help="option passed to the launcher; may be repeated",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for its files (default: output.dir-LAUNCHER)"
    )
    command.add_argument("--submit", action="store_true", help="also submit the files")
    ways.add_argument(
        "--as",
        dest="role",
        choices=ROLES,
        help="run as one process of a launched job, configured by environment variables",
    )
    about = "with --on local and --as: only print the commands"
    command.add_argument("--dry-run", action="store_true", help=about)


def key_value(text: str) -> tuple[str, str]:
    name, value = text.split("=", 1)
    return name, value


def run(arguments: argparse.Namespace) -> int:
    if arguments.on:
        here = arguments.on == "local"
        way, start = ("with --on local", _here) if here else ("with --on", _elsewhere)
    else:
        way, start = ("with --as", _part) if arguments.role else ("without --on or --as", _ranks)
    if arguments.sweep:
        way, start = "with --sweep", _sweep
    for name in NO_EFFECT[way]:
        value = getattr(arguments, name)
        if value or type(value) is int:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect {way}. Remove it, or see --help.")
    return start(arguments)


def _check_config(arguments: argparse.Namespace) -> None:
    """Refuse an invalid configuration before any process starts."""
    from rl4llm.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from rl4llm.compose import check_config  # takes seconds to import; an unknown key is reported before

    check_config(config, here=arguments.on in (None, "local") and not arguments.dry_run)


def _sweep(arguments: argparse.Namespace) -> int:
    """Launch a run for each combination of values, one after another."""
    from rl4llm.commands.sweep import sweep

    if arguments.on not in (None, "local"):
        raise ConfigError(f"--sweep waits for each run, and --on {arguments.on} does not. Use --on local.")
    given = {name: getattr(arguments, name) for name in ("on", *OF_RANKS)}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    start = ["launch", *options, *["--force"] * arguments.force]
    return sweep(arguments.config, arguments.overrides, arguments.sweep, start)


def _ranks(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config
    from rl4llm.extensions.launch.ranks import Nodes, launch

    nproc = arguments.nproc or load_config(arguments.config, arguments.overrides).launch.nproc
    nodes = Nodes(nproc, arguments.nnodes or 1, arguments.node_rank or 0, arguments.rendezvous)
    _check_config(arguments)
    return launch(
        arguments.config,
        arguments.overrides,
        nodes=nodes,
        restarts=arguments.restarts or 0,
        force=arguments.force,
        say=say,
    )


def _here(arguments: argparse.Namespace) -> int:
    """Start all processes of a run on this machine."""
    from rl4llm.extensions.launch.local import launch_here, planned
    from rl4llm.runtime.gpus import visible_gpus

    _check_config(arguments)
    if not arguments.dry_run:
        return launch_here(arguments.config, arguments.overrides, force=arguments.force, say=say)
    gpus = visible_gpus(os.environ) or None
    processes, shared = planned(arguments.config, arguments.overrides, force=arguments.force, gpus=gpus)
    for process in processes:
        environ = [f"{name}={value}" for name, value in {**shared, **process.environ()}.items()]
        show(shlex.join(["env", *environ, *process.role.command]))
    return 0


def _elsewhere(arguments: argparse.Namespace) -> int:
    """Write the files that start a run with a launcher, and submit them."""
    from rl4llm.extensions.launch.launchers import launch_on

    _check_config(arguments)
    return launch_on(
        arguments.on,
        arguments.config,
        arguments.overrides,
        options=dict(arguments.option),
        out=arguments.out,
        submit=arguments.submit,
        say=say,
    )


def _part(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.launch.roles import part

    words = part(arguments.config, arguments.overrides, arguments.role, os.environ, force=arguments.force)
    (show if arguments.dry_run else say)(f"rl4llm {shlex.join(words)}")
    if arguments.dry_run:
        return 0
    from rl4llm.cli import main

    return main(words)
