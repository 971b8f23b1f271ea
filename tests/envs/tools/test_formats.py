"""Calls as models write them: what is found in a turn, how broken calls are reported, and where a turn may stop."""

import copy
import json
import re
import time
from itertools import product

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.envs.tools.formats import FORMATS, MAX_CALL_CHARS, ToolCall, call_format, stray_calls

TWO = [ToolCall("add", {"a": 1, "b": [2, {"c": "}"}]}), ToolCall("now", {})]
DEEPSEEK_FENCED = (
    "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": [2, {"c": "}"}]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'
BOTH = f'{{"name": "add", "arguments": {ARGUMENTS}}}', '{"name": "now", "arguments": {}}'
NEW_FORMATS = [
    ("tool_calls", f"So. <tool_calls>[{', '.join(BOTH)}]</tool_calls><|end|>"),
    ("tool_calls", f"<tool_calls>\n{BOTH[0]}\n{BOTH[1]}\n</tool_calls>"),
    ("nemotron", f"<TOOLCALL>[{', '.join(BOTH)}]</TOOLCALL>"),
    ("apertus", f'<|tools_prefix|>[{{"add": {ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>'),
    (
        "cohere",
        f'<|START_ACTION|>[\n {{"tool_call_id": "0", "tool_name": "add", "parameters": {ARGUMENTS}}},\n'
        ' {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
    ("granite", f"<|tool_call|>[{', '.join(BOTH)}]<|end_of_text|>"),
    ("granite", f"<tool_call> [{', '.join(BOTH)}]<|end_of_text|>"),
    ("gigachat", f"<|function_call|>{BOTH[0]}<|function_call|>{BOTH[1]}<|message_sep|>\n\n"),
    (
        "gigachat",
        "".join(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{one}" for one in BOTH),
    ),
    ("json", f"I call {BOTH[0]} and then functools[{BOTH[1]}] now."),
    (
        "harmony",
        "<|channel|>analysis<|message|>Sums.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
    ),
    (
        "kimi",
        "So.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    (
        "solar",
        f"<|tool_calls|><|tool_call:begin|>7f<|tool_call:name|>add<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
        "<|tool_call:begin|>80<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    ),
    ("functionary", f"add\n{ARGUMENTS}>>>now\n{{}}<|eot_id|>"),
    ("functionary", f"all\nSo: let me see.\n>>>add\n{ARGUMENTS}>>>now\n{{}}<|eot_id|>"),
    (
        "gemma",
        '<|tool_call>call:add{a:1,b:[2,{c:<|"|>}<|"|>}]}<tool_call|><|tool_call>call:now{}<tool_call|><turn|>',
    ),
    ("function", f"<function=add>{ARGUMENTS}</function><function=now>{{}}</function>"),
    (
        "function",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, {'c': '}'}]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "invoke",
        '<x:calls><x:invoke name="add"><x:parameter name="a">1</x:parameter>\n<x:parameter name="b">[2, {"c": "}"}]'
        '</x:parameter></x:invoke>\n<x:invoke name="now"></x:invoke></x:calls>',
    ),
    (
        "invoke",
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">[2, {"c": "}"}]</｜DSML｜parameter>\n</｜DSML｜invoke>'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
    ),
    (
        "invoke",
        '<function name="add"><param name="a">1</param><param name="b"><![CDATA[[2, {"c": "}"}]]]></param></function>'
        '<function name="now"></function>',
    ),
    (
        "glm",
        "So.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        '<arg_value>[2, {"c": "}"}]</arg_value>\n</tool_call><tool_call>now</tool_call><|user|>',
    ),
    (
        "glm",
        "<tool_call:v2>add<tool_sep:v2>\n<arg_key:v2>a</arg_key:v2>\n<arg_value:v2>1</arg_value:v2>"
        '<arg_key:v2>b</arg_key:v2><arg_value:v2>[2, {"c": "}"}]</arg_value:v2></tool_call:v2>'
        "<tool_call:v2>now<tool_sep:v2></tool_call:v2>",
    ),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        '<|close|>argument<|sep|><|open|>argument key="b" type="array"<|sep|>[2, {"c": "}"}]<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    ),
    (
        "minimax_m3",
        '~[<invoke name="add">~[<a>1~[</a>~[<b>~[<item>2~[</item>~[<item>~[<c>}~[</c>~[</item>~[</b>~[</invoke>\n'
        '~[<invoke name="now">~[</invoke>'.replace("~[", "]<]minimax[>["),
    ),
    ("lfm2", "<|tool_call_start|>[add(a=1, b=[2, {'c': \"}\"}]), now()]<|tool_call_end|><|im_end|>"),
    ("lfm2", f"<|tool_call_start|>[{', '.join(BOTH)}]<|tool_call_end|><|im_end|>"),
    ("python", "[add(a=1, b=[2, {'c': \"}\"}]), now()]<|eot|>"),
    ("python", "So. <|python_start|>[add(a=1, b=[2, {'c': \"}\"}]), now()]<|python_end|><|eot|>"),
    ("python", "<function_calls>add(a=1, b=[2, {'c': \"}\"}])\nnow()</function_calls><|im_end|>"),
    ("python", "```tool_code\nadd(a=1, b=[2, {'c': \"}\"}])\nnow()\n```<end_of_turn>"),
]
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
    ("llama3", f"I call {BOTH[0]}; {BOTH[1]} now."),
    ("llama3", f"```json\n[{', '.join(BOTH)}]\n```"),
    ("llama3", f"<function=add>{ARGUMENTS}</function><function=now>{{}}</function>"),
    ("mistral", f"So.[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]now{{}}</s>"),
    (
        "function",
        f"<function=add>\n<parameter=a>\n1\n<parameter=b>{json.dumps([2, {'c': '}'}])}</parameter></function>"
        "<function=now></function>",
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, {"c": "}"}]}[TOOL_CALLS]now[CALL_ID]12ab[ARGS]{}</s>',
    ),
    ("deepseek", DEEPSEEK_FENCED),
    *NEW_FORMATS,
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2, {"c": "}"}]}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
]


SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "text": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def found(name, text):
    return list(FORMATS[name].parse(text))


def typed(name, text):
    return list(call_format(name, None, SCHEMAS).parse(text))


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_calls_are_found_as_each_format_writes_them_in_order(name, text):
    assert typed(name, text) == TWO


@pytest.mark.parametrize("name", list(FORMATS))
def test_example_of_each_format_is_read_back(name):
    assert found(name, FORMATS[name].example) == [ToolCall("f", {"x": "1"})]
    assert FORMATS[name].beside(f"So. {FORMATS[name].example}") == "So. "


@pytest.mark.parametrize("name", list(FORMATS))
def test_an_answer_is_no_call(name):
    for text in ("", "The answer is 85.", '{"answer": 85}', '{"name": "Ada"}', "[1, 2]", "a < b > c {"):
        assert found(name, text) == [], text


@pytest.mark.parametrize(
    "said",
    [
        "<|channel|>analysis<|message|>Sum from=1 to=n. Done.",
        "<|channel|>analysis<|message|>I use commentary to=functions.f next.",
        "<|channel|>commentary to=functions.f",
    ],
)
def test_harmony_calls_are_read_from_headers_alone(said):
    assert found("harmony", f"{said}<|end|><|start|>assistant<|channel|>final<|message|>85.<|return|>") == []
    call = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    assert found("harmony", call) == [ToolCall("f", {"x": 1})]
    assert found("harmony", f"{said}<|end|><|start|>assistant{call}") == [ToolCall("f", {"x": 1})]


