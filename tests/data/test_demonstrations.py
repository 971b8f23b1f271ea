"""A demonstration is token for token what a policy in a rollout would have been given and would have said."""

import copy
import json
from pathlib import Path

import pytest

from rl4llm.core.errors import DataError
from rl4llm.core.types import ChatMessage
from rl4llm.data.demonstrations import demonstration, label_group, pair_group
from rl4llm.data.render import Renderer

TEMPLATES = Path(__file__).parent / "templates"
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "37+48"}}}
ASKED = {"role": "user", "content": "What is 37 + 48?"}
OPENING_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
THINKING_ALOUD = OPENING_THOUGHTS.replace(
    "+ '<|im_end|>", "+ (m.tool_calls | tojson if m.tool_calls else '') + '<|im_end|>"
)
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
    messages = conversation(
        ASKED, said("", CALL, CALL), {"role": "tool", "content": "85"}, said("Answer: 85")
    )
    (_, first), (author, calls), (_, reply), (_, answer) = texts(chatml, demonstration(chatml, messages, "a"))
    assert author == "policy"
    assert first + calls + "\n" == chatml._template.text(messages[:2], prompt=False)
    assert calls == f"\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>" * 2 + "<|im_end|>"
    assert first + calls + reply + answer + "\n" == chatml._template.text(messages, prompt=False)


def test_a_thought_before_a_tool_call_follows_the_open_tag(renderer):
    opening = renderer(THINKING_ALOUD)
    messages = conversation(ASKED, said("<think>\nok\n</think>\n", CALL))
    (_, prompt), (_, answer) = texts(opening, demonstration(opening, messages, "a"))
    assert prompt.endswith("assistant\n<think>\n")
    assert answer == f"ok\n</think>\n{json.dumps([CALL])}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "content", "call"),
    [
        ("thinking_chatml", "", CALL),
        (OPENING_THOUGHTS, "<think>\nok", CALL),
        (THINKING_ALOUD, "ok", CALL),
        (CUTTING, "<think>\nok, sum", CALL),
        (ENDING_OTHERWISE, "<think>\nok", CALL),
        ("chatml_tools", "", {"function": {"name": "calculator", "arguments": '{"expression": "1"}'}}),
    ],
)
def test_tool_calls_that_cannot_be_rendered_are_refused(template, content, call, renderer):
    with pytest.raises(DataError):
        demonstration(
            renderer(template), [*conversation(ASKED), ChatMessage("assistant", content, (call,))], "a7"
        )


def test_a_thought_opened_by_the_prompt_is_opened_only_once(renderer):
    opening = renderer(OPENING_THOUGHTS)
    messages = conversation(
        ASKED, said("<think>\nok\n</think>\nhello"), ASKED, said("<think>\n</think>\nagain")
    )
    spans = texts(opening, demonstration(opening, messages, "a"))
    assert [text for author, text in spans if author == "policy"] == [
        "ok\n</think>\nhello<|im_end|>",
        "</think>\nagain<|im_end|>",
    ]
    assert "".join(text for _, text in spans) + "\n" == opening._template.text(messages, prompt=False)
    for turn in (1, 3):
        assert opening.content(opening.completion_text(messages[: turn + 1])) == messages[turn].content


@pytest.mark.parametrize("content", ["hello", "<think>ok</think>hello", ""])
def test_an_answer_without_the_opened_thought_is_refused(content, renderer):
    with pytest.raises(DataError):
        demonstration(renderer(OPENING_THOUGHTS), conversation(ASKED, said(content)), "a7")


def test_turns_that_depend_on_the_past_are_rendered_behind_it(renderer):
    late = "{% if add_generation_prompt and messages | length > 4 %}Again: {% endif %}"
    again = "('Again: ' if m.role == 'assistant' and loop.index > 4 else '') + m.content"
    dependent = renderer(OPENING_THOUGHTS.replace("<think>\n", "").replace("m.content", again) + late)
    messages = conversation(*[ASKED, said("85")] * 3)
    spans = texts(dependent, demonstration(dependent, messages, "a"))
    assert [text.endswith("Again: ") for author, text in spans if author != "policy"] == [False, False, True]


