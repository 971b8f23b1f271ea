"""The commands, run as a user runs them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked_python import python, started
from safetensors.torch import load_file, save_file

from rl4llm.cli import COMMANDS, _parsed, build_parser, main
from rl4llm.config import load_config
from rl4llm.data.demonstrations import as_row
from rl4llm.data.read import read_rows
from rl4llm.extensions.evaluate.command import examples
from rl4llm.extensions.evaluate.play import collect
from rl4llm.extensions.evaluate.scores import Problem
from rl4llm.extensions.export.card import model_card
from rl4llm.runtime.ports import free_port

ROOT = Path(__file__).parents[1]
LONG = "{name: length, unit: chars, min_length: 99, max_length: 999, margin: 99}"
REWARD = (
    f"rewards=[{{name: threshold, reward: {LONG}, at_least: 0.5}}]"  # tells success, and starts no verifiers
)


def rl4llm(*arguments, code=0):
    """Run a command in the repository; its output, after checking the exit code."""
    done = python("-m", "rl4llm", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def small(model_dir, directory, *more):
    """Return overrides for a short run of the quickstart's configuration."""
    sizes = (
        "rollout.prompts=2",
        "rollout.group_size=2",
        "rollout.max_tokens=8",
        "data.limit=8",
        "eval.limit=4",
    )
    return [f"model.path={model_dir}", f"output.dir={directory}", "max_steps=2", *sizes, REWARD, *more]


@pytest.fixture(scope="module")
def run(model_dir, tmp_path_factory):
    """Return a finished short run."""
    directory = tmp_path_factory.mktemp("run")
    words = small(model_dir, directory)
    return directory, words, rl4llm("train", "configs/quickstart.yaml", *words)


def test_a_run_leaves_its_logs_its_picture_and_its_episodes(run):
    directory, _, output = run
    assert "held-out success at step 2" in output
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = {"reward/mean", "reward/length", "accuracy", "completion_length/p90", "turns", "time/rollout"}
    assert names <= set().union(*steps)
    files = {"config.yaml", "learning_curve.png", "episodes", "checkpoints"}
    assert files <= {path.name for path in directory.iterdir()}
    assert list(directory.glob("events.out.tfevents.*"))
    episode = json.loads((directory / "episodes" / "step-000001.jsonl").read_text().splitlines()[0])
    assert {"messages", "spans", "rewards", "reward", "stop_reason"} <= episode.keys()


def test_the_same_command_resumes_where_it_stopped(run):
    directory, words, _ = run
    output = rl4llm("train", "configs/quickstart.yaml", *words, "max_steps=3")
    assert "after step 2" in output
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3
    assert sorted(set(steps)) == [0, 1, 2, 3]


def test_an_unsafe_change_of_a_key_needs_force(run):
    _, words, _ = run
    command = ["train", "configs/quickstart.yaml", *words, "max_steps=3"]
    rl4llm(*command, "training.lr=0.5", code=1)
    assert "eval.limit: 4 -> 2" in " ".join(rl4llm(*command, "eval.limit=2").split())
    rl4llm("train", "--force", *command[1:], "training.lr=0.5")


def test_a_run_without_servers_stops_with_75_and_resumes(model_dir, tmp_path):
    words = small(model_dir, tmp_path, "eval.every=0", "max_steps=1")
    arguments = ["train", str(ROOT / "configs" / "quickstart.yaml"), *words]
    nobody = ["inference.name=sglang", f"inference.url=http://127.0.0.1:{free_port('127.0.0.1')}"]
    assert main([*arguments, *nobody, "inference.wait_s=0.2"]) == 75
    assert main(arguments) == 0  # where servers are does not make it another run


def told(capsys, *arguments, code=0):
    """Return the JSON that a command prints, run in this process."""
    assert main(list(map(str, arguments))) == code
    return json.loads(capsys.readouterr().out)


