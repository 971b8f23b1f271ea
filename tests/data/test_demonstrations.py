"""A demonstration is token for token what a policy in a rollout would have been given and would have said."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest

from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.demonstrations import check_rows, demonstration, demonstration_group
from rl4llm.data.render import Renderer

TEMPLATES = Path(__file__).parent / "templates"
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "37+48"}}}
ASKED = {"role": "user", "content": "What is 37 + 48?"}
OPENING_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
THINKING_ALOUD = OPENING_THOUGHTS.replace("+ '<|im_end|>", "+ (m.tool_calls | tojson if m.tool_calls else '') + '<|im_end|>")
CUTTING = THINKING_ALOUD.replace("m.content", "(m.content[:11] if m.tool_calls else m.content)")
ENDING_OTHERWISE = THINKING_ALOUD.replace("'<|im_end|>", "('<|eom|>' if m.tool_calls else '<|im_end|>') + '")


@pytest.fixture
def renderer(tokenizer):
    def make(template, **options):
        changed = copy.deepcopy(tokenizer)
        file = TEMPLATES / f"{template}.jinja"
        changed.chat_template = file.read_text() if len(template) < 30 else template
        return Renderer(changed, **options)

    return make


def conversation(*rows):
    return [ChatMessage.from_dict(row) for row in rows]


def said(content="", *calls):
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def texts(renderer, trajectory):
    tokenizer = renderer._template.tokenizer
    return [(span.author, tokenizer.decode(span.token_ids)) for span in trajectory.spans]


def test_tool_calls_are_learned_as_the_template_writes_them(renderer):
    chatml = renderer("chatml_tools")
    messages = conversation(ASKED, said("", CALL, CALL), {"role": "tool", "content": "85"}, said("Answer: 85"))
    (_, first), (author, calls), (_, reply), (_, answer) = texts(chatml, demonstration(chatml, messages, "a"))
    assert author == "policy"
    assert first + calls + "\n" == chatml._template.text(messages[:2], prompt=False)
    assert calls == f"\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>" * 2 + "<|im_end|>"
    assert first + calls + reply + answer + "\n" == chatml._template.text(messages, prompt=False)


def test_a_thought_before_a_tool_call_is_learned_behind_what_the_generation_prompt_opened(renderer):
    opening = renderer(THINKING_ALOUD)
    messages = conversation(ASKED, said("<think>\nok\n</think>\n", CALL))
    (_, prompt), (_, answer) = texts(opening, demonstration(opening, messages, "a"))
    assert prompt.endswith("assistant\n<think>\n")
    assert answer == f"ok\n</think>\n{json.dumps([CALL])}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "content", "call", "reason"),
    [
        ("thinking_chatml", "", CALL, "leaves out a call of 'calculator'"),
        (OPENING_THOUGHTS, "<think>\nok", CALL, "leaves out a call of 'calculator'"),
        (THINKING_ALOUD, "ok", CALL, "in another way than behind the generation prompt"),
        (CUTTING, "<think>\nok, sum", CALL, "leaves out or alters"),
        (ENDING_OTHERWISE, "<think>\nok", CALL, "does not end in"),
        (
            "chatml_tools",
            "",
            {"function": {"name": "calculator", "arguments": '{"expression": "1"}'}},
            "quotes the arguments .* make them an object",
        ),
    ],
)
def test_tool_calls_that_cannot_be_written_safely_are_refused_with_their_row(template, content, call, reason, renderer):
    with pytest.raises(DataError, match=rf"(?s)Row 'a7' \(.*\) cannot be imitated.*message 1: .*{reason}"):
        demonstration(renderer(template), conversation(ASKED, said(content, call)), "a7")


def test_a_thought_that_the_generation_prompt_opens_is_opened_once(renderer):
    opening = renderer(OPENING_THOUGHTS)
    messages = conversation(ASKED, said("<think>\nok\n</think>\nhello"), ASKED, said("<think>\n</think>\nagain"))
    spans = texts(opening, demonstration(opening, messages, "a"))
    assert [text for author, text in spans if author == "policy"] == [
        "ok\n</think>\nhello<|im_end|>",
        "</think>\nagain<|im_end|>",
    ]
    assert "".join(text for _, text in spans) + "\n" == opening._template.text(messages, prompt=False)
    for turn in (1, 3):
        assert opening.content(opening.completion_text(messages[: turn + 1])) == messages[turn].content


@pytest.mark.parametrize("content", ["hello", "<think>ok</think>hello", ""])
def test_an_answer_without_the_thought_that_the_generation_prompt_opens_is_refused(content, renderer):
    with pytest.raises(DataError, match=r"Row 'a7' \(.*\) cannot be imitated.* opens '<think>\\n', but message 1"):
        demonstration(renderer(OPENING_THOUGHTS), conversation(ASKED, said(content)), "a7")


def test_turns_that_depend_on_the_past_are_rendered_behind_it(renderer):
    late = "{% if add_generation_prompt and messages | length > 4 %}Again: {% endif %}"
    dependent = renderer(OPENING_THOUGHTS.replace("<think>\n", "") + late)
    messages = conversation(*[ASKED, said("85")] * 3)
    spans = texts(dependent, demonstration(dependent, messages, "a"))
    assert [text.endswith("Again: ") for author, text in spans if author != "policy"] == [False, False, True]


def test_answers_in_a_row_are_refused_with_their_row(renderer):
    with pytest.raises(DataError, match=r"Row 'a7' \(.*\) cannot be imitated.*must end with one to answer"):
        demonstration(renderer("chatml_tools"), conversation(ASKED, said("8"), said("5")), "a7")
    with pytest.raises(DataError, match=r"Row 'a7' \(.*\) has no assistant message"):
        demonstration(renderer("chatml_tools"), conversation(ASKED), "a7")


def test_a_demonstration_longer_than_the_context_is_found_with_its_row_and_length(renderer):
    chatml = renderer("chatml_tools")
    rows = [{"prompt_id": name, "messages": [ASKED, said("85 " * n)]} for name, n in (("short", 1), ("long", 9))]
    lengths = [demonstration(chatml, conversation(*row["messages"]), "a").num_tokens for row in rows]
    check_rows(partial(demonstration_group, chatml), rows, lengths[1])
    with pytest.raises(DataError, match=rf"Row 'long' \('What.*'\) is .* {lengths[1]} tokens.* context of {lengths[0]}"):
        check_rows(partial(demonstration_group, chatml), rows, lengths[0])
