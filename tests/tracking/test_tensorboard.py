import os
import signal
import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata

from rl4llm.tracking.tensorboard import TensorBoardTracker
from rl4llm.tracking.tracker import TrackedRun

WRITER = """
import sys
from pathlib import Path
from rl4llm.tracking.tensorboard import TensorBoardTracker
from rl4llm.tracking.tracker import TrackedRun
tracker = TensorBoardTracker(TrackedRun(Path(sys.argv[1])))
for step in range(7):
    tracker.log(step, {"reward/mean": step / 10})
print("logged", flush=True)
sys.stdin.read()
"""


def points(directory, name="reward/mean"):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(name)]


def age(directory):
    """Let the events files be old: TensorBoard reads them in the order of the seconds in their names."""
    for file in directory.iterdir():
        file.rename(file.with_name(file.name.replace("tfevents.1", "tfevents.0", 1)))


def test_a_killed_and_resumed_run_shows_every_step_once(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "logged\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    age(tmp_path)
    assert points(tmp_path) == [(step, step / 10) for step in range(7)]
    tracker = TensorBoardTracker(TrackedRun(tmp_path, resume_step=4))
    for step in (5, 6, 7):
        tracker.log(step, {"reward/mean": 1.0})
    tracker.close()
    assert points(tmp_path) == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
        (5, 1.0),
        (6, 1.0),
        (7, 1.0),
    ]


def test_a_fresh_start_in_a_used_directory_hides_old_events(tmp_path):
    for value in (0.25, 0.75):
        age(tmp_path)
        tracker = TensorBoardTracker(TrackedRun(tmp_path, resume_step=-1))
        tracker.log(0, {"reward/mean": value})
        tracker.close()
    assert points(tmp_path) == [(0, 0.75)]


def test_a_curve_has_the_description_of_its_metric(tmp_path):
    tracker = TensorBoardTracker(TrackedRun(tmp_path))
    tracker.log(1, {"reward/math": 0.5, "unheard_of": 1.0})
    tracker.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert points(tmp_path, "train/unheard_of") == [(1, 1.0)]
    assert "reward NAME" in accumulator.SummaryMetadata("reward/math").summary_description


def test_hyper_parameters_are_in_the_events_of_the_run(tmp_path):
    config = {"training.lr": 1e-5, "algorithm.name": "grpo", "model.pad_token": None, "rewards": ["math"]}
    tracker = TensorBoardTracker(
        TrackedRun(tmp_path / "a", config={**config, "tracking.api_key": "its value"})
    )
    tracker.log(1, {"reward/mean": 0.5, "accuracy": 0.25, "eval/accuracy": 0.75})
    tracker.close()
    assert [path.is_file() for path in (tmp_path / "a").iterdir()] == [True]
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert list(multiplexer.Runs()) == ["a"]  # without an ending such as /tensorboard
    assert multiplexer.Runs()["a"]["scalars"] == ["reward/mean", "train/accuracy", "eval/accuracy"]
    content = multiplexer.SummaryMetadata("a", metadata.SESSION_START_INFO_TAG).plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    assert found["training.lr"].number_value == 1e-5 and found["algorithm.name"].string_value == "grpo"
    assert found["rewards"].string_value == '["math"]' and "model.pad_token" not in found
    assert "its value" not in str(found)
    content = multiplexer.SummaryMetadata("a", metadata.EXPERIMENT_TAG).plugin_data.content
    scores = {info.name.tag for info in metadata.parse_experiment_plugin_data(content).metric_infos}
    assert {"eval/accuracy", "train/accuracy", "reward/mean"} <= scores


def test_the_keys_of_a_sweep_are_the_first_hyper_parameters(tmp_path):
    config = {"algorithm.name": "grpo", "training.lr": 1e-5, "max_steps": 9, "algorithm.kl_coef": 0.1}
    run = tmp_path / "training.lr=1e-5,algorithm.kl_coef=0.1"
    TensorBoardTracker(TrackedRun(run, config=config)).close()
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    content = multiplexer.SummaryMetadata(run.name, metadata.EXPERIMENT_TAG).plugin_data.content
    names = [info.name for info in metadata.parse_experiment_plugin_data(content).hparam_infos]
    assert names == ["training.lr", "algorithm.kl_coef", "algorithm.name", "max_steps"]
