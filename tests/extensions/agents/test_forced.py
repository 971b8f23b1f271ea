"""Calls and formats that an agent forces: constrained where the engine can, and refused with the switch where it cannot."""

import asyncio
import copy
import json
import ssl
from dataclasses import replace

import httpx
import pytest
from later import later

from rl4llm.core.errors import DataError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.grammars import masks
from rl4llm.data.template import decode
from rl4llm.envs import forced
from rl4llm.envs.forced import grammar_of
from rl4llm.envs.tools.formats import FORMATS
from rl4llm.envs.wire import WIRES, Asked, RequestError
from rl4llm.runtime.runner import run

TLS = ssl.create_default_context()  # made once, as that takes longer than most episodes here
QUESTION = [{"role": "user", "content": "How many?"}]
ASKING = {
    "chat/completions": {"messages": QUESTION},
    "responses": {"input": "How many?"},
    "messages": {"messages": QUESTION, "max_tokens": 200},
}
SCHEMA = {
    "type": "object",
    "properties": {"coins": {"type": "integer", "minimum": 1, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["coins", "sure"],
    "additionalProperties": False,
}
CALL = {
    "chat/completions": [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "calculator"}}},
    ],
    "responses": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "name": "calculator"}}],
    "messages": [{"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "calculator"}}],
}  # fmt: skip
FORMAT = {
    "chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    },
    "responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "maxLength": 4}},
            "additionalProperties": False,
        },
    },
}


def answers(wire, *bodies):
    """Return an agent that sends these bodies in one conversation each, and the list of the answers."""
    said = []

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            for body in bodies:
                answer = await http.post(f"{base_url}/{wire}", json={**ASKING[wire], **body}, timeout=60)
                said.append(answer.json())

    return agent, said


def calls_of(wire, body):
    """Return the names and arguments of the calls of an answer."""
    if wire == "chat/completions":
        calls = [call["function"] for call in body["choices"][0]["message"].get("tool_calls", ())]
    elif wire == "responses":
        calls = [item for item in body["output"] if item["type"] == "function_call"]
    else:
        return [(item["name"], item["input"]) for item in body["content"] if item["type"] == "tool_use"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def text_of(wire, body):
    if wire == "chat/completions":
        return body["choices"][0]["message"]["content"]
    return body["output"][0]["content"][0]["text"] if wire == "responses" else body["content"][0]["text"]


def calculator(wire):
    """Return a tool whose calls are short."""
    schema = {"type": "object", "properties": {"expression": {"type": "string", "maxLength": 5}}}
    schema |= {"required": ["expression"], "additionalProperties": False}
    if wire == "messages":
        return {"name": "calculator", "input_schema": schema}
    function = {"name": "calculator", "parameters": schema}
    return {"type": "function", **({"function": function} if wire == "chat/completions" else function)}


@pytest.mark.parametrize("wire", WIRES)
def test_a_forced_call_is_a_call(play, remembering, wire):
    agent, said = answers(wire, *({"tools": [calculator(wire)], **choice} for choice in CALL[wire]))
    result, _ = play(agent, client=remembering)
    assert not result.failed and len(said) == 2
    for body in said:
        ((name, arguments),) = calls_of(wire, body)
        assert name == "calculator" and len(arguments["expression"]) <= 5
    assert result.trajectories[0].extras["metrics"]["ignored_fields"] == 0


@pytest.mark.parametrize("wire", WIRES)
def test_a_forced_format_is_the_answers(play, remembering, tokenizer, wire):
    agent, said = answers(wire, FORMAT[wire], {})
    result, _ = play(agent, client=remembering, params=SamplingParams(max_tokens=120))
    answer = json.loads(text_of(wire, said[0]))
    assert 1 <= answer["coins"] <= 99 and answer["sure"] in (True, False)
    (trajectory,) = result.trajectories
    forced, free = trajectory.policy_spans
    assert forced.grammar and not free.grammar
    assert len(masks(tokenizer, forced.grammar, forced.token_ids)) == len(forced.token_ids)


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_with_tools_may_be_a_call_or_the_format(play, remembering, wire):
    agent, said = answers(wire, *[{"tools": [calculator(wire)], **FORMAT[wire]}] * 8)
    play(agent, client=remembering)
    called = [bool(calls_of(wire, body)) for body in said]
    assert all(call or json.loads(text_of(wire, body)) for call, body in zip(called, said, strict=True))


def test_openais_client_gets_the_object_that_it_parses(play, remembering):
    found = []

    async def agent(task, base_url, api_key):
        class Coins(later.pydantic.BaseModel):
            coins: int
            sure: bool

        async with later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            asked = {"model": "policy", "messages": [{"role": "user", "content": "How many?"}]}
            answer = await client.chat.completions.parse(response_format=Coins, **asked)
            found.append(answer.choices[0].message.parsed)
            tool = later.openai.pydantic_function_tool(Coins, name="count")
            answer = await client.chat.completions.create(tools=[tool], tool_choice="required", **asked)
            found.extend(answer.choices[0].message.tool_calls)

    result, _ = play(agent, client=remembering)
    assert not result.failed and isinstance(found[0].sure, bool) and found[1].function.name == "count"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"enum": ["x" * 200_000]},
        {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 30)]},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(play, remembering, schema):
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    agent, said = answers("chat/completions", body, {})
    result, _ = play(agent, client=remembering)
    assert said[0]["error"]["type"] == "invalid_request_error"
    assert result.failed or len(said) == 2


