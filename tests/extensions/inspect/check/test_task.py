"""The report on a task before training names what keeps it from learning."""

import json
import re

import pytest

from rl4llm import load_tokenizer
from rl4llm.cli import main
from rl4llm.config import load_config
from rl4llm.extensions.inspect.check.task import STILL, TaskReport, _of_rate

PROMPTS = [{"prompt": f"What is {n}+1?", "ground_truth": str(n + 1)} for n in range(4)]


@pytest.fixture
def task(model_dir, tmp_path, monkeypatch, capsys):
    """task(*words): the report as JSON, its exit code, and its lines for people."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "taught.py").write_text(
        "def odd(completions, **columns):\n    return [float(number % 2) for number in range(len(completions))]\n\n\n"
        "def right(completions, **columns):\n    return [1.0] * len(completions)\n\n\n"
        "odd.success_at = right.success_at = 1.0\n"
    )
    (tmp_path / "task.yaml").write_text(
        "eval: {every: 0}\nrollout: {prompts: 2, group_size: 2, max_tokens: 4}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = [f"model.path={model_dir}", "data.path=rows.jsonl", "max_steps=50"]

    def run(*words):
        code = main(["check", "task.yaml", "--task", "--prompts", "4", "--json", *keys, *words])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        return json.loads(printed.out), code

    return run


def test_answers_without_the_format_are_quoted(task, tmp_path):
    report, code = task("rewards=[{name: math, extract: boxed}]")
    assert code == 1
    assert report["no_answer"] == 1.0
    assert [truth for truth, _ in report["quoted"]] == ["'1'", "'1'", "'2'"]
    assert any("boxed" in text and "data.system_prompt" in text for text in report["advice"])
    assert any("Raise rollout.max_tokens=4" in text for text in report["advice"])
    assert not (tmp_path / "runs").exists()


def test_episodes_that_fill_the_context_need_shorter_prompts(task, model_dir):
    context = json.loads((model_dir / "config.json").read_text())["max_position_embeddings"]
    tokenizer, text = load_tokenizer(model_dir), ""
    said = [{"role": "user", "content": f"{text} {PROMPTS[0]['prompt']}"}]
    while (
        len(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)) < context - 2
    ):
        text += "7"
        said[0]["content"] = f"{text} {PROMPTS[0]['prompt']}"
    long = f"data.prompt_template={text} {{prompt}}"
    report, _ = task("rewards=['taught:odd']", long, "rollout.max_tokens=100")
    assert report["metrics"]["truncated"] > 0.5
    advice = " ".join(report["advice"])
    assert "Shorten the prompts" in advice and "rollout.max_tokens" not in advice


def test_a_task_with_gradients_passes(task):
    report, code = task("rewards=['taught:odd']")
    assert code == 0
    assert report["teaches"]
    assert report["metrics"]["accuracy"] == 0.5
    assert report["metrics"]["trajectories"] == 8
    assert not any("group" in text for text in report["advice"])
    assert [truth for truth, _ in report["quoted"]] == ["'1'", "'2'", "'3'"]
    assert f"  ground truth '1', answer {report['quoted'][0][1]!r}" in TaskReport(**report).lines()


def test_a_rate_that_changes_nothing_in_the_whole_run_is_named(task):
    low, _ = task("rewards=['taught:odd']", "training.lr=1e-9")
    high, _ = task("rewards=['taught:odd']", "training.lr=1e-4")
    assert low["run"] < STILL < high["run"]
    assert ["training.lr" in " ".join(report["advice"]) for report in (low, high)] == [True, False]
    assert high["run"] == pytest.approx(50 * high["update"])
    named = [re.findall(r"to (\S+) or more", " ".join(report["advice"])) for report in (low, high)]
    assert named == [[], []]  # the change of `low` is rounding, from which no rate follows
    warm, _ = task("rewards=['taught:odd']", "training.lr=1e-4", "training.warmup_steps=10")
    assert warm["update"] == pytest.approx(high["update"] / 10, rel=0.2)
    assert warm["run"] == pytest.approx(warm["update"] * (sum(range(1, 11)) + 400))


@pytest.mark.parametrize("update", [9.7e-6, 1.9e-5, 3.9e-4])
def test_the_named_rate_is_enough(update):
    config = load_config(None, {"model.path": "model", "max_steps": 50, "training.lr": 1e-6})
    run = min(50 * update, STILL * 0.98)
    (advice,) = _of_rate(config, update, run)
    (named,) = map(float, re.findall(r"to (\S+) or more", advice))
    assert STILL <= named / 1e-6 * run < 10 * STILL


def test_a_rate_of_zero_is_not_multiplied(task):
    report, _ = task("rewards=['taught:odd']", "training.lr=0")
    assert [re.findall(r"\d\S*", text) for text in report["advice"] if "training.lr" in text] == [["0", "0."]]


def test_groups_without_a_gradient_promise_no_change(task):
    report, _ = task("rewards=['taught:right']")
    assert report["update"] is None and report["run"] is None


def test_a_task_that_is_solved_asks_for_harder_prompts(task):
    report, code = task("rewards=['taught:right']")
    assert code == 1
    assert any("harder prompts" in text for text in report["advice"])


def test_calls_that_get_errors_are_quoted(task, tmp_path):
    (tmp_path / "calling.py").write_text(
        "from rl4llm import ToolMDPEnv\nfrom rl4llm.envs.tools.formats import FORMATS, CallFormat, ToolCall\n\n\n"
        "class Calling(ToolMDPEnv):\n    continue_truncated = True\n\n\n"
        "FORMATS.register('any')(CallFormat(lambda text: [ToolCall('calculator', {'wrong': text})]))\n\n\n"
        "def right(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    keys = [
        "env.name=calling:Calling", "env.tools=[calculator]", "env.format=any", "env.describe_tools=false",
    ]  # fmt: skip
    report, code = task("rewards=['calling:right']", *keys)
    assert code == 1
    assert "Error: calculator: no argument 'wrong'" in report["refused"][0]
    assert any("env.describe_tools" in text for text in report["advice"])


def test_a_method_on_datasets_has_nothing_to_sample(model_dir, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1?", "completion": "2"}))
    keys = [f"model.path={model_dir}", f"data.path={tmp_path}", "eval.every=0", f"output.dir={tmp_path}/run"]
    assert main(["check", "configs/sft.yaml", "--task", *keys]) == 2