IDS = [
    ("kimi", FORMATS["kimi"].example.replace(":0", ":7"), "functions.f:7"),
    ("solar", FORMATS["solar"].example, "1"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]12ab56789[ARGS]{}", "12ab56789"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "12ab56789"}]', "12ab56789"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]12[ARGS]{}", ""),  # the templates refuse it
    ("mistral", "[TOOL_CALLS]f[ARGS]{}", ""),
    ("hermes", '<tool_call>{"id": "c1", "function": {"name": "f", "arguments": {}}}</tool_call>', "c1"),
    ("hermes", '<tool_call>{"id": "<|im_end|>", "name": "f", "arguments": {}}</tool_call>', ""),
    ("hermes", '<tool_call>{"id": [1], "name": "f", "arguments": {}}</tool_call>', ""),
]


@pytest.mark.parametrize(("name", "text", "written"), IDS)
def test_a_call_has_the_id_that_the_policy_wrote(name, text, written):
    (call,) = found(name, text)
    assert (call.name, call.id) == ("f", written)
    (call,) = call_format(name, None, SCHEMAS).parse(text)
    assert call.id == written


AROUND = {  # what stands around the text of a call, or of its arguments
    "apertus": "<|tools_prefix|>{}<|tools_suffix|>",
    "cohere": "<|START_ACTION|>{}<|END_ACTION|>",
    "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "functionary": "all\nSo.>>>add\n{}",
    "gemma": "<|tool_call>call:{}<tool_call|>",
    "gigachat": "<|function_call|>{}",
    "granite": "<|tool_call|>{}",
    "harmony": "<|channel|>commentary to=functions.add<|message|>{}<|call|>",
    "hermes": "<tool_call>{}</tool_call>",
    "kimi": "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "lfm2": "<|tool_call_start|>{}<|tool_call_end|>",
    "llama3": "<|python_tag|>{}",
    "mistral": "[TOOL_CALLS]{}",
    "nemotron": "<TOOLCALL>{}</TOOLCALL>",
    "solar": "<|tool_call:begin|>1<|tool_call:name|>add<|tool_call:args|>{}<|tool_call:end|>",
    "tool_calls": "<tool_calls>{}</tool_calls>",
}
TAGS = {
    "function": "<function=add>{}</function>",
    "glm": "<tool_call>add {}</tool_call>",
    "invoke": '<invoke name="add">{}</invoke>',
    "kimi_k3": '<|open|>call tool="add"<|sep|>{}<|close|>call<|sep|>',
    "minimax_m3": ']<]minimax[>[<invoke name="add">{}]<]minimax[>[</invoke>',
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


@pytest.mark.parametrize("name", [*AROUND, *TAGS])
def test_broken_calls_carry_a_short_problem(name):
    for body in BROKEN:
        (call,) = found(name, (AROUND | TAGS)[name].replace("{}", body))
        no_arguments = name in TAGS and not body
        assert (call == ToolCall("add")) if no_arguments else (call.problem and not call.name), body[:20]
        assert len(call.problem) <= 200, body[:20]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("json", 'I call {"name": "add", "arguments": {"a": 1', "cannot be read"),
        ("python", "[add(1, 2)]", "expected the name, not '1'"),
        ("python", "[add(a=1, a=2)]", "'a' is given twice"),
        ("python", "[add(a=b)]", "expected a value, not 'b'"),
        ("python", "[add(a=__import__('os').system('true'))]", "expected a value, not '__import__'"),
        ("python", "[add(a={1: 2})]", "the key 1 must be a text"),
        ("python", f"[add(a={'[' * 200}{']' * 200})]", "nested too deeply"),
        ("python", "[add(a='\\x')]", "cannot be read"),
        ("python", "[add(a=1) and more", "unexpected"),
        ("function", "<function=a b></function><function=add>x</function>", "unexpected 'x'"),
        ("function", "<function=add><parameter=a>1</function>", "'a' is not closed by </parameter>"),
        (
            "function",
            "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "'a' is given twice",
        ),
        ("glm", "<tool_call>1. add</tool_call>", "'1.' is not the name of a tool"),
        ("gemma", "<|tool_call>call:add{a:<tool_call|>", "cannot be read"),
        ("hermes", '<tool_call>{"name": "add"} {"name": 1}</tool_call>', "a call must be"),
    ],
)
def test_problem_tells_what_cannot_be_read(name, text, problem):
    assert problem in found(name, text)[-1].problem


