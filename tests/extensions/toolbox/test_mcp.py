"""The tools of a real MCP server, over stdio and over HTTP."""

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from rl4llm.core.errors import ConfigError, EngineError, EnvError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools import ToolError
from rl4llm.envs.tools.arguments import objection
from rl4llm.extensions.toolbox.mcp import MCP
from rl4llm.extensions.toolbox.mcp_answers import text_of
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.ports import free_port
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient

MEMORY = [sys.executable, "-S", str(Path(__file__).with_name("memory_server.py"))]
THINGS = [sys.executable, str(Path(__file__).with_name("things_server.py"))]


@pytest.fixture(scope="module")
def things():
    pytest.importorskip("mcp")
    connected = MCP(command=THINGS)
    yield connected
    connected.close()


@pytest.fixture(scope="module")
def things_url():
    pytest.importorskip("mcp")
    port = free_port("127.0.0.1")
    server = subprocess.Popen([*THINGS, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/mcp"
    for _ in range(600):
        try:
            urlopen(url)
        except HTTPError:  # it answers
            break
        except URLError:
            time.sleep(0.05)
    yield url
    server.kill()
    server.wait()


def call(toolset, name, **arguments):
    return asyncio.run(toolset.tools[name].function(**arguments))


def check_things(things):
    assert things.tools["add"].schema["function"]["description"] == "Add two numbers."
    assert "'a'" in objection(things.tools["add"], {"a": "1", "b": 2})
    assert call(things, "add", a=37, b=48) == "85"
    for name, arguments in (("fail", {}), ("add", {"a": 1})):
        with pytest.raises(ToolError):
            call(things, name, **arguments)


def test_an_internal_error_of_a_server_is_not_the_models_fault(things):
    began = time.monotonic()
    for _ in range(4):
        with pytest.raises(EnvError):
            call(things, "refuse", code=-32603)
    assert time.monotonic() - began < 3  # nothing waits for the last line of a running server
    with pytest.raises(ToolError):
        call(things, "refuse", code=-32602)
    assert call(things, "add", a=1, b=2) == "3"


def test_mcp_stdio_server_offers_its_tools_and_schemas(things):
    check_things(things)


@pytest.mark.parametrize(("kind", "shown"), [
    ("text", "memo://1:\nBuy tea.\nAnd [bread]."),
    ("textual bytes", 'memo://2:\n{"é": 1}'),
    ("bytes", "memo://3 (application/gzip, 2,000 bytes), which cannot be shown as text"),
    ("false text", "memo://4:\n\ufffd\ufffd"),
    ("link", "link to file:///r.pdf (report, application/pdf, 12,345 bytes): The report."),
    ("short link", "link to file:///r.pdf (report)"),
    ("image", "image (image/png, 70 bytes) that cannot be shown as text"),
    ("sound", "audio (audio/wav, 5 bytes) that cannot be shown as text"),
    ("torn image", "image (image/png, 5 bytes) that cannot be shown as text"),
    ("nothing", ""),
])  # fmt: skip
def test_parts_of_an_answer_become_text_or_are_described(things, kind, shown):
    assert call(things, "read", kind=kind) == f"Here:\n{shown}"


def test_an_answer_without_parts_is_its_structured_content(things):
    assert json.loads(call(things, "measure")) == {"width": 3}
    bare = types.SimpleNamespace(content=[], structured_content={"width": "é"})
    assert text_of(bare) == '{"width": "é"}'


def test_text_is_read_where_a_schema_asks_for_more(tmp_path):
    pytest.importorskip("mcp")
    memory = MCP(command=[*MEMORY, str(tmp_path)])
    try:
        assert [call(memory, "tell", text=text) for text in ("a text", "another")] == ["a text", "another"]
    finally:
        memory.close()


def test_mcp_http_server_offers_its_tools_and_schemas(things_url):
    things = MCP(url=things_url, only=["add", "fail"])
    assert sorted(things.tools) == ["add", "fail"]
    check_things(things)
    things.close()


def test_mcp_calls_run_at_once_and_a_cancelled_one_blocks_none(things):
    async def meet():
        function = things.tools["meet"].function
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(function(party="nobody", count=2), 0.2)
        return await asyncio.gather(*(function(party="all", count=20) for _ in range(20)))

    assert asyncio.run(meet()) == ["met"] * 20


def test_mcp_server_that_dies_fails_the_call_and_restarts():
    pytest.importorskip("mcp")
    things = MCP(command=THINGS)
    with pytest.raises(EnvError):
        call(things, "die")
    assert call(things, "add", a=1, b=2) == "3"
    things.close()


def bytes_in_temporary_files():
    """Those without a name that this process has open."""
    sizes = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            state = path.stat()
            sizes.append(state.st_size if stat.S_ISREG(state.st_mode) and not state.st_nlink else 0)
    return sum(sizes)


def test_only_the_end_of_what_a_server_complains_is_kept():
    pytest.importorskip("mcp")
    flood = "import runpy, sys; [sys.stderr.write('x' * 2**20) for _ in range(50)]; print('the last line', file=sys.stderr)"
    things = MCP(
        command=[sys.executable, "-c", f"{flood}; runpy.run_path({THINGS[-1]!r}, run_name='__main__')"]
    )
    assert bytes_in_temporary_files() < 2**20
    tracemalloc.start()
    with pytest.raises(EnvError, match=r"broke while it ran die\. It said: x+the last line$"):
        call(things, "die")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    things.close()
    assert peak_bytes < 10 * 2**20


@pytest.mark.parametrize("options", [
    {"command": ["/no/such/server"]},
    {"command": [sys.executable, "-c", "input(); input()"], "connect_timeout_s": 0.2},
    {"url": "http://127.0.0.1:9/mcp"},
    {"command": THINGS, "only": ["subtract"]},
    {"command": THINGS, "url": "http://127.0.0.1:9/mcp"},
])  # fmt: skip
def test_a_server_that_cannot_be_used_stops_at_the_start(options):
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError):
        MCP(**options)


def said(name, text):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'text': text}})}</tool_call>"


