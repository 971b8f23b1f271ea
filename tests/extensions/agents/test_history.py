"""Token records: exactly what was sampled, however the agent treats its history."""

import asyncio

import pytest
import torch
from later import later
from packed import pack

from rl4llm.core.types import ChatMessage, Completion, SamplingParams
from rl4llm.data.pack import totals_of
from rl4llm.data.render import Renderer
from rl4llm.envs.chat_completions import read_message
from rl4llm.extensions.agents.history import History

SYSTEM, QUESTION, RESULT = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "How many?"),
    ChatMessage("tool", "85"),
)
MORE = ChatMessage("user", "And more?")


def said(text):
    return ChatMessage("assistant", text)


@pytest.fixture
def talk(tokenizer):
    """talk(messages, answer): what a request does to a history; the answers' tokens are those of their text."""
    renderer, history = Renderer(tokenizer, roles=()), History()

    def ask(*messages, answer="Answer: 85", tools="[]"):
        place = history.place(tools, messages, renderer)
        ids = (*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id)
        return history.add(place, Completion(answer, ids, (-0.5,) * len(ids), "stop", 3), said(answer))

    ask.history, ask.renderer, ask.decode = history, renderer, tokenizer.decode
    return ask


def sampled(record):
    return [span.token_ids for span in record.spans if span.author == "policy"]


def text_of(talk, record):
    return talk.decode([token for span in record.spans for token in span.token_ids])


def test_extending_request_adds_only_its_new_messages(talk):
    talk(SYSTEM, QUESTION, answer="one")
    before = list(talk.history.records[0].spans)
    talk(SYSTEM, QUESTION, said("one"), RESULT, answer="two")
    (record,) = talk.history.records
    assert record.spans[:2] == before
    assert list(record.spans[2].token_ids) == talk.renderer.following([RESULT], ended=True)
    assert [span.author for span in record.spans] == ["context", "policy"] * 2


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ((SYSTEM, QUESTION, said("one"), RESULT, said("other"), MORE), "one"),  # an answer changed
        ((SYSTEM, QUESTION, said("one"), MORE), "one"),  # a turn dropped
        ((SYSTEM, QUESTION, said("one"), RESULT), "one"),  # the same asked again
        ((SYSTEM, QUESTION, said("one"), ChatMessage("tool", "86")), "one"),  # what a tool said changed
        ((SYSTEM, ChatMessage("user", "In short: 85."), MORE), None),  # all summarised
        ((ChatMessage("system", "Be long."), QUESTION, said("one"), RESULT, said("two"), MORE), None),
        ((SYSTEM, QUESTION, said("two"), MORE), None),  # the first turn dropped, the second kept
    ],
)
def test_rewritten_history_starts_a_record_after_the_shared_part(talk, messages, kept):
    talk(SYSTEM, QUESTION, answer="one")
    talk(SYSTEM, QUESTION, said("one"), RESULT, answer="two")
    whole = list(talk.history.records[0].spans)
    talk(*messages, answer="three")
    first, fork = talk.history.records
    assert first.spans == whole and [span.author for span in fork.spans] == ["context", "policy"]
    assert talk.decode(fork.spans[1].token_ids).startswith("three")
    context_ids = fork.spans[0].token_ids
    # here as the template has it: nothing was sampled oddly
    assert list(context_ids) == talk.renderer.first(messages)
    if kept:
        shared = whole[0].token_ids + whole[1].token_ids
        assert context_ids[: len(shared)] == shared
    assert (
        sum(len(ids) for record in talk.history.records for ids in sampled(record))
        == talk.history.sampled_tokens
    )


def test_fork_reuses_the_sampled_tokens(talk, tokenizer):
    """The policy writes letter by letter what the tokenizer would write in one token."""
    place = talk.history.place("[]", (QUESTION,), talk.renderer)
    letters = tuple(
        token for letter in "Answer" for token in tokenizer.encode(letter, add_special_tokens=False)
    )
    ids = (*letters, tokenizer.eos_token_id)
    assert len(tokenizer.encode("Answer", add_special_tokens=False)) < len(letters)
    talk.history.add(place, Completion("Answer", ids, (-0.5,) * len(ids), "stop", 3), said("Answer"))
    talk(QUESTION, said("Answer"), RESULT)
    talk(QUESTION, said("Answer"), MORE)
    _, fork = talk.history.records
    prompt = talk.renderer.first([QUESTION])
    assert list(fork.spans[0].token_ids[: len(prompt) + len(ids)]) == [*prompt, *ids]


def test_agent_may_continue_any_of_its_forks(talk):
    talk(QUESTION, answer="one")
    talk(QUESTION, answer="two")
    talk(QUESTION, said("one"), MORE, answer="three")
    talk(QUESTION, said("two"), MORE, answer="four")
    talk(QUESTION, said("one"), MORE, said("three"), MORE, answer="five")
    first, second = talk.history.records
    assert [talk.decode(ids).removesuffix("<|im_end|>") for ids in sampled(first)] == ["one", "three", "five"]
    assert [talk.decode(ids).removesuffix("<|im_end|>") for ids in sampled(second)] == ["two", "four"]


def test_two_requests_at_once_from_one_place_do_not_mix(talk):
    talk(QUESTION, answer="one")
    messages = (QUESTION, said("one"), MORE)
    places = [talk.history.place("[]", messages, talk.renderer) for _ in range(2)]
    for place, token in zip(places, (7, 8), strict=True):
        talk.history.add(place, Completion("x", (token,), (-0.5,), "length", 3), said(f"x{token}"))
    first, second = talk.history.records
    assert sampled(first)[1:] == [(7,)] and sampled(second) == [(8,)]
    assert second.spans[0].token_ids == places[0].prompt.token_ids


