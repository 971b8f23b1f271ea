import base64
import io
import json
import os
import re
import socket
import subprocess
import sys

import PIL.Image
import pytest
from extensions.view.runs import write_run, write_seen

from rl4llm.cli import main
from rl4llm.core.errors import RunDirError
from rl4llm.extensions.view.run import find_runs


def test_directory_of_runs_gives_all_runs_different_names(tokenizer, tmp_path):
    for name in ("a/grpo", "b/grpo", "b/warmup"):
        (tmp_path / name / "episodes").mkdir(parents=True)
    assert [run.name for run in find_runs([tmp_path / "b"])] == ["grpo", "warmup"]
    assert [run.name for run in find_runs([tmp_path / "a", tmp_path / "b" / "grpo"])] == ["a/grpo", "b/grpo"]
    assert [run.name for run in find_runs([tmp_path])] == ["a/grpo", "b/grpo", "b/warmup"]


def test_runs_of_a_recipe_are_found_from_each_directory_above(tmp_path):
    seeds = [tmp_path / "runs/recipes/sums/full" / f"seed-{seed}" / "run" for seed in (0, 1)]
    for run in seeds:
        (run / "episodes/run/episodes").mkdir(parents=True)  # nothing inside a run is another run
    for above in [*seeds[0].parents][1:5]:
        assert [run.path for run in find_runs([above])] == seeds, above


def test_links_give_a_run_once_and_hidden_runs_are_not_shown(tmp_path):
    own, other = tmp_path / "runs/sums/own", tmp_path / "elsewhere/run"
    for run in (own, other, tmp_path / "runs/sums/.old"):
        (run / "episodes").mkdir(parents=True)
    (tmp_path / "runs/sums/same").symlink_to(own)
    (tmp_path / "runs/sums/to_other").symlink_to(other.parent)
    assert [run.path.resolve() for run in find_runs([tmp_path / "runs/sums"])] == [own, other]
    assert [run.path for run in find_runs([tmp_path / "runs"])] == [own]  # a link below may lead back


