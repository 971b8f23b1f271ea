"""Every key of a stored message is read, is metadata, or is refused by its name."""

import json
from pathlib import Path

import pytest

from rl4llm.core.errors import DataError
from rl4llm.core.message import CUT, shortened
from rl4llm.core.types import ChatMessage

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def said(**keys):
    return {"role": "assistant", "content": "4", **keys}


def called(call=CALL, **keys):
    return {"role": "assistant", "content": None, "tool_calls": [call], **keys}


CALLED = ChatMessage("assistant", "", (CALL,))
READ = {
    "developer": ({"role": "developer", "content": "Hi"}, ChatMessage("system", "Hi")),
    "sharegpt": ({"from": "human", "value": "Hi"}, ChatMessage("user", "Hi")),
    "sharegpt answer": ({"from": "gpt", "value": "4"}, ChatMessage("assistant", "4")),
    "sharegpt in a table": (
        {"role": None, "content": None, "from": "human", "value": "Hi"},
        ChatMessage("user", "Hi"),
    ),
    "a role twice": ({"role": "user", "from": "human", "content": "Hi", "value": "Hi"}, ChatMessage("user", "Hi")),
    "text parts": (
        {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}, {"text": "b"}]},
        ChatMessage("user", "ab"),
    ),
    "a thought": (said(reasoning_content="two"), ChatMessage("assistant", "4", reasoning="two")),
    "a thought twice": (
        said(reasoning="two", thinking="two"),
        ChatMessage("assistant", "4", reasoning="two"),
    ),
    "only a thought": (
        {"role": "assistant", "content": None, "reasoning": "two"},
        ChatMessage("assistant", "", reasoning="two"),
    ),
    "no thought": (said(reasoning_content=""), ChatMessage("assistant", "4")),
    "a call": (called(), CALLED),
    "a call with nulls": (
        called({"id": None, "type": "function", "function": {**CALL["function"], "strict": None}}),
        CALLED,
    ),
    "a bare call": (called(CALL["function"]), CALLED),
    "calls as text": ({"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}, CALLED),
    "arguments as text": (called({**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}), CALLED),
    "arguments as pairs": (called({**CALL, "function": {"name": "f", "arguments": [("x", 1)]}}), CALLED),
    "arguments as entries": (
        called({**CALL, "function": {"name": "f", "arguments": [{"key": "x", "value": 1}]}}),
        CALLED,
    ),
    "no arguments": (
        called({"type": "function", "function": {"name": "f", "arguments": ""}}),
        ChatMessage("assistant", "", ({"type": "function", "function": {"name": "f", "arguments": {}}},)),
    ),
    "a null argument that someone wrote": (
        called({"type": "function", "function": {"name": "f", "arguments": {"x": None}}}),
        ChatMessage(
            "assistant", "", ({"type": "function", "function": {"name": "f", "arguments": {"x": None}}},)
        ),
    ),
    "an older call": (
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        CALLED,
    ),
    "the same call twice": (called(function_call={"name": "f", "arguments": '{"x": 1}'}), CALLED),
    "an older call of nulls": (said(function_call={"name": None, "arguments": None}), ChatMessage("assistant", "4")),
    "an older answer": ({"role": "function", "name": "f", "content": "1"}, ChatMessage("tool", "1")),
    "an answer": (
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        ChatMessage("tool", "1", tool_call_id="c1"),
    ),
    "metadata": (
        said(id="m1", name="bot", refusal=None, audio=None, annotations=[], tool_calls=[], tool_call_id=None, extra=None),
        ChatMessage("assistant", "4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", READ)
def test_a_message_is_read_in_the_forms_of_data_sets(form):
    row, message = READ[form]
    assert ChatMessage.from_dict(row) == message
    assert ChatMessage.from_dict(message.to_dict()) == message


REFUSED = {
    "an unknown key": said(rating=5, mood="glad"),
    "a mask": said(mask=0),
    "a fraction": said(weight=0.5),
    "a mask by token": said(loss_mask=[0, 1]),
    "flags that differ": said(weight=0, train=True),
    "thoughts that differ": said(reasoning="a", thinking="b"),
    "roles that differ": said(**{"from": "human"}),
    "contents that differ": said(value="5"),
    "a picture in a text part": said(content=[{"text": "a", "image": "b.png"}]),
    "a user's thought": {"role": "user", "content": "a", "thinking": "b"},
    "a user's call": {"role": "user", "content": "a", "tool_calls": [CALL]},
    "broken arguments": called({"function": {"name": "f", "arguments": "{x"}}),
    "equal keys": called({"function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}}),
    "a list of arguments": called({"function": {"name": "f", "arguments": "[1]"}}),
    "a call without a name": called({"function": {"arguments": {}}}),
    "arguments of Llama": called({"name": "f", "parameters": {"x": 1}}),
    "arguments of LangChain": called({"name": "f", "args": {"x": 1}, "id": "a"}),
    "arguments beside": called({"function": {"name": "f"}, "arguments": {"x": 1}}),
    "two calls": called(function_call={"name": "g", "arguments": "{}"}),
    "an object": {"role": "tool", "content": {"a": 1}},
    "a strange part": said(content=[{"type": "refusal", "refusal": "no"}]),
    "no role": {"content": "a"},
    "no content": {"role": "assistant"},
    "a strange role": {"role": "critic", "content": "a"},
    "images": said(images=["a.png"]),
    "sound": said(audio={"id": "x", "data": None}),
    "an image among texts": said(content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]),
    "an image": said(content=[{"type": "image", "text": None}]),
    "a sound": said(content=[{"type": "input_audio", "input_audio": {}}]),
}  # fmt: skip


@pytest.mark.parametrize("part", [b"image", {"type": "image"}, Path("a.png")], ids=repr)
def test_a_part_that_is_not_text_or_picture_is_refused(part):
    with pytest.raises(DataError):
        ChatMessage.showing("user", "What is ", part)


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_read_is_refused(fault):
    with pytest.raises(DataError):
        ChatMessage.from_dict(REFUSED[fault])


@pytest.mark.parametrize("key", ["weight", "train", "trainable", "loss_mask", "loss"])
@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, False, True])
def test_each_flag_says_whether_a_message_is_learned(key, value):
    message = ChatMessage.from_dict(said(**{key: value}))
    assert message.learned is bool(value)
    assert ChatMessage.from_dict(message.to_dict()).learned is bool(value)
    assert ChatMessage.from_dict(said(**{key: None})).learned is None


def test_cut_text_is_marked_within_its_limit():
    assert [shortened("x" * length, 20) for length in (20, 21)] == ["x" * 20, "x" * 7 + CUT]
    assert shortened("ab" * 20, 20, end=True) == CUT + "bababab"
    assert [shortened("\ud800x", most) for most in (0, 1, 2)] == ["", CUT[:1], "?x"]
    assert shortened("x" * 14, 13, end=True) == CUT