def test_other_tools_make_another_beginning(talk):
    talk(QUESTION, answer="one", tools="[]")
    talk(QUESTION, said("one"), MORE, tools='["more"]')
    assert len(talk.history.records) == 2


def test_an_answer_that_never_arrived_is_struck_out(talk):
    talk(QUESTION, answer="one")
    before = list(talk.history.records[0].spans)
    talk.history.take_back(talk(QUESTION, said("one"), MORE, answer="lost"))
    assert talk.history.records[0].spans == before
    talk.history.take_back(talk(QUESTION, answer="lost"))
    assert len(talk.history.records) == 1 and talk.history.entries[-1].messages[-1] == said("one")
    talk(QUESTION, said("one"), MORE, answer="two")
    assert len(talk.history.records) == 1 and "lost" not in text_of(talk, talk.history.records[0])


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(("one", "other"), [
    ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL], "refusal": None, "audio": None}),
    ({"tool_calls": [CALL]}, {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"x":1}'}}]}),
    ({"content": "yes\n"}, {"content": [{"type": "text", "text": "yes"}]}),
])  # fmt: skip
def test_ways_of_writing_the_same_message_are_equal(one, other):
    assert read_message({"role": "assistant", **one}) == read_message({"role": "assistant", **other})


def other_function(name, arguments):
    return {"function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("change", [{"id": "b"}, other_function("g", '{"x": 1}'), other_function("f", "{}")])
def test_call_with_other_id_name_or_arguments_is_another_message(change):
    one, other = ({"role": "assistant", "tool_calls": [call]} for call in (CALL, {**CALL, **change}))
    assert read_message(one) != read_message(other)


async def wander(task, base_url, api_key):
    """Calls, streams, drops a turn, asks again, summarises, and does two things at once."""
    client = later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    tools = task["tools"]

    async def ask(messages, **options):
        if options.get("stream"):
            pieces = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="m", messages=messages, **options
                )
            ]
            return {
                "role": "assistant",
                "content": "".join(c.choices[0].delta.content or "" for c in pieces if c.choices),
            }
        answer = await client.chat.completions.create(model="m", messages=messages, **options)
        return answer.choices[0].message.model_dump(exclude_none=True)

    def user(text):
        return {"role": "user", "content": text}

    history = [{"role": "system", "content": "Be brief."}, *task["messages"]]
    for turn in range(3):
        history += [await ask(history, stream=turn == 1), user(f"Turn {turn}?")]
    history[2:4] = []  # the first turn is dropped
    history.append(await ask(history))
    short = [user("In short."), user("Go on.")]
    answer, _, _ = await asyncio.gather(
        ask(short), ask([*history, user("More?")]), ask([*history, user("Another?")])
    )
    await ask(short)
    called = [*short, answer, user("Use a tool.")]
    await asyncio.gather(ask(called, tools=tools), ask(called, tools=tools))


@pytest.fixture
def wandered(play, remembering, calculator):
    params = SamplingParams(max_tokens=8, temperature=1.0)
    result, client = play(wander, client=remembering, size=6, columns={"tools": [calculator]}, params=params)
    assert not result.failed, result.failed[0].failure
    return result.trajectories, client


def test_every_sampled_token_trains_exactly_once(wandered):
    trajectories, client = wandered
    engines = sorted((prompt_ids, done.token_ids, done.logprobs) for _, prompt_ids, done in client.record)
    recorded = []
    for trajectory in trajectories:
        for record in trajectory.records:
            before = ()
            for span in record:
                if span.author == "policy":
                    recorded.append((before, span.token_ids, span.logprobs))
                before += span.token_ids
    assert len(recorded) == 6 * 10 and sorted(recorded) == engines
    batches = pack(
        trajectories, [1.0] * 6, max_tokens_per_batch=4096, layout="shared", aggregation="token",
        totals=totals_of(trajectories), pad_token_id=0,
    )  # fmt: skip
    generated = sum(len(token_ids) for _, token_ids, _ in engines)
    assert sum(int(batch.mask_BT.sum()) for batch in batches) == generated
    counts = [trajectory.extras["metrics"] for trajectory in trajectories]
    assert [sum(count[name] for count in counts) for name in ("generated_tokens", "trained_tokens")] == [
        generated
    ] * 2
    assert {(count["requests"], count["forks"]) for count in counts} == {(10, 6)}


def test_the_log_probs_of_every_record_are_the_models_own(wandered, model):
    trajectories, _ = wandered
    for record in trajectories[0].records:
        token_ids = torch.tensor([[token for span in record for token in span.token_ids]])
        with torch.no_grad():
            logprobs = model(token_ids).logits[0].log_softmax(-1)
        at = 0
        for span in record:
            for i, token in enumerate(span.token_ids):
                if span.author == "policy":
                    assert logprobs[at - 1, token].item() == pytest.approx(span.logprobs[i], abs=1e-5)
                at += 1


def test_the_same_seed_gives_the_same_answers_whoever_asks_first(play, remembering):
    order = ["one", "two", "three"]

    async def agent(task, base_url, api_key):
        client = later.openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        for text in (*order, "one"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

    def answers():
        remembering.record.clear()
        play(agent, client=remembering, size=3, params=SamplingParams(max_tokens=8, temperature=1.0))
        return sorted(
            (session, prompt_ids, done.token_ids) for session, prompt_ids, done in remembering.record
        )

    first = answers()
    order.reverse()
    assert answers() == first
    assert len({token_ids for _, _, token_ids in first}) == 12  # asking again draws again
