"""What a row holds beside its prompt is used or refused: tools, template variables, weights, thoughts, nulls, pictures."""

import copy
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rl4llm.core.errors import DataError, TemplateError
from rl4llm.core.types import ChatMessage
from rl4llm.data.demonstrations import demonstration, demonstration_group, label_group, pair_group
from rl4llm.data.lengths import dropped
from rl4llm.data.load import load_rows
from rl4llm.data.read import has_splits
from rl4llm.data.render import Renderer
from tests.data.test_demonstrations import TEMPLATES
from tests.data.test_render import SPECIALS, tokenizers

__all__ = ["tokenizers"]

PROPERTIES = {"city": {"type": "string", "description": "The city."}}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": PROPERTIES},
    },
}
ASKED, SAID = {"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "18C"}
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONCATENATING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def renderer(tokenizer):
    def make(template="chatml_tools", **options):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template if "{" in template else (TEMPLATES / f"{template}.jinja").read_text()
        return Renderer(changed, **options)

    return make


def called(name="get_weather", **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def turns(renderer, row, group=demonstration_group, learns_from="demonstrations"):
    """Return what is read and what is learned of a row, as texts, from the first trajectory of its group."""
    (loaded,) = load_rows([row], learns_from=learns_from)
    spans = group(renderer, loaded, "p").trajectories[0].spans
    return ["".join(renderer.decode(span.token_ids) for span in spans)], [
        renderer.decode(span.token_ids) for span in spans if span.author == "policy"
    ]


CALLS = [
    {"messages": [ASKED, called(name, **arguments), {"role": "tool", "content": "x"}, SAID], "tools": [tool]}
    for name, arguments, tool in (
        ("get_weather", {"city": "P", "days": [1, None]}, SCHEMA),
        ("add", {"n": 3, "more": {"m": 4}}, {"type": "function", "function": {"name": "add", "parameters": {
            "type": "object", "properties": {"n": {"type": "integer", "enum": [1, 3]}}}}}),
        ("now", {}, {"type": "function", "function": {"name": "now", "description": "Time"}}),
    )
]  # fmt: skip


def as_parquet(rows, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def as_saved(rows, tmp_path):
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


TABLES = {
    "dataset": lambda rows, tmp_path: datasets.Dataset.from_list(rows),
    "streamed": lambda rows, tmp_path: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "splits": lambda rows, tmp_path: datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}),
    "parquet": as_parquet,
    "saved": as_saved,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_gives_each_call_only_its_own_arguments(table, tmp_path):
    source = TABLES[table](CALLS, tmp_path)
    read, written = (
        list(load_rows(rows, learns_from="demonstrations"))
        for rows in (source, json.loads(json.dumps(CALLS)))
    )
    assert [row["messages"] for row in read] == [row["messages"] for row in written]
    assert [row["tools"] for row in read] == [row["tools"] for row in written]


def test_other_columns_of_a_table_keep_their_nulls():
    rows = datasets.Dataset.from_list([{"prompt": "a", "info": {"x": 1}}, {"prompt": "b", "info": {"y": 2}}])
    assert [row["info"] for row in load_rows(rows)] == [{"x": 1, "y": None}, {"x": None, "y": 2}]


def test_a_null_in_a_json_file_is_an_argument(tmp_path):
    row = {"messages": [ASKED, called(city=None), {"role": "tool", "content": "x"}, SAID]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (loaded,) = load_rows(tmp_path / "a.jsonl", learns_from="demonstrations")
    assert loaded["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": None}


FUNCTION = SCHEMA["function"]
PAIRS = [(key, json.dumps(value)) for key, value in PROPERTIES.items()]
FORMS = {
    "a list": [SCHEMA],
    "text": json.dumps([SCHEMA]),
    "texts": [json.dumps(SCHEMA)],
    "one": SCHEMA,
    "a bare function": [FUNCTION],
    "only properties": json.dumps([{**FUNCTION, "parameters": PROPERTIES}]),
    "parameters as text": [{"type": "function", "function": {**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}}],
    "properties as pairs": [{**FUNCTION, "parameters": {"type": "object", "properties": PAIRS}}],
    "of Anthropic": [{"name": "get_weather", "description": "Weather", "input_schema": FUNCTION["parameters"]}],
    "of MCP": [{"name": "get_weather", "description": "Weather", "inputSchema": FUNCTION["parameters"]}],
    "a function as text": [{"type": "function", "function": json.dumps(FUNCTION)}],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_schemas_are_read_in_the_forms_of_data_sets(form):
    (row,) = load_rows([{"prompt": "Paris?", "tools": FORMS[form]}])
    assert row["tools"] == [SCHEMA]


def test_schemas_may_be_called_functions():
    for source in (
        [{"prompt": "Paris?", "functions": [FUNCTION]}],
        datasets.Dataset.from_list([{"prompt": "a", "functions": [FUNCTION]}]),
    ):
        assert load_rows(source)[0]["tools"] == [SCHEMA]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_a_row_without_tools_has_none(tools, renderer):
    made = renderer()
    (row,) = load_rows([{"prompt": "Paris?", "tools": tools}])
    assert made.of_row(row) is made


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("chatml_tools", ("user", "tool")),
        ("thinking_chatml", ("user", "tool")),
        ("headers_bos", ("user", "tool")),
        ("inst", ()),
    ],
)
def test_tools_of_a_row_are_shown_as_those_of_an_environment(template, roles, tokenizers):
    tokenizer = tokenizers[template]
    plain, own = Renderer(tokenizer, roles=roles), Renderer(tokenizer, [SCHEMA], roles)
    shown = plain.of_row({"tools": [SCHEMA]})
    asked = [ChatMessage("user", "Paris?")]
    assert shown.first(asked) == own.first(asked) != plain.first(asked)
    said = [*asked, ChatMessage("assistant", "18C")]
    for role in roles:
        new = [ChatMessage(role, "More?")]
        assert shown.following(new, ended=True, messages=said) == own.following(
            new, ended=True, messages=said
        )
    assert plain.of_row({"tools": [SCHEMA]}) is shown


def test_tools_that_change_each_turn_are_shown_in_each_turn(renderer):
    repeating = THINKING.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.role == 'user' %}{{ tools | tojson if tools }}{% endif %}"
    )
    plain, own = renderer(repeating, roles=("user",)), renderer(repeating, tools=[SCHEMA], roles=("user",))
    shown, new = plain.of_row({"tools": [SCHEMA]}), [ChatMessage("user", "More?")]
    said = [ChatMessage("user", "Paris?"), ChatMessage("assistant", "18C")]
    assert shown.following(new, ended=True, messages=said) == own.following(new, ended=True, messages=said)
    assert "get_weather" in shown.decode(shown.following(new, ended=True, messages=said))
    assert "get_weather" not in plain.decode(plain.following(new, ended=True, messages=said))


