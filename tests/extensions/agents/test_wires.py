"""What programs send beside a conversation: metadata is ignored, content is refused, and a refusal is never forgotten."""

import ssl

import httpx
import pytest
from later import later

from rl4llm.core.types import SamplingParams
from rl4llm.envs.wire import WIRES, RequestError

TLS = ssl.create_default_context()  # made once, as that takes longer than most episodes here
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"name": "calculator", "parameters": PARAMETERS}
QUESTION = [{"role": "user", "content": "How many?"}]
ASKING = {
    "chat/completions": {"messages": QUESTION},
    "responses": {"input": "How many?"},
    "messages": {"messages": QUESTION, "max_tokens": 64},
}
TOOLS = {
    "chat/completions": {"type": "function", "function": CALCULATOR},
    "responses": {"type": "function", **CALCULATOR},
    "messages": {"name": "calculator", "input_schema": PARAMETERS},
}
ONE_CALL = {
    "chat/completions": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
FORCED = {
    "chat/completions": {"tool_choice": "required", "response_format": {"type": "json_object"}},
    "responses": {"tool_choice": "required", "text": {"format": {"type": "json_object"}}},
    "messages": {"tool_choice": {"type": "any"}, "output_format": {"type": "json_schema", "schema": {}}},
}


def read(wire, **fields):
    return WIRES[wire].read_request({**ASKING[wire], **fields}, SamplingParams(), {})


def posting(*bodies, path="chat/completions"):
    """Return an agent that sends these bodies and swallows what is refused."""

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            for body in bodies:
                await http.post(f"{base_url}/{path}", json=body)

    return agent


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [True, 3, "x", {"session": {"id": "x", "tags": ["a"]}}])
def test_unknown_metadata_is_ignored_and_unknown_content_refused(wire, value):
    assert read(wire, invented=value).ignored == ("invented",)
    for content in ([{"text": "x"}], {"edits": [{"text": "x"}]}, [["x"]]):
        with pytest.raises(RequestError):
            read(wire, invented=content)


@pytest.mark.parametrize("wire", WIRES)
def test_a_tool_may_have_unknown_metadata_and_no_unknown_content(wire):
    tool = TOOLS[wire]
    (plain,) = read(wire, tools=[tool]).tools
    if wire != "chat/completions":
        asked = read(
            wire, tools=[{**tool, "eager_input_streaming": True}, {"type": "web_search_2030", "name": "w"}]
        )
        assert asked.tools == (plain,) and asked.ignored == (
            "tools.eager_input_streaming",
            "tools.web_search",
        )
        for wrong in ({**tool, "examples": [{"a": 1}]}, {**tool, "type": "computer"}, 7):
            with pytest.raises(RequestError):
                read(wire, tools=[wrong])


def test_codex_and_claude_code_are_understood():
    assert read("responses", client_metadata={"session_id": "x"}).ignored == ()
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert read("messages", context_management=keep, thinking={"type": "adaptive"}).ignored == ("thinking",)


@pytest.mark.parametrize("wire", WIRES)
def test_what_cannot_be_forced_passes_where_the_run_allows_it(play, wire):
    said, body = [], {**ASKING[wire], "tools": [TOOLS[wire]], **FORCED[wire]}
    result, client = play(posting(body, path=wire), said=said, unenforced=["tool_choice", "response_format"])
    assert len(client.calls) == 1 and len(said) == 2
    assert result.trajectories[0].extras["metrics"]["ignored_fields"] == 2


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("end_is_a_token", [True, False])
def test_one_call_at_a_time_ends_the_answer_after_the_first(
    play, tokenizer, monkeypatch, wire, end_is_a_token
):
    if not end_is_a_token:
        vocabulary = {text: token for text, token in tokenizer.get_vocab().items() if text != "</tool_call>"}
        monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: vocabulary)
    found = []

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            for option in ({}, ONE_CALL[wire]):
                body = {**ASKING[wire], "tools": [TOOLS[wire]], **option}
                answer = (await http.post(f"{base_url}/{wire}", json=body)).text
                found.append((answer.count("37+48"), "<tool_call>" in answer))

    _, client = play(agent, [CALL * 2])
    assert found == [(2, False), (1, False)]
    many, one = (call.params for call in client.calls)
    assert (one.stop, one.stop_token_ids) != (many.stop, many.stop_token_ids)


