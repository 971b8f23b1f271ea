"""Recipes: their files, their stored results, their band, and the shortest one from its data to its verdict."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from forked_python import python
from gallery import BEGIN, END, PAGE, PICTURES, drawn, page, store, without_paths
from PIL import Image

from rl4llm.cli import _parsed
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.extensions.recipes.recipe import RECIPES, Recipe, load, names
from rl4llm.extensions.recipes.repeat import measured, repeat
from rl4llm.extensions.recipes.results import Band, outdated, standard_error, stored
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
    "machine": {"processor": "P", "gpu": None, "threads": 1, "torch": "2"},
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


@pytest.mark.parametrize("name", names())
def test_configurations_of_every_stage_are_valid(name, tmp_path):
    found = load(name)
    assert (found.path / "README.md").read_text().strip()
    assert load_config(found.path / "train.yaml").max_steps > 0
    for variant in found.variants:
        for command in found.commands(tmp_path, variant, found.seeds[0], []):
            if command[1] == "-m":
                arguments = _parsed(command[3:])
                load_config(arguments.config, arguments.overrides)


@pytest.mark.parametrize("name", names())
def test_stored_results_belong_to_the_configuration(name):
    found = load(name)
    assert outdated(found) == []
    for known in stored(found).values():
        assert set(known.seeds) <= set(found.seeds)
        assert (found.path / f"{known.variant}.html").stat().st_size < 400_000
        assert (found.path / f"{known.variant}.metrics.jsonl.gz").exists()


@pytest.mark.parametrize("name", names())
def test_stored_files_have_no_path_of_a_machine(name):
    for file in load(name).path.iterdir():
        if file.suffix in (".json", ".html", ".yaml", ".md"):
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


def test_results_of_two_evaluations_are_a_curve(small, tmp_path):
    path = small.path / "recipe.yaml"
    path.write_text(
        path.read_text() + "metric: pass@1\nmeasured: ['{work}/before.json', '{work}/after.json']\n"
    )
    for name, value in (("before", 0.25), ("after", 0.5)):
        result = {"scores": {"pass@1": {"value": value}}, "per_problem": [{}] * 8}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    stage = {"seconds": 2.0, "cpu_seconds": 1.0, "peak_memory_gb": 0.5}
    record = {"weights_sha256": None, "stages": [stage, stage | {"peak_memory_gb": 0.75}]}
    (tmp_path / "recipe.json").write_text(json.dumps(record))
    found = measured(load(str(small.path)), tmp_path)
    assert (found["curve"], found["problems"]) == ([[0, 0.25], [1, 0.5]], 8)
    assert (found["seconds"], found["peak_memory_gb"]) == (4, 0.75)


def test_a_repetition_that_is_not_finished_has_no_result(small, tmp_path):
    with pytest.raises(DataError, match="no finished repetition"):
        measured(small, tmp_path)
    with pytest.raises(ConfigError, match="no finished repetition"):
        store(small, tmp_path)


def test_a_stage_can_import_the_modules_of_its_recipe(small, tmp_path):
    (small.path / "beside.py").write_text("CODE = 7")
    stage = "python -c 'import beside; raise SystemExit(beside.CODE)'"
    assert repeat(replace(small, data="", stages=(stage,)), tmp_path / "work", "default", 0, []) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "sumz"], "Did you mean 'sums'?"),
        (["run"], "needs the name of a recipe"),
        (["run", "sums", "--variant", "lara"], "Did you mean 'lora'?"),
    ],
)
def test_a_wrong_name_is_refused(words, message, tmp_path):
    done = recipe(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_an_unknown_key_of_a_recipe_is_refused(small):
    file = small.path / "recipe.yaml"
    file.write_text(file.read_text() + "stage: []\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'stages'\?"):
        load(str(small.path))


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
def repeated(tmp_path_factory):
    """Return the directory of a repetition of the shortest recipe, and what the command printed."""
    directory = tmp_path_factory.mktemp("repeated")
    return directory, recipe("run", "parity", "--verify", cwd=directory)


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


def test_a_run_that_does_not_learn_fails(tmp_path):
    done = recipe("run", "parity", "--verify", "training.lr=0", "max_steps=2", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Outside the band of" in done.stdout
    assert "has overrides" in done.stdout


def test_a_repetition_is_stored_without_paths(repeated, small, tmp_path):
    directory, _ = repeated
    shutil.copytree(directory / "runs" / "recipes" / "parity", tmp_path / "runs" / "copy")
    record = tmp_path / "runs" / "copy" / "default" / "seed-0" / "recipe.json"
    about = json.loads(record.read_text())
    store(small, tmp_path / "runs")
    found = stored(load(str(small.path)))["default"]
    assert found.seeds[0]["weights_sha256"] == about["weights_sha256"]
    assert found.seeds[0]["curve"][-1][1] > found.seeds[0]["curve"][0][1]
    text = (small.path / "default.html").read_text()
    assert str(tmp_path) not in text and str(directory) not in text
    record.write_text(json.dumps(about | {"overrides": ["training.lr=1"]}))
    with pytest.raises(ConfigError, match="no finished repetition"):
        store(small, tmp_path / "runs")


def test_paths_of_model_and_data_become_those_of_the_recipe(tmp_path):
    found, work = load("sums"), tmp_path / "seed-0"
    (work / "run").mkdir(parents=True)
    given = "model: {path: /models/small}\ndata: {path: /data/sums}\n"
    (work / "run" / "config.yaml").write_text(given)
    text = without_paths(found, work, given + f"output: {work}/run\n")
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in text and "runs/sums/data" in text
    assert "/models" not in text and str(tmp_path) not in text


def test_words_of_a_stage_are_filled_in(small, tmp_path):
    file = small.path / "recipe.yaml"
    stage = "stages: [\"eval {run}/config.yaml 'rewards=[{name: math}]' {overrides} --out {work}/a.json\"]\n"
    file.write_text("title: A\nlearns: B\nvariants: {big: [a.b=1]}\n" + stage)
    (command,) = load(str(small.path)).commands(tmp_path, "big", 3, ["data.path=d", "c.d=[1, 2]"])
    run = ["eval", f"{tmp_path}/run/config.yaml", "rewards=[{name: math}]", "a.b=1", "c.d=[1, 2]"]
    assert command[2:] == ["rl4llm", *run, "--out", f"{tmp_path}/a.json"]


def test_preparation_is_left_out_when_the_data_exist(small, tmp_path):
    assert isinstance(small, Recipe)
    words = ("default", 0, [f"data.path={tmp_path / 'data'}"])
    assert small.preparation(tmp_path, *words)[-1] == str(tmp_path / "data")
    Path(tmp_path / "data").mkdir()
    assert small.preparation(tmp_path, *words) is None