def test_template_variables_of_a_row_are_those_of_the_template(renderer):
    plain, own = (
        renderer("thinking_chatml"),
        renderer("thinking_chatml", template_args={"enable_thinking": False}),
    )
    asked = [ChatMessage("user", "Paris?")]
    for value in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        (row,) = load_rows([{"prompt": "Paris?", "chat_template_kwargs": value}])
        assert plain.of_row(row).first(asked) == own.first(asked) != plain.first(asked)
    back = own.of_row({"chat_template_kwargs": {"enable_thinking": True}})
    assert back.first(asked) == plain.first(asked)
    both = own.of_row({"chat_template_kwargs": {"enable_thinking": True}, "tools": [SCHEMA]})
    assert both.first(asked) == plain.of_row({"tools": [SCHEMA]}).first(asked)
    with pytest.raises(DataError):
        plain.of_row({"chat_template_kwargs": {"tokenize": True}})


def test_tools_of_a_row_and_of_an_environment_clash(renderer):
    other = {"type": "function", "function": {"name": "calculator"}}
    with pytest.raises(DataError):
        renderer(tools=[other]).of_row({"tools": [SCHEMA]})
    kept = renderer("thinking_chatml", tools=[other]).of_row(
        {"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert "calculator" in kept.decode(kept.first([ChatMessage("user", "a")]))


def test_a_template_that_hides_tools_gets_them_in_words(renderer):
    with pytest.raises(TemplateError):
        renderer("start_of_turn", roles=()).of_row({"tools": [SCHEMA]})
    told = renderer(THINKING, roles=(), call_example="<call>f(x)</call>").of_row({"tools": [SCHEMA]})
    text = told.decode(told.first([ChatMessage("user", "a")]))
    assert "get_weather" in text
    assert "<call>f(x)</call>" in text


ANSWERS = {
    "demonstrations": (demonstration_group, {"messages": [ASKED, SAID]}),
    "pairs": (pair_group, {"prompt": "Paris?", "chosen": "18C", "rejected": "9C"}),
    "labels": (label_group, {"prompt": "Paris?", "completion": "18C", "label": True}),
}


@pytest.mark.parametrize("learns_from", ANSWERS)
def test_every_kind_of_answer_reads_the_tools_of_its_row(learns_from, renderer):
    group, row = ANSWERS[learns_from]
    (whole,), learned = turns(renderer(), {**row, "tools": [SCHEMA]}, group, learns_from)
    assert "get_weather" in whole
    assert learned == ["18C<|im_end|>"]


@pytest.mark.parametrize("name", SPECIALS)
def test_weights_change_only_what_is_learned(name, tokenizers):
    made = Renderer(tokenizers[name], roles=("user",))
    thought = made.content("hm\n</think>\n\n") if made.content("") else ""  # which the template asks for
    said = [ASKED, {**SAID, "content": f"{thought}WRONG"}, ASKED, {**SAID, "content": f"{thought}18C"}]
    plain = demonstration(made, [ChatMessage.from_dict(message) for message in said], "p")
    for weights in ((0, 1), (1, 0), (1, 1), (None, 0)):
        said[1]["weight"], said[3]["weight"] = weights
        marked = demonstration(made, [ChatMessage.from_dict(message) for message in said], "p")
        assert marked.token_ids == plain.token_ids
        assert [span.token_ids for span in marked.spans] == [span.token_ids for span in plain.spans]
        first, second = ("policy" if learned else "context" for learned in (weights[0] != 0, weights[1]))
        wanted = ["context", first, "context", second]
        assert [span.author for span in marked.spans] == wanted


def test_weights_of_other_messages_count_where_these_are_learned(renderer):
    told = [{"role": "user", "content": "a"}, SAID, {"role": "user", "content": "b", "weight": 0}, SAID]
    made = renderer(roles=("user",))
    messages = [ChatMessage.from_dict(message) for message in told]
    spans = demonstration(made, messages, "p", learned="all").spans
    assert [span.author for span in spans] == ["context", "policy", "context", "policy"]
    with pytest.raises(DataError):
        load_rows([{"messages": told}], learns_from="worlds")
    mixed = {"messages": [*told[:3], {"role": "user", "content": "c"}, SAID]}
    for learns_from in ("worlds", "conversations"):
        with pytest.raises(DataError):
            load_rows([mixed], learns_from=learns_from)
    assert load_rows([mixed], learns_from="demonstrations")  # where nothing of the user's is learned


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_learned_where_the_template_renders_it(key, renderer):
    row = {"messages": [ASKED, {**SAID, key: "two and two"}]}
    for read in ("reasoning_content", "reasoning", "thinking"):
        _, learned = turns(renderer(THINKING.replace("reasoning_content", read), roles=()), row)
        assert learned == ["<think>\ntwo and two\n</think>\n\n18C<|im_end|>"]


def test_a_thought_that_a_template_drops_is_refused(renderer):
    row = {"messages": [ASKED, {**SAID, "thinking": "two and two"}]}
    with pytest.raises(DataError):
        turns(renderer(), row)
    only_long = THINKING.replace(
        "{% if m.reasoning_content %}", "{% if m.reasoning_content and m.content | length > 5 %}"
    )
    with pytest.raises(DataError):
        turns(renderer(only_long, roles=()), row)
    with pytest.raises(TemplateError):
        renderer().first([ChatMessage.from_dict(message) for message in (*row["messages"], ASKED)])


def test_a_template_gets_arguments_in_the_form_that_it_writes(renderer):
    row = {"messages": [ASKED, called(city="P"), {"role": "tool", "content": "x"}, SAID]}
    _, learned = turns(renderer(CONCATENATING, roles=("tool",)), row)
    assert learned == ['get_weather:{"city": "P"}<|im_end|>', "18C<|im_end|>"]
    as_text = copy.deepcopy(row)
    as_text["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city": "P"}'
    for template in (CONCATENATING, "chatml_tools"):
        made = renderer(template, roles=("tool",))
        assert turns(made, as_text) == turns(made, row)


FLAT = {
    "city": {"description": "The city.", "type": "str", "default": "Paris"},
    "days": {"type": "int, optional"},
}
CALLING = {
    "id": 0,
    "query": "Weather in Paris and Rome?",
    "tools": json.dumps([{"name": "get_weather", "description": "Weather", "parameters": FLAT}]),
    "answers": json.dumps(
        [
            {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
            {"name": "get_weather", "arguments": {"city": "Rome"}},
        ]
    ),
}


@pytest.mark.parametrize("stored", ["text", "list", "arguments as text"])
@pytest.mark.parametrize("options", [{}, {"prompt_column": "query", "answer_column": "answers"}])
def test_answers_beside_tools_are_calls_of_the_assistant(stored, options, renderer):
    calls = json.loads(CALLING["answers"])
    if stored == "arguments as text":
        calls = [{**call, "arguments": json.dumps(call["arguments"])} for call in calls]
    row = CALLING if stored == "text" else {**CALLING, "answers": calls}
    (read,) = load_rows([row], learns_from="demonstrations", **options)
    asked, said = read["messages"]
    assert asked == {"role": "user", "content": CALLING["query"]} and said["content"] == ""
    assert [call["function"] for call in said["tool_calls"]] == json.loads(CALLING["answers"])
    (trajectory,) = demonstration_group(renderer(), read, "a").trajectories
    context, learned = (renderer().decode(span.token_ids) for span in trajectory.spans)
    assert (
        '"description": "The city."' in context
        and "Rome" not in context.split("Weather in Paris and Rome?")[1]
    )
    assert learned.count("<tool_call>") == 2 and '"city": "Rome"' in learned and '\\"' not in learned


def test_lines_in_a_json_file_are_rows(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    file = tmp_path / "train.json"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert [row["messages"][0]["content"] for row in load_rows(file)] == ["a", "b"]
    assert not has_splits(file)
    file.write_text(json.dumps({"train": rows}) + "\n")
    assert has_splits(file)
    assert len(load_rows(file)) == 2


EMPTY, SYSTEM, Q = (
    {"role": "assistant", "content": " "},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "q"},
)
PAIR, UNLEARNED = {"prompt": "p", "chosen": "a", "rejected": "b"}, {**SAID, "weight": 0}
GOOD = {
    "pairs": PAIR,
    "comparisons": PAIR,
    "labels": {"prompt": "p", "completion": "a", "label": True},
    "worlds": {"messages": [ASKED, SAID, ASKED]},
    "conversations": {"messages": [ASKED, SAID]},
    "demonstrations": {"messages": [ASKED, SAID]},
    "episodes": {"prompt": "a"},
}
BAD = {
    "pairs": [
        {"prompt": "p", "chosen": "a"},
        {"prompt": "p", "rejected": "a"},
        {**PAIR, "rejected": None},
        {**PAIR, "rejected": "a"},
        {**PAIR, "chosen": ""},
        {**PAIR, "rejected": " "},
        {**PAIR, "rejected": []},
        {**PAIR, "chosen": [SAID, ASKED, EMPTY]},
        {"chosen": [ASKED, EMPTY], "rejected": [ASKED, SAID]},
        {**PAIR, "rejected": 3},
        {**PAIR, "rejected": [{"role": "bot", "content": "x"}]},
        {**PAIR, "prompt": " "},
        {"chosen": "The sky is blue.", "rejected": "The sky is red."},
        {"chosen": [ASKED, SAID], "rejected": [Q, EMPTY]},
        {"chosen": [SYSTEM, ASKED, SAID], "rejected": [SYSTEM, Q, EMPTY]},
        {"prompt": "other", "chosen": [ASKED, SAID], "rejected": [ASKED, EMPTY]},
        {"chosen": [ASKED], "rejected": [ASKED, SAID]},
        {**PAIR, "rejected": [ASKED, SAID]},
        {**PAIR, "margin": "big"},
        {**PAIR, "margin": -1},
        {**PAIR, "margin": "nan"},
        {**PAIR, "chosen": [SAID, ASKED]},
        {**PAIR, "chosen": [UNLEARNED]},
        {**PAIR, "a": {"bytes": None, "path": "1.PNG"}},
    ],
    "comparisons": [{**PAIR, "chosen": [{**SAID, "train": True}]}, {**PAIR, "prompt": [{**ASKED, "loss": 0}]}],
    "labels": [
        {"prompt": "p", "label": True},
        {"prompt": "p", "completion": "a"},
        {"prompt": "p", "completion": "a", "label": "yes"},
        {"prompt": "p", "completion": "a", "label": 0.7},
        {"completion": "a", "label": True},
        {"prompt": "p", "completion": [ASKED], "label": True},
        {"prompt": "p", "completion": [UNLEARNED], "label": True},
    ],
    "worlds": [{"messages": [ASKED, SAID]}, {"messages": [ASKED, SAID, {**ASKED, "weight": 0}]}],
    "conversations": [{"messages": [ASKED, SAID, {**ASKED, "weight": 0}, {"role": "tool", "content": "x"}]}],
    "demonstrations": [
        {"prompt": "2+2?"},
        {"body": "2+2? 4"},
        {"prompt": "2+2?", "completion": " "},
        {"prompt": [ASKED, SAID, ASKED], "completion": "4"},
        {"instruction": "2+2?", "input": "", "output": "4", "history": [["1+1?", "2"]]},
        *({"instruction": "Double it.", "input": wrong, "output": "4"} for wrong in (2, 0, False, b"")),
        {"text": "2+2 is 4", "system": "Be brief."},
        {"text": "Question: 2+2? Answer: 4", "question": "2+2?", "answer": "4"},
        {"text": "\n"},
        {"text": 5},
        {"text": b"Hello"},
        {"messages": [ASKED, SAID, SAID]},
        {"messages": [SAID, ASKED, SAID]},
        {"prompt": "2+2?", "completion": "5", "label": False},
        {"messages": [ASKED, SAID, ASKED, ASKED]},
        {"prompt": "2+2?", "completion": [SAID, ASKED]},
        {"prompt": "Write a chat.", "completion": json.dumps([ASKED, SAID])},
        {"messages": [ASKED, EMPTY]},
        {"messages": [ASKED]},
        {"messages": []},
        {"messages": "[a"},
        {"messages": repr([ASKED, {"role": "assistant"}])},
        {"messages": [ASKED, {"role": "assistant", "content": None}]},
        {"messages": [ASKED, UNLEARNED]},
        {"messages": [{**ASKED, "train": True}, SAID]},
        {"messages": [ASKED, {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
        {"conversations": [{"from": "bot", "value": "a"}]},
        {"messages": [ASKED, SAID], "image_1": {"bytes": b"RIFF\0\0\0\0WEBPVP8 ", "path": "a"}},
        *({**CALLING, "answers": answers} for answers in (
            "It rains.", '{"name": "f"}', [{"arguments": {}}], '["get_weather"]', [{"name": "f", "arguments": [1]}], "[]"
        )),
        {"prompt": repr([SYSTEM, ASKED]).replace("}, {", "}\n {"), "completion": "2"},
        {"prompt": "1+1?", "completion": repr([SYSTEM, ASKED]).replace("}, {", "}\n {")},
    ],
    "episodes": [
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED, {"role": "user", "content": " "}]},
        {"prompt": " "},
        {"prompt": "\ud83d"},
        {"prompt": [{**ASKED, "rating": 5}]},
        {"prompt": [ASKED], "system": "Be brief.", "system_prompt": "Be long."},
        {"prompt": [SYSTEM, ASKED], "system": "Be long."},
        *({"prompt": "a", "tools": tools} for tools in (
            "calculator", ["calculator"], 5, [{"x": 1}], [{"function": {"name": None}}], "{x", '[{"name": "f", "name": "g"}]'
        )),
        {"prompt": "<image> What is it?", "images": [{"bytes": b"x", "path": None}]},
        {"prompt": "What is it?", "image": "train/1.jpg"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        {"prompt": "What is it?", "image": "iVBORw0KGgoA" * 50},
        {"prompt": "What is it?", "images": [{"image": "1.jpg"}]},
        {"prompt": "What is it?", "images": [{"base64": "iVBORw0KGgoA"}]},
        {"prompt": "What is it?", "images": '["1.jpg", "2.jpg"]'},
        {"prompt": "What is it?", "jpg": b"\xff\xd8\xff\xe0"},
        {"prompt": "What is it?", "videos": ["https://example.com/a"]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("learns_from", "bad"), [(kind, row) for kind in BAD for row in BAD[kind]])
def test_a_bad_row_stops_the_run_or_is_skipped_and_counted(learns_from, bad):
    good = GOOD[learns_from]
    with pytest.raises(DataError, match=r"(?s)dataset\[1\]: .* Or set data\.bad_rows=skip"):
        load_rows([good, bad, good], learns_from=learns_from)
    rows = load_rows([good, bad, bad, good, good], learns_from=learns_from, bad_rows="skip", limit=2)
    assert rows.places == ("dataset[0]", "dataset[3]")
    (warning,) = dropped(rows, rows, "data")
    assert warning.startswith("data: 2 of 4 rows were skipped (data.bad_rows=skip). The first: dataset[1]: ")
    with pytest.raises(DataError):
        load_rows([bad], learns_from=learns_from, bad_rows="skip")


def test_what_is_near_a_bad_row_is_read():
    assert load_rows([{"messages": [{**ASKED, "train": True}, SAID, ASKED]}], learns_from="worlds")
    empty = {"messages": [ASKED, {"role": "assistant", "content": "", "weight": 0}, ASKED, SAID]}
    assert load_rows([empty], learns_from="demonstrations")
    row, columns = (
        {"text": "2+2? 4", "question": "2+2?", "answer": "4"},
        {"prompt_column": "question", "answer_column": "answer"},
    )
    (read,) = load_rows([row], learns_from="demonstrations", **columns)
    assert [message["content"] for message in read["messages"]] == ["2+2?", "4"]
    text = "Human: Hi\n\nAssistant: Hello."
    (row,) = load_rows([{"prompt": "Quote.", "chosen": text, "rejected": "No."}], learns_from="pairs")
    assert row["chosen"] == [{"role": "assistant", "content": text}]  # beside a prompt it is an answer
    with pytest.raises(DataError):
        load_rows([{"messages": [SYSTEM, ASKED]}], system_prompt="Be brief.")


def test_columns_that_only_sound_like_media_are_columns():
    row = {
        "prompt": "a",
        "files": [{"path": "logo.png", "content": "data"}],
        "digest": b"\x00\x01",
        "figure": "absent.png",
        "image": "registry.example/swe:1.2",
        "images": [],
        "audio": None,
        "video": {"bytes": None},
    }
    assert load_rows([row])[0]["image"] == row["image"]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_row_may_bring_its_system_prompt(name):
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]  # as Anthropic writes it
    for told, text in (([ASKED], "Be brief."), ([SYSTEM, ASKED], "Be brief."), ([ASKED], parts)):
        assert load_rows([{"prompt": told, name: text}])[0]["messages"] == [SYSTEM, ASKED]
    with pytest.raises(DataError):
        load_rows([{"prompt": [ASKED], name: "Be brief."}], system_prompt="Hi")
    assert load_rows([{"prompt": [ASKED], name: {"os": "linux"}}])[0]["messages"] == [ASKED]


def test_a_conversation_may_be_stored_as_json_text():
    (row,) = load_rows([{"messages": json.dumps([ASKED, SAID])}], learns_from="demonstrations")
    assert row["messages"] == [ASKED, SAID]


def test_dialogues_in_strings_are_conversations():
    start = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye?\n\nAssistant:"
    (row,) = load_rows([{"chosen": f"{start} Bye.", "rejected": f"{start} No.\n\nNo."}], learns_from="pairs")
    assert row["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye?"},
    ]
    assert row["chosen"] == [{"role": "assistant", "content": "Bye."}]
    assert row["rejected"] == [{"role": "assistant", "content": "No.\n\nNo."}]