@pytest.mark.parametrize("name", list(FORMATS))
def test_hostile_turns_never_raise(name):
    example = FORMATS[name].example
    pieces = [example[:half] for half in range(1, len(example), 3)] + [
        example[half:] for half in range(0, len(example), 3)
    ]
    for piece in [
        *pieces,
        *FORMATS[name].begins,
        "f(x=",
        "{",
        '{"name":',
        "<",
        ">>>f\n",
        "'",
        "]<]minimax[>[<a>",
    ]:
        list(FORMATS[name].parse(piece * (20_000 // len(piece))))


@pytest.mark.parametrize("name", [*sorted(AROUND.keys() - {"gemma", "lfm2"}), "json"])
def test_marks_in_the_text_of_an_argument_are_text(name):
    example = FORMATS[name].example
    text = example.replace('"1"', json.dumps(f"{example} {example}"))
    assert found(name, f"{text}\n{text}") == [ToolCall("f", {"x": f"{example} {example}"})] * 2
    if name == "mistral":
        named = '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]g[ARGS]{}"}'
        assert found(name, named) == [ToolCall("f", {"x": "[TOOL_CALLS]g[ARGS]{}"})]
        assert found(name, f"[TOOL_CALLS]{json.dumps([{'name': 'f', 'arguments': {'x': named}}])}") == [
            ToolCall("f", {"x": named})
        ]


@pytest.mark.parametrize("name", list(FORMATS))
def test_time_for_a_hostile_turn_is_bounded(name):
    """A quadratic parser would need a minute for the longest turns, and fails at the shortest."""
    example = FORMATS[name].example
    end = FORMATS[name].stop(1) or example[max(example.rfind("<"), 0) :]
    for size in (5_000, 60_000):
        for piece in re.finditer(r"\w+\W", example):
            begun = example[: piece.end()]
            for text in (begun * (size // len(begun)), begun + " " * size + end):
                start = time.process_time()
                list(FORMATS[name].parse(text))
                assert time.process_time() - start < 5.0, text[: len(begun) + 20]


@pytest.mark.parametrize(
    "body", ['{"arguments": {}}', '{"name": 5, "arguments": {}}', '{"name": "f", "arguments": [1]}']
)
def test_calls_need_a_name_and_an_object_of_arguments(body):
    (call,) = found("hermes", f"<tool_call>{body}</tool_call>")
    assert "a call must be" in call.problem or "arguments must be an object" in call.problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}'),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        ),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"),
        ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"),
        ("tool_calls", "<tool_calls>[]"),
        ("function", "<function=now>"),
        ("gemma", "<|tool_call>call:now{}"),
        ("lfm2", "<|tool_call_start|>[now()]"),
    ],
)
def test_unclosed_call_is_reported(name, text):
    assert "not closed" in found(name, text)[0].problem


@pytest.mark.parametrize(
    ("name", "key"),
    product(("hermes", "json", "llama3"), ("arguments", "parameters", "args", "kwargs", "params", "input")),
)
def test_arguments_are_read_under_the_keys_of_others(name, key):
    for value in ({"a": 1}, json.dumps({"a": 1})):
        for call in (
            {"name": "add", key: value},
            {"function": "add", key: value},
            {"function": {"name": "add"}, key: value},
        ):
            assert found(name, f"<tool_call>{json.dumps(call)}</tool_call>") == [ToolCall("add", {"a": 1})]


def test_call_without_arguments_has_no_other_keys():
    assert found("hermes", '<tool_call>{"type": "function", "name": "now", "id": "1"}</tool_call>') == [
        ToolCall("now")
    ]
    (call,) = found("hermes", '<tool_call>{"name": "add", "a": 1}</tool_call>')
    assert "'a'" in call.problem and not call.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '```json\n[{"name": "now", "parameters": {}}]\n```'),
        ("llama3", "<function=now>{}</function>"),
        ("json", 'functools[{"name": "now", "arguments": {}}]'),
        ("function", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"),
        ("invoke", '<function_calls>\n<invoke name="now"></invoke>\n</function_calls>'),
        ("granite", '<tool_call>[{"name": "now", "arguments": {}}]'),
        ("gigachat", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}'),
        ("python", "<function_calls>now()</function_calls>"),
    ],
)
def test_text_before_a_call_has_none_of_its_marks(name, text):
    assert found(name, text) == [ToolCall("now")]
    assert FORMATS[name].beside(f"<think>[1]</think> So: \n{text}") == "<think>[1]</think> So: \n"


