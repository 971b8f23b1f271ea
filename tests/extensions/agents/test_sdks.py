"""Agents of the SDKs whose defaults are OpenAI's Responses and Anthropic's Messages, from the real packages."""

import json
import sys
from itertools import product

import pytest
from later import later
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.tracking.tracker import read_jsonl

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
CALCULATOR = {
    "name": "calculator",
    "description": "Computes.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
QUESTION = [{"role": "user", "content": "How many?"}]


@pytest.fixture(scope="module", autouse=True)
def _no_traces():
    later.agents.set_tracing_disabled(True)


def of_openai(base_url, api_key):
    return later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def of_anthropic(base_url, api_key):
    return later.anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0)


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


async def plays_responses(client, stream, by_id=False):
    """Let the policy call the tool, and send the result with the history or with the id of the answer."""
    tool = {"type": "function", **CALCULATOR, "strict": None}
    options = {"instructions": "Be brief.", "tools": [tool], "stream": stream}
    said = QUESTION
    first = await respond(client, input=said, **options)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "85"}
        for item in first.output
        if item.type == "function_call"
    ] or [{"role": "user", "content": "And now?"}]
    if by_id:
        return first, await respond(client, input=results, previous_response_id=first.id, **options)
    return first, await respond(client, input=[*said, *first.output, *results], **options)


async def plays_messages(client, stream):
    """Let the policy call the tool, and send the result with the history."""
    tool = {
        "name": CALCULATOR["name"],
        "description": CALCULATOR["description"],
        "input_schema": CALCULATOR["parameters"],
    }
    options = {"system": "Be brief.", "tools": [tool], "stream": stream}
    said = [*QUESTION]
    first = await message(client, messages=said, **options)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "85"}]}
        for block in first.content
        if block.type == "tool_use"
    ] or "And now?"
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    return first, await message(client, messages=said, **options)


async def plays_agent(client, stream, **settings):
    """Let openai-agents run the loop."""

    @later.agents.function_tool
    def calculator(expression: str) -> str:
        """Computes."""
        return "85"

    model = later.agents.OpenAIResponsesModel(model="policy", openai_client=client)
    agent = later.agents.Agent(
        name="solver",
        instructions="Be brief.",
        model=model,
        tools=[calculator],
        model_settings=later.agents.ModelSettings(**settings),
    )
    if not stream:
        return await later.agents.Runner.run(agent, "How many?")
    result = later.agents.Runner.run_streamed(agent, "How many?")
    async for _ in result.stream_events():
        pass
    return result


def check_exact(result, client):
    """Check that the second request continued the first, token for token, in one record."""
    (trajectory,) = result.trajectories
    assert not result.failed and not trajectory.forks and trajectory.extras["metrics"]["requests"] == 2
    one, other = (tuple(call.prompt_ids) for call in client.calls)
    first = trajectory.policy_spans[0]
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
def test_responses_play_a_tool_call(play, stream, by_id):
    async def agent(task, base_url, api_key):
        first, second = await plays_responses(of_openai(base_url, api_key), stream, by_id)
        said, call = first.output
        assert said.content[0].text == "Let me see." and first.output_text == "Let me see."
        assert json.loads(call.arguments) == {"expression": "37+48"} and call.name == "calculator"
        assert (first.status, second.status, second.output_text) == ("completed", "completed", "Answer: 85")
        assert second.previous_response_id == (first.id if by_id else None)
        assert second.instructions == "Be brief." and second.tools[0].name == "calculator"
        assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens > 0

    check_exact(*play(agent, [f"Let me see.{CALL}", "Answer: 85"]))


@pytest.mark.parametrize("stream", [False, True])
def test_messages_play_a_tool_call(play, stream):
    async def agent(task, base_url, api_key):
        first, second = await plays_messages(of_anthropic(base_url, api_key), stream)
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