def test_eval_repeats_its_result_and_does_not_change_the_run(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    directory, words, _ = run
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    sampled = [*words, "eval.temperature=1", "--samples", "4", "--k", "1,3", "--json"]
    result = told(capsys, "eval", "configs/quickstart.yaml", *sampled, "--out", tmp_path / "a.json")
    assert result["step"] >= 2
    assert result["metrics"]["trajectories"] == 16
    assert list(result["scores"]) == ["pass@1", "pass@3", "mean@4", "reward"]
    assert result["scores"]["mean@4"]["value"] == pytest.approx(result["metrics"]["accuracy"])
    assert result["scores"]["reward"]["value"] == pytest.approx(result["metrics"]["reward/mean"])
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before

    written = json.loads((tmp_path / "a.json").read_text())
    rows = written.pop("per_problem")
    assert written == result
    assert [len(row["rewards"]) for row in rows] == [4] * 4
    same = [*sampled, "--compare", tmp_path / "a.json", "--fail-if-worse"]
    again = told(capsys, "eval", "configs/quickstart.yaml", *same)
    assert again["scores"] == result["scores"]
    assert {item["gained"]["value"] for item in again["compared"]["differences"].values()} == {0.0}

    better = [row | {"successes": 4, "rewards": [1.0] * 4} for row in rows]
    (tmp_path / "better.json").write_text(json.dumps({"per_problem": better}))
    worse = [*sampled, "--compare", tmp_path / "better.json"]
    changed = told(capsys, "eval", "configs/quickstart.yaml", *worse)["compared"]["differences"]
    assert changed["mean@4"]["gained"]["high"] < 0
    told(capsys, "eval", "configs/quickstart.yaml", *worse, "--fail-if-worse", code=3)


def test_eval_measures_the_model_that_it_names(run, model_dir, tmp_path, capsys, monkeypatch):
    """A run's configuration means that run, and --model means that model."""
    directory, words, _ = run
    shutil.copytree(directory, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    keys = [text for text in words if not text.startswith("output.dir=")]
    last = told(capsys, "eval", "moved/config.yaml", *keys, "--json")
    assert last["step"] >= 2 and last["model"].startswith("moved/checkpoints/step-")
    shutil.copytree(model_dir, "other")
    weights = load_file("other/model.safetensors")
    save_file(
        {name: tensor * 1.5 for name, tensor in weights.items()}, "other/model.safetensors", {"format": "pt"}
    )
    named = told(
        capsys, "eval", "moved/config.yaml", *keys, "--model", "other", "--json", "--out", "named.json"
    )
    assert (named["step"], named["model"]) == (None, "other")
    assert named["metrics"]["surprise"] != last["metrics"]["surprise"]

    written = json.loads((tmp_path / "named.json").read_text())
    for row in written["per_problem"]:
        row["question"] += "?"
    (tmp_path / "others.json").write_text(json.dumps(written))
    assert main(["eval", "moved/config.yaml", *keys, "--json", "--compare", "others.json"]) == 0
    assert "4 problems have the same id in others.json" in " ".join(capsys.readouterr().err.split())
    prompted = [*keys, "env.max_steps=2", "eval.temperature=0.5", "--json", "--compare", "named.json"]
    assert main(["eval", "moved/config.yaml", *prompted]) == 0
    assert " ".join(capsys.readouterr().err.split()).count("was measured with") == 2


def test_eval_with_a_dataset_configuration_samples_prompts(model_dir, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"problem": f"How many coins are {n} and 1?", "answer": str(n + 1)} for n in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"model.path={model_dir}",
        "model.autocast=none",
        f"output.dir={tmp_path}",
        "rollout.max_tokens=4",
    ]
    columns = ["data.prompt_column=problem", "data.answer_column=answer", REWARD]
    arguments = ["eval", str(ROOT / "configs/dpo.yaml"), *words, *columns]
    result = told(capsys, *arguments, f"eval.path={prompts}", "--json")
    assert result["scores"]["pass@1"]["problems"] == 3

    (tmp_path / "others.json").write_text('{"per_problem": []}')
    files = ["--compare", str(tmp_path / "others.json"), "--out", str(tmp_path / "kept.json")]
    assert main([*arguments, f"eval.path={prompts}", *files]) == 1  # what took an hour to measure is not lost
    assert json.loads((tmp_path / "kept.json").read_text())["scores"] == result["scores"]
    for more in (
        [],
        [f"eval.path={prompts}", "data.answer_column=solution"],
        ["algorithm.name=reward_model"],
        [f"eval.path={prompts}", "--samples", "2"],
        [f"eval.path={prompts}", "--fail-if-worse"],
        [f"eval.path={prompts}", "--compare", str(prompts)],
        [f"eval.path={prompts}", "--out", str(prompts)],
    ):
        assert main([*arguments, *more]) in (1, 2)


def test_info_lists_versions_algorithms_environments_and_rewards(capsys):
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    for name in ("torch", "grpo", "dapo", "tool", "math"):
        assert name in output
    found = told(capsys, "info", "--json")
    tables = ["versions", "devices", "algorithms", "environments", "rewards", "engines", "backends"]
    assert list(found) == tables
    assert all(row["what"] for name in tables[1:] for row in found[name])
    detailed = told(capsys, "info", "algorithms", "--json")
    assert list(detailed) == ["algorithms", "options"]
    (ppo,) = (row for row in detailed["algorithms"] if row["name"] == "ppo")
    assert "critic" in ppo["needs"] and "whiten" in ppo["special options and defaults"]
    assert found["algorithms"] == [
        {key: row[key] for key in ("name", "what")} for row in detailed["algorithms"]
    ]
    assert list(told(capsys, "info", "rewards", "--json")) == ["rewards"]
    (cpu,) = (row for row in told(capsys, "info", "devices", "--json")["devices"] if row["device"] == "cpu")
    assert "threads" in cpu["what"]


def test_only_the_command_that_is_named_is_read():
    def commands(*words):
        return [set(action.choices) for action in build_parser(*words)._actions if action.choices]

    assert commands("train") == [{"train"}]
    assert commands("tran") == commands("-h") == commands()


def test_the_examples_in_every_help_text_can_be_parsed():
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    assert len(commands) == len(list(COMMANDS))
    inner = {
        f"{group} {name}": command
        for group in ("recipe", "tasks")
        for actions in (action.choices for action in commands[group]._actions if action.choices)
        for name, command in actions.items()
    }
    for name, command in (commands | inner).items():
        if name in (
            "serve",
            "recipe",
            "tasks",
        ):  # the launcher's own help; the words that follow have examples
            continue
        _, _, examples = command.format_help().partition("examples:\n")
        assert f"rl4llm {name} " in examples.replace("\n", " "), name
        for example in examples.strip().splitlines():
            words = shlex.split(example)
            assert words[0] == "rl4llm"
            _parsed(words[1:])


def test_a_command_ends_without_a_visit_of_all_objects():
    look = "atexit.register(lambda: print(gc.get_freeze_count() > 0))"  # before the program's, so it runs after it
    code = f"import atexit, gc; {look}; from rl4llm.__main__ import program; program()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True"


def test_a_gpu_without_memory_gets_one_line_that_names_the_plan(monkeypatch, capsys):
    def full(arguments):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"
        )

    monkeypatch.setattr("rl4llm.extensions.inspect.plan.command.run", full)
    assert main(["plan", "configs/quickstart.yaml"]) == 1
    assert capsys.readouterr().err == (
        "MemoryError: CUDA out of memory. Run `rl4llm plan CONFIG` to see how much a step needs.\n"
    )


