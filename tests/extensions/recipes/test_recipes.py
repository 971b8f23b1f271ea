"""Recipes: their files, their stored results, their band, and the shortest one from its data to its verdict."""

import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_python import python, started
from gallery import BEGIN, END, PAGE, PICTURES, check_models, drawn, page, store
from PIL import Image

from rl4llm.cli import _parsed
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.extensions.recipes.recipe import RECIPES, Recipe, load, names
from rl4llm.extensions.recipes.repeat import measured, repeat
from rl4llm.extensions.recipes.results import Band, Stored, outdated, standard_error, stored
from rl4llm.extensions.recipes.summary import compared, rows

HERE = ("/home/", "/root/", "/work/", "/tmp/", "/Users/")  # paths of a machine
RUN = {
    "seed": 0,
    "curve": [[0, 0.2], [5, 0.8]],
    "problems": 100,
    "seconds": 60,
    "cpu_seconds": 50,
    "peak_memory_gb": 1.0,
    "weights_sha256": "a" * 64,
    "machine": {"model": "M", "processor": "P", "gpu": None, "threads": 1, "torch": "2"},
}


def recipe(*words, cwd):
    return python("-m", "rl4llm", "recipe", *words, cwd=cwd)


@pytest.fixture
def small(tmp_path):
    """Return a copy of the shortest recipe with one stored result."""
    shutil.copytree(RECIPES / "parity", tmp_path / "copy")
    copied = load(str(tmp_path / "copy"))
    results = {"fingerprint": copied.fingerprint("default"), "seeds": {"0": RUN}}
    (tmp_path / "copy" / "results.json").write_text(json.dumps({"variants": {"default": results}}))
    return copied


def repeated_with(copied, work, *stages, overrides=()):
    return repeat(replace(copied, data="", stages=stages), work, "default", 0, overrides)


@pytest.mark.parametrize("name", names())
def test_configurations_of_every_stage_are_valid(name, tmp_path):
    found = load(name)
    assert (found.path / "README.md").read_text().strip()
    assert load_config(found.path / "train.yaml").max_steps > 0
    for variant in found.variants:
        for command in found.commands(found.words(tmp_path, variant, found.seeds[0], [])):
            if command[1] == "-m":
                arguments = _parsed(command[3:])
                load_config(arguments.config, arguments.overrides)


@pytest.mark.parametrize("name", names())
def test_stored_results_belong_to_the_configuration(name):
    found = load(name)
    assert outdated(found) == []
    for known in stored(found).values():
        assert set(known.seeds) <= set(found.seeds)


@pytest.mark.parametrize("name", names())
def test_stored_files_have_no_path_of_a_machine(name):
    for file in load(name).path.iterdir():
        if file.suffix in (".json", ".yaml", ".md"):
            assert not [path for path in HERE if path in file.read_text()], file


def test_the_page_and_its_pictures_are_current():
    """Run scripts/gallery.py --write if it fails."""
    assert page() == PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    for name in names():
        if results := stored(load(name)):
            assert Image.open(PICTURES / f"{name}.png").text["Description"] == drawn(results)


def test_band_is_two_standard_errors_beyond_the_seeds():
    low, high = (0.70 * 100 + 2) / 104, (0.80 * 100 + 2) / 104
    expected = (0.70 - 2 * math.sqrt(low * (1 - low) / 100), 0.80 + 2 * math.sqrt(high * (1 - high) / 100))
    band = Band.of([0.8, 0.7, 0.75], 100)
    assert (band.low, band.high) == pytest.approx(expected, abs=5e-4)
    assert 0.7 in band and 0.6 not in band and 0.9 not in band


def test_band_stays_within_0_and_1_and_has_a_width_there():
    assert standard_error(1.0, 100) == pytest.approx(standard_error(0.0, 100))
    assert standard_error(1.0, 100) > 0.01
    assert Band.of([1.0], 100).high == 1.0
    assert Band.of([0.0], 100).low == 0.0
    assert Band.of([1.0], 100).low < 0.98


