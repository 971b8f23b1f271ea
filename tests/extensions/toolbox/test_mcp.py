"""The tools of a real MCP server, over stdio and over HTTP."""

import asyncio
import stat
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.envs.tools import MCP, ToolError
from rl4llm.envs.tools.arguments import objection
from rl4llm.runtime.ports import free_port

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
    assert (
        objection(things.tools["add"], {"a": "1", "b": 2})
        == "add: the argument 'a' must be of type integer, not '1'"
    )
    assert call(things, "add", a=37, b=48) == "85"
    with pytest.raises(ToolError, match="Error executing tool fail"):
        call(things, "fail")
    with pytest.raises(ToolError, match="Field required"):
        call(things, "add", a=1)


def test_an_internal_error_of_a_server_is_not_the_models_fault(things):
    began = time.monotonic()
    for _ in range(4):
        with pytest.raises(EnvError, match="could not run refuse: not like this"):
            call(things, "refuse", code=-32603)
    assert time.monotonic() - began < 3  # nothing waits for the last line of a running server
    with pytest.raises(ToolError, match="not like this"):
        call(things, "refuse", code=-32602)
    assert call(things, "add", a=1, b=2) == "3"


def test_mcp_stdio_server_offers_its_tools_and_schemas(things):
    check_things(things)


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
    with pytest.raises(EnvError, match="broke while it ran die"):
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ["/no/such/server"]}, "No such file"),
        (
            {"command": [sys.executable, "-c", "import nothing_like_it"]},
            "Connection closed.*No module named 'nothing_like_it'",
        ),
        ({"command": [sys.executable, "-c", "input(); input()"], "connect_timeout_s": 0.2}, "within 0.2 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "no connection to http://127.0.0.1:9/mcp"),
        ({"command": THINGS, "only": ["subtract"]}, "has no tool 'subtract'; it has .'add'"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_at_the_start(options, said):
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        MCP(**options)