def test_collected_episodes_are_a_dataset_that_sft_learns_from(run, tmp_path, capsys):
    directory, words, _ = run
    before = sorted(path.relative_to(directory) for path in directory.rglob("*"))
    command = ["collect", ROOT / "configs/quickstart.yaml", *words, "--prompts", "3"]
    files = [tmp_path / name for name in ("a.jsonl", "a.parquet", "saved")]
    for file in files:
        result = told(capsys, *command, "--out", file, "--filter-reward", "0", "--json")
        assert result == {"out": str(file), "kept": 6, "played": 6}
    rows = [list(read_rows(str(file), "train")) for file in files]
    columns = ("prompt_id", "group", "messages", "reward")
    first, *others = [[tuple(row[name] for name in columns) for _, row in read] for read in rows]
    assert len({row[0] for row in first}) == 6
    assert len({row[1] for row in first}) == 3
    assert all(other == first for other in others)  # the same seed plays the same episodes
    assert {"system", "user", "assistant"} <= {message["role"] for row in first for message in row[2]}
    assert sorted(path.relative_to(directory) for path in directory.rglob("*")) == before
    learned = [f"data.path={files[0]}", f"output.dir={tmp_path / 'sft'}", "max_steps=1", "rollout.prompts=2"]
    assert (
        main(
            [
                "train",
                str(ROOT / "configs/sft.yaml"),
                words[0],
                *learned,
                "eval.every=0",
                "model.autocast=none",
            ]
        )
        == 0
    )
    assert (tmp_path / "sft" / "model").is_dir()


