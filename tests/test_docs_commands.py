"""The commands of the pages run as shown, from one directory, in the order of the page.

Their configurations are those of `configs/` with a small model, few rows of a dataset, and one step of short samples.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from forked_python import python
from test_docs import ROOT, blocks, commands

SIZES = {
    "eval": {"limit": 2},
    "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 6},
    "training": {"max_tokens_per_batch": 4096, "lr": 1e-4},
    "max_steps": 1,
}
CHAT = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}]
ROWS = {
    "chats/train.jsonl": {"messages": CHAT},
    "pairs/train.jsonl": {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "no"}]},
    "gsm8k/train.jsonl": {"question": "How many legs have two cats?", "answer": "Two times four.\n#### 8"},
    "math500.jsonl": {"problem": "What is $1+1$?", "answer": "2", "solution": "\\boxed{2}"},
    "HumanEval.jsonl": {
        "prompt": "def twice(x):\n    ...\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "twice",
    },
}
DATA = {
    "sft": "chats", "dpo": "pairs", "reward_model": "pairs", "gsm8k_grpo": "gsm8k", "humaneval_grpo": "HumanEval.jsonl",
}  # fmt: skip
LONG = {"name": "length", "unit": "chars", "min_length": 9, "max_length": 99, "margin": 9}
RIGHT = {"name": "threshold", "reward": LONG, "at_least": 0.5}
"""Stands in for `math`, whose verifiers take longer to start than a small run; tests/extensions/quickstart starts them."""
STAND_INS = {"MODEL": "model", "CHATS": "chats", "PAIRS": "pairs", "HumanEval.jsonl.gz": "HumanEval.jsonl"}
TRAINED = ("train", "eval", "plan", "check")
ELSEWHERE = {  # what a line says that needs more than is here, and where such lines run
    "http://": "tests/extensions/servers/test_sglang.py, tests/envs/test_debate.py",
    "inference.name=": "tests/extensions/servers/test_sglang.py, tests/extensions/servers/test_vllm.py",
    "env.remote=": "tests/extensions/remote/test_remote.py",
    "configs/quickstart.yaml": "tests/extensions/quickstart/test_quickstart.py",
    "tracking.": "tests/tracking",
    "DIRECTORY_WITH": "a description of the directory, which is gsm8k here",
}
if shutil.which("bwrap") is None:
    ELSEWHERE |= dict.fromkeys(("humaneval", "code_repair", "python,"), "where bubblewrap is")


@pytest.fixture
def desk(tmp_path, model_dir, monkeypatch):
    """Return the directory that the commands are run in, with all that they name."""
    shutil.copytree(model_dir, tmp_path / "model")
    # tools take a thousand of the small tokens
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 4096}))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "tests" / "extensions" / "toolbox" / "things_server.py", tmp_path / "server.py")
    for name, row in ROWS.items():
        for file in {name, name.replace("train.", "test.")}:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("".join(json.dumps(row | {"id": i}) + "\n" for i in range(4)))
    # as where a .venv is active
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for path in (tmp_path / "configs").glob("*.yaml"):
        path.write_text(yaml.safe_dump(small(path.stem, yaml.safe_load(path.read_text()))))
    return tmp_path


def small(name, config):
    config = config | {key: config.get(key, {}) | own for key, own in SIZES.items() if isinstance(own, dict)}
    config |= {"max_steps": 1, "model": {"path": "model"}}
    if name in ("agent_grpo", "arithmetic_tool_dapo"):
        config["rollout"] |= {"prompts": 1}  # each of their episodes starts a program
        config["eval"] |= {"every": 0}
    if config.get("algorithm", {}).get("name") == "dapo":
        config["algorithm"] |= {"resampling_rounds": 1}  # all groups have equal rewards
    if "rewards" in config:
        config["rewards"] = [quick(reward) for reward in config["rewards"]]
    if name in DATA:
        config["data"] = config["data"] | {"path": DATA[name]}
    return config


def quick(reward):
    """Return a reward with RIGHT in the place of `math`."""
    if "math" in (reward, isinstance(reward, dict) and reward["name"]):
        return RIGHT
    return reward | {"by": quick(reward["by"])} if "by" in reward else reward


@pytest.mark.parametrize(
    "page", ["docs/datasets", "docs/environments", "docs/programs", "docs/runs", "docs/tools", "docs/view"]
)
def test_the_commands_of_a_page_run(desk, page):
    for block in blocks(ROOT / f"{page}.md", "python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (desk / named[1]).write_text(block)
    lines = [
        words for words in commands(ROOT / f"{page}.md") if words[:1] == ["rl4llm"] and words[1] in TRAINED
    ]
    lines = [words for words in lines if not any(mark in " ".join(words) for mark in ELSEWHERE)]
    assert lines or not shutil.which("bwrap")
    for words in lines:
        if words[1] == "train":  # else it would go on with what the line before began
            shutil.rmtree(desk / "runs" / Path(words[2]).stem, ignore_errors=True)
        done = python("-m", *(stand_in(word) for word in words), cwd=desk)
        untaught = "--task" in words  # a model without a gradient exits with 1
        assert done.returncode in (0, untaught), [words, done.stdout, done.stderr]


def stand_in(word):
    for name, path in STAND_INS.items():
        word = re.sub(rf"\b{re.escape(name)}(?=$|[,}}])", path, word)
    return word
