"""Directories of tasks are a dataset: each key that changes the outcome is used or refused, with one line."""

import os
import shutil

import pytest
from task_files import HARBOR, TERMINAL_BENCH, grades, write_task

from rl4llm.core.errors import DataError
from rl4llm.data.load import load_rows
from rl4llm.data.read import has_splits
from rl4llm.extensions.tasks.task import read_task


@pytest.mark.parametrize("files", [HARBOR, TERMINAL_BENCH])
def test_a_directory_of_tasks_is_a_dataset(tmp_path, files):
    write_task(tmp_path / "b", files)
    write_task(tmp_path / "more" / "a", files | {"tests/expected": "4"})
    rows = load_rows(tmp_path)
    assert [row["prompt_id"] for row in rows] == ["b", "more/a"] == [row["ground_truth"] for row in rows]
    assert rows[0]["messages"] == [{"role": "user", "content": "Write 2 + 2 to /answer."}]
    assert rows[0]["task"] == str(tmp_path / "b")
    assert [row["prompt_id"] for row in load_rows(tmp_path / "b")] == ["b"]


def test_splits_of_tasks_never_mix(tmp_path):
    write_task(tmp_path / "all" / "a")
    assert not has_splits(tmp_path / "all")
    write_task(tmp_path / "parted" / "train" / "a")
    write_task(tmp_path / "parted" / "test" / "b", instruction_md="Write 2 + 2 to /answer, again.")
    assert has_splits(tmp_path / "parted")
    assert [row["prompt_id"] for row in load_rows(tmp_path / "parted")] == ["a"]
    assert [row["prompt_id"] for row in load_rows(tmp_path / "parted", split="test")] == ["b"]
    with pytest.raises(DataError):
        load_rows(tmp_path / "parted", split="validation")


def test_files_of_rows_come_before_directories_of_tasks(tmp_path):
    write_task(tmp_path / "a")
    (tmp_path / "train.jsonl").write_text('{"prompt": "Hello?"}\n')
    assert load_rows(tmp_path)[0]["messages"][0]["content"] == "Hello?"
    with pytest.raises(DataError):
        load_rows(tmp_path, split="test")  # never the tasks as another split


def test_changed_tests_change_the_rows(tmp_path):
    write_task(tmp_path / "a")
    before = load_rows(tmp_path)[0]["task_digest"]
    assert load_rows(tmp_path)[0]["task_digest"] == before
    write_task(tmp_path / "a", tests_test_sh="exit 0\n")
    assert load_rows(tmp_path)[0]["task_digest"] != before


@pytest.mark.parametrize("name", ["instruction.md", "tests", "tests/more", "task.toml"])
@pytest.mark.parametrize("target", ["../../secret", "../blobs", "gone", "loop"])
def test_no_link_leads_out_of_a_task(tmp_path, name, target):
    write_task(tmp_path / "data/a")
    write_task(tmp_path / "secret" / "a")
    (tmp_path / "blobs").symlink_to(tmp_path / "secret")
    path = tmp_path / "data/a" / name
    if path.exists():
        path.rename(tmp_path / "moved")
    source = (tmp_path / "secret/a" / name).resolve()
    links = {
        "../../secret": source if source.exists() else tmp_path / "secret",
        "../blobs": tmp_path / "blobs/a",
    }
    path.symlink_to(links.get(target, path if target == "loop" else tmp_path / "gone"))
    with pytest.raises(DataError):
        load_rows(tmp_path / "data")


def test_a_snapshot_of_the_hub_is_a_dataset(tmp_path):
    task = write_task(tmp_path / "snapshots/0a1b/a")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate([path for path in task.rglob("*") if path.is_file()]):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(os.path.relpath(tmp_path / "blobs" / str(number), file.parent))
    (task / "tests/more.sh").symlink_to("test.sh")
    assert [row["prompt_id"] for row in load_rows(tmp_path / "snapshots/0a1b")] == ["a"]
    if shutil.which("bwrap"):
        assert grades(task, "true", "echo 4 > /answer") == [0, 1]
    write_task(task, **{"environment/Dockerfile": "FROM host\nCOPY . /app\n"})
    with pytest.raises(DataError):
        load_rows(tmp_path / "snapshots/0a1b")