@pytest.mark.parametrize("share", [-0.2, 1.2, math.nan])
def test_a_metric_that_is_not_a_share_has_no_band(share):
    with pytest.raises(DataError, match="Accepted: a share"):
        Band.of([share], 100)


def test_a_changed_configuration_outdates_the_results(small):
    assert outdated(small) == []
    file = small.path / "train.yaml"
    file.write_text("# a comment changes nothing\n" + file.read_text())
    assert outdated(small) == []
    file.write_text(file.read_text().replace("group_size: 8", "group_size: 4"))
    assert outdated(small) == ["default"]
    assert "with an earlier configuration" in rows(small)[0][-1]


def test_a_repetition_is_compared_with_the_stored_one(small):
    known, run = stored(small)["default"], RUN | {"overrides": []}
    same = compared(small, known, 0, run)
    assert (same["within_band"], same["weights_equal"]) == (True, True)
    worse = compared(small, known, 0, run | {"curve": [[0, 0.2], [5, 0.3]], "weights_sha256": "b" * 64})
    assert (worse["within_band"], worse["weights_equal"]) == (False, False)
    assert "code, data or the kind of processor changed" in worse["lines"][-1]
    moved = compared(
        small, known, 0, run | {"weights_sha256": "b", "machine": RUN["machine"] | {"threads": 2}}
    )
    assert "these differ: threads 2 (stored: 1)" in moved["lines"][-1]
    assert compared(small, None, 0, run)["within_band"] is None


def test_a_run_of_another_model_is_not_comparable(small):
    known, run = stored(small)["default"], RUN | {"overrides": []}
    other = run | {"machine": RUN["machine"] | {"model": "N"}}
    assert compared(small, known, 0, other)["within_band"] is True  # the recipe makes its model
    given = replace(small, stages=("train model.path={model}",))
    assert compared(given, known, 0, run)["within_band"] is True
    verdict = compared(given, known, 0, other)
    assert (verdict["within_band"], verdict["weights_equal"]) == (None, None)
    assert verdict["lines"][-1].startswith("Not comparable: this run began with the model N")


def test_the_given_model_is_recorded_not_that_of_a_stage(small, tmp_path):
    (small.path / "train.py").write_text(
        "import pathlib, sys; run = pathlib.Path(sys.argv[1]); (run / 'model').mkdir(parents=True)\n"
        "(run / 'config.yaml').write_text('model: {path: imitated}')\n"
    )
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "model.safetensors").write_bytes(b"weights")
    words = (small, tmp_path / "work", "python {recipe}/train.py {run} {model}")
    assert repeated_with(*words, overrides=[f"model.path={tmp_path / 'given'}"]) == 0
    record = json.loads((tmp_path / "work" / "recipe.json").read_text())
    assert record["machine"]["model"] == hashlib.sha256(b"weights").hexdigest()[:12]


def finished(work, **changed):
    """Write the files of a finished repetition with results of two evaluations."""
    for name, value in (("before", 0.25), ("after", 0.5)):
        problems = [{"prompt_id": str(number), "role": ""} for number in range(8)]
        result = {"scores": {"pass@1": {"value": value}}, "per_problem": problems} | changed
        (work / f"{name}.json").write_text(json.dumps(result))
    stage = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_memory_gb": 0.5}
    record = {"weights_sha256": None, "stages": [stage, stage | {"peak_memory_gb": 0.75}]}
    (work / "recipe.json").write_text(json.dumps(record))


def test_results_of_two_evaluations_are_a_curve(small, tmp_path):
    files = ("{work}/before.json", "{work}/after.json")
    evaluated = replace(small, metric="pass@1", measured=files)
    finished(tmp_path)
    found = measured(evaluated, tmp_path)
    assert (found["curve"], found["problems"]) == ([[0, 0.25], [1, 0.5]], 8)
    assert (found["seconds"], found["peak_memory_gb"]) == (4, 0.75)
    finished(tmp_path, per_problem=[{"role": role} for role in ("pro", "con") for _ in range(4)])
    assert measured(evaluated, tmp_path)["problems"] == 4
    finished(tmp_path, scores={"pass@1": {"value": -0.5}})
    with pytest.raises(DataError, match=r"pass@1 is -0\.5"):
        measured(evaluated, tmp_path)


