"""What `rl4llm recipe new` writes is a task: its test passes, its check passes, and its episodes are played."""

import json
import shutil
import subprocess
import sys
from itertools import product

import pytest
import yaml
from vision_models import vision_directories  # noqa: F401 - fixture

from rl4llm.cli import main
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.new.command import CHOICES, Answers, asked, write
from rl4llm.extensions.new.templates import rows

SHAPES = [(right, tools, 1 if tools == "none" else 3) for right, tools in product(*CHOICES.values())]
SHAPES.append(("text", "none", 3))


@pytest.fixture
def no_task(monkeypatch):
    """Forget the module of another new task."""
    for name in ("task", "test_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("task", "test_task"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_passes_its_test(shape, tmp_path, no_task, monkeypatch, capsys):
    right, tools, turns = shape
    write(tmp_path, Answers("", right, tools, turns, "model"))
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = {}
    exec(compile((tmp_path / "test_task.py").read_text(), "test_task.py", "exec"), namespace)
    tests = [item for name, item in namespace.items() if name.startswith("test_")]
    assert len(tests) == 1 + (turns > 1)
    for item in tests:
        item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_formatted_as_ruff_does(shape, tmp_path):
    write(tmp_path, Answers("", *shape, "model"))
    for command in (["check", "--isolated", "--select", "E,F,B,UP"], ["format", "--isolated", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--line-length", "120", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "tools"),
    [("number", "sqlite"), ("number", "picture"), ("number", "none"), ("text", "none"), ("own", "none")],
)
def test_no_example_row_is_in_both_splits(right, tools):
    train, test = (rows(right, tools, split) for split in ("train", "test"))
    assert len(train) == 48
    assert not [row for row in test if row in train]


TRAINED = [
    ("number", "sqlite", 3),
    pytest.param(("number", "picture", 3), marks=pytest.mark.sweep),
    pytest.param(("text", "none", 2), marks=pytest.mark.sweep),
]


@pytest.mark.parametrize("shape", TRAINED, ids=str)
def test_a_new_task_is_checked_played_and_trained(
    shape,
    model_dir,
    vision_directories,  # noqa: F811
    tmp_path,
    no_task,
    capsys,
    monkeypatch,
):
    right, tools, turns = shape
    model = tmp_path / "model"
    shutil.copytree(vision_directories["qwen3_vl"] if tools == "picture" else model_dir, model)
    described = json.loads((model / "config.json").read_text())
    described.get("text_config", described)["max_position_embeddings"] = (
        4096  # tools take a thousand of its small tokens
    )
    (model / "config.json").write_text(json.dumps(described))
    place = tmp_path / "mine"
    options = ["--right", right, "--tools", tools, "--turns", str(turns), "--model", str(model)]
    assert main(["recipe", "new", str(place), *options]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert "All checks passed" in out
    assert out.count("reward ") >= 8
    assert len((place / "episodes.jsonl").read_text().splitlines()) == 8
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    keys = [
        "max_steps=2", "rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=8", "eval.limit=1",
    ]  # fmt: skip
    assert main(["train", "task.yaml", *keys]) == 0


def test_columns_of_given_rows_are_found(tmp_path):
    data = tmp_path / "gsm8k.jsonl"
    data.write_text(json.dumps({"question": "1+1?", "answer": "1+1=2 #### 2"}) + "\n")
    write(tmp_path / "new", Answers(str(data), "number", "none", 1, "model"))
    made = yaml.safe_load((tmp_path / "new" / "task.yaml").read_text())
    assert made["data"] == {
        "path": str(data),
        "prompt_column": "question",
        "answer_column": "answer",
        "answer_pattern": r"####\s*(.+)",
    }
    assert made["eval"] == {"every": 0}
    data.write_text(json.dumps({"question": "1+1?", "truth": "2"}) + "\n")
    with pytest.raises(ConfigError, match=r"no column looks like the answer\..*The row has: question, truth"):
        write(tmp_path / "other", Answers(str(data), "number", "none", 1, "model"))
    assert not (tmp_path / "other").exists()


def test_questions_are_asked_on_a_terminal(monkeypatch):
    told = iter(["", "text", "sqlite", "", "m"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(told))
    nothing = dict.fromkeys(("data", "right", "tools", "turns", "model"))
    assert asked(nothing) == Answers("", "text", "sqlite", 4, "m")
    with pytest.raises(ConfigError, match=r"turns=1 is not accepted\. Accepted: 2 or more, since a call"):
        asked({**nothing, "data": "d", "right": "own", "tools": "function", "turns": 1, "model": "m"})


def test_a_task_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "task.py").write_text("mine = 1\n")
    assert main(["recipe", "new", str(tmp_path)]) == 2
    assert "has task.py already" in capsys.readouterr().err
    assert (tmp_path / "task.py").read_text() == "mine = 1\n"


def test_rows_with_images_turn_them_on(tmp_path):
    for name, row in (("text", {}), ("seen", {"image": "red.png"}), ("none", {"images": None})):
        data = tmp_path / f"{name}.jsonl"
        data.write_text(json.dumps({"prompt": "<image>?", "answer": "red", **row}) + "\n")
        write(tmp_path / name, Answers(str(data), "text", "none", 1, "model"))
        model = yaml.safe_load((tmp_path / name / "task.yaml").read_text())["model"]
        assert model == {"path": "model", **({"vision": "frozen"} if name == "seen" else {})}


def test_pictures_are_shown_to_a_model_that_sees_them():
    given = {"data": None, "right": None, "tools": "picture", "turns": None, "model": None}
    assert asked(given) == Answers("", "number", "picture", 4, "Qwen/Qwen2.5-VL-3B-Instruct")
    assert asked({**given, "model": "mine"}).model == "mine"
