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
OF_RANKS = ("nproc", "nnodes", "node_rank", "rendezvous", "restarts")  # options without --on and --as


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
    add_launchers(command)


def add_launchers(command: argparse.ArgumentParser) -> None:
    """Add ``--on slurm --submit`` for a whole run, ``--as server`` for one process of it."""
    command.add_argument(
        "--on",
        metavar="LAUNCHER",
        help="start all processes of the section `launch` with a launcher: local, slurm, ...",
    )
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option passed to the launcher; may be repeated",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for its files (default: output.dir-LAUNCHER)"
    )
    command.add_argument("--submit", action="store_true", help="also submit the files")
    command.add_argument(
        "--as",
        dest="role",
        choices=ROLES,
        help="run as one process of a launched job, configured by environment variables",
    )
    about = "with --on local and --as: only print the commands"
    command.add_argument("--dry-run", action="store_true", help=about)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.on == "local":
        return _here(arguments)
    if arguments.on:
        return _elsewhere(arguments)
    if arguments.role:
        return _part(arguments)
    return _ranks(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""
    if arguments.on and arguments.role:
        raise ConfigError(
            "--on starts all processes of a run, --as is one of them. Use only one of the two options."
        )
    whole, here = arguments.on or arguments.role, arguments.on in (None, "local")
    alone = {name: getattr(arguments, name) is not None for name in OF_RANKS}
    launcher = {"option": arguments.option, "out": arguments.out, "submit": arguments.submit}
    refused = {
        "with --on or --as; use launch.nproc and launch.nodes in the configuration": alone if whole else {},
        "without --on LAUNCHER": {} if arguments.on else launcher,
        "with --on local, which writes and submits no files": launcher if arguments.on == "local" else {},
        "with --on, except --on local": {}
        if here
        else {"force": arguments.force, "dry_run": arguments.dry_run},
        "without --on or --as": {} if whole else {"dry_run": arguments.dry_run},
    }
    for why, options in refused.items():
        for name, given in options.items():
            if given:
                raise ConfigError(f"--{name.replace('_', '-')} is not accepted {why}.")


def _check_config(arguments: argparse.Namespace) -> None:
    """Refuse an invalid configuration before any process starts."""
    from rl4llm.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from rl4llm.compose import check_config  # takes seconds to import; an unknown key is reported before

    check_config(config, here=arguments.on in (None, "local") and not arguments.dry_run)


def _ranks(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config
    from rl4llm.extensions.launch.ranks import Nodes, launch

    config = load_config(arguments.config, arguments.overrides)
    nproc = config.launch.nproc if arguments.nproc is None else arguments.nproc
    nnodes, node_rank = 1 if arguments.nnodes is None else arguments.nnodes, arguments.node_rank or 0
    restarts = arguments.restarts or 0
    if nnodes > 1 and not arguments.rendezvous:
        raise ConfigError("--nnodes above 1 needs --rendezvous HOST:PORT, the same on every machine.")
    _check_config(arguments)
    nodes = Nodes(nproc, nnodes, node_rank, arguments.rendezvous)
    return launch(
        arguments.config, arguments.overrides, nodes=nodes, restarts=restarts, force=arguments.force, say=say
    )


def _here(arguments: argparse.Namespace) -> int:
    """Start all processes of a run on this machine."""
    from rl4llm.extensions.launch.local import launch_here, planned
    from rl4llm.runtime.gpus import visible_gpus

    _check_config(arguments)
    if not arguments.dry_run:
        return launch_here(arguments.config, arguments.overrides, force=arguments.force, say=say)
    found, shared = planned(
        arguments.config, arguments.overrides, force=arguments.force, gpus=visible_gpus(os.environ) or None
    )
    for place in found:
        known = [f"{name}={value}" for name, value in {**shared, **place.environ()}.items()]
        show(shlex.join(["env", *known, *place.role.command]))
    return 0


def _elsewhere(arguments: argparse.Namespace) -> int:
    """Write the files that start a run with a launcher, and submit them."""
    from rl4llm.extensions.launch.launchers import launch_on

    _check_config(arguments)
    return launch_on(
        arguments.on,
        arguments.config,
        arguments.overrides,
        options=arguments.option,
        out=arguments.out,
        submit=arguments.submit,
        say=say,
    )


def _part(arguments: argparse.Namespace) -> int:
    from rl4llm.extensions.launch.roles import part

    words = part(arguments.config, arguments.overrides, arguments.role, os.environ, force=arguments.force)
    if arguments.dry_run:
        show(f"rl4llm {shlex.join(words)}")
        return 0
    say(f"rl4llm {shlex.join(words)}")
    from rl4llm.cli import main

    return main(words)
