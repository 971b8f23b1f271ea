"""Solutions and empty agents show which tasks do not tell, before anything trains."""

import shutil
from pathlib import Path

import pytest
from task_files import TERMINAL_BENCH, write_task

from rl4llm.cli import main
from rl4llm.data.load import load_rows
from rl4llm.extensions.tasks.check import try_tasks

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")


def test_check_names_tasks_that_do_not_tell(tmp_path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "bench", TERMINAL_BENCH)
    write_task(tmp_path / "unsolved", solution_solve_sh="echo 5 > /answer\n")
    write_task(tmp_path / "empty", tests_test_sh="exit 0\n")
    write_task(tmp_path / "broken", tests_test_sh="echo 7 > /logs/verifier/reward.txt\n")
    write_task(tmp_path / "open", instruction_md="No solution.", solution_solve_sh=None)
    told = []
    lines = try_tasks(load_rows(tmp_path), {"count": 3}, told.append)
    assert sorted(Path(line.partition(": ")[0]).name for line in lines) == ["broken", "empty", "unsolved"]
    assert all("\n" not in line for line in lines) and told == lines
    others = [{"task": kind} for kind in ("sorting", None, 5, str(tmp_path))]
    assert try_tasks(others, {}, told.append) == []  # columns of other datasets


def test_check_tries_tasks_with_the_files_of_each_row(tmp_path):
    task = str(write_task(tmp_path / "task", solution_solve_sh="cp /begin /answer\n"))
    rows = [{"task": task, "files": {"/begin": text, "/gone": None}} for text in ("4", "5", "4")]
    lines = try_tasks(rows, {}, print)
    assert len(lines) == 1 and "the solution gets 0" in lines[0]
    assert try_tasks(rows[:1], {}, print) == []


def test_tasks_that_a_host_plays_are_not_run_here(tmp_path, capsys):
    remote = pytest.importorskip("extensions.remote.hosting")
    write_task(tmp_path / "tasks" / "train" / "unsolved", solution_solve_sh="exit 1\n")
    config = tmp_path / "hosted.yaml"
    config.write_text(f"model: {{path: none}}\ndata: {{path: {tmp_path}/tasks}}\neval: {{every: 0}}\n")
    with remote.HostThread(["chat"]) as host:
        assert (
            main(["check", str(config), "--task", f"env.remote={host.address}"]) == 1
        )  # for want of a model
        out, err = capsys.readouterr()
        assert out.count("\n") == 1 and host.address in out and err.startswith("ModelError")


def test_the_command_checks_tasks_before_it_loads_a_model(tmp_path, capsys):
    write_task(tmp_path / "tasks" / "train" / "good")
    write_task(tmp_path / "tasks" / "test" / "unsolved", solution_solve_sh="echo 5 > /answer\n")
    config = tmp_path / "tasks.yaml"
    config.write_text(
        f"model: {{path: {tmp_path}/none}}\ndata: {{path: {tmp_path}/tasks}}\nrewards: [task]\n"
    )
    words = ["check", str(config), "--task", f"output.dir={tmp_path}/run"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "unsolved" in out
    assert main([*words, "eval.every=0"]) == 1  # nothing is wrong with the tasks
    assert capsys.readouterr().err.startswith("ModelError")
    assert main([*words, "env.workspace={imag: host}"]) == 2
