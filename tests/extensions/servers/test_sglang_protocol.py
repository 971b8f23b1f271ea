"""What SGLangClient sends, what it believes, and what a load leaves behind, against a server that breaks on request."""

import asyncio
import gc
import math
import tracemalloc

import pytest
from fault_server import (
    FaultServer,
    client_of,
    done_but_denied,
    edited,
    hang,
    lie,
    reset,
    shifted,
    slow,
    small_model,
    started,
    status,
    text,
    twice,
    write_weights,
)

from rl4llm.core.errors import EngineError, RefusedError, UnreachableError
from rl4llm.core.types import SamplingParams, TokenSpan
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.server import DamagedReplyError, DoubleReplyError
from rl4llm.runtime.transport import Retry, Transport

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tokenizer):
    return small_model(tokenizer)


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights"), tokenizer, [1, 2])


@pytest.fixture
def play(base, tokenizer):
    """Run `scene(server, client)` in an event loop, where failures are retried at once."""

    def run(scene, **options):
        async def main():
            server = FaultServer(base, tokenizer)
            async with started(server, tokenizer, Retry(4, first_wait_s=0.001), **options) as client:
                return await scene(server, client)

        return asyncio.run(main())

    return run


def test_a_refused_request_is_sent_once_and_named(play):
    async def scene(server, client):
        server.next("/generate", status(400, text="sampling_params.top_p is out of range"))
        with pytest.raises(RefusedError):
            await client.generate(PROMPT, PARAMS, session="4/gsm8k-17/2")
        assert server.calls["/generate"] == 1

    play(scene)


def test_no_request_id_is_ever_sent_twice(play, tokenizer):
    async def scene(server, client):
        other = client_of(server.url, tokenizer)
        server.next("/generate", *[status(500)] * 2, None, reset(), None, text("{}"))
        for session in ("1/a/0", "1/a/0", "1/a/1", ""):
            await client.generate(PROMPT, PARAMS, session=session)
        await other.generate(PROMPT, PARAMS, session="1/a/0")
        await client.release("1/a/0")
        await client.generate(PROMPT, PARAMS, session="1/a/0")
        await other.close()
        sent = [name.split("/") for name in server.rids]
        assert len(set(server.rids)) == len(server.rids) == 6
        assert [name[-1] for name in sent] == ["a2", "a1", "a1", "a0", "a0", "a0"]
        assert [name[-3] for name in sent] == ["t0", "t1", "t0", "t0", "t0", "t0"]

    play(scene)


def _meta(**changes):
    return edited(lambda answer: answer["meta_info"].update(changes))


def _without(*path):
    def change(answer):
        for name in path[:-1]:
            answer = answer[name]
        del answer[path[-1]]

    return edited(change)


def _logprob(value):
    return edited(lambda answer: answer["meta_info"]["output_token_logprobs"][2].__setitem__(0, value))


def _token(value):
    def change(answer):
        answer["output_ids"][2] = answer["meta_info"]["output_token_logprobs"][2][1] = value

    return edited(change)


NONSENSE = {
    "not JSON": text("Internal error"),
    "empty": text(""),
    "a list": text("[]"),
    "a number": text("7"),
    "no tokens": _without("output_ids"),
    "no meta_info": _without("meta_info"),
    "meta_info null": edited(lambda answer: {**answer, "meta_info": None}),
    "no log-probs": _without("meta_info", "output_token_logprobs"),
    "no finish reason": _without("meta_info", "finish_reason"),
    "finish reason null": _meta(finish_reason=None),
    "finish reason text": _meta(finish_reason="stop"),
    "finish reason odd": _meta(finish_reason={"type": ["stop"]}),
    "unknown finish reason": _meta(finish_reason={"type": "tired"}),
    "tokens null": edited(lambda answer: {**answer, "output_ids": None}),
    "tokens text": edited(lambda answer: {**answer, "output_ids": "abc"}),
    "tokens empty": edited(
        lambda answer: {
            **answer,
            "output_ids": [],
            "meta_info": {**answer["meta_info"], "output_token_logprobs": []},
        }
    ),
    "token a float": _token(7.0),
    "token a bool": _token(True),
    "token outside the vocabulary": _token(10**6),
    "token negative": _token(-1),
    "versions odd": _meta(weight_versions=["1"]),
    "versions begin late": _meta(weight_versions=[{"start": 2, "version": "1"}]),
    "versions not in order": _meta(
        weight_versions=[{"start": 0, "version": "1"}, {"start": 0, "version": "2"}]
    ),
    "versions end late": _meta(weight_versions=[{"start": 0, "version": "1"}, {"start": 6, "version": "2"}]),
}


