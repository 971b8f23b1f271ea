"""Benchmarks by name: their prompts, what they refuse, and results that can be compared."""

import json

import pytest

from rl4llm.cli import main
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.extensions.evaluate import play
from rl4llm.extensions.evaluate.benchmarks import BENCHMARKS, digest
from rl4llm.extensions.evaluate.named import benchmarks_in, plan

SUMS = [{"question": f"{n} plus 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(8)]
PROBLEMS = [{"problem": f"What is {n}+1?", "answer": str(n + 1), "unique_id": f"p/{n}"} for n in range(3)]


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def gsm8k(tmp_path):
    """A directory with the splits of GSM8K."""
    write(tmp_path / "gsm8k" / "train.jsonl", SUMS[:6])
    return write(tmp_path / "gsm8k" / "test.jsonl", SUMS[6:]).parent


@pytest.fixture
def math500(tmp_path):
    return write(tmp_path / "math500.jsonl", PROBLEMS)


def rows_of(name, place, *overrides):
    return plan([name], ["model.path=m", *overrides], [f"{name}={place}"])[0].rows


def test_eval_refuses_what_it_cannot_measure(math500, gsm8k):
    model = ("math500", "--model", "m", "--data")
    for words, code in (
        (("math500", "--data", math500), 2),
        ((*model, f"gsm8k={gsm8k}"), 2),
        ((*model, "none.jsonl"), 1),
        (("configs/gsm8k_grpo.yaml", "--data", "x"), 2),
        (("math500", "--model", "m", "--fail-if-worse"), 2),
    ):
        assert main(["eval", *map(str, words)]) == code, words


def test_gsm8k_shows_the_first_five_solved_problems(gsm8k):
    first, second = rows_of("gsm8k", gsm8k)
    roles = [message["role"] for message in first["messages"]]
    assert roles == ["user", "assistant"] * 5 + ["user"]
    assert first["messages"][:2] == [
        {"role": "user", "content": "Question: 0 plus 1?\nAnswer:"},
        {"role": "assistant", "content": SUMS[0]["answer"]},
    ]
    assert first["messages"][:-1] == second["messages"][:-1]
    assert second["messages"][-1]["content"] == "Question: 7 plus 1?\nAnswer:"


def test_gsm8k_without_examples_is_refused(gsm8k):
    write(gsm8k / "train.jsonl", SUMS[:4])
    with pytest.raises(DataError):
        rows_of("gsm8k", gsm8k)
    with pytest.raises(DataError, match=r"math500: .* no column 'problem'"):
        rows_of("math500", gsm8k)


def test_the_hash_tells_other_problems_apart(math500):
    rows = rows_of("math500", math500)
    assert digest(rows) == digest(rows_of("math500", math500))
    assert digest(rows) != digest(rows_of("math500", math500, "eval.limit=2"))
    assert [row["prompt_id"] for row in rows] == ["p/0", "p/1", "p/2"]


def test_a_changed_definition_is_named(math500):
    (unchanged,) = plan(["math500"], ["model.path=m", "eval.limit=1"], [str(math500)])
    assert unchanged.changed == {}
    overrides = ["model.path=m", "rollout.max_tokens=9", "eval.temperature=0.5"]
    (changed,) = plan(["math500"], overrides, [str(math500)])
    assert changed.changed == {"rollout.max_tokens": 9, "eval.temperature": 0.5}


def test_names_and_files_are_distinguished(tmp_path, monkeypatch):
    assert benchmarks_in("gsm8k,math500") == ["gsm8k", "math500"]
    assert benchmarks_in("configs/missing.yaml") == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").write_text("model: {path: m}")
    assert benchmarks_in("gsm8k") == []
    with pytest.raises(ConfigError):
        benchmarks_in("ifeval,gsm9k")


def test_eval_measures_benchmarks_by_name(model_dir, math500, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(play, "REPORT_S", 0.01)
    stored = tmp_path / "before.json"
    base = ["eval", "math500", "--model", str(model_dir), "--data", str(math500), "--limit", "2"]
    base += ["rollout.max_tokens=40", "--json"]
    assert main([*base, "--out", str(stored)]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert " of 2 episodes finished, " in printed.err
    assert list(result["scores"]) == ["math500/pass@1"]
    assert result["scores"]["math500/pass@1"]["high"] > 0.5  # Wilson's, also where nothing is right
    about = result["benchmarks"]["math500"]
    assert (about["version"], about["problems"]) == (BENCHMARKS["math500"].version, 2)
    assert about["changed"] == {"rollout.max_tokens": 40}
    problems = json.loads(stored.read_text())["per_problem"]
    assert [item["prompt_id"] for item in problems] == ["p/0", "p/1"]
    assert problems[0]["question"].startswith("What is 0+1?")
    assert problems[0]["answers"][0]

    better = [item | {"successes": 1, "rewards": [1.0]} for item in problems]
    for differs, reported in (
        ({"changed": {}}, True),
        ({"hash": "0"}, True),
        ({"hash": "0", "problems": 3}, False),
    ):
        earlier = {"math500": about | differs}
        stored.write_text(json.dumps({"benchmarks": earlier, "per_problem": better}))
        assert main([*base, "--compare", str(stored)]) == 0
        printed = capsys.readouterr()
        gained = json.loads(printed.out)["compared"]["differences"]["math500/pass@1"]["gained"]
        assert gained["value"] == -1.0
        assert ("has another definition" in printed.err) is reported


def test_each_grader_of_a_benchmark_has_its_own_score(model_dir, gsm8k, tmp_path):
    out = tmp_path / "out.json"
    small = ["--model", str(model_dir), "--data", str(gsm8k), "--out", str(out), "rollout.max_tokens=4"]
    assert main(["eval", "gsm8k", *small]) == 0
    assert [*json.loads(out.read_text())["scores"]] == ["gsm8k/pass@1", "gsm8k/strict/pass@1"]


def test_ifeval_without_lm_eval_is_refused_before_it_plays(gsm8k, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    row = {"key": 1, "prompt": "No comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    file = write(tmp_path / "train.jsonl", [row])
    places = ["--data", f"gsm8k={gsm8k}", "--data", f"ifeval={file}"]
    assert main(["eval", "gsm8k,ifeval", "--model", "no-such-model", *places]) == 2