def test_a_prompt_that_is_collected_again_gets_other_attempts(model_dir, tmp_path):
    words = small(model_dir, tmp_path / "run", "data.limit=1", "rollout.prompts=1")
    config = load_config(ROOT / "configs/quickstart.yaml", words)
    episodes = list(collect(config, 3))
    assert [as_row(episode)["prompt_id"].rpartition("/")[2] for episode in episodes] == list("012345")
    assert len({episode.spans[1].token_ids for episode in episodes}) == 6


def test_collect_refuses_an_unwritable_file_before_it_samples(run, tmp_path):
    _, words, _ = run
    command = ["collect", "configs/quickstart.yaml", *words]
    (tmp_path / "there.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    for out, code in (("there.jsonl", 2), ("x.csv", 2), ("file/x.jsonl", 1)):
        rl4llm(*command, "--out", tmp_path / out, code=code)
    rl4llm(*command, "--out", tmp_path / "x.jsonl", "--prompts", "1", "--filter-reward", "7", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there.jsonl"]


def test_an_exported_run_is_a_model_with_a_card_of_its_results(run, tmp_path, capsys, monkeypatch):
    directory, _, _ = run
    last = max(int(path.name.split("-")[1]) for path in (directory / "checkpoints").glob("step-*"))
    out = tmp_path / "exported"
    (listed,) = told(capsys, "view", directory, "--json")
    assert (listed["name"], listed["running"]) == (directory.name, False)
    assert told(capsys, "export", directory, "--out", out, "--json") == {
        "out": str(out),
        "step": last,
        "notes": [],
    }
    assert (out / "model.safetensors").read_bytes() == (
        directory / "model" / "model.safetensors"
    ).read_bytes()
    card = (out / "README.md").read_text()
    monkeypatch.chdir(out)
    shown = {"request": json.loads(re.search(r"```json\n(.*?)```", card, re.DOTALL)[1])}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], shown)
    assert shown["tokenizer"].chat_template and shown["model"].num_parameters()
    assert f"| held-out set | step 0 | step {last} |" in card
    assert "| accuracy | " in card
    assert "name: grpo" in card
    assert str(directory) not in card
    rl4llm("export", directory, "--out", out, code=2)
    for arguments in ((directory, "--step", "99"), (tmp_path,)):
        rl4llm("export", *arguments, "--out", tmp_path / "x", code=1)
    assert not (tmp_path / "x").exists()


def test_export_finds_a_relative_model_above_the_run(model_dir, tmp_path, monkeypatch):
    shutil.copytree(model_dir, tmp_path / "models" / "of" / "mine")
    monkeypatch.chdir(tmp_path)
    words = small("models/of/mine", "runs/one", "max_steps=1", "eval.every=0")
    assert main(["train", "configs/quickstart.yaml", *words]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["export", "../runs/one", "--out", "here"]) == 0
    assert (tmp_path / "elsewhere" / "here" / "model.safetensors").is_file()
    (tmp_path / "models").rename(tmp_path / "moved")
    assert main(["export", "../runs/one", "--out", "again"]) == 1
    assert main(["export", "../runs/one", "--out", "again", "model.path=../moved/of/mine"]) == 0


def test_eval_shows_wrong_answers_before_right_ones():
    problems = [
        Problem("a", (1.0,), 1, question="1+1?", answers=("2",)),
        Problem("b", (0.0,), 0, question="2+2?", answers=("x " * 400,)),
        Problem("c", (), 0, failed=1),
    ]
    lines = examples(problems)
    assert [line[:14] for line in lines] == [
        "question b: 2+",
        "  answer with ",
        "question a: 1+",
        "  answer with ",
    ]
    assert lines[-1] == "  answer with reward 1: 2"
    assert all(len(line) < 400 for line in lines)