TOML = HARBOR["task.toml"]


@pytest.mark.parametrize(
    "change",
    [
        {"tests_test_sh": None},
        {"instruction_md": None},
        {"instruction_md": " \n"},
        {"task_toml": "version = "},
        {"task_toml": "agent = 3"},
        {"task_toml": TOML + "[environment]\ngpus = 1\n"},
        {"task_toml": TOML + "[environment]\nos = 'windows'\n"},
        {"task_toml": TOML + "user = 'nobody'\n"},
        {"task_toml": TOML + "[[steps]]\nname = 'first'\n"},
        {"task_toml": TOML + "[solution]\nenv = {KEY = '${RL4LLM_UNSET}'}\n"},
        {"task_toml": TOML + "[environment]\nenv = {KEY = '${PATH}'}\n"},
        {"task_toml": TOML + "[environment]\nenv = {KEY = 'a${RL4LLM_UNSET:-b}'}\n"},
        {"environment/data.txt": "in no image"},
        {"environment/docker-compose.yaml": "services: {main: {}, db: {image: postgres}}"},
        {"environment/docker-compose.yaml": "services: {main: {privileged: true}}"},
        {"environment/docker-compose.yaml": "services: {main: {environment: [SIZE=3]}}"},
    ],
    ids=str,
)
def test_a_task_that_cannot_be_obeyed_is_one_line(tmp_path, change):
    write_task(tmp_path / "a", **change)
    with pytest.raises(DataError) as caught:
        load_rows(tmp_path)
    assert str(tmp_path / "a") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["run_tests_in_same_shell: true", "parser_name: swebench", "instruction: ''", "- a list", "a: [1"]
)
def test_a_bad_task_of_terminal_bench_is_one_line(tmp_path, line):
    text = TERMINAL_BENCH["task.yaml"]
    text = line if line.startswith(("-", "a")) else text.replace("parser_name: pytest\n", "") + line
    write_task(tmp_path / "a", TERMINAL_BENCH, task_yaml=text)
    with pytest.raises(DataError) as caught:
        load_rows(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_task_that_is_there_twice_is_refused(tmp_path):
    write_task(tmp_path / "a")
    write_task(tmp_path / "group" / "a")
    with pytest.raises(DataError):
        load_rows(tmp_path)


def test_every_key_that_changes_the_outcome_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LLM_TOKEN", "secret")
    text = """
schema_version = "1.4"
[metadata]
anything = {is = "metadata"}
[agent]
timeout_sec = 7
[verifier]
timeout_sec = 8.5
env = {A = "${RL4LLM_TOKEN}", B = "${RL4LLM_UNSET:-b}"}
[solution]
env = {C = "c"}
[environment]
memory = "2G"
storage_mb = 512
workdir = "/work"
os = "linux"
gpus = 0
env = {D = "d"}
"""
    write_task(tmp_path, task_toml=text, **{"environment/Dockerfile": "FROM host\n"})
    write_task(tmp_path, tests_test_sh="#!/usr/bin/env bash\ntrue\n")
    task = read_task(write_task(tmp_path, task_toml=text, tests_test_sh="#!/usr/bin/env bash\ntrue\n"))
    assert task.test.wall_s == 8.5 and task.solution.wall_s == 7
    assert (
        task.test.env == {"A": "secret", "B": "b"}
        and task.solution.env == {"C": "c"}
        and task.env == {"D": "d"}
    )
    assert task.test.words == ("/usr/bin/env", "bash", "/tests/test.sh")
    assert task.solution.words == ("sh", "/solution/solve.sh")
    assert (task.image, task.workdir) == (str(tmp_path / "environment"), "/work")


def test_terminal_bench_has_the_same_parts(tmp_path):
    compose = "services: {client: {build: {context: box}}}"
    files = {"docker-compose.yaml": compose, "box/Dockerfile": "FROM host\n"}
    task = read_task(write_task(tmp_path, TERMINAL_BENCH | files))
    assert task.image == str(tmp_path / "box") and task.test.wall_s == 20 and task.solution.wall_s == 360
    assert task.test.files == {"/tests": tmp_path / "tests", "/run-tests.sh": tmp_path / "run-tests.sh"}
    assert task.test.env == {"TEST_DIR": "/tests"}