@pytest.fixture
def play(tokenizer, tmp_path):
    """play(turns by session, **options): the texts of the tools by session, failures, and the processes of servers."""
    pytest.importorskip("mcp")
    runner = Runner()

    def run(script, *, size, options=None, **mcp):
        server = {"name": "mcp", "command": [*MEMORY, str(tmp_path)], **mcp}
        rows = [{"prompt_id": "p", "messages": [{"role": "user", "content": "?"}], "ground_truth": ""}]
        keys = {"tools": [server], "describe_tools": False, "max_steps": 4, **(options or {})}
        env = ToolMDPEnv(rows, tokenizer, [as_reward_function("tool_use")], 1, size, **keys)
        client = ScriptedClient(tokenizer, script)
        runner.run(client.load(WeightRef(0)))
        rollout = Rollout(
            env, client, Renderer(tokenizer, roles=("user", "tool")), runner, seed=0, max_failed_share=1.0
        )
        try:
            result = rollout.play([0], step=0, sampling_params=SamplingParams(max_tokens=10_000))
            answers = {
                one.extras["sample"]: [item.content for item in one.messages if item.role == "tool"]
                for one in result.trajectories
            }
            return answers, [sample.failure for sample in result.failed], running(tmp_path)
        finally:
            env.close()

    yield run
    runner.close()


def running(directory):
    """Return the ids of the servers that run, of all that left their file in the directory."""
    return [path.name for path in directory.iterdir() if Path("/proc", path.name).exists()]


def test_each_episode_has_a_server_that_ends_with_it(play, tmp_path):
    script = {f"0/p/{i}": [said("remember", f"first{i}"), said("remember", "more"), "done"] for i in range(6)}
    answers, failures, alive = play(script, size=6, per_episode=True)
    assert answers == {i: [f"first{i}", f"first{i} more"] for i in range(6)}
    assert failures == [] and alive == []
    assert len(list(tmp_path.iterdir())) == 7  # one at the start, which lists the tools


def test_episodes_share_a_server_unless_it_is_per_episode(play, tmp_path):
    script = {f"0/p/{i}": [said("remember", f"first{i}"), "done"] for i in range(3)}
    answers, _, alive = play(script, size=3)
    assert sorted(len(texts[0].split()) for texts in answers.values()) == [1, 2, 3]
    assert len(alive) == len(list(tmp_path.iterdir())) == 1
    assert running(tmp_path) == []  # after `close`


def test_episodes_that_fail_or_hang_leave_no_server(play):
    script = {
        "0/p/0": [said("remember", "a"), said("break", "now")] * 2,
        "0/p/1": [said("break", "sleep")] * 2,
        "0/p/2": [said("remember", "b"), "done"],
    }
    answers, failures, alive = play(script, size=3, per_episode=True, options={"tool_timeout_s": 2.0})
    assert answers == {2: ["b"]}
    assert "broke while it ran break" in failures[0] and "took more than 2 s" in failures[1]
    assert alive == []


def test_episodes_that_are_cancelled_leave_no_server(play, tmp_path):
    def scripted(session, prompt_ids):
        if session == "0/p/0" and len(list(tmp_path.iterdir())) == 4:  # all servers run
            raise EngineError("the engine broke")
        return said("break", "sleep") if session == "0/p/1" else said("remember", "a")

    with pytest.raises(EngineError):
        play(scripted, size=3, per_episode=True, options={"max_steps": 10_000})
    assert running(tmp_path) == []


def test_a_server_whose_episode_ended_is_not_started(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    tools = MCP(command=[*MEMORY, str(tmp_path)], per_episode=True)
    opened = tools.open(None)
    tools._starting.acquire()  # as if another server were starting
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(call, opened, "remember", text="a")
        opened.close()
        assert isinstance(answer.exception(10), EnvError)
    assert len(list(tmp_path.iterdir())) == 1
