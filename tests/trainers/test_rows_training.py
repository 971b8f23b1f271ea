"""Whole runs on rows with weights, tools, texts and bad rows: what is trained is what the rows say."""

import copy
import json

import pytest

from rl4llm import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from rl4llm.cli import main
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.lengths import PATIENCE
from rl4llm.data.render import Renderer
from tests.trainers.test_preferences import column, make, metrics

ASKED = {"role": "user", "content": "How many coins?"}
SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def said(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def trained(directory):
    return column(directory, "update/tokens")


def test_only_messages_with_weight_train(model_dir, tokenizer, tmp_path):
    rows = [{"messages": [ASKED, said("WRONG WRONG", weight=0), ASKED, said("85", weight=1)]}] * 4
    make(SFTTrainer, model_dir, rows, tmp_path / "a", rollout={"prompts": 2}).train()
    size = len(tokenizer.encode("85", add_special_tokens=False)) + 1
    assert trained(tmp_path / "a") == [2 * size]


MANY = PATIENCE + 4
"""Rows that are longer than the bad one, so that it is not among those whose length is measured."""

LATE = {
    "a weight": (RewardTrainer, {"chosen": [said("85", weight=1)]}),
    "a thought": (SFTTrainer, {"completion": [said("85", thinking="hm")]}),
    "a thought of a pair": (DPOTrainer, {"rejected": [said("5", thinking="hm")]}),
    "a label with a thought": (KTOTrainer, {"completion": [said("85", thinking="hm")]}),
    "tools": (SFTTrainer, {"tools": [SCHEMA], "chat_template_kwargs": {"messages": 1}}),
}


@pytest.mark.parametrize("fault", LATE)
def test_a_row_that_cannot_be_read_is_refused_before_a_run(fault, model_dir, tmp_path):
    trainer, bad = LATE[fault]
    row = {"prompt": "How many?", "completion": "85", "chosen": "85", "rejected": "84"}
    label = "label" if trainer is KTOTrainer else "of"
    rows = [row | {"prompt": f"How many coins? {number}", label: number % 2 == 0} for number in range(MANY)]
    rows[MANY - 2] = row | bad | {label: True}
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    with pytest.raises(DataError):
        make(trainer, model_dir, None, tmp_path / "a", data={"path": str(file)})
    assert not (tmp_path / "a").exists()
    data = {"path": str(file), "bad_rows": "skip"}
    made = make(trainer, model_dir, None, tmp_path / "b", data=data, rollout={"prompts": 2})
    assert len(made.trainer.dataset) == MANY - 1
    made.train()


def test_texts_train_whole_without_a_chat_template(model, tokenizer, tmp_path, capsys):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    model.save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "base")
    texts = ["How many coins are 37 and 48? " * 6, "Answer: 85"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": texts[1]}))
    sizes = [len(plain.encode(text, add_special_tokens=False)) for text in texts]
    chunks = sum(-(-size // 15) for size in sizes)  # of 16 tokens, the first of which is only read
    keys = [
        f"model.path={tmp_path}/base", f"data.path={tmp_path}", "training.max_tokens_per_batch=16",
        f"rollout.prompts={chunks}", "max_steps=1", "algorithm.name=sft", "tracking.tensorboard=false", "eval.every=1",
    ]  # fmt: skip
    (tmp_path / "run.yaml").write_text("{}")
    for command in ("plan", "train"):
        output = f"output.dir={tmp_path}/run"
        assert main([command, str(tmp_path / "run.yaml"), *keys, output]) == 0, capsys.readouterr()
    assert trained(tmp_path / "run") == [sum(sizes)]  # and the end of each text for its first token
    assert column(tmp_path / "run", "eval/loss")


def test_skipped_rows_are_counted_in_the_log(model_dir, tmp_path, capsys):
    rows = [{"prompt": "a", "chosen": "x", "rejected": side} for side in ("y", "x", "z", "x")]
    with pytest.raises(DataError):
        make(DPOTrainer, model_dir, rows, tmp_path / "a")
    options = {"data": {"bad_rows": "skip"}, "rollout": {"prompts": 2}}
    trainer = make(DPOTrainer, model_dir, rows, tmp_path / "b", **options)
    assert len(trainer.trainer.dataset) == 2
    trainer.train()
    assert (
        "Warning: data: 2 of 4 rows were skipped (data.bad_rows=skip). The first: dataset[1]"
        in capsys.readouterr().out
    )


def even(completions, tools=None, **columns):
    return [float(number % 2) + len(tools[0]) for number, _ in enumerate(completions)]


def test_tools_of_rows_reach_prompts_of_every_trainer(model_dir, tokenizer, tmp_path):
    own = Renderer(tokenizer, [SCHEMA], ())
    asked = own.first([ChatMessage.from_dict(ASKED)])
    row = {"messages": [ASKED], "tools": json.dumps([SCHEMA["function"]])}
    answered = {"messages": [ASKED, said("85")], "tools": [SCHEMA]}
    sft = make(SFTTrainer, model_dir, [answered] * 2, tmp_path / "a", rollout={"prompts": 1})
    assert list(sft.trainer.read(sft.trainer.dataset[0], "p").trajectories[0].spans[0].token_ids) == asked
    sft.trainer.close()
    small = {
        "rollout": {"prompts": 1, "group_size": 2, "max_tokens": 4},
        "tracking": {"tensorboard": False, "episodes_every": 1},
    }
    rows = [{**row, "ground_truth": ""}] * 2
    held_out = {"eval_dataset": rows, "eval": {"every": 1}}
    options = {"max_steps": 1, "output": {"dir": str(tmp_path / "b")}, "checkpoint": {"every": 0}}
    trainer = GRPOTrainer(str(model_dir), rows, [even], **options, **small, **held_out)
    assert trainer.trainer.rollout.env.dataset[0]["tools"] == [SCHEMA]
    trainer.train()
    (measured,) = [
        line
        for line in metrics(tmp_path / "b")
        if line.get("step") == 1 and "eval/prompt_length/mean" in line
    ]
    assert measured["eval/prompt_length/mean"] == len(asked)
    (step,) = [line for line in metrics(tmp_path / "b") if "prompt_length/mean" in line]
    assert step["prompt_length/mean"] == len(asked)
    assert step["reward/mean"] == 1.5


def test_a_clash_of_tools_is_refused_before_a_run(model_dir, tmp_path):
    rows = [{"messages": [ASKED], "ground_truth": "85", "tools": [SCHEMA]}] * 2
    env = {"name": "tool", "tools": ["calculator"]}
    with pytest.raises(DataError):
        make(GRPOTrainer, model_dir, rows, tmp_path, rewards=["math"], env=env, rollout={"prompts": 1})
    with pytest.raises(ConfigError):
        make(GRPOTrainer, model_dir, rows, tmp_path, data={"bad_rows": "drop"})