@pytest.mark.parametrize("name", sorted(NONSENSE))
def test_an_incomplete_reply_is_a_failed_attempt(play, name):
    async def scene(server, client):
        right = await client.generate(PROMPT, PARAMS)
        server.next("/generate", NONSENSE[name])
        assert await client.generate(PROMPT, PARAMS) == right
        server.next("/generate", *[NONSENSE[name]] * 4)
        with pytest.raises(UnreachableError):
            await client.generate(PROMPT, PARAMS)

    play(scene)


DAMAGED = {
    "NaN": _logprob(math.nan), "null": _logprob(None), "infinite": _logprob(-math.inf), "text": _logprob("-1.0"),
    "above 0": _logprob(0.5), "beyond all floats": _logprob(-(10**400)),
    "one less": edited(lambda answer: answer["meta_info"]["output_token_logprobs"].pop()),
    "of other tokens": edited(lambda answer: answer["output_ids"].reverse()),
    "all null": _meta(output_token_logprobs=None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_invalid_log_probs_are_a_sign_of_damaged_weights(play, name):
    async def scene(server, client):
        server.next("/generate", *[DAMAGED[name]] * 4)
        with pytest.raises(DamagedReplyError if name != "all null" else UnreachableError):
            await client.generate(PROMPT, PARAMS)

    play(scene)


@pytest.mark.parametrize(
    "prompt", [[], [-1], [5, 10**6], [5] * 128], ids=["empty", "negative", "large", "long"]
)
def test_a_prompt_that_a_server_might_die_of_is_never_sent(play, prompt):
    async def scene(server, client):
        with pytest.raises(EngineError):
            await client.generate(prompt, PARAMS)
        with pytest.raises(EngineError):
            await client.score(prompt)
        assert not server.calls

    play(scene)


def test_a_completion_never_outgrows_the_context(play):
    async def scene(server, client):
        completion = await client.generate([5] * 120, PARAMS.replace(max_tokens=100))
        assert len(completion.token_ids) == 8
        assert server.bodies[0]["sampling_params"]["max_new_tokens"] == 8

    play(scene)


def test_a_repeated_reply_is_not_taken_for_the_next_one(play):
    async def scene(server, client):
        server.next("/generate", twice())
        first = await client.generate(PROMPT, PARAMS)
        await asyncio.sleep(0.1)
        other = await client.generate(PROMPT, PARAMS.replace(seed=4))
        assert other.token_ids != first.token_ids
        server.next("/generate", *[_meta(id="1/of/another")] * 4)
        with pytest.raises(DoubleReplyError):
            await client.generate(PROMPT, PARAMS)

    play(scene)


def test_a_connection_whose_answers_are_one_request_late_is_left(play):
    async def scene(server, client):
        right = await client.generate(PROMPT, PARAMS)
        server.next("/generate", slow(0.5), shifted())
        waits = asyncio.create_task(client.generate(PROMPT, PARAMS.replace(seed=4)))
        await asyncio.sleep(0.1)
        assert (await client.generate(PROMPT, PARAMS)).token_ids == right.token_ids
        assert server.calls["/generate"] == 4
        await waits  # what was under way on another one is not disturbed

    play(scene)


def test_tokens_carry_the_versions_that_the_server_reports(play):
    async def scene(server, client):
        spans = [{"start": 0, "end": 2, "version": "11"}, {"start": 2, "end": 6, "version": "12"}]
        server.next(
            "/generate", _meta(weight_versions=spans), _meta(weight_versions=None, weight_version="9")
        )
        mixed = await client.generate(PROMPT, PARAMS)
        assert (mixed.version, mixed.versions) == (11, ((0, 11), (2, 12)))
        assert [(len(span.token_ids), span.version) for span in TokenSpan.policy(mixed)] == [(2, 11), (4, 12)]
        whole = await client.generate(PROMPT, PARAMS)
        assert (whole.version, whole.versions) == (9, ())
        assert (await client.generate(PROMPT, PARAMS)).version == -1

    play(scene)


def test_a_load_counts_when_its_version_reads_back(play, weights):
    async def scene(server, client):
        assert await client.version() == -1
        digests, tokens = [await client.checksum()], []
        for version in (1, 2, 1):
            await client.load(weights[version])
            digests.append(await client.checksum())
            tokens.append((await client.generate(PROMPT, PARAMS)).token_ids)
            assert await client.version() == version
        assert len(set(digests)) == 3
        assert digests[1] == digests[3]
        assert tokens[0] == tokens[2] != tokens[1]
        assert not server.paused

    play(scene)


def test_a_success_that_left_the_old_version_is_an_error(play, weights):
    async def scene(server, client):
        await client.load(weights[1])
        server.next("/update_weights_from_disk", lie())
        with pytest.raises(EngineError):
            await client.load(weights[2])
        assert not server.paused

    play(scene)


def test_a_failure_that_changed_the_weights_counts_as_a_load(play, weights):
    async def scene(server, client):
        await client.load(weights[1])
        server.next("/update_weights_from_disk", done_but_denied())
        await client.load(weights[2])
        assert await client.version() == 2
        assert server.calls["/flush_cache"] == 1
        assert not server.paused

    play(scene)


def test_a_failed_load_is_an_error_even_with_the_right_version(play, weights):
    async def scene(server, client):
        await client.load(weights[1])
        server.next("/update_weights_from_disk", status(400, text="no such file"))
        with pytest.raises(EngineError):
            await client.load(WeightRef(1, "full", "/nowhere"))
        assert not server.paused

    play(scene)


FAILED_LOADS = {
    "refused": ("/update_weights_from_disk", status(400)),
    "broken": ("/update_weights_from_disk", reset()),
    "silent": ("/update_weights_from_disk", hang()),
    "pause lost": ("/pause_generation", reset(after=True)),
    "pause refused": ("/pause_generation", status(400)),
}


@pytest.mark.parametrize("name", sorted(FAILED_LOADS))
def test_a_server_is_never_left_paused(play, weights, name):
    async def scene(server, client):
        await client.load(weights[1])
        path, fault = FAILED_LOADS[name]
        server.next(path, fault)
        server.next("/continue_generation", status(503), reset())
        with pytest.raises(EngineError):
            await client.load(weights[2])
        assert not server.paused
        assert (await client.generate(PROMPT, PARAMS)).version == 1

    play(scene, admin_deadline_s=0.5)


def test_a_cancelled_load_does_not_leave_the_server_paused(play, weights):
    async def scene(server, client):
        server.next("/update_weights_from_disk", hang())
        load = asyncio.create_task(client.load(weights[1]))
        while not server.paused:
            await asyncio.sleep(0.01)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert not server.paused

    play(scene)


def test_running_requests_wait_for_a_load_and_then_finish(play, weights):
    async def scene(server, client):
        await client.load(weights[1])
        long = PARAMS.replace(max_tokens=100)
        requests = [
            asyncio.create_task(client.generate(PROMPT, long.replace(seed=seed))) for seed in range(4)
        ]
        while await server.busy() < 4:
            await asyncio.sleep(0.001)
        await client.load(weights[2])
        completions = await asyncio.gather(*requests)
        assert all(len(completion.token_ids) == 100 for completion in completions)

    play(scene)


def test_scores_that_are_not_whole_are_asked_for_again(play):
    async def scene(server, client):
        right = await client.score(PROMPT)
        assert len(right) == 3
        rows = "input_token_logprobs"
        others = [[None, 9, None], *([-1.0, token, None] for token in PROMPT[1:])]
        for wrong in (None, [[None, 5, None]], others):
            server.next("/generate", _without("meta_info"), _meta(**{rows: wrong}))
            assert await client.score(PROMPT) == right
        server.next("/generate", _meta(**{rows: [[None, token, None] for token in PROMPT]}))
        assert all(math.isnan(score) for score in await client.score(PROMPT))

    play(scene)


def test_a_cancelled_request_frees_its_row_and_its_name(play):
    async def scene(server, client):
        request = asyncio.create_task(
            client.generate(PROMPT, PARAMS.replace(max_tokens=100), session="1/a/0")
        )
        while not await server.busy():
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await client.release("1/a/0")
        while await server.busy():
            await asyncio.sleep(0.001)
        assert not client.names.turns
        assert (await client.generate(PROMPT, PARAMS)).finish_reason == "length"

    play(scene)


def test_all_options_that_change_probabilities_are_sent(play, tokenizer):
    async def scene(server, client):
        params = SamplingParams(
            max_tokens=200, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(9,), seed=2**31 + 5
        )
        await client.generate(PROMPT, params)
        assert server.bodies[0]["sampling_params"] == {
            "max_new_tokens": 124, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [9, tokenizer.eos_token_id],
            "ignore_eos": False, "sampling_seed": 5,
        }  # fmt: skip
        assert server.bodies[0]["return_logprob"]

    play(scene)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_special_token_as_stop_string_stops_at_that_token(play, tokenizer, ignore_eos):
    async def scene(server, client):
        end = tokenizer.eos_token
        await client.generate(PROMPT, SamplingParams(max_tokens=4, stop=("\n", end), ignore_eos=ignore_eos))
        params = server.bodies[0]["sampling_params"]
        assert params["stop_token_ids"] == [tokenizer.eos_token_id]
        assert params["stop"] == ["\n", end]

    play(scene)


def test_the_last_token_of_the_vocabulary_is_scored(play):
    async def scene(server, client):
        last = client.vocab_size - 1
        server.next(
            "/generate", _meta(input_token_logprobs=[[None, 5, None], [-2.5, 0, None], [-1.5, 6, None]])
        )
        assert await client.score([5, last, 6]) == [-2.5, -1.5]
        assert server.calls["/generate"] == 1

    play(scene)


def test_files_that_appear_late_are_awaited(play, weights, tmp_path):
    late = WeightRef(2, "full", str(tmp_path / "v000002"))

    async def scene(server, client):
        await client.load(weights[1])
        load = asyncio.create_task(client.load(late))
        while server.calls["/update_weights_from_disk"] < 4:
            await asyncio.sleep(0.001)
        assert (await client.generate(PROMPT, PARAMS)).version == 1  # it goes on with what it has
        (tmp_path / "v000002").symlink_to(weights[2].path)
        await load
        assert await client.version() == 2
        assert not server.paused

    play(scene)


def test_files_that_never_appear_are_an_error_in_time(play, weights, tmp_path):
    async def scene(server, client):
        await client.load(weights[1])
        with pytest.raises(EngineError):
            await client.load(WeightRef(2, "full", str(tmp_path / "never")))
        tried = server.calls["/update_weights_from_disk"]
        assert tried > 2
        server.next("/update_weights_from_disk", status(400, text="the shapes differ"))
        with pytest.raises(EngineError):
            await client.load(weights[2])
        assert server.calls["/update_weights_from_disk"] == tried + 1
        assert not server.paused

    play(scene, visible_within_s=0.1)


def test_a_failed_flush_after_a_failed_load_reports_both(play, weights):
    async def scene(server, client):
        server.next("/update_weights_from_disk", status(400, text="no such file"))
        server.next("/flush_cache", status(400, text="requests are running"))
        with pytest.raises(RefusedError):
            await client.load(weights[1])
        assert not server.paused

    play(scene)


class Quick(FaultServer):
    """Answers at once, without a model, and counts how many requests it has at a time."""

    at_once = most = 0

    async def _generate(self, body):
        self.rids.append(body["rid"])
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0)
            rows = [[-0.5, token, None] for token in (7, 8, 9)]
            meta = {"id": body["rid"], "weight_version": "1", "output_token_logprobs": rows}
            return {"output_ids": [7, 8, 9], "meta_info": {**meta, "finish_reason": {"type": "length"}}}
        finally:
            self.at_once -= 1


async def storm(server, client, samples=160):
    """Sample many at once while four in six requests fail, and return the memory that is held afterwards."""
    start, faults = server.calls["/generate"], [status(503), reset(), text("{"), status(429), None, None]
    server.at(
        "/generate", {start + number: faults[number % 6] for number in range(3 * samples) if number % 6 < 4}
    )
    names = [f"1/p{number // 16}/{number % 16}" for number in range(samples)]
    found = await asyncio.gather(*(client.generate(PROMPT, PARAMS, session=name) for name in names))
    assert [completion.token_ids for completion in found] == [(7, 8, 9)] * samples
    for name in names:
        await client.release(name)
    server.rids.clear()
    server._faults.clear()
    del found
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_retries_keep_the_limit_on_requests_and_leave_nothing(base, tokenizer):
    async def main():
        server, retry = Quick(base, tokenizer), Retry(40, first_wait_s=0.0001, longest_wait_s=0.001)
        async with started(server, tokenizer, retry) as client:
            client.http = Transport(server.url, connections=16)
            await storm(server, client)
            tracemalloc.start()
            held = [await storm(server, client) for _ in range(3)]
            tracemalloc.stop()
            assert server.most <= len(server.connections()) <= 16
            assert not client.names.turns
            assert len(asyncio.all_tasks()) <= 1 + 2 * 16
            assert held[2] - held[0] < 100_000  # bytes: less than what is kept of each of 320 samples

    asyncio.run(main())
