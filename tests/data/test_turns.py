"""Turns of the policy end as the template ends them, and answers of tools follow the calls that they answer."""

import random
import sys

import pytest

from rl4llm.core.errors import TemplateError
from rl4llm.core.types import ChatMessage, TokenSpan
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.render import Renderer
from rl4llm.data.template import ChatTemplate
from tests.data.test_render import ASK, CHATML, EACH, TOOLS, asked, chatml, complete, in_place, play

ROLES = ["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
NEXT_ROLE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|open|>{{ m.role }}<|sep|>"
    "{% if m.role == 'assistant' %}<|open|>said<|sep|>{{ m.content }}<|close|>said<|sep|>"
    "{% else %}{{ m.content }}{% endif %}<|close|>{{ m.role }}<|sep|><|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}"
)
EOS_AT_THE_END = EACH + ASK.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
OPENING_A_CHANNEL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|say|>{% endif %}{{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|think|>{% endif %}"
)
CALLING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<|call|>{{ c.function | tojson }}{% endfor %}<|calls|>"
    "{% elif m.role == 'tool' %}"
    "{% set named = messages | selectattr('tool_calls') | map(attribute='tool_calls') | sum(start=[]) %}"
    "{% set call = named | selectattr('id', 'equalto', m.tool_call_id) | first %}"
    "{% if not call %}{{ raise_exception('no call has the id ' ~ m.tool_call_id) }}{% endif %}"
    "<|of|>{{ call.function.name }}<|sep|>{{ m.content }}<|im_end|>"
    "{% else %}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
SHOWING_IDS = EACH.replace("+ m.content", "+ (m.tool_call_id ~ ': ' if m.role == 'tool' else '') + m.content")
CALLED = {
    "id": "abc",
    "type": "function",
    "function": {"name": "calculator", "arguments": {"expression": "1"}},
}


def decoded(renderer, token_ids):
    return renderer._template.tokenizer.decode(token_ids)


@pytest.fixture(scope="module")
def next_role():
    return Renderer(
        chatml(NEXT_ROLE, specials=[*CHATML, *ROLES], eos="<|endoftext|>"), roles=("user", "tool")
    )


def test_the_token_of_the_next_role_ends_a_turn(next_role):
    tokenizer = next_role._template.tokenizer
    assert tokenizer.convert_ids_to_tokens(next_role.stop_token_ids) == [
        "<|user|>",
        "<|endoftext|>",
        "<|tool|>",
    ]
    for role in ("user", "tool"):
        sampled = [*in_place(next_role, "85", stop=False), tokenizer.convert_tokens_to_ids(f"<|{role}|>")]
        by = sampled[-1]
        follows = next_role.following([ChatMessage(role, "x")], ended=next_role.ends_turn(sampled), by=by)
        assert decoded(next_role, sampled + follows) == f"85<|{role}|>\nx<|assistant|>\n"
        messages = [*asked(False), ChatMessage("assistant", "85"), ChatMessage(role, "x")]
        assert next_role.first(asked(False)) + sampled + follows == next_role.first(messages)


@pytest.mark.parametrize("end", ["<|tool|>", "<|endoftext|>"])
def test_a_token_of_another_role_stays_where_it_was_sampled(end, next_role):
    by = next_role._template.tokenizer.convert_tokens_to_ids(end)
    follows = next_role.following([ChatMessage("user", "x")], ended=True, by=by)
    assert decoded(next_role, follows) == "<|user|>\nx<|assistant|>\n"


def test_next_role_tokens_end_single_turns_too():
    tokenizer = chatml(NEXT_ROLE, specials=[*CHATML, *ROLES], eos="<|endoftext|>")
    assert Renderer(tokenizer, roles=()).stop_token_ids == Renderer(tokenizer, roles=("user",)).stop_token_ids


def test_a_token_within_a_turn_does_not_end_it():
    tokenizer = chatml(PARTS, specials=["<|open|>", "<|close|>", "<|sep|>", "<|end|>"], eos="<|end|>")
    renderer = Renderer(tokenizer)
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    behind = "<|open|>user<|sep|>x<|close|>user<|sep|><|end|><|open|>assistant<|sep|>"
    new = [ChatMessage("user", "x")]
    assert decoded(renderer, renderer.following(new, ended=True)) == behind
    closing = "<|close|>said<|sep|><|close|>assistant<|sep|><|end|>"
    assert decoded(renderer, renderer.following(new, ended=False)) == closing + behind


def test_a_conversation_may_end_with_another_token():
    tokenizer = chatml(EOS_AT_THE_END, eos="<|endoftext|>")
    renderer = Renderer(tokenizer)
    assert tokenizer.convert_ids_to_tokens(renderer.stop_token_ids) == ["<|im_end|>", "<|endoftext|>"]
    answer = ("85", in_place(renderer, "85"))
    spans, messages = play(renderer, asked(True), [answer] * 2, [[ChatMessage("user", "x")]] * 2)
    assert [token for span in spans for token in span.token_ids] == renderer.first(messages)


def test_a_generation_prompt_may_open_another_channel():
    renderer = Renderer(chatml(OPENING_A_CHANNEL, specials=[*CHATML, "<|say|>", "<|think|>"]))
    follows = decoded(renderer, renderer.following([ChatMessage("user", "x")], ended=True))
    assert follows == "<|im_start|>userx<|im_end|><|im_start|>assistant<|think|>"
    with pytest.raises(TemplateError):
        Renderer(chatml(OPENING_A_CHANNEL.replace("<|think|>", "Think:"), specials=[*CHATML, "<|say|>"]))


@pytest.fixture(scope="module")
def calling():
    return chatml(CALLING, specials=[*CHATML, "<|call|>", "<|calls|>", "<|of|>", "<|sep|>"])


def test_answers_follow_the_calls_that_they_answer(calling):
    renderer = Renderer(calling, TOOLS, roles=("tool",))
    ends = calling.convert_ids_to_tokens(renderer.stop_token_ids)
    assert ends == ["<|im_end|>", "<|calls|>"]
    new = [ChatMessage("tool", text, (CALLED | {"id": text},)) for text in ("85", "86")]
    parts = [f"<|im_start|>tool<|of|>calculator<|sep|>{text}<|im_end|>" for text in ("85", "86")]
    follows = renderer.following(new, ended=False)
    assert decoded(renderer, follows) == "<|calls|>" + "".join(parts) + "<|im_start|>assistant"
    assert renderer.following(new, ended=True, by=renderer.stop_token_ids[1]) == follows[1:]


def test_the_calls_of_the_policy_stay_as_sampled(calling):
    renderer = Renderer(calling, TOOLS, roles=("tool",))
    sampled = [*renderer.encode('<|call|>{ "name" : "calculator"}<|calls|>')]
    new = [ChatMessage("tool", "85", (CALLED,))]
    spans, _ = play(renderer, asked(True), [("{}", sampled)] * 2, [new] * 2)
    assert [span for span in spans if span.author == "policy"] == list(
        TokenSpan.policy(complete(sampled))
    ) * 2
    assert len({span.token_ids for span in spans[2::2]}) == 1


def test_unknown_calls_are_made_up(calling):
    follows = Renderer(calling, TOOLS, roles=("tool",)).following([ChatMessage("tool", "85")], ended=True)
    assert calling.decode(follows) == "<|im_start|>tool<|of|>tool<|sep|>85<|im_end|><|im_start|>assistant"


def test_calls_are_shown_only_where_the_template_shows_them():
    new = [ChatMessage("tool", "85", (CALLED,))]
    plain = Renderer(chatml(EACH + ASK), roles=("tool",))
    assert plain.following(new, ended=True) == plain.following([ChatMessage("tool", "85")], ended=True)
    silent = SHOWING_IDS.replace(
        "+ m.content", "+ m.content + (m.tool_calls | string if m.tool_calls else '')"
    )
    showing = Renderer(chatml(silent + ASK), roles=("tool",))
    assert "tool\nabc: 85" in decoded(showing, showing.following(new, ended=True))


def test_white_space_that_changes_later_is_reported():
    last = "('' if loop.last else '\\n')"
    template = EACH.replace("+ '<|im_end|>", f"+ ({last} if m.role == 'tool' else '') + '<|im_end|>") + ASK
    renderer = Renderer(chatml(template), roles=("tool",))
    follows = decoded(renderer, renderer.following([ChatMessage("tool", "85")], ended=True))
    assert follows.startswith("\n<|im_start|>tool\n85<|im_end|>")
    assert [note for note in renderer.notes if "white space" in note]
    assert not Renderer(chatml(template), roles=("user",)).notes


def test_a_demonstration_ends_turns_with_the_token_that_follows(next_role):
    so, tool, user = ChatMessage("assistant", "so"), ChatMessage("tool", "85"), ChatMessage("user", "x")
    messages = [*asked(False), so, tool, so, user, so]
    found = demonstration(next_role, messages, "a")
    ends = [decoded(next_role, span.token_ids[-1:]) for span in found.spans if span.author == "policy"]
    assert ends == ["<|tool|>", "<|user|>", "<|user|>"]
    assert (
        decoded(next_role, found.token_ids) == next_role._template.text(messages, prompt=False) + "<|user|>"
    )


def test_calls_are_learned_with_their_own_end_of_turn(calling):
    renderer = Renderer(calling, TOOLS, roles=("tool",))
    messages = [
        *asked(False),
        ChatMessage("assistant", "", (CALLED,)),
        ChatMessage("tool", "85", None, "abc"),
        ChatMessage("assistant", "85"),
    ]
    found = demonstration(renderer, messages, "a")
    assert decoded(renderer, found.token_ids) == renderer._template.text(messages, prompt=False)
    assert decoded(renderer, found.spans[1].token_ids).endswith("<|calls|>")


HERMES = '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>'


@pytest.mark.parametrize("system", [False, True])
def test_tools_are_described_where_the_template_hides_them(system):
    tokenizer = chatml(EACH + ASK)
    renderer = Renderer(tokenizer, TOOLS, ("tool",), call_example=HERMES)
    prompt = tokenizer.decode(renderer.first(asked(system)))
    assert prompt.startswith(
        "<|im_start|>system\n" + ("Be brief.\n\n" if system else "") + "You can call these tools"
    )
    assert '"name": "calculator"' in prompt and HERMES in prompt and prompt.count("<|im_start|>") == 3
    assert [note for note in renderer.notes if "system prompt describes them" in note]
    with pytest.raises(TemplateError):
        Renderer(tokenizer, TOOLS, ("tool",))


def test_tools_are_described_to_the_user_without_system_prompts():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    tokenizer = chatml(refusing + EACH + ASK)
    prompt = tokenizer.decode(Renderer(tokenizer, TOOLS, ("tool",), call_example=HERMES).first(asked(False)))
    assert prompt.startswith("<|im_start|>user\nYou can call these tools")
    assert prompt.endswith("What is 37 + 48?<|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_in_described_tools_are_text():
    tool = {
        "type": "function",
        "function": {"name": "calculator", "description": "Sums.<|im_end|>", "parameters": {}},
    }
    tokenizer = chatml(EACH + ASK)
    token_ids = Renderer(tokenizer, [tool], ("tool",), call_example=HERMES).first(asked(False))
    assert token_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert tokenizer.decode(token_ids).count("<|im_end|>") == 3


def test_a_template_that_shows_tools_does_not_describe_them():
    told = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    tokenizer = chatml(told + EACH + ASK)
    shown = Renderer(tokenizer, TOOLS, ("tool",), call_example=HERMES)
    assert shown.first(asked(False)) == Renderer(tokenizer, TOOLS, ("tool",)).first(asked(False))
    assert not shown.notes


def test_shared_beginning_ends_within_no_token(tokenizer):
    template, draw = ChatTemplate(tokenizer), random.Random(0)
    tokens = sorted(tokenizer.get_added_vocab())
    cut = 0
    for _ in range(500):
        one, other = ("".join(draw.choices(["a", "b", *tokens], k=draw.randrange(4))) for _ in range(2))
        one, other = one[: draw.randrange(20)], one[: draw.randrange(20)] + other
        size = next((i for i in range(len(one)) if one[i : i + 1] != other[i : i + 1]), len(one))
        spans = [found.span() for text in (one, other) for found in template._token_pattern.finditer(text)]
        start = min((start for start, stop in spans if start < size < stop), default=size)
        assert template.shared(one, other) == one[:start]
        cut += start < size
    assert cut > 20


@pytest.mark.parametrize("ends", [("", "x"), ("x", "y")])
def test_long_texts_are_not_compared_by_character(tokenizer, ends):
    template, text, lines = ChatTemplate(tokenizer), "a word " * 1000, []

    def traced(frame, event, argument):
        lines.append(event)
        return traced

    template.tokens(text)  # compiles the pattern of tokens, once for a template
    tracing = sys.gettrace()
    sys.settrace(traced)
    try:
        found = template.shared(text + ends[0], text + ends[1])
    finally:
        sys.settrace(tracing)
    assert found == text
    assert len(lines) < 200
