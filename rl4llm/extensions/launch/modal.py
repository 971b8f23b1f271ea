"""Modal: a function for the trainer and a server for each inference server, each on its GPUs, with a shared volume.

``modal run --detach modal_app.py::train`` starts them; the file only contains the arguments of
`rl4llm.extensions.launch.modal_app`.

Options: `volume`, which contains output.dir and local models (``rl4llm``); `image`, from a registry, with
`rl4llm[modal]` and SGLang, instead of one that Modal builds; `extras` of rl4llm for the image that Modal builds, such
as ``deepspeed,wandb``; `secret`, a Modal secret with further keys that the run needs, such as HF_TOKEN.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from rl4llm.core.errors import ConfigError, unknown
from rl4llm.extensions.launch.roles import ClusterJob

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
    """Return the app. Raises ConfigError for what would end only in a container, or lose the run's files."""
    for name in job.options:
        if name not in OPTIONS:
            raise ConfigError(unknown("--on modal: --option", name, OPTIONS))
    if job.roles[0].count > 1 or not {role.name for role in job.roles} <= {"trainer", "server"}:
        # containers connect only over HTTPS, so not by gRPC or torchrun
        raise ConfigError(
            "--on modal starts one trainer and servers. Set launch.nodes=1, launch.router=false and launch.env_hosts=0."
        )
    if any(role.gpus and not role.gpu for role in job.roles):
        raise ConfigError("--on modal needs launch.gpu, such as H100.")
    config = yaml.safe_load(job.config)
    for key, path in (("output.dir", config["output"]["dir"]), ("sync.dir", config["sync"]["dir"] or "")):
        if not Path(os.path.normpath(Path(SHARED, path))).is_relative_to(SHARED):
            raise ConfigError(f"{key}={path} is not on the volume {SHARED}. Set {key}=runs/NAME.")
    if (sync := config["sync"]["name"]) not in SYNC:  # others do not wait for new files, which appear late
        raise ConfigError(f"sync.name={sync!r} does not work on a volume. Accepted: {', '.join(SYNC)}.")
    return {APP: TEXT.format(name=job.name, options=dict(job.options))}
