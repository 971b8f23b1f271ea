"""Agents of the SDKs whose defaults are OpenAI's Responses and Anthropic's Messages, from the real packages."""

import json

import agents
import anthropic
import openai
import pytest

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
agents.set_tracing_disabled(True)


def of_openai(base_url, api_key):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def of_anthropic(base_url, api_key):
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0)


async def respond(client, stream, **asked):
    if not stream:
        return await client.responses.create(model="policy", **asked)
    async with client.responses.stream(model="policy", **asked) as stream:
        async for event in stream:
            last = event
    return last.response


async def message(client, stream, **asked):
    asked = {"model": "policy", "max_tokens": 100, **asked}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


def parameters(calculator):
    return calculator["function"]["parameters"]


async def plays_responses(client, stream, calculator, by_id=False):
    """Let the policy call the tool, and send the result with the history or with the id of the answer."""
    tool = {"type": "function", **calculator["function"], "strict": None}
    options = {"instructions": "Be brief.", "tools": [tool], "stream": stream}
    said = [{"role": "user", "content": "How many?"}]
    first = await respond(client, input=said, **options)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "85"}
        for item in first.output
        if item.type == "function_call"
    ] or [{"role": "user", "content": "And now?"}]
    if by_id:
        return first, await respond(client, input=results, previous_response_id=first.id, **options)
    return first, await respond(client, input=[*said, *first.output, *results], **options)


async def plays_messages(client, stream, calculator):
    """Let the policy call the tool, and send the result with the history."""
    function = calculator["function"]
    tool = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    options = {"system": "Be brief.", "tools": [tool], "stream": stream}
    said = [{"role": "user", "content": "How many?"}]
    first = await message(client, messages=said, **options)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "85"}]}
        for block in first.content
        if block.type == "tool_use"
    ] or "And now?"
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    return first, await message(client, messages=said, **options)


async def plays_agent(client, stream):
    """Let openai-agents run the loop with a tool of its own kind."""

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Computes."""
        return "85"

    model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
    agent = agents.Agent(name="solver", instructions="Be brief.", model=model, tools=[calculator])
    if not stream:
        return await agents.Runner.run(agent, "How many?")
    result = agents.Runner.run_streamed(agent, "How many?")
    async for _ in result.stream_events():
        pass
    return result


def check_exact(result, client):
    """Check that the second request continued the first, token for token, in one record."""
    (trajectory,) = result.trajectories
    assert not result.failed and not trajectory.forks and trajectory.extras["metrics"]["requests"] == 2
    one, other = (tuple(call.prompt_ids) for call in client.calls)
    (first, second) = trajectory.policy_spans
    assert other[: len(one) + len(first.token_ids)] == one + first.token_ids
    assert [message.role for message in trajectory.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.messages[3].content == "85" and trajectory.messages[4].content == "Answer: 85"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_play_a_tool_call(play, calculator, stream, by_id):
    async def agent(task, base_url, api_key):
        first, second = await plays_responses(of_openai(base_url, api_key), stream, calculator, by_id)
        said, call = first.output
        assert said.content[0].text == "Let me see." and first.output_text == "Let me see."
        assert json.loads(call.arguments) == {"expression": "37+48"} and call.name == "calculator"
        assert (first.status, second.status, second.output_text) == ("completed", "completed", "Answer: 85")
        assert second.previous_response_id == (first.id if by_id else None)
        assert second.instructions == "Be brief." and second.tools[0].name == "calculator"
        assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens > 0

    check_exact(*play(agent, [f"Let me see.{CALL}", "Answer: 85"]))


@pytest.mark.parametrize("stream", [False, True])
def test_messages_play_a_tool_call(play, calculator, stream):
    async def agent(task, base_url, api_key):
        first, second = await plays_messages(of_anthropic(base_url, api_key), stream, calculator)
        said, call = first.content
        assert said.text == "Let me see." and (call.name, call.input) == (
            "calculator",
            {"expression": "37+48"},
        )
        assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
        assert (
            second.content[0].text == "Answer: 85"
            and second.usage.input_tokens > first.usage.input_tokens > 0
        )

    check_exact(*play(agent, [f"Let me see.{CALL}", "Answer: 85"]))


@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents_play_a_tool_call(play, stream):
    async def agent(task, base_url, api_key):
        result = await plays_agent(of_openai(base_url, api_key), stream)
        assert result.final_output == "Answer: 85"

    check_exact(*play(agent, [f"Let me see.{CALL}{CALL}"[: -len(CALL)], "Answer: 85"]))
