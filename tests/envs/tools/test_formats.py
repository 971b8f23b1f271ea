"""Calls as models write them: what is found in a turn, what is said of what is none, and where a turn may stop."""

import copy
import json
from types import SimpleNamespace

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.envs.tools.formats import FORMATS, MAX_CALL_CHARS, ToolCall, call_format

TWO = [ToolCall("add", {"a": 1, "b": [2, {"c": "}"}]}), ToolCall("now", {})]
DEEPSEEK_FENCED = (
    "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": [2, {"c": "}"}]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
WRITTEN = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>',
    ),
    (
        "llama3",
        '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": "}"}]}}; {"name": "now", "parameters": {}}<|eot_id|>',
    ),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": [2, {"c": "}"}]}}\n'
        '<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>',
    ),
    (
        "mistral",
        'So.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}, "id": "123456789"}, '
        '{"name": "now", "arguments": {}}]</s>',
    ),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, {"c": "}"}]}[TOOL_CALLS]now[CALL_ID]12ab[ARGS]{}</s>'),
    ("deepseek", DEEPSEEK_FENCED),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2, {"c": "}"}]}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
]


def found(name, text):
    return list(FORMATS[name].parse(text))


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_calls_are_found_as_each_format_writes_them_in_order(name, text):
    assert found(name, text) == TWO


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("text", ["", "The answer is 85.", '{"answer": 85}', '{"name": "Ada"}', "[1, 2]", "a < b > c {"])
def test_an_answer_is_no_call(name, text):
    assert found(name, text) == []


AROUND = {  # a call's JSON text in each format
    "hermes": "<tool_call>{}</tool_call>",
    "llama3": "<|python_tag|>{}",
    "mistral": "[TOOL_CALLS]{}",
    "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
}
BROKEN = [
    '{"name": "add", "arguments": {"a": 1}',
    "add(1, 2)",
    "{'name': 'add'}",
    '"add"',
    "17",
    "null",
    "[" * 100_000,
    '{"name": "add", "arguments": {"a": "' + "x" * 10_000_000 + '"}}',
    '{"a": ' + "9" * 5000 + "}",
    "",
]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("body", BROKEN, ids=lambda body: body[:20])
def test_what_is_meant_for_a_call_but_is_none_says_why_in_a_few_words(name, body):
    (call,) = found(name, AROUND[name].replace("{}", body))
    assert call.problem and len(call.problem) <= 200 and not call.name


@pytest.mark.parametrize("body", ['{"arguments": {}}', '{"name": 5, "arguments": {}}', '{"name": "f", "arguments": [1]}'])
def test_a_call_without_a_name_or_with_other_arguments_than_an_object_says_so(body):
    (call,) = found("hermes", f"<tool_call>{body}</tool_call>")
    assert "a call must be" in call.problem or "arguments must be an object" in call.problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"),
    ],
)
def test_a_call_that_is_not_closed_is_told_so(name, text):
    assert "not closed" in found(name, text)[0].problem


def test_other_keys_and_quoted_arguments_are_taken():
    quoted = json.dumps({"name": "add", "parameters": json.dumps({"a": 1})})
    assert found("hermes", f"<tool_call>{quoted}</tool_call>") == [ToolCall("add", {"a": 1})]


def test_calls_up_to_the_limit_of_their_length_are_read():
    call = {"name": "add", "arguments": {"a": ""}}
    call["arguments"]["a"] = "x" * (MAX_CALL_CHARS - len(json.dumps(call)))
    assert found("hermes", f"<tool_call>{json.dumps(call)}</tool_call>")[0].name == "add"
    call["arguments"]["a"] += "x"
    assert str(MAX_CALL_CHARS) in found("hermes", f"<tool_call>{json.dumps(call)}</tool_call>")[0].problem


def tokenizer_with(template, **attributes):
    return SimpleNamespace(chat_template=template, get_chat_template=lambda tools: template, name_or_path="m", **attributes)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("Call one as <tool_call>{...}</tool_call>", "hermes"),
        ('{"name": function name, "parameters": dictionary}. {{- "<|eom_id|>" }}', "llama3"),
        ("{{- '[TOOL_CALLS] [' }}{{ '\"parameters\":' }}", "mistral"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}", "deepseek"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_format_is_that_of_the_chat_template(template, name):
    assert call_format("auto", tokenizer_with(template)) is FORMATS[name]
    assert call_format("llama3", tokenizer_with(template)) is FORMATS["llama3"]


def test_a_template_of_another_format_and_an_unknown_name_are_refused():
    with pytest.raises(ConfigError, match="asks for calls as <function="):
        call_format("auto", tokenizer_with("<tool_call><function=f>"))
    with pytest.raises(ConfigError, match=r"env.format='hermse' is unknown.*Did you mean 'hermes'"):
        call_format("hermse", tokenizer_with(""))


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def test_a_tokenizer_that_says_how_its_answers_are_read_is_asked(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.response_template = RESPONSE_TEMPLATE
    parse = call_format("auto", tokenizer).parse
    said = 'So. <call:add>{"a": 1}</call><call:now>{}</call><|im_end|>'
    assert list(parse(said)) == [ToolCall("add", {"a": 1}), ToolCall("now", {})]
    assert "cannot be read" in next(parse("<call:add>{</call>")).problem


def test_generation_stops_where_the_calls_of_a_turn_are_over():
    assert FORMATS["deepseek"].stop(max_calls=4) == "<｜tool▁calls▁end｜>"
    assert FORMATS["hermes"].stop(max_calls=4) == "" and FORMATS["hermes"].stop(max_calls=1) == "</tool_call>"