async def plays_any(task, base_url, api_key):
    """Act as an agent of each SDK in turn, with and without streams."""
    way, stream = divmod(task["sample"], 2)
    if way == 0:
        return (await plays_responses(of_openai(base_url, api_key), stream))[1].output_text
    if way == 1:
        _, last = await plays_messages(of_anthropic(base_url, api_key), stream)
        return "".join(block.text for block in last.content)
    return (await plays_agent(of_openai(base_url, api_key), stream)).final_output


def test_every_sdk_trains_two_steps(model_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sdks_of_a_test", sys.modules[__name__])
    trainer = GRPOTrainer(
        str(model_dir),
        [{"messages": [{"role": "user", "content": "How many?"}], "ground_truth": ""}],
        [Vowels()],
        env=AgentEnv,
        output={"dir": str(tmp_path)},
        rollout={"prompts": 1, "group_size": 6, "max_tokens": 40, "stop": ["t", "1", "m"]},
        mismatch={"stop_above": 1e-4},
        max_steps=2,
        **{"model.autocast": "none", "env.agent": "sdks_of_a_test:plays_any"},
    )
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["env/forks"] for row in rows] == [0, 0] and all(row["reward/std"] > 0.05 for row in rows)
    assert all(row["mismatch/max"] < 1e-4 and row["grad_norm"] > 0 for row in rows)
    assert all(row["env/trained_tokens"] == row["env/generated_tokens"] for row in rows)
    episodes = [
        row for step in (1, 2) for row in read_jsonl(tmp_path / "episodes" / f"step-{step:06d}.jsonl")
    ]
    turns = [[episode["turns"] for episode in episodes if episode["step"] == step] for step in (1, 2)]
    assert turns == [[2, 2, 2, 2, 1, 1]] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_answers_are_marked_and_train(play, stream):
    async def agent(task, base_url, api_key):
        first = await message(of_anthropic(base_url, api_key), stream, messages=QUESTION, max_tokens=2)
        assert (first.stop_reason, first.usage.output_tokens) == ("max_tokens", 2)
        asked = {"messages": QUESTION, "stop_sequences": ["85"]}
        stopped = await message(of_anthropic(base_url, api_key), stream, **asked)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "85")
        cut = await respond(of_openai(base_url, api_key), stream, input="How many?", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        return await plays_agent(of_openai(base_url, api_key), stream, max_tokens=2)

    said = []
    result, _ = play(agent, ["Answer: 85 and more"], said=said)
    (crash,) = said  # openai-agents raises after an answer that was cut
    assert "ModelBehaviorError" in crash and "response.incomplete" in crash
    assert result.trajectories[0].stop_reason == "length" and result.trajectories[0].num_turns == 4


def test_changed_history_begins_a_fork(play):
    async def agent(task, base_url, api_key):
        client = of_openai(base_url, api_key)
        first, _ = await plays_responses(client, False)
        first.output[-1].arguments = '{"expression": "1+1"}'
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}
        await respond(client, False, input=[*QUESTION, *first.output, result], instructions="Be brief.")
        client = of_anthropic(base_url, api_key)
        said = [*QUESTION, {"role": "assistant", "content": "Made up."}, *QUESTION]
        await message(client, False, messages=said)

    result, _ = play(agent, [f"Let me see.{CALL}", "Answer: 85"])
    assert not result.failed and len(result.trajectories[0].forks) == 2


