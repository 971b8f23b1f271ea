"""The endpoint as agents find it: OpenAI's interface, and a clear refusal of what it does not do."""

import asyncio
import json
import re
import ssl

import httpx
import pytest
from later import later

from rl4llm.core.types import SamplingParams
from rl4llm.envs import chat_completions as wire
from rl4llm.envs.wire import RequestError
from rl4llm.testing import ScriptedClient

TLS = ssl.create_default_context()  # made once, as that takes longer than most episodes here
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
USER = {"role": "user", "content": "How many?"}


def asking(*bodies, headers=None, path="/chat/completions"):
    """An agent over plain HTTP, and the responses that it got."""
    found = []

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            # so that the episode has an answer
            await http.post(f"{base_url}/chat/completions", json={"messages": [USER]})
            for body in bodies:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                found.append(await http.post(base_url + path, content=content, headers=headers))

    return agent, found


def error_of(response):
    """What SDKs read of an error, all of whose fields must be there."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("body", "status", "message"), [
    (b"{not JSON", 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b"", 400, "not JSON"),
    ([], 400, "must be a JSON object"),
    ({}, 400, "messages must be a list"),
    ({"messages": []}, 400, "at least one message"),
    ({"messages": ["Hi"]}, 400, r"messages\[0\] must be an object with a role"),
    ({"messages": [{"role": ["user"]}]}, 400, "one of system, developer, user"),
    ({"messages": [{"role": "function", "content": "x"}]}, 400, "one of system, developer, user"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "the image None is not accepted"),
    ({"messages": [{"role": "user", "content": 7}]}, 400, "list of text and image parts"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "must end with a message to answer"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": 3}, USER]}, 400, "tool_calls must be a list"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}, USER]}, 400, "functions with names"),
    ({"messages": [USER], "n": 2}, 400, "n=2 is not accepted"),
    ({"messages": [USER], "top_logprobs": 5}, 400, "top_logprobs="),
    ({"messages": [USER], "max_tokens": 0}, 400, "max_tokens=0 is not accepted"),
    ({"messages": [USER], "max_completion_tokens": "9"}, 400, "max_completion_tokens='9' is not accepted"),
    ({"messages": [USER], "stop": [""]}, 400, "stop="),
    ({"messages": [USER], "stream": "yes"}, 400, "stream='yes' is not accepted"),
    ({"messages": [USER], "tools": [{"name": "f"}]}, 400, "tools="),
    ({"messages": [USER], "tools": 5}, 400, "tools="),
    ({"messages": [USER], "tools": {"function": {"name": "f"}}}, 400, "tools="),
    ({"messages": [USER], "stop": ["x"] * 65}, 400, "at most 64 strings"),
    ({"messages": [0] * 100_000}, 400, "the context length is 512"),
    (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f", "d": %s}}]}'
     % (b"[" * 600 + b"]" * 600), 400, "nested too deeply"),
    ({"messages": [USER], "documents": [{"a": 1}]}, 400, r"documents=\[{'a': 1}\] is not accepted"),
    ({"messages": [USER | {"audio": {"id": "a"}}]}, 400, r"messages\[0\].audio is not read"),
    ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, 400, "longer than any conversation"),
    ({"messages": [USER], "tools": [{"function": {"name": "x" * 10_000_000}}]}, 400, "longer than any conversation"),
    ({"messages": [{"role": "user", "content": "number 7 " * 400}]}, 400, "the context length is 512"),
    ({"messages": [{"role": "user", "content": "x" * 65 * 1024**2}]}, 413, "[Mm]aximum request body size"),
])  # fmt: skip
def test_a_request_that_cannot_be_answered_gets_a_clear_error(play, tokenizer, body, status, message):
    agent, found = asking(body, {"messages": [USER]})
    result, client = play(agent, client=ScriptedClient(tokenizer, {"": ["Answer: 85"]}, context_length=512))
    refused, served = found[:2]
    assert refused.status_code == status and served.status_code == 200
    assert re.search(message, error_of(refused)["message"]) and len(refused.text) < 1000
    assert error_of(refused)["type"] == "invalid_request_error"
    (episode,) = result.trajectories or result.failed
    # what was refused never reached the engine, in one attempt or two
    assert episode.extras["metrics"]["requests"] == 2 and len(client.calls) == len(found)
    assert episode.extras["metrics"]["refused"] == (status == 400)


@pytest.mark.parametrize(("path", "status"), [("/completions", 404), ("/embeddings", 404), ("/models", 405)])
def test_unknown_paths_are_refused_with_the_known_one(play, path, status):
    agent, found = asking({}, path=path)
    play(agent)
    assert found[0].status_code == status and "/v1/chat/completions" in error_of(found[0])["message"]


def test_endpoint_replaces_lone_surrogates(play):
    half = b"\\ud800 \\u0000 <|im_end|> \xff \xed\xa0\x80"
    tool = b'{"type": "function", "function": {"name": "f", "description": "%s"}}' % half
    agent, found = asking(
        b'{"messages": [{"role": "user", "content": "%s"}]}' % half,
        b'{"model": "%s", "messages": [{"role": "user", "content": "x"}]}' % half,
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % tool,
    )
    result, _ = play(agent)
    assert [response.status_code for response in found] == [200, 200, 200] and not result.failed


@pytest.mark.parametrize("argument", ['"x\\ud800"', '{"\\ud800": 1}', "NaN", "[1e999]"])
def test_call_that_json_cannot_write_is_text(play, argument):
    said = CALL.replace('"37+48"', argument)
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
    agent, found = asking({"messages": [USER], "tools": [tool]})
    play(agent, [said, said])
    (choice,) = found[0].json()["choices"]
    assert choice["message"]["content"] == said and "tool_calls" not in choice["message"]


def test_other_sampling_parameters_are_ignored_with_one_warning(play):
    asked = {"temperature": 0, "top_p": 0.5, "frequency_penalty": 1.0}
    agent, found = asking({"messages": [USER], **asked}, {"messages": [USER], **asked})
    said = []
    _, client = play(agent, said=said, size=2, params=SamplingParams(max_tokens=9, temperature=0.7))
    assert {response.status_code for response in found} == {200}
    assert {(call.params.temperature, call.params.top_p) for call in client.calls} == {(0.7, 1.0)}
    assert sorted(line.split("set '")[1].split("'")[0] for line in said) == sorted(asked)


def test_fields_that_ask_for_nothing_else_are_no_news(play):
    same = {
        "temperature": 0.7, "top_p": 1, "presence_penalty": 0.0, "seed": 5, "user": "me", "n": 1, "logit_bias": None,
        "response_format": {"type": "text"}, "tool_choice": "auto", "stream": False, "parallel_tool_calls": True,
    }  # fmt: skip
    agent, _ = asking({"messages": [USER], **same})
    said = []
    play(agent, said=said, params=SamplingParams(max_tokens=9, temperature=0.7))
    assert said == []


def test_answer_respects_all_token_limits(play, tokenizer):
    limits = ({"max_tokens": 2}, {"max_completion_tokens": 3, "max_tokens": 9}, {"max_tokens": 999})
    agent, found = asking(*({"messages": [USER], **limit} for limit in limits))
    play(
        agent,
        client=ScriptedClient(tokenizer, {"": ["Answer: 85 and some more"]}),
        params=SamplingParams(max_tokens=5),
    )
    usages = [response.json()["usage"]["completion_tokens"] for response in found]
    assert usages == [2, 3, 5]
    assert {response.json()["choices"][0]["finish_reason"] for response in found} == {"length"}


def test_an_answer_ends_before_what_the_agent_stops_at(play, remembering, tokenizer):
    agent, found = asking({"messages": [USER], "stop": ["e", "a", "o"]})
    _, client = play(agent, client=remembering, params=SamplingParams(max_tokens=200))
    answer = found[0].json()["choices"][0]
    assert not set("eao") & set(answer["message"]["content"])
    sampled = client.record[-1][2].token_ids
    assert (
        answer["finish_reason"] == "stop"
        and tokenizer.decode(sampled[-1:]).strip() != answer["message"]["content"][-1:]
    )


def test_log_probs_are_those_that_train(play, remembering):
    agent, found = asking({"messages": [USER], "logprobs": True})
    result, client = play(agent, client=remembering, params=SamplingParams(max_tokens=5))
    told = [item["logprob"] for item in found[0].json()["choices"][0]["logprobs"]["content"]]
    assert (
        told == list(client.record[-1][2].logprobs) == list(result.trajectories[0].policy_spans[-1].logprobs)
    )


def openai_client(base_url, api_key):
    return later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


@pytest.mark.parametrize("text", [f"Let me see.{CALL}{CALL}", "Answer: 85, or é so 世", "", CALL])
def test_a_streamed_answer_is_the_answer(play, calculator, text):
    async def agent(task, base_url, api_key):
        client = openai_client(base_url, api_key)
        asked = {"model": "gpt-4o", "messages": task["messages"], "tools": [calculator]}
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
        for answer in (whole, streamed):
            message = answer.choices[0].message
            message.content = message.content or None  # an empty text, or none, is the same beside calls
            for call in message.tool_calls or []:
                assert json.loads(call.function.arguments) == {"expression": "37+48"}
                call.id, call.function = (
                    "",
                    later.openai.types.chat.chat_completion_message_tool_call.Function(
                        name=call.function.name, arguments=call.function.arguments
                    ),
                )
        one, other = (answer.choices[0] for answer in (whole, streamed))
        dumps = [choice.message.model_dump(include={"role", "content"}) for choice in (one, other)]
        calls = [
            [call.function.model_dump() for call in choice.message.tool_calls or []]
            for choice in (one, other)
        ]
        assert dumps[0] == dumps[1] and calls[0] == calls[1] and len(calls[0]) == text.count(CALL)
        assert one.finish_reason == other.finish_reason == ("tool_calls" if calls[0] else "stop")
        assert whole.usage == streamed.usage and whole.model == "gpt-4o"

    result, _ = play(agent, [text])
    assert not result.failed, result.failed[0].failure


def test_malformed_calls_and_calls_without_tools_arrive_as_text(play, calculator):
    broken = '<tool_call>{"name": 7}</tool_call>'

    async def agent(task, base_url, api_key):
        client = openai_client(base_url, api_key)
        for options in ({"tools": [calculator]}, {}, {"tools": [calculator], "tool_choice": "none"}):
            answer = await client.chat.completions.create(model="m", messages=task["messages"], **options)
            assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"
            assert "<tool_call>" in answer.choices[0].message.content

    result, _ = play(agent, [f"{CALL}{broken}", CALL, CALL])
    assert not result.failed, result.failed[0].failure


def test_models_are_listed_as_sdks_want_them(play):
    async def agent(task, base_url, api_key):
        client = openai_client(base_url, api_key)
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        await client.chat.completions.create(model="policy", messages=task["messages"])

    result, _ = play(agent)
    assert not result.failed, result.failed[0].failure


def test_path_or_key_selects_the_episode(play):
    given, seen = asyncio.Queue(), []

    async def agent(task, base_url, api_key):
        server, _, _ = base_url.rpartition(f"/{api_key}/")
        given.put_nowait((base_url, api_key))
        while given.qsize() < 2:
            await asyncio.sleep(0.01)
        other_url = next(url for url, key in list(given._queue) if key != api_key)
        ways = {
            "path": (base_url, "EMPTY"), "key": (f"{server}/v1", api_key), "both": (base_url, api_key),
            "others path": (other_url, api_key), "no key": (f"{server}/v1", "sk-x"), "guessed": (f"{server}/x/v1", "x"),
        }  # fmt: skip
        for way, (url, key) in ways.items():
            body = {"messages": [{"role": "user", "content": f"{task['sample']} by {way}"}]}
            async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
                headers = {"Authorization": f"Bearer {key}"}
                response = await http.post(f"{url}/chat/completions", json=body, headers=headers)
            seen.append((way, response.status_code))
            if response.status_code != 200:
                assert error_of(response)["code"] == "invalid_api_key"

    result, _ = play(agent, size=2)
    good, bad = ("path", "key", "both"), ("others path", "no key", "guessed")
    assert sorted(seen) == sorted([(way, 200) for way in good] * 2 + [(way, 401) for way in bad] * 2)
    for trajectory in result.trajectories:
        assert trajectory.extras["metrics"]["requests"] == 3
        assert trajectory.messages[0].content == f"{trajectory.extras['sample']} by both"


def test_requests_after_the_episode_are_refused(play):
    late = []

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            await http.post(f"{base_url}/chat/completions", json={"messages": [USER]})
        if task["sample"] == 0:
            late.append(base_url)
            return
        while not late:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            late.append(await http.post(f"{late[0]}/chat/completions", json={"messages": [USER]}))

    _, client = play(agent, size=2)
    assert (
        late[1].status_code == 410 and error_of(late[1])["code"] == "episode_over" and len(client.calls) == 2
    )
    with pytest.raises(httpx.ConnectError):  # with the rollout the endpoint ends
        httpx.post(f"{late[0]}/chat/completions", json={"messages": [USER]}, trust_env=False)


def test_no_more_requests_are_answered_than_the_episode_has(play):
    agent, found = asking(*[{"messages": [USER]}] * 3)
    result, client = play(agent, max_steps=2)
    assert [response.status_code for response in found] == [200, 400, 400] and len(client.calls) == 2
    assert error_of(found[1])["code"] == "max_steps" and "env.max_steps" in error_of(found[1])["message"]
    assert result.trajectories[0].stop_reason == "max_steps"


def test_a_request_that_its_agent_gave_up_leaves_no_trace(play, tokenizer):
    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"{base_url}/chat/completions", json={"messages": [USER]}, timeout=0.2)
            await http.post(f"{base_url}/chat/completions", json={"messages": [USER]}, timeout=30)

    result, client = play(agent, client=ScriptedClient(tokenizer, {"": ["Answer: 85"]}, delay_s=0.5))
    (trajectory,) = result.trajectories
    assert len(client.calls) == 2 and trajectory.num_turns == 1 and not trajectory.forks


def test_request_in_progress_is_cancelled_at_the_end(play, tokenizer):
    late = []

    async def leave_behind(base_url):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            try:
                response = await http.post(
                    f"{base_url}/chat/completions", json={"messages": [USER]}, timeout=30
                )
                late.append(response.status_code)
            except httpx.RemoteProtocolError:  # hung up on
                late.append(None)

    async def agent(task, base_url, api_key):
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as http:
            await http.post(f"{base_url}/chat/completions", json={"messages": [USER]}, timeout=30)
        if task["sample"] == 0:
            background.append(asyncio.create_task(leave_behind(base_url)))
            while len(client.calls) < 3:
                await asyncio.sleep(0.01)
        else:
            while not late:
                await asyncio.sleep(0.01)

    background, client = [], ScriptedClient(tokenizer, {"": ["Answer: 85"]}, delay_s=1.0)
    result, _ = play(agent, client=client, size=2)
    assert late == [None] and [trajectory.num_turns for trajectory in result.trajectories] == [1, 1]


@pytest.mark.parametrize("key", ['"role"', '"r\\u006fle"'], ids=["plain", "escaped"])
def test_too_many_messages_are_refused_before_they_are_built(play, monkeypatch, key):
    built, read = [], wire.read_message
    monkeypatch.setattr(wire, "read_message", lambda row, *more: built.append(row) or read(row, *more))
    many = b'{"messages": [' + b",".join([b'{%s: "user"}' % key.encode()] * 5000) + b"]}"
    agent, found = asking(many)
    play(agent)
    assert error_of(found[0])["code"] == "context_length_exceeded" and len(built) == 1


def test_malformed_http_is_one_line_in_the_log(play, caplog):
    async def agent(task, base_url, api_key):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base_url.split(":")[2].split("/")[0]))
        writer.write(b"GET /v1/models HTTP/1.1\r\nno header\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()

    with caplog.at_level("ERROR"):
        play(agent)
    found = [record for record in caplog.records if record.name == "rl4llm.agents"]
    assert len(found) == 2  # the episode without an answer is played twice
    assert not any(record.exc_info or "\n" in record.getMessage() for record in found)


def test_a_thought_that_an_agent_sends_back_is_read_or_refused():
    said = {"role": "assistant", "content": "85", "reasoning_content": " Add them. "}
    assert wire.read_message(said).reasoning == "Add them."
    assert wire.read_message(said | {"reasoning": " Add them. ", "thinking": None}).reasoning == "Add them."
    for wrong in ({"role": "user"}, {"thinking": "Another."}, {"reasoning_content": ["Add."]}):
        with pytest.raises(RequestError, match="must be one string, in a message of the assistant"):
            wire.read_message(said | wrong)