def test_a_problem_that_several_roles_play_counts_once(small, tmp_path):
    finished(tmp_path)
    (tmp_path / "run").mkdir()
    row = {"step": 0, "accuracy": 0.5, "trajectories": 128.0}
    row |= {"role/pro/trajectories": 64.0, "role/con/trajectories": 63.0, "role/pro/accuracy": 0.5}
    (tmp_path / "run" / "eval.jsonl").write_text(json.dumps(row) + "\n")
    assert measured(small, tmp_path)["problems"] == 64


def test_a_repetition_that_is_not_finished_has_no_result(small, tmp_path):
    with pytest.raises(DataError, match="no finished repetition"):
        measured(small, tmp_path)
    with pytest.raises(ConfigError, match="no finished repetition"):
        store(small, tmp_path)


def test_a_stage_can_import_the_modules_of_its_recipe(small, tmp_path):
    (small.path / "beside.py").write_text("CODE = 7")
    stage = "python -c 'import beside; raise SystemExit(beside.CODE)'"
    assert repeat(replace(small, data="", stages=(stage,)), tmp_path / "work", "default", 0, []) == 7


def test_a_killed_first_stage_keeps_its_overrides(small, tmp_path):
    (small.path / "kills.py").write_text(
        "import os, pathlib, signal, sys; started = pathlib.Path(sys.argv[1])\n"
        "started.exists() or (started.touch(), os.kill(os.getppid(), signal.SIGKILL))\n"
    )
    started = tmp_path / "started"
    stages = f"stages: ['python {{recipe}}/kills.py {started}']\n"
    (small.path / "recipe.yaml").write_text(f"title: A\nlearns: B\n{stages}")
    done = recipe("run", small.path, "--dir", tmp_path / "runs", "training.lr=1", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    work = tmp_path / "runs" / "copy" / "default" / "seed-0"
    with pytest.raises(ConfigError, match="was begun with overrides"):
        repeat(load(str(small.path)), work, "default", 0, [])


@pytest.mark.parametrize("path", ["model.path", "data.path"])
def test_a_repetition_with_another_path_is_refused(path, small, tmp_path):
    assert repeated_with(small, tmp_path, "python -c 'exit(3)'", overrides=[f"{path}=/one"]) == 3
    with pytest.raises(ConfigError, match="was begun with overrides"):
        repeated_with(small, tmp_path, "python -c 'exit(3)'", overrides=[f"{path}=/two"])


@pytest.mark.parametrize(("words", "message"), [
    (["max_stpes=9"], "Did you mean 'max_steps'?"),
    (["model.path=/other", "eval.limit=4", "--verify"], "--verify does not accept eval.limit=4"),
])  # fmt: skip
def test_a_wrong_override_is_refused_before_anything_starts(words, message, tmp_path):
    done = recipe("run", "parity", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_data_appear_when_they_are_complete(small, tmp_path):
    data, broken = tmp_path / "made" / "data", tmp_path / "broken"
    (small.path / "data.py").write_text(
        "import pathlib, sys; made, data, broken = map(pathlib.Path, sys.argv[1:])\n"
        "made.mkdir(); (made / 'test').touch(); sys.exit(4 * (data.exists() or broken.exists()))\n"
    )
    changed = replace(
        small, data=f"python {{recipe}}/data.py {{data}} {data} {broken}", stages=("python -c 'exit(5)'",)
    )

    def repeated():
        return repeat(changed, tmp_path / "work", "default", 0, [f"data.path={data}"])

    broken.touch()
    assert repeated() == 4
    assert not list(data.parent.iterdir())
    broken.unlink()
    assert repeated() == 5
    assert [item.name for item in data.parent.rglob("*")] == ["data", "test"]
    (data / "test").write_text("given")
    assert repeated() == 5
    assert (data / "test").read_text() == "given"


def test_output_of_an_unfinished_stage_is_removed(small, tmp_path):
    stages = (
        "python -c 'import sys, pathlib; pathlib.Path(sys.argv[2]).touch(exist_ok=False); exit(7)' --out {}"
    )
    inside = stages.format("{work}/before.json")
    assert [repeated_with(small, tmp_path / "work", inside) for _ in range(2)] == [7, 7]
    outside = stages.format(tmp_path / "kept.json")
    assert [repeated_with(small, tmp_path / "other", outside) for _ in range(2)] == [7, 1]
    assert (tmp_path / "kept.json").exists()


def test_no_stage_starts_after_a_signal(small, tmp_path):
    ignores = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5)"
    )
    stages = (f"python -c '{ignores}'", "python -c 'exit(7)'")
    before = signal.getsignal(signal.SIGTERM)
    assert repeated_with(small, tmp_path, *stages) == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert repeated_with(small, tmp_path, *stages) == 7  # the first stage is not repeated


