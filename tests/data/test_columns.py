"""Rows as other projects store them: messages in `prompt`, nested answers, and no answer at all."""

import csv
import json
from decimal import Decimal

import datasets
import pytest
from sweeps import sampled

from rl4llm.cli import main
from rl4llm.compose import build_trainer
from rl4llm.compose.environments import readable_rows
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import DataError
from rl4llm.data.load import load_rows
from rl4llm.rewards import as_reward_function

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
VERL = {"data_source": "sums", "prompt": ASKED, "reward_model": {"style": "rule", "ground_truth": "2"}}
NESTED = "reward_model.ground_truth"


def parquet(path):
    datasets.Dataset.from_list([VERL]).to_parquet(path)


def jsonl(path):
    path.write_text(json.dumps(VERL) + "\n")


def table(write):
    def save(path):
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["prompt", NESTED])
            writer.writerow([write(ASKED), "2"])

    return save


FORMS = {
    "rows.parquet": parquet,
    "rows.jsonl": jsonl,
    "json.csv": table(json.dumps),
    "python.csv": table(repr),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("column", [None, "prompt"])
def test_messages_in_the_prompt_are_read_from_every_file(name, column, tmp_path):
    FORMS[name](tmp_path / name)
    rows = load_rows(tmp_path / name, prompt_column=column, answer_column=NESTED)
    assert rows[0]["messages"] == ASKED
    assert rows[0]["ground_truth"] == "2"


def test_a_csv_cell_that_is_no_conversation_stays_text(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,ground_truth\n"[{1: 2}] in Python?",dict\n"[{""a"": 1}]",json\n')
    rows = load_rows(tmp_path / "a.csv")
    assert [row["messages"][0]["content"] for row in rows] == ["[{1: 2}] in Python?", '[{"a": 1}]']


SHARED = [{"from": "human", "value": "What is 1+1?"}]
ANSWER = [{"role": "assistant", "content": "2"}]
WRONG = [{"role": "assistant", "content": "3"}]
COLUMNS = {
    "prompt": ("episodes", {"prompt": ASKED}),
    "conversations": ("episodes", {"conversations": SHARED}),
    "prompt and completion": ("demonstrations", {"prompt": ASKED, "completion": ANSWER}),
    "an imitated conversation": (
        "demonstrations",
        {"conversations": [*SHARED, {"from": "gpt", "value": "2"}]},
    ),
    "a pair": ("pairs", {"prompt": ASKED, "chosen": ANSWER, "rejected": WRONG}),
    "a pair of conversations": ("pairs", {"chosen": [*ASKED, *ANSWER], "rejected": [*ASKED, *WRONG]}),
    "a label": ("labels", {"prompt": ASKED, "completion": ANSWER, "label": True}),
}


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("form", COLUMNS)
def test_messages_as_text_are_messages_in_every_column(form, write):
    learns_from, row = COLUMNS[form]
    text = {column: write(value) if isinstance(value, list) else value for column, value in row.items()}
    found, wanted = (dict(load_rows([rows], learns_from=learns_from)[0]) for rows in (text, row))
    for column in ("messages", *(name for name in ("chosen", "rejected") if name in row)):
        assert found[column] == wanted[column]


TEXTS = [
    '[{"name": "Ann", "role": "engineer"}]',
    '[{"from": "Paris", "to": "Rome"}]',
    '[{"role": r, "content": text} for r in roles if {}]',
    "[{'role': 'user', 'content': f'{x}'}]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_data_and_code_that_name_roles_stay_text(text):
    (row,) = load_rows([{"prompt": text, "completion": text}], learns_from="demonstrations")
    assert [message["content"] for message in row["messages"]] == [text, text]


def test_a_template_wraps_messages_as_text():
    stored = json.dumps(ASKED)
    (row,) = load_rows([{"prompt": stored}], prompt_template="Summarize: {prompt}")
    assert row["messages"][0]["content"] == f"Summarize: {stored}"


class Lenient(BaseRewardFunction):
    needs_ground_truth = False

    def __init__(self, name="lenient"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns):
        return float(ground_truth is None)


def by_columns(completions, **columns):
    return [float("ground_truth" in columns)] * len(completions)


def by_truth(completions, ground_truth):
    return [1.0] * len(completions)


LENGTH = {"name": "length", "max_length": 4, "margin": 4}
WITHOUT = [LENGTH, Lenient(), by_columns, {"name": "clip", "reward": LENGTH, "high": 1.0}]
WITH = [
    "math",
    by_truth,
    {"name": "clip", "reward": "math"},
    {"name": "gate", "reward": LENGTH, "by": "math"},
]


OPEN = [{"prompt": "What is 1+1?", "ground_truth": "2"}, {"prompt": "Say hi."}]


def built(model_dir, tmp_path, rewards, rows=OPEN, **keys):
    file = tmp_path / "open.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(overrides={
        "model.path": str(model_dir), "data.path": str(file), "eval.every": 0, "output.dir": str(tmp_path / "run"),
        "rollout.prompts": 1, "rollout.group_size": 2, "rollout.max_tokens": 4, **keys,
    })  # fmt: skip
    from rl4llm.compose.setup import Given

    return build_trainer(config, Given(reward_functions=rewards))


def name(reward):
    """Return the same name of a reward in each process of the tests."""
    return getattr(
        reward, "__name__", str(reward) if isinstance(reward, dict | str) else type(reward).__name__
    )


@pytest.mark.parametrize("reward", WITHOUT, ids=name)
def test_a_reward_that_compares_nothing_needs_no_ground_truth(reward, model_dir, tmp_path):
    with built(model_dir, tmp_path, [reward]) as trainer:
        assert [row["ground_truth"] for row in trainer.rollout.env.dataset] == ["2", None]


@pytest.mark.parametrize("reward", WITH, ids=name)
def test_a_reward_that_compares_names_the_row_without_answer(reward, model_dir, tmp_path):
    with pytest.raises(DataError):
        built(model_dir, tmp_path, [reward])


@pytest.mark.parametrize("reward", sampled(WITH, WITH[:2]), ids=name)
def test_a_missing_number_is_no_ground_truth(reward, model_dir, tmp_path):
    rows = [{"prompt": "1+1?", "ground_truth": 10**300}, {"prompt": "2+2?", "ground_truth": float("nan")}]
    with pytest.raises(DataError):
        built(model_dir, tmp_path, [reward], rows)
    with built(model_dir, tmp_path, [reward], rows, **{"data.bad_rows": "skip"}) as trainer:
        assert [row["ground_truth"] for row in trainer.rollout.env.dataset] == [10**300]


@pytest.mark.parametrize("nothing", [float("nan"), Decimal("NaN")], ids=repr)
def test_number_that_is_missing_is_left_out_in_memory(nothing):
    rows = load_rows(
        [{"prompt": "1+1?", "ground_truth": Decimal(2)}, {"prompt": "2+2?", "ground_truth": nothing}]
    )
    rewards = [as_reward_function(by_truth)]
    with pytest.raises(DataError):
        readable_rows(rows, rewards, skip=False)
    assert [row["ground_truth"] for row in readable_rows(rows, rewards, skip=True)] == [2]


def test_a_function_of_columns_gets_no_empty_ground_truth():
    reward = as_reward_function(by_columns)
    assert reward([], None) == 0.0
    assert reward([], "2") == 1.0


def test_rows_of_verl_are_trained_evaluated_and_checked(model_dir, tmp_path, capsys):
    parquet(tmp_path / "train.parquet")
    parquet(tmp_path / "test.parquet")
    keys = [
        str(tmp_path / "run.yaml"), f"model.path={model_dir}", f"data.path={tmp_path}", f"output.dir={tmp_path}/run",
        f"data.answer_column={NESTED}", "rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=4",
        "max_steps=1", "tracking.tensorboard=false",
    ]  # fmt: skip
    short = "rewards=[{name: length, unit: chars, max_length: 1, margin: 9}]"
    (tmp_path / "run.yaml").write_text("{}")
    for command in ("plan", "check", "train", "eval"):
        reward = "rewards=[math]" if command == "train" else short
        assert main([command, *keys, reward]) == 0, capsys.readouterr()