def test_answers_in_a_row_are_refused_with_their_row(renderer):
    with pytest.raises(DataError):
        demonstration(renderer("chatml_tools"), conversation(ASKED, said("8"), said("5")), "a7")
    with pytest.raises(DataError):
        demonstration(renderer("chatml_tools"), conversation(ASKED), "a7")


CHANNEL = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}to user: {% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY_THOUGHT = CHANNEL.replace(
    "to user: ", "{% if loop.last and 'think' not in m.content %}<think>\n</think>\n{% endif %}"
)
OTHERWISE_ASKED = CHANNEL.replace("assistant\n{%", "assistant\nthought: {%")
CLOSED_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|im_start|>none<|im_end|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "said_first", "said_last"),
    [
        (CHANNEL, "to user: 85<|im_end|>", "to user: Yes.<|im_end|>"),
        (EMPTY_THOUGHT, "<think>\n</think>\n85<|im_end|>", "<think>\n</think>\nYes.<|im_end|>"),
        (CLOSED_THOUGHT, "85<|im_end|>", "Yes.<|im_end|>"),
    ],
)
def test_a_turn_is_learned_as_the_template_writes_it(template, said_first, said_last, renderer):
    rendering = renderer(template)
    messages = conversation(ASKED, said("85"), {"role": "user", "content": "Sure?"}, said("Yes."))
    spans = texts(rendering, demonstration(rendering, messages, "a"))
    assert [text for author, text in spans if author == "policy"] == [said_first, said_last]
    whole = rendering._template.text(messages, prompt=False)
    assert whole.endswith(f"assistant\n{said_last}\n")
    if template == CHANNEL:
        assert "".join(text for _, text in spans) + "\n" == whole


def test_all_readers_see_the_templates_rendering_of_a_turn(renderer):
    rendering = renderer(CHANNEL, roles=())
    prompt, row = [ASKED], {"messages": [ASKED], "chosen": [said("85")], "rejected": [said("84")]}
    labelled = {"messages": prompt, "completion": [said("85")], "label": True}
    pair, label = pair_group(rendering, row, "a"), label_group(rendering, labelled, "b")
    for trajectory, answer in zip([*pair.trajectories, *label.trajectories], ["85", "84", "85"], strict=True):
        whole = rendering._template.text(conversation(ASKED, said(answer)), prompt=False)
        assert "".join(text for _, text in texts(rendering, trajectory)) + "\n" == whole


def test_a_turn_that_the_template_asks_for_otherwise_is_refused(renderer):
    with pytest.raises(DataError):
        demonstration(renderer(OTHERWISE_ASKED, roles=()), conversation(ASKED, said("85")), "a")
    with pytest.raises(DataError):
        cutting = renderer(CHANNEL.replace("m.content +", "m.content[:30] +"), roles=())
        demonstration(cutting, conversation(ASKED, said("1234567890" * 4)), "a")


def test_white_space_is_what_the_template_makes_of_it(renderer):
    trimming = renderer(CHANNEL.replace("m.content +", "m.content | trim +"))
    spans = texts(trimming, demonstration(trimming, conversation(ASKED, said(" 85\n")), "a"))
    assert spans[-1] == ("policy", "to user: 85<|im_end|>")


def test_answers_of_tools_follow_the_calls_of_their_row(renderer):
    answers = "{% if m.role == 'tool' %}{{ 'to ' ~ m.tool_call_id ~ ': ' }}{% endif %}"
    calls = "{% for c in m.tool_calls or [] %}{{ c.id ~ c.function | tojson }}{% endfor %}"
    showing = renderer(CHANNEL.replace("{{ m.content +", answers + calls + "{{ m.content +"))
    tool = {"role": "tool", "content": "85", "tool_call_id": "c7"}
    messages = conversation(ASKED, said("", CALL | {"id": "c7"}), tool, said("85"))
    spans = texts(showing, demonstration(showing, messages, "a"))
    assert "".join(text for _, text in spans) + "\n" == showing._template.text(messages, prompt=False)
    assert "to c7: 85" in spans[2][1]