def test_a_signal_reaches_the_stage(small, tmp_path):
    waits = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert repeated_with(small, tmp_path, f"python -c '{waits}'") == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_killed_repetition_leaves_no_stage(small, tmp_path):
    (small.path / "waits.py").write_text(
        "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    )
    stage = f"python {{recipe}}/waits.py {tmp_path}/pid"
    (small.path / "recipe.yaml").write_text(f"title: A\nlearns: B\nstages: [{json.dumps(stage)}]\n")
    with started("-m", "rl4llm", "recipe", "run", small.path, "--dir", tmp_path / "runs") as program:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        left = psutil.Process(int((tmp_path / "pid").read_text()))
        program.process.kill()
    psutil.wait_procs([left], timeout=30)
    assert not left.is_running()


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not accepted"),
    ("title: A", "learns is missing"),
    ("title: 5", "title=5 is not accepted"),
    ("stages: train x", "a list, each item a string"),
    ("expected: [{variant: a}]", "before, after and source"),
    ("stage: []", r"Did you mean 'stages'\?"),
])  # fmt: skip
def test_a_wrong_recipe_is_refused(text, message, tmp_path):
    rest = "title: A\nlearns: B\n" if text and not text.startswith("title") else ""
    (tmp_path / "recipe.yaml").write_text(f"{rest}{text}\n")
    with pytest.raises(ConfigError, match=message):
        load(str(tmp_path))


def test_a_recipe_has_the_name_of_its_directory(small, monkeypatch):
    monkeypatch.chdir(small.path)
    assert load(".").name == "copy"