TOOL = {"type": "function", "name": "f", "parameters": {}}
NO_CALL = "no call can be forced"
NO_FORMAT = "no format can be forced"
BAD_CHATS = [
    ({"tool_choice": "required"}, NO_CALL),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, NO_CALL),
    ({"response_format": {"type": "json_object"}}, NO_FORMAT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}, NO_FORMAT),
]
BAD_RESPONSES = [
    ({"input": []}, "input must be a list with at least one message"),
    ({"input": [{"role": "assistant", "content": "x"}]}, "input must end with a message to answer"),
    ({"input": [{"type": "reasoning", "summary": []}]}, r"input\[0\] must be an object with a type"),
    ({"input": [{"role": "user", "content": "x", "phases": 1}]}, r"input\[0\]\.phases is not read"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "the image 'u' is not"),
    ({"tool_choice": "required", "tools": [TOOL]}, NO_CALL),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}, NO_CALL),
    ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, NO_CALL),
    ({"tools": [{"type": "local_shell"}]}, "tools must have type 'function'"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, r"text\.format.*" + NO_FORMAT),
    ({"text": {"format": {"type": "json_object"}}}, NO_FORMAT),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "'msg_x' is not an item of a stored answer"),
    ({"include": ["file_search_call.results"]}, "include="),
    ({"conversation": "conv_1"}, "conversation='conv_1' is not accepted"),
    ({"previous_response_id": "resp_x"}, "previous_response_id='resp_x' is not a stored answer"),
]  # fmt: skip
BAD_MESSAGES = [
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "must end with a message to answer"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "one of user, assistant, system"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "the image None is not accepted"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, r"messages\[0\]\.name is not read"),
    ({"tool_choice": {"type": "any"}}, NO_CALL),
    ({"tool_choice": {"type": "tool", "name": "f"}}, NO_CALL),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools must have type 'custom'"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits that keep all"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, r"output_config\.format.*" + NO_FORMAT),
    ({"output_format": {"type": "json_schema", "schema": {}}}, NO_FORMAT),
    ({"container": "c"}, "container='c' is not accepted"),
    ({"stop_sequences": [""]}, "stop_sequences="),
]  # fmt: skip


def test_refusals_are_the_exceptions_of_each_sdk(play):
    async def agent(task, base_url, api_key):
        client = of_openai(base_url, api_key)
        ways = [(client.responses.create, {"input": "x"}, case) for case in BAD_RESPONSES]
        ways += [(client.chat.completions.create, {"messages": QUESTION}, case) for case in BAD_CHATS]
        for (create, plain, (body, problem)), stream in product(ways, (False, True)):
            with pytest.raises(later.openai.BadRequestError, match=problem) as refused:
                await create(**{"model": "policy", "stream": stream, **plain, **body})
            assert refused.value.param in body and refused.value.type == "invalid_request_error"
        with pytest.raises(later.openai.AuthenticationError, match="does not name an episode"):
            await respond(of_openai(base_url.replace(api_key, "guessed"), "x"), False, input="x")
        client = of_anthropic(base_url, api_key)
        for (body, problem), stream in product(BAD_MESSAGES, (False, True)):
            asked = {"model": "policy", "max_tokens": 9, "messages": QUESTION, "stream": stream}
            asked |= {"extra_body": body}
            with pytest.raises(later.anthropic.BadRequestError, match=problem) as refused:
                await client.messages.create(**asked)
            assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(later.anthropic.AuthenticationError, match="does not name an episode"):
            await message(of_anthropic(base_url.replace(api_key, "guessed"), "x"), False, messages=QUESTION)
        kept = await respond(of_openai(base_url, api_key), False, input="x", store=False)
        with pytest.raises(later.openai.BadRequestError, match="is not a stored answer"):
            await respond(of_openai(base_url, api_key), False, input="x", previous_response_id=kept.id)
        tools = [{"name": "calculator", "input_schema": CALCULATOR["parameters"]}]
        asked = {"messages": QUESTION, "tools": tools, "tool_choice": {"type": "none"}}
        await message(of_anthropic(base_url.removesuffix("/v1"), api_key), False, **asked)

    result, client = play(agent)
    assert result.failed[0].failure_class == "agent/refused"
    assert len(client.calls) == 4  # two of each attempt


def test_other_sampling_is_ignored_with_a_warning(play):
    async def agent(task, base_url, api_key):
        asked = {"temperature": 0.1, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
        answer = await respond(of_openai(base_url, api_key), False, input="x", **asked)
        assert answer.temperature == 1.0  # what was sampled with
        asked = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
        await message(
            of_anthropic(base_url, api_key), False, messages=QUESTION, extra_body={"top_k": 3}, **asked
        )

    said = []
    result, _ = play(agent, said=said)
    assert not result.failed, result.failed[0].failure
    names = ["output_config.effort", "reasoning", "temperature", "text.verbosity", "thinking", "top_k"]
    assert sorted(line.split("set '")[1].split("'")[0] for line in said) == names
