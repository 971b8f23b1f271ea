"""The command line: ``rl4llm train configs/x.yaml training.lr=1e-5``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl4llm import __version__
from rl4llm.core.errors import ConfigError, EnginesDownError, HostsDownError, RL4LLMError

STOPPED = 75  # EX_TEMPFAIL: the run was asked to stop before it was done; the same command goes on with it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 75 stopped and resumable, 130 broken off, 1 or 2 an error."""
    arguments = _parsed(argv)
    try:
        return arguments.run(arguments)
    except (EnginesDownError, HostsDownError) as error:
        Console(stderr=True, markup=False, highlight=False).print(
            f"{error}\nThe same command goes on from the last checkpoint."
        )
        return STOPPED
    except RL4LLMError as error:
        if arguments.debug:
            raise
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
        Console(stderr=True, markup=False, highlight=False).print(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped at once. The same command goes on from the last checkpoint.")
        return 130


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse alone does not take."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl4llm", description="Reinforcement learning for language models.")
    parser.add_argument("--version", action="version", version=f"rl4llm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of errors")
    # DeepSpeed's launcher puts it before everything else; the environment variable LOCAL_RANK says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train as a configuration says; run it again to resume")
    _add_config(train)
    train.add_argument("--force", action="store_true", help="go on with a run although its configuration changed")
    train.set_defaults(run=_train)

    _add_launch(commands)

    evaluate = commands.add_parser("eval", help="measure a model, or a run's last checkpoint, on the held-out set")
    _add_config(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print the numbers as JSON")
    evaluate.set_defaults(run=_evaluate)

    _add_collect(commands)
    _add_export(commands)

    replay = commands.add_parser("replay", help="compute a step that was not finite again, and show where it comes from")
    replay.add_argument("step", help="a directory such as runs/NAME/failed/step-000012")
    replay.set_defaults(run=_replay)

    _add_view(commands)

    info = commands.add_parser("info", help="versions, devices, and what the names in a configuration may be")
    info.add_argument("topic", nargs="?", choices=("algorithms", "environments", "rewards"), help="only this table")
    info.set_defaults(run=_info)

    _add_quickstart(commands)

    _add_serve_env(commands)

    # No prefix starts an option here, so all that follows goes to the launcher, which knows its own options.
    serve = commands.add_parser("serve", help="start an inference server", add_help=False, prefix_chars="\0")
    serve.add_argument("flags", nargs="*")
    serve.set_defaults(run=_serve)
    return parser


def _add_collect(commands: Any) -> None:
    collect = commands.add_parser("collect", help="play episodes and write them as a dataset, for example for sft")
    _add_config(collect)
    collect.add_argument("--out", required=True, type=Path, help="episodes.jsonl, episodes.parquet, or a directory")
    collect.add_argument("--prompts", type=int, default=64, help="how many; rollout.group_size episodes each (%(default)s)")
    collect.add_argument("--filter-reward", type=float, metavar="R", help="only episodes with a reward of at least R")
    collect.set_defaults(run=_collect)


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write a run's model as a Hugging Face directory, with a model card")
    export.add_argument("run_dir", type=Path, metavar="RUN", help="the output.dir of a run")
    export.add_argument("--out", required=True, type=Path, help="a directory that is not there yet")
    export.add_argument("--step", type=int, help="of which checkpoint (default: the last)")
    export.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes, such as a model.path that has moved")
    export.set_defaults(run=_export)


def _add_quickstart(commands: Any) -> None:
    quickstart = commands.add_parser("quickstart", help="build a small model here, warm it up, train it with GRPO")
    quickstart.add_argument("--dir", default="runs/quickstart", help="where everything goes (default: %(default)s)")
    quickstart.add_argument("--seed", type=int, default=42)
    quickstart.add_argument("--configs", default="configs", help="where quickstart*.yaml lie (default: %(default)s)")
    quickstart.set_defaults(run=_quickstart)


def _add_serve_env(commands: Any) -> None:
    host = commands.add_parser("serve-env", help="host environments, with tools and rewards, for trainers elsewhere")
    host.add_argument("--env", required=True, help="what to host, as in env.name: tool,chat,package.module:Class")
    host.add_argument("--host", default="127.0.0.1", help="address to listen on; others need a token (default: %(default)s)")
    host.add_argument("--port", type=int, default=50051, help="0 takes a free one (default: %(default)s)")
    host.add_argument("overrides", nargs="*", metavar="sandbox.key=value", help="where programs of the policy run")
    host.set_defaults(run=_serve_env)


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser("launch", help="train on several processes or machines, started again when one dies")
    _add_config(launch)
    launch.add_argument("--nproc", type=int, default=1, help="processes on this machine, one per GPU (default: %(default)s)")
    launch.add_argument("--nnodes", type=int, default=1, help="machines (default: %(default)s)")
    launch.add_argument("--node-rank", type=int, default=0, help="number of this machine, from 0")
    launch.add_argument("--rendezvous", help="HOST:PORT of machine 0, which all of them can reach")
    launch.add_argument("--restarts", type=int, default=0, help="in a row, without a new checkpoint (default: never)")
    launch.add_argument("--force", action="store_true", help="go on with a run although its configuration changed")
    launch.set_defaults(run=_launch)


def _add_view(commands: Any) -> None:
    view = commands.add_parser(
        "view",
        help="look at runs in a browser: curves, configurations, episodes token by token",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  rl4llm view runs/quickstart/grpo\n  rl4llm view runs/a runs/b --open\n"
        "  rl4llm view runs --export report.html",
    )
    view.add_argument("runs", nargs="+", metavar="RUN", help="output.dir of a run, or a directory of runs")
    view.add_argument("--port", type=int, help="of 127.0.0.1; 0 is any that is free (default: the first free one from 6100)")
    view.add_argument("--open", action="store_true", help="open the page in the browser")
    view.add_argument("--export", metavar="FILE", help="write all of it into one HTML file instead")
    view.add_argument("--episodes", type=int, default=200, help="of each run in FILE, the newest (default: %(default)s)")
    view.set_defaults(run=_view)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", help="a YAML file")
    command.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="changes to keys, or YAML files to be laid over the first"
    )