def test_a_model_card_has_neither_secrets_nor_local_paths(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    tools = [
        {"name": "mcp", "command": ["python", str(tmp_path / "server.py")], "env": {"SEARCH_TOKEN": "sesame"}}
    ]
    judge = {"name": "llm_judge", "url": "http://me:sesame@10.1.2.3:9/v1"}
    parts = {
        "far": {
            "data": {"path": str(prompts)},
            "env": {"name": "tool", "remote": "10.1.2.3:50051", "tools": tools},
        },
        "agents": {
            "env": {"name": "agent", "command": f"python {tmp_path}/agent.py --fast"},
            "rewards": [judge],
        },
    }
    own = {"algorithm": {"name": "distill", "teacher_path": str(tmp_path / "base")}}
    config = load_config(overrides={"model.path": "m", "data.path": "arithmetic", "parts": parts} | own)
    card = model_card(config, 3).content
    for hidden in ("sesame", "10.1.2.3", str(tmp_path)):
        assert hidden not in card
    assert "on prompts.jsonl, arithmetic, by" in card and "teacher_path: base" in card


def test_an_exported_adapter_is_merged(model_dir, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data.jsonl"
    said = [{"role": "user", "content": "Say four."}, {"role": "assistant", "content": "four"}]
    data.write_text("".join(json.dumps({"prompt_id": str(row), "messages": said}) + "\n" for row in range(4)))
    words = [
        f"model.path={model_dir}",
        f"data.path={data}",
        f"output.dir={run}",
        "eval.every=0",
        "max_steps=2",
    ]
    words += ["rollout.prompts=2", "model.autocast=none", "model.lora.rank=2", "training.lr=0.1"]
    rl4llm("train", "configs/sft.yaml", *words)
    rl4llm("export", run, "--out", tmp_path / "out")
    exported = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert exported == (run / "model" / "model.safetensors").read_bytes()
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(model_dir / "model.safetensors").keys()
    )
    assert exported != (model_dir / "model.safetensors").read_bytes()


@pytest.mark.parametrize("command", ["eval", "collect"])
def test_a_command_that_is_terminated_leaves_no_files(model_dir, tmp_path, command, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    words = [command, "configs/quickstart.yaml", f"model.path={model_dir}", f"output.dir={tmp_path / 'run'}"]
    if command == "collect":
        words += ["--out", str(tmp_path / "episodes.jsonl"), "--prompts", "100000"]
    with started("-m", "rl4llm", *words, "eval.limit=512", "rollout.max_tokens=400") as program:
        while "phase: publish" not in program.err.read_text():
            assert program.process.is_alive(), program.err.read_text()
            time.sleep(0.02)
        assert list(scratch.glob(".scratch-*"))
        program.process.terminate()
        done = program.end(60)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(scratch.glob(".scratch-*"))
    assert not list(tmp_path.glob("*episodes*"))


def code_of(words):
    try:
        return main(words)
    except SystemExit as end:
        return end.code


def test_help_and_version_are_commands_too(capsys):
    for words, same in (
        ([], ["--help"]),
        (["help"], ["--help"]),
        (["help", "train"], ["train", "--help"]),
        (["version"], ["--version"]),
    ):
        printed = [(code_of(given), capsys.readouterr().out) for given in (words, same)]
        assert printed[0] == printed[1] and printed[0][0] == 0 and printed[0][1]


@pytest.mark.parametrize(
    ("words", "near"), [(["trian"], "train"), (["recipe", "rnu"], "run"), (["info", "rewads"], "rewards")]
)
def test_a_misspelled_word_is_answered_with_the_closest(words, near, capsys):
    assert code_of(words) == 2
    assert f"Did you mean '{near}'?" in capsys.readouterr().err


def test_the_help_of_serve_names_all_that_it_serves(capsys):
    from rl4llm.commands.serve import KINDS

    assert code_of(["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"rl4llm serve {name} " in printed for name in KINDS) and "--engine" in printed


def test_the_first_line_of_a_run_is_about_the_run(run):
    directory, _, printed = run
    assert str(directory) in next(line for line in printed.splitlines() if not line.startswith("Warning"))


def test_others_may_read_a_model_as_they_may_its_directory(run):
    directory, _, _ = run
    for file in (directory / "model").iterdir():
        assert file.stat().st_mode & 0o644 == (directory / "model").stat().st_mode & 0o644
