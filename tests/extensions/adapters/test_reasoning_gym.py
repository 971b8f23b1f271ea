"""Tasks of reasoning-gym: prompts that the environment brings, verifiers as rewards, and no answer that runs."""

import json
import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from rl4llm.cli import main
from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import ChatMessage, SampleState
from rl4llm.core.base_reward import as_sample
from rl4llm.core.errors import ConfigError, DataError, SandboxError
from rl4llm.extensions.adapters import reasoning_reward as module
from rl4llm.extensions.adapters.reasoning_gym import ReasoningGymEnv, reasoning_prompts
from rl4llm.extensions.adapters.reasoning_reward import ReasoningReward
from rl4llm.extensions.sandbox import Sandbox
from rl4llm.rewards.pool import RewardFailure
from rl4llm.testing import check_env

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
library = pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")

CONFIG = Path(__file__).parents[3] / "configs" / "reasoning_gym_grpo.yaml"
SMALL = [
    "env.task=chain_sum", "env.task_options={min_terms: 2, max_terms: 2}", "data.limit=4", "eval.limit=2", "eval.every=2",
    "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=6", "model.autocast=none", "max_steps=2",
    "tracking.tensorboard=false", "checkpoint.every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    """Prompts of a task whose problems Python makes in the order of a set, and of one whose verifier evaluates answers."""
    return {
        task: reasoning_prompts("train", 4, task=task) for task in ("isomorphic_strings", "spiral_matrix")
    }


@pytest.fixture(scope="module")
def reward():
    reward = ReasoningReward(workers=1)
    yield reward
    reward.close()


def answered(row, text):
    columns = {
        name: value for name, value in row.items() if name not in ("messages", "ground_truth", "prompt_id")
    }
    messages = [*map(ChatMessage.from_dict, row["messages"]), ChatMessage("assistant", text)]
    return SampleState(row["prompt_id"], 0, messages, row["ground_truth"], columns, init_msg_size=2)


def test_reasoning_splits_share_no_question_and_follow_the_seed(rows):
    train = reasoning_prompts("train", 64, task="coin_flip")
    test = reasoning_prompts("test", 64, task="coin_flip")
    questions = [row["messages"][1]["content"] for row in train + test]
    assert len(train) == 64
    assert 8 < len(test) < 64, "a task with few problems gives each once"
    assert len(set(questions)) == len(questions)
    assert [row["prompt_id"] for row in train[:2]] == ["coin_flip-train-0", "coin_flip-train-1"]
    assert reasoning_prompts("train", 4, task="isomorphic_strings") == rows["isomorphic_strings"]
    others = reasoning_prompts("train", 4, task="isomorphic_strings", task_seed=1)
    assert not {row["messages"][1]["content"] for row in others} & {
        row["messages"][1]["content"] for row in rows["isomorphic_strings"]
    }


@pytest.mark.parametrize("task", ["countdwon", "puzzle24", "game_of_life_halting"])
def test_unknown_tasks_and_blind_verifiers_are_refused(task):
    with pytest.raises(ConfigError):
        reasoning_prompts("train", 2, task=task)


@pytest.mark.parametrize("task", ["isomorphic_strings", "spiral_matrix"])
def test_the_verifier_of_the_task_judges_the_last_answer(rows, reward, task):
    right, other = rows[task][:2]
    assert right["ground_truth"]
    said = f"<answer>no</answer> Wait: <answer>\n{right['ground_truth']}\n</answer>"
    samples = [
        answered(right, said),
        answered(right, "<answer>neither</answer>"),
        answered(right, right["ground_truth"]),
    ]
    assert reward.score_batch(samples) == [1.0, 0.0, 0.0]
    assert [sample.extras.get("reward_notes") for sample in samples] == [
        None,
        None,
        {"reasoning_gym": "no_answer"},
    ]
    assert other["messages"] != right["messages"]


@pytest.mark.parametrize(("extract", "reply", "found"), [
    ("answer", "It is 4.", ""),
    ("answer", "<answer> a b </answer>", "a b"),
    ("last_number", "<answer>3</answer> or 4", "4"),
    ("last_number", "I do not know", ""),
    ("any", "<answer>3</answer> or 4", "3"),
    ("any", "2 + 2 = 4", "4"),
    ("any", "  gab\n", "gab"),
    ("any", "3 <answer></answer>", ""),
])  # fmt: skip
def test_extract_selects_where_the_answer_stands(extract, reply, found):
    sample = as_sample([ChatMessage("assistant", reply)], "", {})
    with closing(ReasoningReward(workers=1, extract=extract)) as reward:
        answer, note = reward._answer(sample)
    assert (answer or "", note) == (found, None if found else "no_answer")


def test_the_system_prompt_of_a_task_is_an_option(rows):
    def messages(**given):
        return reasoning_prompts("train", 4, task="spiral_matrix", **given)[0]["messages"]

    system, question = rows["spiral_matrix"][0]["messages"]
    assert "<answer>" in system["content"]
    assert messages(system_prompt="Be brief.") == [{"role": "system", "content": "Be brief."}, question]
    assert messages(system_prompt=None) == [question]


def hidden(code):
    """Return a string literal without a bracket that runs code where sympy evaluates it."""
    return (
        '"' + f"exec({code!r}) or 0".replace("(", r"\x28").replace(")", r"\x29").replace('"', r"\x22") + '"'
    )


@needs_bubblewrap
@pytest.mark.parametrize("task", ["spiral_matrix", "simple_integration"])
def test_a_reply_runs_no_code_and_forges_no_reward(reward, tmp_path, task):
    (row,) = reasoning_prompts("train", 1, task=task)
    touch = f"__import__('pathlib').Path('{tmp_path}/file').touch()"
    forge = "import sympy; sympy.simplify = lambda e: 0"
    attacks = [touch, f"[{touch} for x in (1,)]", f"(lambda: {touch})()", f"exec\n ({forge!r}) or 0", hidden(touch),
               hidden(forge), f"sin({hidden(forge)})", "().__class__", f"S({hidden(forge)})"]  # fmt: skip
    samples = [answered(row, f"<answer>{attack}</answer>") for attack in attacks]
    assert reward.score_batch(samples) == [0.0] * len(attacks)
    assert not any(tmp_path.iterdir())
    assert reward.score_batch([answered(row, f"<answer>{row['ground_truth']}</answer>")]) == [1.0]


@needs_bubblewrap
def test_code_that_passes_the_check_stays_in_its_process(reward, tmp_path, monkeypatch):
    verifier = tmp_path / "verifier.py"
    text = module.VERIFIER.read_text()
    verifier.write_text(text.replace("if harmful or (names", "harmful = False\n    if (names"))
    monkeypatch.setattr(module, "VERIFIER", verifier)
    (row,) = reasoning_prompts("train", 1, task="simple_integration")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)  # pytest's own directories are closed to the uid of a sandbox
        codes = "import sympy; sympy.simplify = lambda e: 0", f"open('{directory}/file', 'w').close()"
        said = [*(f"sin({hidden(code)})" for code in codes), "x**99"]
        scores = reward.score_batch([answered(row, f"<answer>{text}</answer>") for text in said])
        assert scores == [1.0, 0.0, 0.0] and not os.listdir(directory)


@needs_bubblewrap
def test_answers_are_evaluated_in_the_sandbox(reward):
    """One answer that takes too long or too much memory costs the others nothing."""
    (row,) = reasoning_prompts("train", 1, task="countdown")
    said = [row["ground_truth"], "9**9**9**9", "1", row["ground_truth"]]
    before = reward.sandbox.counts["ok"]
    samples = [answered(row, f"<answer>{text}</answer>") for text in said]
    assert reward.score_batch(samples) == [1.0, 0.0, 0.05, 1.0]
    assert samples[1].extras["reward_notes"]["reasoning_gym"].startswith(("timeout: ", "crash: "))
    assert reward.sandbox.counts["ok"] == before + 1


def test_tasks_that_evaluate_need_a_sandbox(rows):
    (row,) = reasoning_prompts("train", 1, task="countdown")
    with closing(ReasoningReward(workers=1, sandbox=Sandbox("rlimits"))) as reward:
        right = [
            answered(one, f"<answer>{one['ground_truth']}</answer>")
            for one in (row, rows["spiral_matrix"][0])
        ]
        failure, score = reward.score_batch(right)
        assert isinstance(failure, RewardFailure) and score == 1.0
        with pytest.raises(SandboxError):
            reward.check_row(None, right[0].columns)
        reward.check_row(None, right[1].columns)


def test_nan_is_near_no_answer(reward):
    (row,) = reasoning_prompts("train", 1, task="complex_arithmetic")
    said = [row["ground_truth"], "nan", "((NaN))", "1 + nani", "nani", "inf"]
    scores = reward.score_batch([answered(row, f"<answer>{text}</answer>") for text in said])
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_prompt_without_a_library_problem_is_not_scored(rows, reward):
    sample = answered(rows["spiral_matrix"][0], "<answer>1</answer>")
    sample.columns = {"reasoning": {**sample.columns["reasoning"], "question": "What is 1 + 1?"}}
    assert isinstance(reward.score_batch([sample])[0], RewardFailure)


@pytest.mark.parametrize("columns", [{}, {"reasoning": "First, "}, {"reasoning": {"task": "countdown"}}])
def test_rows_without_a_problem_can_be_skipped(reward, columns):
    with pytest.raises(DataError):
        reward.check_row("4", columns)


def test_reasoning_environment_keeps_the_contract(rows, reward, tokenizer):
    prompts = rows["spiral_matrix"]
    env = ReasoningGymEnv(prompts, tokenizer, [reward], batch_size=1, group_size=1)
    check_env(env, [f"<answer>{prompts[0]['ground_truth']}</answer>"])


def test_reasoning_config_trains_and_evaluates_held_out_problems(model_dir, tmp_path):
    given = [str(CONFIG), *SMALL, f"model.path={model_dir}", f"output.dir={tmp_path / 'run'}"]
    assert main(["train", *given]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("reward/reasoning_gym" in row for row in steps) == 2
    assert {"chain_sum-train"} == tasks_of(tmp_path / "run", "step")
    assert {"chain_sum-test"} == tasks_of(tmp_path / "run", "eval")


def tasks_of(run, kind):
    """The prompts of stored episodes, without their numbers."""
    lines = [line for path in (run / "episodes").glob(f"{kind}-*") for line in path.read_text().splitlines()]
    return {json.loads(line)["prompt_id"].rsplit("-", 1)[0] for line in lines}


def test_the_environment_takes_no_other_data(model_dir, tmp_path):
    place = [*SMALL, f"model.path={model_dir}", f"output.dir={tmp_path / 'run'}"]
    for other in ("data.path=arithmetic", "algorithm={name: sft}"):
        with pytest.raises((ConfigError, DataError)):
            build_trainer(load_config(CONFIG, [*place, other]))