@pytest.mark.parametrize("name", list(FORMATS))
def test_call_in_the_form_of_another_model_is_noticed(name):
    form = FORMATS["gemma" if name != "gemma" else "kimi"]
    if not found("gemma" if name != "gemma" else "kimi", FORMATS[name].example):
        (call,) = stray_calls(FORMATS[name].example, ["f"], form)
        assert form.example[:40] in call.problem
    assert stray_calls(FORMATS[name].example, ["g"], form) == []


def test_calls_up_to_the_limit_of_their_length_are_read():
    call = {"name": "add", "arguments": {"a": ""}}
    call["arguments"]["a"] = "x" * (MAX_CALL_CHARS - len(json.dumps(call)))
    assert found("hermes", f"<tool_call>{json.dumps(call)}</tool_call>")[0].name == "add"
    call["arguments"]["a"] += "x"
    assert str(MAX_CALL_CHARS) in found("hermes", f"<tool_call>{json.dumps(call)}</tool_call>")[0].problem


def test_texts_get_the_types_of_the_schema():
    text = "<parameter=a>{}</parameter><parameter=text>{}</parameter><parameter=new>{}</parameter>"
    for written, value in [("7", 7), ("7.0", 7), ("seven", "seven"), ("true", "true"), ("7.5", "7.5")]:
        (call,) = typed("function", f"<function=add>{text.format(written, written, written)}</function>")
        assert call.arguments["a"] == value and call.arguments["text"] == written
    assert type(call.arguments["a"]) is str and call.arguments["new"] == 7.5
    deep = "[" * 5000
    (call,) = typed("function", f"<function=add><parameter=b>{deep}</parameter></function>")
    assert call.arguments == {"b": deep}


@pytest.mark.parametrize(("number", "read"), [(3.0, 3), (-2.0, -2), (3.5, 3.5)])
def test_number_without_fraction_is_read_as_integer_asked_for(number, read):
    either, inner = {"type": ["integer", "null"]}, {"type": "array", "items": {"type": "integer"}}
    properties = {"a": {"type": "integer"}, "b": {"type": "number"}, "c": either, "d": inner}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    call = {"name": "f", "arguments": {"a": number, "b": number, "c": number, "d": [number]}}
    (found,) = call_format("hermes", None, [tool]).parse(f"<tool_call>{json.dumps(call)}</tool_call>")
    assert repr(found.arguments) == repr({"a": read, "b": number, "c": read, "d": [read]})


