"""GPUs that a launch assigns: those that are visible, under their names, and never more than there are."""

import re

import pytest
import torch

from rl4llm.cli import main
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.launch import local
from rl4llm.extensions.launch.local import planned, present
from rl4llm.runtime import devices

RUN = ["model.path=hub/model", "data.path=arithmetic", "inference.name=sglang", "launch.servers=1"]
BOTH = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-94f1da9b-6c27-5d2d-9d1f-ef5d3b2a1c11"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that sets the number of GPUs and CUDA_VISIBLE_DEVICES, and plans a run on them."""
    (tmp_path / "run.yaml").write_text("")

    def plan(count, visible, *overrides):
        monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found, _ = planned(str(tmp_path / "run.yaml"), [*RUN, *overrides], gpus=present(local.os.environ))
        return {place.role.name: place.environ().get("CUDA_VISIBLE_DEVICES") for place in found}

    return plan


@pytest.mark.parametrize(("count", "visible", "expected"), [
    (8, None, ["0", "1"]),
    (2, "4,5", ["4", "5"]),
    (2, " 5 , 4 ", ["5", "4"]),
    (2, ",".join(BOTH), BOTH),
    (2, "4,5,-1,6", ["4", "5"]),
])  # fmt: skip
def test_processes_get_the_visible_gpus_under_their_names(machine, count, visible, expected):
    assert list(machine(count, visible).values()) == expected


@pytest.mark.parametrize(
    ("count", "visible"), [(1, None), (1, "4"), (1, "4,5"), (1, "4,x,5"), (0, "4,5"), (0, None)]
)
def test_more_gpus_than_visible_are_refused(machine, count, visible):
    with pytest.raises(ConfigError):
        machine(count, visible, "model.device=cuda")


def test_a_server_with_cohost_shares_the_gpus_of_the_trainer(machine):
    assert machine(1, "3", "inference.cohost=true") == {"trainer": "3", "server": "3"}
    four = ["inference.cohost=true", "launch.nproc=4", "launch.server_gpus=2"]
    assert machine(4, "4,5,6,7", *four) == {"trainer": "4,5,6,7", "server": "4,5"}


def test_a_trainer_without_gpus_uses_the_cpu(machine):
    assert machine(0, None, "launch.server_gpus=0") == {"trainer": None, "server": None}
    with pytest.raises(ConfigError):
        machine(0, None)


def test_a_dry_run_uses_the_visible_names_but_needs_no_gpu(monkeypatch, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("")
    words = ["launch", str(tmp_path / "run.yaml"), *RUN, "--on", "local", "--dry-run"]
    for visible, expected in (("4,5", ["4", "5"]), ("", ["0", "1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S*)", shown) == expected
