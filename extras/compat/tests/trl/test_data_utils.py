"""The functions of trl.data_utils, and why rows that went through a chat template are refused."""

import pytest
from datasets import Dataset, DatasetDict

from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.render import Renderer
from rl4llm_compat.trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer, data_utils

ASKED, RIGHT, WRONG = (
    {"role": role, "content": text}
    for role, text in (("user", "How many"), ("assistant", "Three"), ("assistant", "Two"))
)
FORMS = {
    "messages": {"messages": [ASKED, RIGHT]},
    "prompt": {"prompt": [ASKED]},
    "open": {"prompt": [ASKED, RIGHT]},
    "completion": {"prompt": [ASKED], "completion": [RIGHT], "label": True},
    "pair": {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
    "whole": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
}


@pytest.mark.parametrize("form", FORMS)
def test_chat_template_is_cut_where_the_answer_begins(form, tokenizer):
    row = FORMS[form]
    made = data_utils.maybe_apply_chat_template(row, tokenizer)

    def text(*messages, **how):
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **how)

    asked = text(ASKED, add_generation_prompt=True)
    right, wrong = (text(ASKED, answer).removeprefix(asked) for answer in (RIGHT, WRONG))
    assert (
        made
        == {
            "messages": {"text": asked + right},
            "prompt": {"prompt": asked},
            "open": {"prompt": asked + "Three"},
            "completion": {"prompt": asked, "completion": right, "label": True},
            "pair": {"prompt": asked, "chosen": right, "rejected": wrong},
            "whole": {"chosen": asked + right, "rejected": asked + wrong},
        }[form]
    )
    assert data_utils.is_conversational(row)
    assert not data_utils.is_conversational(made)
    assert data_utils.maybe_apply_chat_template(made, tokenizer) is made


def test_template_gets_tools_and_variables_of_the_row(tokenizer):
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template="{{ a }}{{ b }}{{ tools }}"
    )
    row = {"prompt": [ASKED], "chat_template_kwargs": {"b": 2}}
    made = data_utils.apply_chat_template(row, tokenizer, [{"name": "c"}], a=1, b=1)
    assert made == {"prompt": "12[{'name': 'c'}]"}
    with pytest.raises(DataError, match="The row has none of messages"):
        data_utils.apply_chat_template({"question": "a"}, tokenizer)


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), [
    ("It is here.", "It is there.", "It is"),
    ("It is", "It is here.", "It i"),
    ("same", "same", "sam"),
    ([ASKED, RIGHT], [ASKED, WRONG], [ASKED]),
    ([ASKED, RIGHT], [ASKED, RIGHT, ASKED, WRONG], [ASKED]),
])  # fmt: skip
def test_prompt_is_what_both_answers_begin_with(chosen, rejected, prompt):
    made = data_utils.maybe_extract_prompt({"chosen": chosen, "rejected": rejected})
    assert made["prompt"] == prompt
    assert made["prompt"] + made["chosen"] == chosen
    assert made["prompt"] + made["rejected"] == rejected
    assert data_utils.maybe_extract_prompt(made) is made


def test_pairs_become_labelled_answers():
    pairs = Dataset.from_dict(
        {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"], "id": [1, 2]}
    )
    for made in (
        data_utils.maybe_unpair_preference_dataset(pairs),
        data_utils.maybe_unpair_preference_dataset(DatasetDict(train=pairs))["train"],
    ):
        found = {(row["prompt"], row["completion"], row["label"], row["id"]) for row in made}
        assert found == {("a", "c", True, 1), ("b", "d", True, 2), ("a", "e", False, 1), ("b", "f", False, 2)}
        assert data_utils.maybe_unpair_preference_dataset(made) is made


def test_messages_of_from_and_value_get_roles_and_content():
    row = {"conversations": [{"from": "user", "value": "How many"}], "id": 1}
    assert data_utils.is_conversational_from_value(row)
    assert data_utils.maybe_convert_to_chatml(row) == {"messages": [ASKED], "id": 1}
    assert data_utils.maybe_convert_to_chatml({"prompt": row["conversations"]}) == {"prompt": [ASKED]}
    assert data_utils.maybe_convert_to_chatml(FORMS["pair"]) == FORMS["pair"]
    assert not data_utils.is_conversational_from_value(FORMS["pair"])


@pytest.mark.parametrize("form", ["completion", "messages", "whole"])
def test_strings_that_a_chat_template_wrote_are_refused(form, model_dir, tokenizer, tmp_path):
    rows = [data_utils.apply_chat_template(FORMS[form], tokenizer)] * 2
    kind, config = (RewardTrainer, RewardConfig) if form == "whole" else (SFTTrainer, SFTConfig)
    args = config(str(tmp_path), max_steps=1, bf16=False, use_cpu=True, per_device_train_batch_size=2)
    with pytest.raises(ConfigError, match=r"has the special token '<.im_end.>' in its strings"):
        kind(model=str(model_dir), args=args, train_dataset=rows)
    allowed = kind(model=str(model_dir), args=args, train_dataset=rows, data={"special_tokens": "allow"})
    trained = allowed.trainer.read(allowed.trainer.dataset[0], "p").trajectories[0].token_ids
    assert tokenizer.eos_token_id in trained[:-1]
    allowed.trainer.close()
    kind(model=str(model_dir), args=args, train_dataset=[FORMS[form]] * 2).trainer.close()


def test_rows_with_tools_are_read_as_ours(model_dir, tokenizer, tmp_path):
    schema = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": schema}]
    row = FORMS["messages"] | {"tools": tools, "chat_template_kwargs": {"x": 1}}
    args = SFTConfig(
        str(tmp_path), assistant_only_loss=True, max_steps=1, per_device_train_batch_size=2, bf16=False
    )
    sft = SFTTrainer(model=str(model_dir), train_dataset=[row] * 2, args=args)
    spans = sft.trainer.read(sft.trainer.dataset[0], "p").trajectories[0].spans
    assert list(spans[0].token_ids) == Renderer(tokenizer, tools, ()).first([ChatMessage.from_dict(ASKED)])
    sft.trainer.close()