CHATML = """{{%- if tools %}}{shows}{{% endif %}}
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}
{{%- for c in m.tool_calls or [] %}}{{%- set f = c.function %}}{call}{{%- endfor %}}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"""
JSON_CALL = "{{ f | tojson }}"
PYTHON_CALL = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }},{% endfor %})"
EACH = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
WRITERS = [
    ("hermes", f"<tool_call>{JSON_CALL}</tool_call>"),
    ("hermes", "<tool_call>{{ c | tojson }}</tool_call>"),
    ("llama3", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'),
    ("mistral", f"[TOOL_CALLS][{JSON_CALL}]"),
    ("mistral", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    ("mistral", "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}"),  # it accepts only a string
    (
        "deepseek",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
    ),
    (
        "harmony",
        " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>",
    ),
    ("apertus", "<|tools_prefix|>[{{ {f.name: f.arguments} | tojson }}]<|tools_suffix|>"),
    ("json", f"I call {JSON_CALL} now."),
    (
        "lfm2",
        "<|tool_call_start|>[{{ f.name }}("
        + EACH.replace("PAIR", "{{ k }}={{ v | tojson }},")
        + ")]<|tool_call_end|>",
    ),
    ("python", f"[{PYTHON_CALL}]"),
    (
        "function",
        "<function={{ f.name }}>"
        + EACH.replace("PAIR", f"<parameter={{{{ k }}}}>{VALUE}</parameter>")
        + "</function>",
    ),
    (
        "invoke",
        '<a:invoke name="{{ f.name }}">'
        + EACH.replace("PAIR", f'<a:parameter name="{{{{ k }}}}">{VALUE}</a:parameter>')
        + "</a:invoke>",
    ),
    (
        "glm",
        "<think>\n</think><tool_call>{{ f.name }}"
        + EACH.replace("PAIR", f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{VALUE}</arg_value>")
        + "</tool_call>",
    ),
]


@pytest.fixture
def tokenizer_with(tokenizer):
    """Return a tokenizer whose chat template writes calls with some Jinja."""

    def made(call, shows="{{ tools | tojson }}"):
        other = copy.deepcopy(tokenizer)
        other.chat_template = CHATML.format(call=call, shows=shows)
        return other

    return made


@pytest.mark.parametrize(("name", "call"), WRITERS)
def test_auto_takes_the_format_that_the_template_writes(tokenizer_with, name, call):
    assert call_format("auto", tokenizer_with(call)) is FORMATS[name]
    assert call_format("solar", tokenizer_with(call)) is FORMATS["solar"]


def test_auto_refuses_calls_that_are_not_read_back(tokenizer_with, caplog):
    with pytest.raises(ConfigError):
        call_format("auto", tokenizer_with("CALL {{ f.name }}: {{ f.arguments | tojson }}"))
    lossy = "<tool_call>{{ {'name': f.name, 'arguments': {'code': f.arguments.code}} | tojson }}</tool_call>"
    with pytest.raises(ConfigError):
        call_format("auto", tokenizer_with(lossy))
    with pytest.raises(ConfigError):
        call_format("auto", tokenizer_with(""))
    with pytest.raises(ConfigError):
        call_format("hermse", tokenizer_with(""))
    assert not caplog.records


def test_template_without_tools_reads_hermes_and_reports_it(tokenizer_with, caplog):
    assert call_format("auto", tokenizer_with("", shows="")) is FORMATS["hermes"]
    (line,) = caplog.messages
    assert "writes no tool calls, so they are read as hermes: <tool_call>{" in line


def test_auto_reads_calls_that_only_stand_beside_null(tokenizer_with):
    tokenizer = tokenizer_with(
        f"{{% if m.content is none %}}<TOOLCALL>[{JSON_CALL}]</TOOLCALL>{{% endif %}}", ""
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content }}", "(m.content or '') }}")
    assert call_format("auto", tokenizer) is FORMATS["nemotron"]


def test_hermes_is_not_taken_if_the_template_has_other_marks(tokenizer_with):
    hidden = tokenizer_with("{% if c.never %}<TOOLCALL>{% endif %}", shows="")
    with pytest.raises(ConfigError):
        call_format("auto", hidden)
    refusing = tokenizer_with("{{ raise_exception('no calls here') }}<TOOLCALL>", shows="")
    with pytest.raises(ConfigError):
        call_format("auto", refusing)
    with pytest.raises(ConfigError):
        call_format("auto", tokenizer_with("{{ raise_exception('no calls here') }}"))


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
    assert FORMATS["harmony"].stop(max_calls=4) == "<|call|>"
    assert FORMATS["hermes"].stop(max_calls=4) == "" and FORMATS["hermes"].stop(max_calls=1) == "</tool_call>"