@pytest.mark.parametrize("make, message", [
    (lambda path: None, "does not exist"),
    (lambda path: path.write_text(""), "is not a directory"),
    (lambda path: path.mkdir(), "contains no run"),
])  # fmt: skip
def test_a_path_without_a_run_is_one_clear_line(tmp_path, capsys, make, message):
    make(tmp_path / "x")
    with pytest.raises(RunDirError, match=message):
        find_runs([tmp_path / "x"])
    assert main(["view", str(tmp_path / "x")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert message in said and "Accepted:" in said and "Traceback" not in said


def test_port_in_use_and_unwritable_file_are_reported(tokenizer, tmp_path, capsys):
    run = write_run(tmp_path / "run", tokenizer, steps=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["view", str(run), "--port", str(taken.getsockname()[1])]) == 1
    assert main(["view", str(run), "--port", "99999"]) == 1
    assert main(["view", str(run), "--export", str(tmp_path)]) == 1
    assert main(["view", str(run), "--export", "/proc/report.html"]) == 1
    assert main(["view", str(run), "--export", str(tmp_path / "nothing" / "report.html")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("--port") == 2 and said.count("cannot be written") == 3
    assert "Traceback" not in said


def test_config_of_another_version_is_shown_and_damage_reported(tokenizer, tmp_path):
    directory = write_run(tmp_path / "run", tokenizer, steps=1)
    (directory / "config.yaml").write_text("no_longer_known: {deep: [1, {a: 2}]}\nwhen: 2026-01-01\n1: one\n")
    (run,) = find_runs([directory])
    assert run.about()["config"] == {
        "no_longer_known.deep": '[1, {"a": 2}]',
        "when": '"2026-01-01"',
        "1": "one",
    }
    json.dumps(run.about())
    for text in ("a: [1", "\x00", "- 1", "&a [*a, *a]", "a: &a {b: *a}"):
        (directory / "config.yaml").write_text(text)
        (directory / "run.json").write_text(text)
        about = run.about()
        assert about["config"] == {} and len(about["warnings"]) == 2, text
    os.unlink(directory / "config.yaml")
    assert run.about()["config"] == {} and run.about()["warnings"]


def test_metrics_continue_or_reset_if_the_file_was_truncated(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": NaN}\nnot JSON\n{"step": 3, "lo')
    (run,) = find_runs([tmp_path])
    first = run.metrics()
    assert [row["step"] for row in first["rows"]] == [1, 2] and first["damaged"] == 1
    assert first["rows"][1]["loss"] is None
    with open(file, "a") as log:
        log.write('ss": 3}\n')
    assert run.metrics(first["next"])["rows"] == [{"step": 3, "loss": 3}]
    file.write_text('{"step": 1, "loss": 5}\n')
    again = run.metrics(first["next"])
    assert again["reset"] and again["rows"] == [{"step": 1, "loss": 5}]
    assert set(again["glossary"]) == {"loss"} and again["glossary"]["loss"]["healthy"] == "finite"
    file.write_text('{"step": 1, "accuracy": 1}\n')
    assert "Share of trajectories" in run.metrics()["glossary"]["accuracy"]["meaning"]


def test_a_directory_that_may_only_be_read_is_shown(tokenizer, tmp_path):
    directory = write_run(tmp_path / "run", tokenizer, steps=1)
    before = sorted((str(file), file.stat().st_mtime_ns) for file in directory.rglob("*"))
    (run,) = find_runs([directory])
    run.index.refresh(60)
    assert run.about()["name"] == "run" and run.metrics()["rows"] and run.index.search("calculator")[0]
    assert before == sorted((str(file), file.stat().st_mtime_ns) for file in directory.rglob("*"))


def test_run_is_running_as_long_as_its_process_lives(tokenizer, tmp_path):
    (run,) = find_runs([write_run(tmp_path / "run", tokenizer, steps=1)])
    (run.path / "model").rename(tmp_path / "kept")
    assert run.about()[
        "running"
    ]  # it has no lock, as one that was copied from another machine, and wrote just now
    holds = (
        "import pathlib, rl4llm.runs.lock as lock\n"
        f"held = lock.DirectoryLock(pathlib.Path({str(run.path)!r}))\nprint(flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        trainer.stdout.readline()
        os.utime(run.path / "metrics.jsonl", (0, 0))  # its last step began long ago
        assert run.about()["running"]
        trainer.kill()
    os.utime(run.path / "metrics.jsonl")
    assert not run.about()["running"]
    signed = json.loads((run.path / ".lock").read_text())
    (run.path / ".lock").write_text(json.dumps(signed | {"host": "another"}))
    assert run.about()["running"]
    os.utime(run.path / "metrics.jsonl", (0, 0))
    assert not run.about()["running"]


def test_tokens_without_tokenizer_and_partial_bytes_have_text(tokenizer, tmp_path):
    directory = write_run(tmp_path / "run", tokenizer, steps=1)
    (run,) = find_runs([directory])
    token_ids = tokenizer.encode("é ü 漢", add_special_tokens=False)
    pieces = [run.texts.of([token])[token] for token in token_ids]
    assert "".join(pieces).encode().decode("unicode_escape").encode("latin-1").decode() == "é ü 漢"
    assert run.texts.of([10**9, -1, "x"]) == {}
    os.unlink(directory / "model" / "tokenizer.json")
    (without,) = find_runs([directory])
    assert without.texts.of(token_ids) == {}


def test_an_exported_page_carries_small_copies_of_images(tokenizer, tmp_path):
    run, report = write_run(tmp_path / "run", tokenizer, steps=1), tmp_path / "report.html"
    digest = write_seen(run).stem
    assert main(["view", str(run), "--export", str(report)]) == 0
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.read_text())[1]
    *others, seen = json.loads(data)["runs"][0]["episodes"]
    assert not any("images" in episode for episode in others) and [*seen["images"]] == [digest]
    kind, _, copy = seen["images"][digest].partition(",")
    with PIL.Image.open(io.BytesIO(base64.b64decode(copy))) as small:
        assert kind == "data:image/png;base64" and small.size == (256, 128)


def test_foreign_episodes_are_shown_beside_the_others(tokenizer, tmp_path, capsys):
    """Their messages may be anything."""
    run, report = write_run(tmp_path / "run", tokenizer, steps=1), tmp_path / "report.html"
    path = next((run / "episodes").glob("step-*"))
    line = json.loads(path.read_text().splitlines()[0])
    others = [5, [5], [{"role": "user", "parts": 5}]]
    path.write_text(path.read_text() + "".join(json.dumps(line | {"messages": one}) + "\n" for one in others))
    assert main(["view", str(run), "--export", str(report)]) == 0
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.read_text())[1]
    assert [one["episode"]["messages"] for one in json.loads(data)["runs"][0]["episodes"]][-3:] == others
