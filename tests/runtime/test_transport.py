"""HTTP to one server: temporary errors differ from others, and an incomplete answer never counts as complete."""

import asyncio
import gc
import os
import resource
import warnings
from contextlib import contextmanager

import pytest
from aiohttp import web
from fault_server import (
    FaultServer,
    free_port,
    half_body,
    hang,
    kill,
    reset,
    slow,
    status,
    text,
    too_long_a_length,
    too_short_a_length,
)

from rl4llm.core.errors import RefusedError, UnreachableError
from rl4llm.runtime.transport import NotConnectedError, Retry, Transport

FAST = Retry(attempts=4, first_wait_s=0.001, longest_wait_s=0.01)


@pytest.fixture
def play(model, tokenizer):
    """Run `scene(server, transport)` in an event loop."""

    def run(scene, **options):
        async def main():
            server = FaultServer(model, tokenizer)
            await server.start()
            transport = Transport(server.url, **options)
            try:
                return await scene(server, transport)
            finally:
                await transport.close()
                await server.stop()

        return asyncio.run(main())

    return run


@pytest.mark.parametrize("code", [408, 425, 429, 500, 502, 503, 504, 599])
def test_what_may_pass_is_tried_again(play, code):
    async def scene(server, transport):
        server.next("/model_info", status(code), status(code))
        answer = await FAST.run(lambda attempt: transport.get("/model_info"))
        assert answer["weight_version"] == "default"
        assert server.calls["/model_info"] == 3

    play(scene)


@pytest.mark.parametrize("code", [400, 401, 403, 404, 409, 413, 422])
def test_a_permanent_error_is_raised_at_once_with_its_reason(play, code):
    async def scene(server, transport):
        server.next("/model_info", status(code, text="input_ids: too long"))
        with pytest.raises(RefusedError):
            await FAST.run(lambda attempt: transport.get("/model_info"))
        assert server.calls["/model_info"] == 1

    play(scene)


def test_attempts_are_bounded_and_the_last_failure_is_raised(play):
    async def scene(server, transport):
        server.next("/model_info", *[status(500)] * 3, status(502, text="the last"))
        with pytest.raises(UnreachableError, match="the last"):
            await FAST.run(lambda attempt: transport.get("/model_info"))
        assert server.calls["/model_info"] == 4

    play(scene)


def test_every_attempt_gets_its_number(play):
    async def scene(server, transport):
        numbers = []

        async def ask(number):
            numbers.append(number)
            return await transport.get("/model_info")

        server.next("/model_info", status(500), status(500))
        await FAST.run(ask)
        assert numbers == [0, 1, 2]

    play(scene)


BROKEN = {
    "reset": reset(),
    "half_body": half_body(),
    "too_long": too_long_a_length(),
    "too_short": too_short_a_length(),
    "html": text("<html>Bad gateway</html>"),
    "nested": text("[" * 200_000),
    "no_utf8": text("\ud800".encode("utf-8", "surrogatepass").decode("latin-1")),
    "killed": kill(),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_answer_does_not_reach_the_next_request(play, name):
    async def scene(server, transport):
        whole = await transport.get("/server_info")
        server.next("/model_info", BROKEN[name])
        with pytest.raises(UnreachableError):
            await transport.post("/model_info", {})
        if not server.running:
            await server.start()
        assert await transport.get("/server_info") == whole

    play(scene)


def test_silence_ends_at_the_deadline_and_the_message_names_it(play):
    async def scene(server, transport):
        server.next("/model_info", hang())
        with pytest.raises(UnreachableError):
            await transport.get("/model_info", deadline_s=0.2)

    play(scene)


def test_an_address_without_a_server_has_a_distinct_error():
    async def main():
        transport = Transport(f"http://127.0.0.1:{free_port()}")
        with pytest.raises(NotConnectedError):
            await transport.get("/model_info")
        await transport.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "kept"), [("7", 7.0), ("0.5", 0.5), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), (None, 0.0)]
)
def test_retry_after_is_read(play, sent, kept):
    async def scene(server, transport):
        server.next("/model_info", status(503, retry_after=sent))
        with pytest.raises(UnreachableError) as failure:
            await transport.get("/model_info")
        assert failure.value.retry_after_s == kept

    play(scene)


def test_waits_grow_with_jitter_and_respect_retry_after():
    retry = Retry(attempts=9, first_wait_s=1.0, longest_wait_s=10.0)
    waits = [[retry.wait_s(number) for _ in range(50)] for number in range(4)]
    for number, found in enumerate(waits):
        assert all(0.5 * 2**number <= wait <= 2**number for wait in found)
        assert len(set(found)) > 1
    assert retry.wait_s(0, asked_s=7.0) == 7.0
    assert retry.wait_s(0, asked_s=3600.0) == retry.wait_s(2000) == 10.0