@pytest.mark.parametrize(("wire", "fields"), [
    ("responses", {"tools": [{"type": "namespace", "name": "a", "tools": [TOOLS["responses"]]}, TOOLS["responses"]]}),
    ("responses", {"text": {"y": [{"z": 1}]}}),
    ("messages", {"tool_choice": {"type": "auto", "x": [{"y": 1}]}}),
    ("messages", {"context_management": {"edits": {"type": "clear_tool_uses_20250919"}}}),
    ("chat/completions", {"system": "Be brief."}),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("chat/completions", {"guided_json": {"type": "object"}}),
    ("chat/completions", {"function_call": {"name": "f"}}),
])  # fmt: skip
def test_what_changes_the_prompt_or_forces_an_answer_is_refused(wire, fields):
    with pytest.raises(RequestError) as refused:
        read(wire, **fields)
    assert refused.value.param in fields


REFUSED = {"messages": QUESTION, "n": 2}
HOW = {"type": "text", "text": "How many?"}


@pytest.mark.parametrize(("bodies", "trains"), [
    ([{"messages": QUESTION}, REFUSED], False),
    ([REFUSED, {"messages": QUESTION}], True),
    ([{"messages": QUESTION}, REFUSED, {"messages": [{"role": "user", "content": "Another?"}]}], False),
    ([{"messages": [{"role": "user", "content": [HOW, {"type": "audio"}]}]}, {"messages": QUESTION}], True),
    ([{"messages": QUESTION}, {"messages": [*QUESTION, {"role": "user", "content": [{"type": "audio"}]}]}], False),
    ([REFUSED, {"messages": [{"role": "user", "content": "Another?"}]}], False),
    ([REFUSED, {"messages": [*QUESTION, {"role": "user", "content": "In JSON."}]}], True),
    ([{"messages": QUESTION}, ["no object"]], False),
    (["no object", {"messages": QUESTION}], True),
])  # fmt: skip
def test_an_episode_with_a_refused_request_fails_unless_repeated(play, bodies, trains):
    """An SDK that swallows the error would otherwise train a cut episode as a whole one."""
    result, _ = play(posting(*bodies))
    assert bool(result.trajectories) == trains
    if not trains:
        assert result.failed[0].failure_class == "agent/refused"
    (episode,) = result.trajectories or result.failed
    assert episode.extras["metrics"]["refused"] == 1


def test_advice_that_was_followed_repeats_the_request(play):
    async def agent(task, base_url, api_key):
        client = later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        with pytest.raises(later.openai.BadRequestError):
            await client.responses.create(model="policy", input="And now?", previous_response_id="resp_x")
        items = [*QUESTION, {"role": "assistant", "content": "85"}, {"role": "user", "content": "And now?"}]
        await client.responses.create(model="policy", input=items)

    assert play(agent)[0].trajectories


def test_an_api_that_is_not_read_fails_the_episode(play):
    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            await http.post(f"{base_url}/chat/completions", json={"messages": QUESTION})
            await http.post(f"{base_url}/embeddings", json={"input": "x"})

    assert play(agent)[0].failed[0].failure_class == "agent/refused"


def test_a_count_of_tokens_ends_nothing(play):
    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            await http.post(f"{base_url}/chat/completions", json={"messages": QUESTION})
            await http.post(f"{base_url}/messages/count_tokens", json={"messages": QUESTION * 200_000})

    assert play(agent)[0].trajectories[0].stop_reason == "done"


def test_a_refusal_of_a_limit_is_an_end_and_no_fault(play):
    result, _ = play(posting(*[{"messages": QUESTION}] * 3), max_steps=2)
    assert result.trajectories[0].stop_reason == "max_steps"


def test_items_of_earlier_answers_are_named_by_their_ids(play):
    async def agent(task, base_url, api_key):
        client = later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        space = {"type": "namespace", "name": "team", "tools": [TOOLS["responses"], {"type": "web_search"}]}
        first = await client.responses.create(model="policy", input="How many?", tools=[space])
        said, call = first.output
        assert call.namespace == "team" and (await client.responses.retrieve(first.id)).output == first.output
        items = [
            {"role": "user", "content": "How many?"},
            {"type": "item_reference", "id": said.id},
            {"id": call.id},
        ]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "85"})
        await client.responses.create(model="policy", input=items, tools=[space])

    result, client = play(agent, [f"Let me see.{CALL}", "Answer: 85"])
    assert not result.failed and not result.trajectories[0].forks and len(client.calls) == 2
    first, second = (tuple(call.prompt_ids) for call in client.calls)
    assert second[: len(first)] == first


def test_sdks_count_tokens_and_read_the_length_of_the_context(play):
    async def agent(task, base_url, api_key):
        client = later.anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key)
        count = await client.messages.count_tokens(model="policy", messages=QUESTION)
        answer = await client.messages.create(model="policy", max_tokens=64, messages=QUESTION)
        assert count.input_tokens == answer.usage.input_tokens > 0
        assert "citations" not in answer.content[0].model_fields_set
        assert (
            await later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key).models.retrieve("policy")
        ).max_model_len > 0

    result, client = play(agent)
    assert not result.failed, result.failed[0].failure
    assert len(client.calls) == 1
