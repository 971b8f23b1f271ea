import sys

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry
from rl4llm.tracking.tracker import TRACKERS, JsonlTracker, Tolerant, Trackers, check_installed, read_jsonl


def test_a_full_disk_is_reported_once_and_stops_nothing(tmp_path, files_of_at_most):
    warnings = []
    tolerant = Tolerant(warnings.append)
    full = JsonlTracker(tmp_path / "full.jsonl")
    full.log(0, {str(name): 1.0 for name in range(100)})
    trackers = Trackers([full, JsonlTracker(tmp_path / "m.jsonl")], tolerant)
    with files_of_at_most((tmp_path / "full.jsonl").stat().st_size):
        for step in (1, 2, 3):
            trackers.log(step, {"loss": 1.0})
    trackers.log(4, {"loss": 1.0})
    trackers.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "m.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(tmp_path / "full.jsonl")] == [0, 4]
    assert len(warnings) == 1 and warnings[0].startswith("full.jsonl cannot be written")
    assert tolerant.failures == {"full.jsonl": 3}


def test_only_failures_of_writing_are_tolerated():
    with pytest.raises(ConfigError), Tolerant(lambda text: None)("log"):
        raise ConfigError("wrong")


def test_a_tracker_without_its_package_is_refused_at_start(monkeypatch):
    table = {"tensorboard": TRACKERS.path_of("tensorboard")}
    again = Registry("tracking", table=table, group="rl4llm.trackers")
    monkeypatch.setattr("rl4llm.tracking.tracker.TRACKERS", again)
    packages = {"opentelemetry": "opentelemetry.sdk", "prometheus": "prometheus_client"}
    for name in again:
        package = packages.get(name, name)
        importers = ("torch.utils.tensorboard", again.path_of(name).partition(":")[0])
        for module in [one for one in sys.modules if f"{one}.".startswith(f"{package}.") or one in importers]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError):
            check_installed([name])


def test_a_tracker_that_nothing_provides_is_refused(monkeypatch):
    monkeypatch.setattr("rl4llm.tracking.tracker.TRACKERS", Registry("tracking"))
    with pytest.raises(ConfigError):
        check_installed(["wandb"])
