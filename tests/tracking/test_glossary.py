"""The glossary knows every metric that runs log, and its page is current."""

import ast
import json
from pathlib import Path

import pytest
from metrics_page import BEGIN, END, PAGE, tables

import rl4llm
from rl4llm.core.base_backend import WEIGHTED
from rl4llm.tracking.glossary import find, sections

ALGORITHMS = Path(rl4llm.__file__).parent / "algorithms"
QUIET = {"checkpoint": {"every": 0}, "tracking": {"tensorboard": False}, "max_steps": 1, "eval": {"every": 1}}
CHAT = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}]
PROMPTS = [{"messages": CHAT[:1], "ground_truth": "yes"}] * 4
SFT = [{"messages": CHAT}] * 4
PAIRS = [{"prompt": CHAT[:1], "chosen": "yes", "rejected": "no"}] * 4
LABELS = [{"prompt": CHAT[:1], "completion": word, "label": word == "yes"} for word in ("yes", "no")] * 2
EPISODES = {
    "reward_functions": [lambda completions, **columns: [float(len(text)) for text in completions]],
    "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 4},
}


@pytest.mark.parametrize(
    ("trainer", "rows", "options"),
    [
        ("GRPOTrainer", PROMPTS, EPISODES | {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.1}}),
        ("DAPOTrainer", PROMPTS, EPISODES | {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}),
        ("PPOTrainer", PROMPTS, EPISODES),
        ("SFTTrainer", SFT, {}),
        ("DPOTrainer", PAIRS, {}),
        ("KTOTrainer", LABELS, {}),
        ("RewardTrainer", PAIRS, {}),
    ],
)
def test_the_glossary_knows_what_a_run_logs(trainer, rows, options, model_dir, tmp_path):
    run = tmp_path / "run"
    build = getattr(rl4llm, trainer)
    build(
        model=model_dir, dataset=rows, eval_dataset=rows, output={"dir": str(run)}, **QUIET, **options
    ).train()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    assert {"loss", "time/step", "tokens/s"} <= names and any(name.startswith("eval/") for name in names)
    assert sorted(name for name in names if find(name) is None) == []


def test_the_glossary_knows_what_algorithms_measure():
    names = set()
    for file in ALGORITHMS.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if getattr(function, "name", "") in ("token_losses", "surrogate", "value_losses", "pair_losses"):
                dicts = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
                names |= {key.value.removesuffix(WEIGHTED) for item in dicts for key in item.keys if key}
    assert {"clip_fraction", "value_loss", "dpo/margin"} <= names
    assert sorted(name for name in names if find(name) is None) == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/math", "reward/NAME"),
        ("reward/mean", "reward/mean"),
        ("eval/part/sums/role/pro/turns", "turns"),
        ("tool/clock/raised/NameError at tools.py:9", "tool/NAME/raised/ERROR"),
        ("part/sums/failures/tool/clock", "failures/CLASS"),
        ("critic/grad_norm", "grad_norm"),
    ],
)
def test_a_logged_name_has_an_entry(name, entry):
    assert find(name).name == entry


@pytest.mark.parametrize("name", ["rewards", "eval/", "part/sums", "losses", "time"])
def test_an_unknown_name_has_no_entry(name):
    assert find(name) is None


def test_entries_are_noun_phrases_with_a_unit():
    metrics = [metric for section in sections().values() for metric in section]
    assert len({metric.name for metric in metrics}) == len(metrics) > 70
    assert all(metric.meaning.endswith(".") and metric.unit for metric in metrics)
    assert not [
        metric.name for metric in metrics if metric.meaning.split()[0] in ("Is", "Averages", "Counts")
    ]


def test_a_sentence_begins_with_the_name():
    sentence = find("groups/zero_spread").sentence()
    assert sentence.startswith("groups/zero_spread: Share of zero-variance groups")
    assert sentence.endswith(". Healthy: below 1.")
    assert find("lr").sentence() == "lr: Learning rate of the optimizer step."


def test_the_page_shows_the_table():
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == tables()
