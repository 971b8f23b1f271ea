"""``rl4llm plan``: what a run will do and need, before anything is loaded."""

from __future__ import annotations

import argparse
from typing import Any

from rl4llm.commands.arguments import add_command, add_config, add_json
from rl4llm.commands.output import meanwhile, show, write_json
from rl4llm.core.errors import ConfigError


def add(commands: Any) -> None:
    examples = (
        "rl4llm plan configs/gsm8k_grpo.yaml",
        "rl4llm plan configs/gsm8k_grpo.yaml --time",
        "rl4llm plan configs/gsm8k_grpo.yaml backend.shard=fsdp2 --devices 8 --device-memory 24GiB",
    )
    about = "show what a step does and how much memory each phase takes; exit code 1 when it does not fit"
    command = add_command(commands, "plan", run, about, examples)
    add_config(command)
    command.add_argument(
        "--devices", type=int, default=1, help="devices, one process on each (default: %(default)s)"
    )
    command.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of one GPU, here or on another machine, such as 24GiB; with model.device=cpu, of the machine "
        "(default: this machine's)",
    )
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU of another machine, such as H100 or A100-40GB: plan for its memory, and estimate how long a rollout "
        "decodes on it (default: this machine's)",
    )
    command.add_argument(
        "--time",
        action="store_true",
        help="also play and train on a few prompts, for about ten seconds if the machine is fast enough, and estimate how "
        "long a step and the run take on this machine",
    )
    command.add_argument(
        "--run",
        dest="timed",
        metavar="DIR",
        help="also estimate steps with other values of rollout.max_staleness, from the times of a run with 0",
    )
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config
    from rl4llm.extensions.inspect.plan.advice import changes
    from rl4llm.extensions.inspect.plan.plan import make_plan, on_target
    from rl4llm.extensions.inspect.plan.show import as_json, parse_size, tables, verdict
    from rl4llm.extensions.inspect.plan.speed import CARDS, estimate, given_card
    from rl4llm.extensions.inspect.plan.staleness import of_run, of_time, under_way

    _check(arguments)
    config = load_config(arguments.config, arguments.overrides)
    card = given_card(arguments.gpu, config.model.device) if arguments.gpu else None
    memory = CARDS[card].memory if card else None
    if arguments.device_memory is not None:
        memory = parse_size(arguments.device_memory)
    overlap = of_run(arguments.timed)
    config = on_target(config, memory)
    plan = make_plan(config, arguments.devices, memory)
    found = [] if plan.fits else changes(plan)
    times: dict[str, Any] = {
        "under_way": under_way(plan),
        "rollout": estimate(plan, card, here=memory is None),
    }
    if arguments.time and plan.fits:
        from rl4llm.extensions.inspect.check.times import measure

        with meanwhile():
            times["time"] = measure(config)
    times["overlap"] = overlap or of_time(times.get("time"))
    times = {name: time for name, time in times.items() if time}
    if arguments.json:
        write_json(as_json(plan, found) | {name: time.as_json() for name, time in times.items()})
    else:
        lines = (line for time in times.values() for line in time.lines())
        show(*tables(plan), *verdict(plan, found), *lines)
    return 0 if plan.fits else 1


def _check(arguments: argparse.Namespace) -> None:
    if arguments.devices < 1:
        raise ConfigError(f"--devices {arguments.devices} is not accepted. Accepted: 1 or more.")
    for flag, given in (("--device-memory", arguments.device_memory), ("--gpu", arguments.gpu)):
        if arguments.time and given is not None:
            raise ConfigError(f"--time measures this machine, so it is not accepted with {flag}. Remove one.")
