"""Files that start a run of every role elsewhere, and stand-ins for where they do."""

import pytest
import yaml
from launch_cluster import EVERY_ROLE, Cluster

from rl4llm.extensions.launch.launchers import launch_on


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written(engine, *overrides): the directory with what starts a run of every role there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(EVERY_ROLE))

    def write(engine, *overrides, options=("partition=all",), **more):
        arguments = {
            "options": dict(option.split("=") for option in options), "out": tmp_path / f"on {engine}", "submit": False,
            "say": lambda text: None, **more,
        }  # fmt: skip
        assert launch_on(engine, "run.yaml", overrides, **arguments) == 0
        return arguments["out"]

    return write


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)