def test_a_cancelled_request_leaves_nothing_running(play):
    async def scene(server, transport):
        server.next("/model_info", hang())
        request = asyncio.create_task(transport.get("/model_info"))
        while not server.calls["/model_info"]:
            await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await transport.get("/model_info")
        assert len(server.connections()) == 1

    play(scene)


def test_a_key_is_sent_and_in_no_message(play):
    async def scene(server, transport):
        async def echo(server, request, answer):
            assert request.headers["Authorization"] == "Bearer sesame"
            return await status(403)(server, request, answer)

        server.next("/model_info", echo)
        with pytest.raises(RefusedError) as refusal:
            await transport.get("/model_info")
        assert "sesame" not in str(refusal.value)

    play(scene, api_key="sesame")


def test_credentials_in_an_address_are_sent_but_never_shown(model, tokenizer):
    async def echo(server, request, answer):
        assert request.headers["Authorization"] == "Basic bWU6c2VrcmV0"  # me:sekret
        return await status(403)(server, request, answer)

    async def main():
        server = FaultServer(model, tokenizer)
        await server.start()
        transport = Transport(f"http://me:sekret@127.0.0.1:{server.port}")
        server.next("/model_info", echo)
        with pytest.raises(RefusedError) as refusal:
            await transport.get("/model_info")
        assert f"127.0.0.1:{server.port}" in str(refusal.value)
        assert "sekret" not in str(refusal.value) + transport.base_url
        await transport.close()
        await server.stop()

    asyncio.run(main())


def test_one_transport_serves_one_event_loop_after_the_other(model, tokenizer):
    transport = Transport(f"http://127.0.0.1:{free_port()}")

    async def main(close):
        server = FaultServer(model, tokenizer)
        server.port = int(transport.base_url.rpartition(":")[2])
        await server.start()
        assert await transport.get("/model_info")
        if close:
            await transport.close()
        await server.stop()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for close in (False, False, True):
            asyncio.run(main(close))
        gc.collect()
    assert not [
        item
        for item in caught
        if "never awaited" in str(item.message) or "client session" in str(item.message)
    ]


def test_an_operators_request_skips_the_queue(play):
    async def scene(server, transport):
        server.next("/generate", hang(), hang(), hang())
        waiting = [asyncio.create_task(transport.post("/generate", {})) for _ in range(3)]
        while server.calls["/generate"] < 2:
            await asyncio.sleep(0.01)
        assert await transport.get("/model_info", deadline_s=5)
        assert server.calls["/generate"] == 2
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    play(scene, connections=2)


def test_the_deadline_of_a_request_begins_when_it_is_sent(play):
    async def scene(server, transport):
        server.next("/model_info", *[slow(0.1)] * 12)
        answers = await asyncio.gather(*(transport.post("/model_info", {}) for _ in range(12)))
        assert len(answers) == 12
        assert server.calls["/model_info"] == 12

    play(scene, connections=1, deadline_s=0.6)


@pytest.fixture
def few_files():
    """Allow only `more` open files inside `with few_files(more)`, until the limit is raised."""

    @contextmanager
    def limited(more):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))  # the lowest number that a new file can get, which the limit is on
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return limited


def test_as_many_connections_are_opened_as_the_system_allows(play, few_files):
    async def scene(server, transport):
        server.next("/model_info", *[slow(0.3)] * 60)
        with few_files(40):
            assert len(await asyncio.gather(*(transport.post("/model_info", {}) for _ in range(60)))) == 60

    play(scene)


def test_too_many_open_files_is_not_a_lost_server(play, few_files):
    async def scene(server, transport):
        await transport.get("/model_info")
        server.next("/model_info", hang())
        held = asyncio.create_task(transport.post("/model_info", {}))
        while server.calls["/model_info"] < 2:
            await asyncio.sleep(0.01)
        with few_files(0), pytest.raises(UnreachableError) as failure:
            await transport.get("/model_info")
        assert not isinstance(failure.value, NotConnectedError)
        assert failure.value.retry_after_s > 0
        held.cancel()
        assert await transport.get("/model_info")

    play(scene)


def test_redirects_are_not_followed(play):
    async def scene(server, transport):
        async def away(fault_server, request, answer):
            return web.Response(status=307, headers={"Location": f"{server.url}/health"})

        server.next("/model_info", away)
        with pytest.raises(RefusedError):
            await transport.get("/model_info")
        assert not server.calls["/health"]

    play(scene, api_key="secret")


def test_a_page_of_another_program_becomes_one_line(play):
    async def scene(server, transport):
        server.next("/model_info", status(404, text="<!DOCTYPE HTML>\n<html><h1>Not found</h1></html>"))
        with pytest.raises(RefusedError) as caught:
            await transport.get("/model_info")
        assert "\n" not in str(caught.value) and "<" not in str(caught.value)

    play(scene)
