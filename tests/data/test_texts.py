"""Texts without roles: every token is learned exactly once, in chunks that fit, without a chat template."""

import copy

import pytest

from rl4llm.core.errors import ConfigError, DataError, SpecialTokenError
from rl4llm.data.load import load_rows
from rl4llm.data.texts import hold_text, text_chunks, text_group

TEXTS = ["How many coins are 37 and 48? " * 5, "x", "Zwölf Boxkämpfer 🥊"]


@pytest.fixture
def plain(tokenizer):
    """Return a tokenizer without a chat template, as base models have."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = None
    return changed


def learned(plain, texts, size, mode="escape"):
    rows = load_rows([{"text": text} for text in texts], learns_from="demonstrations")
    chunks = text_chunks(rows, plain, mode, size)
    groups = [text_group(row, row["prompt_id"]) for row in chunks]
    return rows, chunks, [group.trajectories[0] for group in groups]


@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
@pytest.mark.parametrize("size", [2, 3, 7, 10_000])
def test_each_token_of_a_text_is_learned_once(size, bos, plain):
    plain.bos_token = bos
    _, chunks, trajectories = learned(plain, TEXTS, size)
    assert all(2 <= trajectory.num_tokens <= size for trajectory in trajectories)
    found = {}
    for row, trajectory in zip(chunks, trajectories, strict=True):
        context, policy = trajectory.spans
        assert len(context.token_ids) == 1
        said = found.setdefault(row["prompt_id"].partition("/")[0], list(context.token_ids))
        assert said[-1:] == list(context.token_ids)  # a chunk is read behind the token before it
        said += policy.token_ids
    starts = [plain.bos_token_id] if bos else []
    wanted = [[*starts, *plain.encode(text, add_special_tokens=False), plain.eos_token_id] for text in TEXTS]
    assert list(found.values()) == wanted


def test_special_tokens_in_a_text_are_text(plain):
    text = "a<|im_end|>b"
    (_, _, (trajectory,)) = learned(plain, [text], 100)
    assert trajectory.token_ids.count(plain.eos_token_id) == 1
    assert plain.decode(trajectory.token_ids) == f"{text}{plain.eos_token}"
    assert trajectory.extras == {"metrics": {"special_tokens": 1}}
    (_, _, (kept,)) = learned(plain, [text], 100, "allow")
    assert kept.token_ids.count(plain.convert_tokens_to_ids("<|im_end|>")) == 2
    assert not kept.extras
    with pytest.raises(SpecialTokenError):
        learned(plain, [text], 100, "refuse")


def test_texts_and_conversations_do_not_mix(plain):
    said = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "text": "a b",
    }
    rows = load_rows([{"text": "a"}, said], learns_from="demonstrations")
    assert hold_text(rows)
    assert not hold_text(rows[1:])  # messages come first
    with pytest.raises(DataError):
        text_chunks(rows, plain, "escape", 9)


@pytest.mark.parametrize("option", ["system_prompt", "prompt_template"])
def test_options_of_conversations_are_refused_for_texts(option):
    with pytest.raises(ConfigError):
        load_rows([{"text": "a"}], learns_from="demonstrations", **{option: "{prompt}"})
    with pytest.raises(ConfigError):
        load_rows([{"text": "a"}], learns_from="worlds")
