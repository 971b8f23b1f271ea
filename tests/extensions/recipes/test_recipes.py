"""Recipes: their files, their stored results, their band, and the shortest one from its data to its verdict."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from forked_python import python, started
from gallery import BEGIN, END, PAGE, PICTURES, drawn, page, store
from PIL import Image

from rl4llm.cli import _parsed, main
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.extensions.recipes.command import repeat
from rl4llm.extensions.recipes.recipe import RECIPES, command, load, names
from rl4llm.extensions.recipes.results import Band, compared, measured, outdated, rows, stored

HERE = ("/home/", "/root/", "/work/", "/tmp/", "/Users/")  # paths of a machine
RUN = {
    "seed": 0,
    "curve": [[0, 0.2], [5, 0.8]],
    "problems": 100,
    "seconds": 60,
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


def repeated_with(copied, work, *stages, overrides=(), data=""):
    return repeat(replace(copied, data=data, stages=stages), work, "default", 0, overrides)


@pytest.mark.parametrize("name", names())
def test_bundled_recipes_are_valid_and_their_results_current(name, tmp_path):
    bundled = load(name)
    assert (bundled.path / "README.md").read_text().strip()
    for variant in bundled.variants:
        for stage in bundled.stages:
            words = command(stage, bundled.words(tmp_path, variant, bundled.seeds[0], []))
            if words[1] == "-m":
                arguments = _parsed(words[3:])
                load_config(arguments.config, arguments.overrides)
    assert outdated(bundled) == []
    assert all(set(known.seeds) <= set(bundled.seeds) for known in stored(bundled).values())
    for file in bundled.path.iterdir():
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
    assert Band.of([1.0], 100).high == 1.0 and Band.of([1.0], 100).low < 0.98
    assert Band.of([0.0], 100).low == 0.0


def test_a_changed_configuration_outdates_the_results(small):
    file = small.path / "train.yaml"
    file.write_text("# a comment changes nothing\n" + file.read_text())
    assert outdated(small) == []
    file.write_text(file.read_text().replace("group_size: 8", "group_size: 4"))
    assert outdated(small) == ["default"]
    assert "with an earlier configuration" in rows(small)[0][-1]


@pytest.mark.parametrize(("changed", "within", "equal"), [
    ({}, True, True),
    ({"curve": [[0, 0.2], [5, 0.3]], "weights_sha256": "b"}, False, False),
    ({"machine": RUN["machine"] | {"model": "N"}}, None, None),
    ({"overrides": ["training.lr=1"]}, None, None),
    ({"overrides": ["data.path=/elsewhere"]}, True, True),
    ({"weights_sha256": None}, True, None),
])  # fmt: skip
def test_a_repetition_is_compared_with_runs_of_its_kind(changed, within, equal, small):
    begins = replace(small, stages=("train model.path={model}",))
    verdict = compared(begins, stored(small)["default"], 0, RUN | {"overrides": []} | changed)
    assert (verdict["within_band"], verdict["weights_equal"]) == (within, equal)
    assert compared(begins, None, 0, RUN | {"overrides": []})["within_band"] is None


@pytest.mark.parametrize(("roles", "problems"), [([""] * 8, 8), (["pro", "con"] * 4, 4)])
def test_results_of_two_evaluations_are_a_curve(roles, problems, small, tmp_path):
    evaluated = replace(small, metric="pass@1", measured=("{work}/before.json", "{work}/after.json"))
    for name, value in (("before", 0.25), ("after", 0.5)):
        result = {"scores": {"pass@1": {"value": value}}, "per_problem": [{"role": role} for role in roles]}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    record = {"weights_sha256": None, "seconds": 4.2, "peak_memory_gb": 0.75}
    (tmp_path / "recipe.json").write_text(json.dumps(record))
    run = measured(evaluated, tmp_path)
    assert (run["curve"], run["problems"], run["seconds"]) == ([[0, 0.25], [1, 0.5]], problems, 4)
    (tmp_path / "before.json").write_text(json.dumps(result | {"scores": {"pass@1": {"value": -0.5}}}))
    with pytest.raises(DataError):
        measured(evaluated, tmp_path)


def test_a_problem_that_several_roles_play_counts_once(small, tmp_path):
    (tmp_path / "recipe.json").write_text('{"weights_sha256": null, "seconds": 1, "peak_memory_gb": 1}')
    (tmp_path / "run").mkdir()
    row = {"step": 0, "accuracy": 0.5, "trajectories": 128.0}
    row |= {"role/pro/trajectories": 64.0, "role/con/trajectories": 63.0, "role/pro/accuracy": 0.5}
    (tmp_path / "run" / "eval.jsonl").write_text(json.dumps(row) + "\n")
    assert measured(small, tmp_path)["problems"] == 64


def test_finished_stages_and_data_are_not_made_again(small, tmp_path):
    (small.path / "beside.py").write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir()\n")
    data, fails = "python -c 'import beside' {data}", "python -c 'exit(3)'"
    words = {"data": data, "overrides": [f"data.path={tmp_path / 'data'}"]}
    stages = ("python {recipe}/beside.py {work}/first", fails)
    assert [repeated_with(small, tmp_path / "work", *stages, **words) for _ in range(2)] == [3, 3]
    assert [(tmp_path / name).is_dir() for name in ("data", "work/first")] == [True, True]
    with pytest.raises(ConfigError):
        repeated_with(small, tmp_path / "work", *stages, data=data, overrides=["data.path=/other"])


def test_incomplete_data_do_not_appear(small, tmp_path):
    data = "python -c 'import os, sys; os.mkdir(sys.argv[1]); exit(4)' {data}"
    words = {"data": data, "overrides": [f"data.path={tmp_path / 'made' / 'data'}"]}
    assert repeated_with(small, tmp_path / "work", "python -c 'exit(5)'", **words) == 4
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 75)])
def test_after_a_signal_no_stage_starts(number, code, small, tmp_path):
    """SIGTERM reaches the stage, and Ctrl-C leaves it to end: a terminal sends it to both."""
    stops = f"import os, time; os.kill(os.getppid(), {number:d}); time.sleep({60 if code == 143 else 0.5})"
    stages = (f"python -c '{stops}'", "python -c 'exit(7)'")
    before = signal.getsignal(number)
    assert repeated_with(small, tmp_path, *stages) == code
    assert signal.getsignal(number) is before
    if code == 75:
        assert repeated_with(small, tmp_path, *stages) == 7  # the first stage is not repeated


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_killed_repetition_leaves_no_stage(small, tmp_path):
    (small.path / "waits.py").write_text(
        "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    )
    stage = f"python {{recipe}}/waits.py {tmp_path}/pid"
    (small.path / "recipe.yaml").write_text(f"title: A\nlearns: B\nstages: [{json.dumps(stage)}]\n")
    run = ("run", small.path, "--dir", tmp_path / "runs")
    with started("-m", "rl4llm", "recipe", *run, "training.lr=1") as program:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        left = psutil.Process(int((tmp_path / "pid").read_text()))
        program.process.kill()
    psutil.wait_procs([left], timeout=30)
    assert not left.is_running()
    assert recipe(*run, cwd=tmp_path).returncode == 2  # the first stage may have begun with other overrides


@pytest.mark.parametrize("words", [["sumz"], ["sums", "--variant", "lara"], ["parity", "max_stpes=9"]])
def test_a_wrong_word_is_refused_before_anything_starts(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (main(["recipe", "run", *words]), list(tmp_path.iterdir())) == (2, [])


def test_list_names_every_recipe(tmp_path):
    table = json.loads(recipe("list", "--json", cwd=tmp_path).stdout)["recipes"]
    assert {row["name"] for row in table} == set(names())
    assert all(row["held-out"] or row["measured on"].startswith("not run here") for row in table)
    lines = recipe("list", cwd=tmp_path).stdout.splitlines()
    for row in table:  # a line for each recipe, then one for each variant
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


def test_the_shortest_recipe_ends_within_its_band(repeated, tmp_path):
    directory, first = repeated
    assert first.returncode == 0, first
    again = recipe("run", "parity", "--verify", "--json", cwd=directory)  # measures only
    assert again.returncode == 0, again
    verdict = json.loads(again.stdout)
    assert verdict["within_band"] is True
    assert verdict["lines"][0] in first.stdout
    assert recipe("run", "parity", "training.lr=1.0", cwd=directory).returncode == 2


def test_a_run_that_does_not_learn_fails(repeated, tmp_path):
    """A finished repetition whose every evaluation is the first one."""
    directory, _ = repeated
    shutil.copytree(directory / "runs", tmp_path / "runs")
    file = tmp_path / "runs" / "recipes" / "parity" / "default" / "seed-0" / "run" / "eval.jsonl"
    first = json.loads(file.read_text().splitlines()[0])
    file.write_text("".join(json.dumps(first | {"step": step}) + "\n" for step in (0, 25)))
    done = recipe("run", "parity", "--verify", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Outside the band of" in done.stdout


def test_a_repetition_is_stored_without_paths(repeated, small, tmp_path):
    directory, _ = repeated
    shutil.copytree(directory / "runs" / "recipes" / "parity", tmp_path / "runs" / "copy")
    record = tmp_path / "runs" / "copy" / "default" / "seed-0" / "recipe.json"
    about = json.loads(record.read_text())
    store(small, tmp_path / "runs")
    seed = stored(load(str(small.path)))["default"].seeds[0]
    assert seed["weights_sha256"] == about["weights_sha256"]
    assert seed["curve"][-1][1] > seed["curve"][0][1]
    text = (small.path / "results.json").read_text()
    assert str(tmp_path) not in text and str(directory) not in text
    record.write_text(json.dumps(about | {"overrides": [f"data.path={tmp_path}"]}))
    store(small, tmp_path / "runs")
    record.write_text(json.dumps(about | {"overrides": ["training.lr=1"]}))
    with pytest.raises(ConfigError):
        store(small, tmp_path / "runs")


def test_seeds_of_different_models_are_not_stored_together(small, tmp_path):
    begins = replace(small, stages=("train model.path={model}",))
    about = {"fingerprint": begins.fingerprint("default"), "overrides": []} | RUN
    for seed in (0, 1):
        work = tmp_path / "runs" / "copy" / "default" / f"seed-{seed}"
        (work / "run").mkdir(parents=True)
        machine = RUN["machine"] | {"model": f"M{seed}"}
        (work / "recipe.json").write_text(json.dumps(about | {"seed": seed, "machine": machine}))
        row = {"step": 0, "accuracy": 0.5, "trajectories": 128.0}
        (work / "run" / "eval.jsonl").write_text(json.dumps(row) + "\n")
    (small.path / "results.json").unlink()
    with pytest.raises(ConfigError):
        store(begins, tmp_path / "runs")