@pytest.mark.parametrize(("words", "message"), [
    (["run", "sumz"], "Did you mean 'sums'?"),
    (["run"], "the following arguments are required: name"),
    (["run", "sums", "--variant", "lara"], "Did you mean 'lora'?"),
])  # fmt: skip
def test_a_wrong_name_is_refused(words, message, tmp_path):
    done = recipe(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_list_names_every_recipe(tmp_path):
    done = recipe("list", "--json", cwd=tmp_path)
    listed = json.loads(done.stdout)["recipes"]
    assert sorted({row["name"] for row in listed}) == names()
    assert not [
        row for row in listed if not row["held-out"] and not row["measured on"].startswith("not run here")
    ]
    lines = recipe("list", cwd=tmp_path).stdout.splitlines()
    for row in listed:  # a line for each recipe, then one for each variant
        assert not row["learned"] or f"{row['name']}: {row['learned']}" in lines
        start, end = f"  {row['variant']}: ", row["measured on"]
        assert any(line.startswith(start) and line.endswith(end) for line in lines)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory, warm_python):
    """Return the directory of a repetition of the shortest recipe, and what the command printed."""
    directory = tmp_path_factory.mktemp("repeated")
    command = [warm_python, "-m", "rl4llm", "recipe", "run", "parity", "--verify"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    return directory, done


def test_the_shortest_recipe_ends_within_its_band(repeated):
    _, done = repeated
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Within the band of" in done.stdout
    assert "weights" in done.stdout


def test_a_finished_repetition_is_only_measured_again(repeated):
    directory, first = repeated
    again = recipe("run", "parity", "--verify", "--json", cwd=directory)
    assert again.returncode == 0, again.stderr
    verdict = json.loads(again.stdout)
    assert verdict["within_band"] is True
    assert verdict["lines"][0] in first.stdout
    other = recipe("run", "parity", "training.lr=1.0", cwd=directory)
    assert other.returncode == 2
    assert "was begun with overrides []" in " ".join(other.stderr.split())


def test_a_run_that_does_not_learn_fails(repeated, tmp_path):
    """A finished repetition whose every evaluation is the first one, and that was begun with an override."""
    directory, _ = repeated
    shutil.copytree(directory / "runs", tmp_path / "runs")
    work = tmp_path / "runs" / "recipes" / "parity" / "default" / "seed-0"
    first = json.loads((work / "run" / "eval.jsonl").read_text().splitlines()[0])
    flat = [json.dumps(first | {"step": step}) + "\n" for step in (0, 25)]
    (work / "run" / "eval.jsonl").write_text("".join(flat))
    about = json.loads((work / "recipe.json").read_text()) | {"overrides": ["data.path=data"]}
    (work / "recipe.json").write_text(json.dumps(about))
    (tmp_path / "data").mkdir()
    done = recipe("run", "parity", "--verify", "data.path=data", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Outside the band of" in done.stdout
    assert "has overrides: data.path=data" in done.stdout


def test_a_repetition_is_stored_without_paths(repeated, small, tmp_path):
    directory, _ = repeated
    shutil.copytree(directory / "runs" / "recipes" / "parity", tmp_path / "runs" / "copy")
    record = tmp_path / "runs" / "copy" / "default" / "seed-0" / "recipe.json"
    about = json.loads(record.read_text())
    store(small, tmp_path / "runs")
    found = stored(load(str(small.path)))["default"]
    assert found.seeds[0]["weights_sha256"] == about["weights_sha256"]
    assert found.seeds[0]["curve"][-1][1] > found.seeds[0]["curve"][0][1]
    text = (small.path / "results.json").read_text()
    assert str(tmp_path) not in text and str(directory) not in text
    record.write_text(json.dumps(about | {"overrides": ["training.lr=1"]}))
    with pytest.raises(ConfigError, match="no finished repetition"):
        store(small, tmp_path / "runs")
    record.write_text(json.dumps(about | {"overrides": [f"data.path={tmp_path}"]}))
    store(small, tmp_path / "runs")


def test_seeds_of_different_models_are_not_stored_together(small):
    seeds = {0: RUN, 1: RUN | {"machine": RUN["machine"] | {"model": "N"}}}
    given = replace(small, stages=("train model.path={model}",))
    check_models(small, Stored("default", "", seeds))
    check_models(given, Stored("default", "", {0: RUN}))
    with pytest.raises(ConfigError, match="seeds of different models: M, N"):
        check_models(given, Stored("default", "", seeds))


def test_words_of_a_stage_are_filled_in(small, tmp_path):
    file = small.path / "recipe.yaml"
    stage = "stages: [\"eval {run}/config.yaml 'rewards=[{name: math}]' {overrides} --out {work}/a.json\"]\n"
    file.write_text("title: A\nlearns: B\nvariants: {big: [a.b=1]}\n" + stage)
    found = load(str(small.path))
    (command,) = found.commands(found.words(tmp_path, "big", 3, ["data.path=d", "c.d=[1, 2]"]))
    run = ["eval", f"{tmp_path}/run/config.yaml", "rewards=[{name: math}]", "a.b=1", "c.d=[1, 2]"]
    assert command[2:] == ["rl4llm", *run, "--out", f"{tmp_path}/a.json"]


def test_preparation_is_left_out_when_the_data_exist(small, tmp_path):
    assert isinstance(small, Recipe)
    words = small.words(tmp_path, "default", 0, [f"data.path={tmp_path / 'data'}"])
    assert small.missing_data(words) == tmp_path / "data"
    assert small.preparation(words, tmp_path / "made")[-1] == str(tmp_path / "made")
    Path(tmp_path / "data").mkdir()
    assert small.missing_data(words) is None
