"""Modal: a function for the trainer and a server for each inference server, each on its GPUs, with a shared volume.

``modal run --detach modal_app.py::train`` starts them; the file only contains the arguments of
`rl4llm.extensions.launch.modal_app`.

Options: `volume`, which contains output.dir and local models (``rl4llm``); `image`, from a registry, with
`rl4llm[modal]` and SGLang, instead of one that Modal builds; `extras` of rl4llm for the image that Modal builds, such
as ``deepspeed,wandb``; `secret`, a Modal secret with further keys that the run needs, such as HF_TOKEN.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch.job import ClusterJob

APP = "modal_app.py"
SUBMIT = ("modal", "run", "--detach", f"{APP}::train")
OPTIONS = ("volume", "image", "extras", "secret")
CONFIG = (
    "/rl4llm-run/config.yaml"  # in every container; Python started in / would take /rl4llm for the package
)
SHARED = "/shared"  # mount point of the volume, and base of the trainer's relative paths
SYNC = ("auto", "filesystem")

TEXT = '''\
"""The run {name} on Modal.

    modal run --detach modal_app.py::train             start it, or resume from its last checkpoint
"""

from pathlib import Path

from rl4llm.extensions.launch.modal_app import build

run = build(Path(__file__).with_name("config.yaml"), {name!r}, {options!r})
app = run.app


@app.local_entrypoint()
def train():
    run.start()
'''


def render(job: ClusterJob) -> dict[str, str]:
    """Return the app. Raises ConfigError for a run that Modal does not support."""
    check(job)
    return {APP: TEXT.format(name=job.name, options=dict(job.options))}


def check(job: ClusterJob) -> None:
    """Raise ConfigError for a run that Modal does not support."""
    job.check_options(OPTIONS, "modal")
    _check_roles(job)
    _check_files(yaml.safe_load(job.config))


def _check_roles(job: ClusterJob) -> None:
    """Refuse roles that Modal cannot run: containers connect only over HTTPS, and one of them trains."""
    counts = {role.name: role.count for role in job.roles}
    refusals = {
        f"launch.nodes={counts['trainer']} is not accepted with --on modal, where one container trains. Next: set "
        "launch.nodes=1 and launch.nproc up to 8.": counts["trainer"] > 1,
        "launch.router=true is not accepted with --on modal. Next: remove it; requests are balanced without it.":
        "router" in counts,
        f"launch.env_hosts={counts.get('env')} is not accepted with --on modal: containers cannot connect by gRPC. Next: "
        "remove it, or set env.remote to hosts outside Modal.": "env" in counts,
        "--on modal needs launch.gpu, such as H100, and launch.server_gpu if servers use another GPU.":
        any(role.gpus and not role.gpu for role in job.roles),
    }  # fmt: skip
    for text, applies in refusals.items():
        if applies:
            raise ConfigError(text)


def _check_files(config: dict[str, Any]) -> None:
    """Refuse directories outside the volume, which servers read and the run keeps."""
    way = config["sync"]["name"]
    for key, path in (("output.dir", config["output"]["dir"]), ("sync.dir", config["sync"]["dir"] or "")):
        directory = PurePosixPath(path)
        elsewhere = directory.is_absolute() and not directory.is_relative_to(SHARED)
        if elsewhere or ".." in directory.parts:
            raise ConfigError(
                f"{key}={directory} is not accepted: it must be on the volume at {SHARED}. Next: "
                f"set {key}=runs/{directory.name}."
            )
    if way not in SYNC:
        raise ConfigError(
            f"sync.name={way!r} is not accepted with --on modal: new files appear late on a volume, and this method does "
            f"not wait for them. Accepted: {', '.join(SYNC)}."
        )
