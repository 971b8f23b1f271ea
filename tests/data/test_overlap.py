"""Held-out prompts that are also in the training data are counted, by their content and for every kind of dataset."""

import json

import pytest

from rl4llm.api import DPOTrainer, GRPOTrainer, SFTTrainer
from rl4llm.cli import main
from rl4llm.core.types import ChatMessage
from rl4llm.data.load import Rows
from rl4llm.data.overlap import overlap_warnings


def rows(*conversations):
    """Return rows with different ids; a conversation is a list of texts, the user's first."""
    roles = ("user", "assistant")
    return Rows(
        tuple(
            {
                "prompt_id": f"{id(texts)}",
                "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)],
            }
            for texts in conversations
        ),
        "test",
    )


def test_prompts_are_compared_by_content_and_not_by_id():
    training = rows(["1+1?"], ["2+2?"], ["3+3?"], ["3+3?"])
    held_out = rows(["2+2? "], ["3+3?"], ["3+3?"], ["4+4?"])
    (warning,) = overlap_warnings(training, held_out, "eval")
    assert warning.startswith("eval: 3 of 4 held-out prompts are also in the training data")
    assert overlap_warnings(training, rows(["5+5?"]), "eval") == []
    assert overlap_warnings(training, rows(), "eval") == []
    other_role = Rows(({"messages": [{"role": "system", "content": "1+1?"}]},), "test")
    assert overlap_warnings(training, other_role, "eval") == []


def test_answers_of_demonstrations_are_not_compared():
    training = rows(["1+1?", "2"], ["2+2?", "4", "and 3+3?", "6"])
    held_out = rows(["1+1?", "It is 2."], ["2+2?", "4", "and 3+3?", "Six."], ["2+2?", "5", "and 3+3?", "6"])
    (warning,) = overlap_warnings(training, held_out, "eval", answered=True)
    assert "2 of 3" in warning
    assert overlap_warnings(training, held_out, "eval") == []


def test_prompts_that_an_environment_made_are_not_compared():
    made = [{"messages": [ChatMessage("user", "Guess.")], "seed": 1}]
    assert overlap_warnings(made, made, "eval") == []


@pytest.mark.parametrize("trainer", [GRPOTrainer, SFTTrainer, DPOTrainer])
def test_every_kind_of_run_reports_the_overlap(model_dir, tmp_path, capsys, trainer):
    def row(number, answer):
        ask = [{"role": "user", "content": f"{number}+1?"}]
        said = {"role": "assistant", "content": answer}
        if trainer is SFTTrainer:
            return {"messages": [*ask, said]}
        if trainer is DPOTrainer:
            return {"prompt": ask, "chosen": [said], "rejected": [{"role": "assistant", "content": "no"}]}
        return {"messages": ask, "ground_truth": answer}

    keys = {"output": {"dir": str(tmp_path / "run")}, "rollout": {"prompts": 2, "max_tokens": 4}}
    training, held_out = [row(n, "a") for n in range(4)], [row(n, "b") for n in (2, 3, 4)]
    made = trainer(str(model_dir), training, eval_dataset=held_out, **keys)
    made.trainer.close()
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("eval: 2 of 3 held-out prompts are also in the training data") == 1


def test_an_evaluation_compares_with_the_data_that_it_is_given(model_dir, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1?", "ground_truth": "2"}) + "\n" for n in range(3)))
    keys = [f"model.path={model_dir}", f"eval.path={file}", "rollout.max_tokens=4"]
    keys.append("rewards=[{name: length, unit: chars, max_length: 1, margin: 9}]")
    config = tmp_path / "run.yaml"
    config.write_text(f"output: {{dir: {tmp_path / 'run'}}}\n")
    assert main(["eval", str(config), *keys]) == 0
    shown = capsys.readouterr()
    assert "also in the training data" not in shown.out + shown.err
    training = tmp_path / "training.jsonl"
    training.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert main(["eval", str(config), *keys, f"data.path={training}"]) == 0
    assert "eval: 2 of 3 held-out prompts are also in the training data" in capsys.readouterr().err
    training.write_text("{}\n")
    assert main(["eval", str(config), *keys, f"data.path={training}"]) == 0
    assert "data.path is not compared with eval.path: " in capsys.readouterr().err
