"""Every tracker with its real package: what was logged is read back through the package, after the run was resumed."""

import functools
import json
import math
import struct
import sys
import time

import pytest
from matplotlib.image import imsave
from numpy import zeros

from rl4llm.tracking.tensorboard import TensorBoardTracker, as_markdown
from rl4llm.tracking.tracker import TrackedRun

KEY = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"training.lr": 0.1, "judge.api_key": KEY, "judge.url": f"http://me:{KEY}@host"}
ROWS = [{"prompt": "user: 1|1?", "completion": "assistant: <b>2\n</b>", "reward": 1.0, "stop_reason": "done"}]


class TensorBoard:
    """Opens a tracker on a directory, and reads back what is there."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory

    def open(self, resume_step):
        while list((self.directory / "tb").glob(f"*.tfevents.{int(time.time())}.*")):
            time.sleep(0.1)  # TensorBoard reads files in the order of the seconds in their names
        return TensorBoardTracker(TrackedRun(self.directory / "tb", resume_step))

    @functools.cached_property
    def _events(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.directory / "tb"))
        events.Reload()
        return events

    def points(self, name):
        return [(event.step, round(event.value, 4)) for event in self._events.Scalars(name)]

    def table(self):
        text = self._events.Tensors("eval/episodes/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert text == as_markdown(ROWS)
        return ROWS

    def has_picture(self):
        return self._events.Images("curve")[-1].encoded_image_string.startswith(b"\x89PNG")

    def config(self):
        return {"training.lr": "0.1"}  # shows none


class Wandb(TensorBoard):
    def __init__(self, directory, monkeypatch):
        wandb = pytest.importorskip("wandb", exc_type=ImportError)
        wandb.teardown()  # it reads the environment once
        self.directory = directory
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("HOME", str(directory / "home"))
        monkeypatch.setattr(sys, "argv", ["train", f"judge.api_key={KEY}"])

    def open(self, resume_step):
        warned = []
        while list((self.directory / "wandb").glob(f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-run1")):
            time.sleep(0.1)  # W&B names a directory by the second
        from rl4llm.extensions.trackers.wandb import WandbTracker

        tracker = WandbTracker(
            TrackedRun(self.directory, resume_step, "project", "run1", CONFIG, warned.append)
        )
        assert not warned  # it was asked to be offline
        return tracker

    @functools.cached_property
    def _records(self):
        """Of both starts of the run, as `wandb sync` reads them."""
        import wandb
        from wandb.proto.wandb_internal_pb2 import Record

        wandb.teardown()  # its process writes out what it has
        files = sorted((self.directory / "wandb").glob("offline-run-*-run1/run-run1.wandb"))
        assert len(files) == 2
        return [Record.FromString(data) for file in files for data in read_leveldb_log(file.read_bytes())]

    def _rows(self):
        for record in self._records:
            row = {}
            for item in record.history.item:
                name, *field = item.nested_key
                value = json.loads(item.value_json)
                row[name] = {**row.get(name, {}), field[0]: value} if field else value
            if row:
                yield row

    def points(self, name):
        first = {}  # what the server does with a step that comes twice
        for row in self._rows():
            if name in row:
                first.setdefault(row["_step"], row[name])
        return sorted(first.items())

    def table(self):
        entry = next(row["eval/episodes"] for row in self._rows() if "eval/episodes" in row)
        file = next((self.directory / "wandb").glob(f"offline-run-*/files/{entry['path']}"))
        table = json.loads(file.read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]

    def has_picture(self):
        entry = next(row["curve"] for row in self._rows() if "curve" in row)
        return bool(list((self.directory / "wandb").glob(f"offline-run-*/files/{entry['path']}")))

    def config(self):
        updates = [item for record in self._records for item in record.run.config.update]
        return {item.key: item.value_json for item in updates}


def read_leveldb_log(data, header=7, block=32768):
    """The records of a W&B file: blocks of pieces with checksum, length and kind (whole, first, middle or last)."""
    place, parts = header, []
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


@pytest.mark.parametrize("kind", [TensorBoard, Wandb])
def test_resumed_run_is_one_run_with_each_step_once_and_no_key(kind, tmp_path, monkeypatch):
    place = kind(tmp_path, monkeypatch)
    imsave(tmp_path / "curve.png", zeros((4, 4, 3)))
    for resume_step, steps in (
        (-1, (1, 2)),
        (1, (2, 3)),
    ):  # killed behind step 2, whose checkpoint is of step 1
        tracker = place.open(resume_step)
        for step in steps:
            tracker.log(step, {"reward/mean": step / 2, "kl": math.nan if step == 1 else 0.0})
            if step == 2:
                tracker.log(step, {"eval/accuracy": 0.5})
                tracker.table(step, "eval/episodes", ROWS)
        tracker.picture(steps[-1], "curve", tmp_path / "curve.png")
        tracker.close()
    assert place.points("reward/mean") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert place.points("eval/accuracy") == [(2, 0.5)]
    assert place.table() == ROWS
    assert place.has_picture()
    assert str(place.config()["training.lr"]) == "0.1"
    files = [path for path in place.directory.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in files)
    assert sum(path.stat().st_size for path in files) > 100


def test_wandb_without_a_server_logs_offline_and_hides_the_key(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", exc_type=ImportError)
    wandb.teardown()  # it reads the environment once
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    from rl4llm.extensions.trackers.wandb import WandbTracker

    warnings = []
    tracker = WandbTracker(
        TrackedRun(tmp_path / "run", -1, "project", "run1", CONFIG, warnings.append), init_timeout_s=2.0
    )
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    wandb.teardown()  # its process writes out what it has
    assert len(warnings) == 1 and "offline" in warnings[0] and KEY not in warnings[0]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(b"reward/mean" in path.read_bytes() for path in files)
    assert not any(KEY.encode() in path.read_bytes() for path in files)