def test_the_switch_lets_requests_pass_unenforced(play, remembering):
    agent, _ = answers(
        "responses", {"tools": [calculator("responses")], **CALL["responses"][0], **FORMAT["responses"]}
    )
    result, _ = play(agent, client=remembering, unenforced=["tool_choice", "response_format"])
    (trajectory,) = result.trajectories
    assert trajectory.extras["metrics"]["ignored_fields"] == 2 and not trajectory.policy_spans[0].grammar


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_each_grammar_is_read_back(remembering, tokenizer, name):
    form, asked = FORMATS[name], Asked((), (TOOL,), forced=("look_up",))
    with pytest.raises(RequestError):
        grammar_of(asked, replace(form, parse=lambda text: iter(())), tokenizer, [2], "")
    if '{"x": "1"}' not in form.example:
        with pytest.raises(RequestError, match=r"env\.unenforced=\[tool_choice\]"):
            grammar_of(asked, form, tokenizer, [2], "")
        return
    params = SamplingParams(grammar=grammar_of(asked, form, tokenizer, [2], ""))
    run(remembering.load(WeightRef(0)))
    (said,) = remembering.generate_batch([[5, 6]], [params])
    (call,) = form.parse(decode(tokenizer, said.token_ids[:-1]))
    assert said.finish_reason == "stop" and call.name == "look_up" and not call.problem


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(
    ("prompt", "said"), [("<think>\n", "3?\n</think>\n\n85"), ("\n", "<think>3?</think>85"), ("\n", "85")]
)
def test_a_thought_may_come_before_what_is_forced(tokenizer, prompt, said, tokens):
    tokenizer = copy.deepcopy(tokenizer)
    if tokens:
        tokenizer.add_tokens(["<think>", "</think>"])
    grammar = grammar_of(Asked((), schema=("text", {"type": "integer"})), None, tokenizer, [2], prompt)
    matching = [*tokenizer.encode(said), 2]
    if "<think>" in said and not tokens:
        with pytest.raises(DataError):
            masks(tokenizer, grammar, matching)
    else:
        assert len(masks(tokenizer, grammar, matching)) == len(matching)
    with pytest.raises(DataError):
        masks(tokenizer, grammar, [*tokenizer.encode(said.replace("85", "none")), 2])


def form(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def at_once(*bodies):
    """Return an agent that sends these bodies at the same time, and the list of the codes of the answers."""
    codes = []

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS, timeout=60) as http:
            body = ASKING["chat/completions"]
            sent = (http.post(f"{base_url}/chat/completions", json={**body, **each}) for each in bodies)
            codes.extend(answer.status_code for answer in await asyncio.gather(*sent))

    return agent, codes


@pytest.fixture
def compiled(monkeypatch):
    """Counts the processes that compile: those that began, and the most at once."""
    counts = {"began": 0, "most": 0}
    monkeypatch.setattr(forced, "_PROBLEMS", {})
    create, running = forced.create_subprocess_exec, []

    async def counted(*words, **options):
        process = await create(*words, **options)
        running[:] = [each for each in running if each.returncode is None] + [process]
        counts["began"] += 1
        counts["most"] = max(counts["most"], len(running))
        return process

    monkeypatch.setattr(forced, "create_subprocess_exec", counted)
    return counts


def test_forms_compile_one_at_a_time_and_equal_ones_once(play, remembering, compiled):
    schemas = [{"type": name} for name in ("nonsense", "other", "integer")]
    for _ in range(2):
        agent, codes = at_once(*map(form, [*schemas, *schemas]))
        play(agent, client=remembering, params=SamplingParams(max_tokens=9))
        assert sorted(codes) == [200, 200, 400, 400, 400, 400]
    assert compiled == {"began": 3, "most": 1}


def test_a_refused_form_is_forgotten_after_many_others(play, remembering, compiled, monkeypatch):
    monkeypatch.setattr(forced, "REMEMBERED", 2)
    names = ["a", "b", "a", "c", "a", "b"]
    agent, _ = answers("chat/completions", *[form({"type": name}) for name in names], {})
    play(agent, client=remembering)
    assert compiled["began"] == 4  # of a, b and c, and of b again


def test_a_form_may_have_the_text_of_a_token(play, remembering):
    agent, said = answers("chat/completions", form({"enum": ['<[12]> "<[2]>"']}))
    play(agent, client=remembering)
    assert json.loads(text_of("chat/completions", said[0])) == '<[12]> "<[2]>"'


def test_forced_requests_at_once_keep_to_the_limit(play, remembering):
    schemas = [{"type": "integer", "minimum": 0, "maximum": 1000 + i} for i in range(4)]
    agent, codes = at_once(*map(form, schemas))
    play(agent, client=remembering, max_steps=1, params=SamplingParams(max_tokens=9))
    assert sorted(codes) == [200, 400, 400, 400]
    assert len(remembering.record) == 1


def test_a_refused_form_takes_no_request_of_the_limit(play, remembering):
    agent, said = answers("chat/completions", form({"type": "nonsense"}), {}, {})
    play(agent, client=remembering, max_steps=1)
    assert ["error" in body for body in said] == [True, False, True]