def _train(arguments: argparse.Namespace) -> int:
    from rl4llm.build import build_trainer
    from rl4llm.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    with build_trainer(config, force=arguments.force) as trainer:
        trainer.train()
        trainer.ranks.wait()
        trainer.ranks.close()
    if trainer.stopped and trainer.ranks.is_first:
        command = " ".join(["rl4llm train", arguments.config, *arguments.overrides])
        Console().print(f"Stopped after step {trainer.step} and saved. Resume with:\n  {command}", soft_wrap=True)
        return STOPPED
    return 0


def _launch(arguments: argparse.Namespace) -> int:
    from rl4llm.launch import Nodes, launch

    if arguments.nproc < 1 or arguments.nnodes < 1 or arguments.restarts < 0:
        raise ConfigError("--nproc and --nnodes are 1 or above, --restarts 0 or above.")
    if arguments.nnodes > 1 and not arguments.rendezvous:
        raise ConfigError("--nnodes above 1 needs --rendezvous HOST:PORT, the same on every machine.")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise ConfigError(f"--node-rank {arguments.node_rank} is not accepted: 0 to {arguments.nnodes - 1}, by machine.")
    nodes = Nodes(arguments.nproc, arguments.nnodes, arguments.node_rank, arguments.rendezvous)
    say = Console(stderr=True, markup=False, highlight=False).print
    return launch(
        arguments.config, arguments.overrides, nodes=nodes, restarts=arguments.restarts, force=arguments.force, say=say
    )


def _evaluate(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config
    from rl4llm.evaluate import evaluate

    numbers = evaluate(load_config(arguments.config, arguments.overrides))
    if arguments.json:
        sys.stdout.write(json.dumps(numbers) + "\n")
        return 0
    table = Table("metric", "value", title=f"held-out set, {arguments.config}")
    for name, value in numbers.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from rl4llm.config import load_config
    from rl4llm.evaluate import collect
    from rl4llm.tracking.export import check_target, write_episodes

    if arguments.prompts < 1:
        raise ConfigError(f"--prompts {arguments.prompts} is not accepted: 1 or above.")
    check_target(arguments.out)
    episodes = collect(load_config(arguments.config, arguments.overrides), arguments.prompts)
    with closing(episodes):
        kept, total = write_episodes(episodes, arguments.out, arguments.filter_reward)
    Console().print(f"{kept} of {total} episodes are in {arguments.out}", soft_wrap=True)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from rl4llm.export import export

    checkpoint = export(arguments.run_dir, arguments.out, step=arguments.step, overrides=arguments.overrides)
    Console().print(f"The model after step {checkpoint.step} is in {arguments.out}", soft_wrap=True)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from rl4llm.replay import replay

    for table in replay(Path(arguments.step)):
        Console().print(table)
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from rl4llm.view import export, find_runs, serve

    runs, say = find_runs(arguments.runs), Console(stderr=True, markup=False, highlight=False).print
    if arguments.episodes < 0:
        raise ConfigError(f"--episodes {arguments.episodes} is not accepted: 0 or above.")
    if arguments.export is not None:
        count = export(runs, Path(arguments.export), arguments.episodes)
        say(f"{arguments.export}: {len(runs)} run(s), {count} episode(s)", soft_wrap=True)
        return 0

    def ready(url: str) -> None:
        say(f"{url}  shows {', '.join(run.name for run in runs)}; Ctrl-C ends it", soft_wrap=True)
        if arguments.open and not webbrowser.open(url):
            say("No browser can be opened from here. Open the address yourself.")

    serve(runs, arguments.port, ready)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from rl4llm.info import tables

    for table in tables(arguments.topic):
        Console().print(table)
    return 0


def _quickstart(arguments: argparse.Namespace) -> int:
    from rl4llm.quickstart.run import quickstart

    finished = quickstart(Path(arguments.dir), seed=arguments.seed, configs=Path(arguments.configs))
    if not finished:
        command = " ".join(["rl4llm", *sys.argv[1:]])
        Console().print(f"Stopped and saved. Resume with:\n  {command}", soft_wrap=True)
        return STOPPED
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from rl4llm.inference.launch import serve

    return serve(arguments.flags)


def _serve_env(arguments: argparse.Namespace) -> int:
    from rl4llm.serve_env import serve_env

    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port} is not accepted: a number from 1 to 65535, or 0 for a free one.")
    names = [name.strip() for name in arguments.env.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--env {arguments.env!r} names no environment. Accepted: names, such as tool,chat.")
    say = Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print
    return serve_env(names, arguments.host, arguments.port, arguments.overrides, say)


def console_script() -> None:
    """The entry point of the `rl4llm` command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
