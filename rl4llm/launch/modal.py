"""Modal: a function for the trainer and a server for each inference server, each on its GPUs, with a volume between them.

``modal run --detach modal_app.py::train`` starts them; the file only says what `rl4llm.launch.modal_app` is to make.

Options: `volume`, which has output.dir and local models (``rl4llm``); `image`, a registry's, with `rl4llm[modal]` and SGLang
in it, instead of one that Modal builds; `extras` of rl4llm to build it with, such as ``deepspeed,wandb``; `secret`, one of
Modal's, for keys that the run needs besides its own, such as HF_TOKEN.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml

from rl4llm.core.errors import ConfigError
from rl4llm.launch.job import Job

APP = "modal_app.py"
OPTIONS = ("volume", "image", "extras", "secret")
CONFIG = "/rl4llm-run/config.yaml"  # in every container; Python, begun in /, would take /rl4llm for the package
SHARED = "/shared"  # where the volume is, and relative paths of the trainer begin
MOST_GPUS = 8  # of a container
SYNC = ("auto", "filesystem", "tensor")

TEXT = '''\
"""The run {name} on Modal.

    modal run --detach modal_app.py::train             start it, or go on from its last checkpoint
    modal run modal_app.py::checkpoints                list its checkpoints
    modal run modal_app.py::clear --steps 10,20        delete some; without --steps all but the newest
"""

from pathlib import Path

from rl4llm.launch.modal_app import build

run = build(Path(__file__).with_name("config.yaml"), {name!r}, {options!r})
app, files = run.app, run.files
checkpoints, clear = run.checkpoints, run.clear


@app.local_entrypoint()
def train():
    run.start()
'''


def render(job: Job, config: str) -> dict[str, str]:
    """The app and the configuration; raises ConfigError for a run that Modal cannot hold."""
    check(job, config)
    return {APP: TEXT.format(name=job.name, options=dict(job.options)), "config.yaml": config}


def check(job: Job, config: str) -> None:
    """Raise ConfigError for a run that Modal cannot hold; `config` is the text of the configuration."""
    job.check_options(OPTIONS, "modal")
    _check_roles(job)
    _check_files(yaml.safe_load(config))


def submit(job: Job) -> list[str]:
    return ["modal", "run", "--detach", f"{APP}::train"]


def ready() -> None:
    """Raise ConfigError where Modal would refuse to start anything."""
    try:
        from rl4llm.launch.modal_app import check_account  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("--on modal needs its package. Next: pip install 'rl4llm[modal]'.") from None
    check_account()


def _check_roles(job: Job) -> None:
    """Modal's containers reach each other by HTTPS alone, and have as many GPUs as one machine."""
    counts = {role.name: role.count for role in job.roles}
    if counts["trainer"] > 1:
        raise ConfigError(
            f"launch.nodes={counts['trainer']} is not accepted with --on modal: one container trains. Next: "
            f"launch.nodes=1 with launch.nproc up to {MOST_GPUS}."
        )
    if "router" in counts:
        raise ConfigError("launch.router=true is not accepted with --on modal. Next: leave it out; requests spread anyway.")
    if "env" in counts:
        raise ConfigError(
            f"launch.env_hosts={counts['env']} is not accepted with --on modal: no container reaches another by gRPC. Next: "
            "leave it out, so that the trainer plays them, or name hosts elsewhere with env.remote."
        )
    for role in job.roles:
        if role.gpus > MOST_GPUS:
            raise ConfigError(f"{role.gpus} GPUs for a {role.name} are not accepted with --on modal: up to {MOST_GPUS}.")
        if role.gpus and not role.gpu:
            raise ConfigError("--on modal: launch.gpu is to be set, such as H100, and launch.server_gpu where it differs.")


def _check_files(config: dict[str, Any]) -> None:
    """What servers load, and what is to stay, must be on the volume."""
    way = config["sync"]["name"]
    for key, path in (("output.dir", config["output"]["dir"]), ("sync.dir", config["sync"]["dir"] or "")):
        directory = PurePosixPath(path)
        elsewhere = directory.is_absolute() and not directory.is_relative_to(SHARED)
        if elsewhere or ".." in directory.parts:
            raise ConfigError(
                f"{key}={directory} is not accepted: it has to be on the volume, which is {SHARED}. Next: "
                f"{key}=runs/{directory.name}."
            )
    if way not in SYNC:
        raise ConfigError(
            f"sync.name={way!r} is not accepted with --on modal: a volume shows new files late, for which this way does not "
            f"wait. Accepted: {', '.join(SYNC)}."
        )
