"""The tools that are there, each alone: what it answers, what it refuses, and that nothing leads out of its bounds."""

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, DataError, EnvError, SandboxError
from rl4llm.envs.tools import MCP, Python, Search, ToolError, ToolSet, Workspace, as_toolset, calculator, tool
from rl4llm.envs.tools.arguments import objection
from rl4llm.inference.ports import free_port
from rl4llm.sandbox import Outcome

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed; scripts/install_sandbox.sh does it"
)
THINGS = [sys.executable, str(Path(__file__).with_name("things_server.py"))]


@tool(timeout_s=2.5)
def weather(city: str, days: int = 1, near: list[str] | None = None) -> str:
    """The weather forecast.

    Args:
        city: Name of a city.
        days: How many days ahead.
        near: Other cities.
    """
    return f"{city}+{days}: rain"


def test_the_schema_of_a_tool_comes_from_its_type_hints_and_docstring():
    made = as_toolset(weather).tools["weather"]
    assert made.schema["function"]["description"] == "The weather forecast."
    assert made.parameters["properties"]["days"] == {"type": "integer", "description": "How many days ahead."}
    assert made.parameters["required"] == ["city"] and made.timeout_s == 2.5
    assert weather("Rome") == "Rome+1: rain"


def test_a_function_that_says_too_little_of_itself_is_no_tool():
    def mute(city):
        """The weather."""

    for function in (mute, lambda city: city):
        with pytest.raises(ConfigError, match=r"has no schema.*Next step: give each parameter a type hint"):
            tool(function)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": "Rome", "days": 3, "near": None}, None),
        ({}, "the argument 'city' is missing; arguments: city, days, near"),
        ({"city": "Rome", "town": 1}, "no argument 'town'"),
        ({"city": 5}, "'city' must be of type string, not 5"),
        ({"city": "Rome", "days": True}, "'days' must be of type integer, not True"),
        ({"city": "Rome", "near": "Ostia"}, "'near' must be of type array"),
    ],
)
def test_arguments_of_other_names_and_types_are_objected_to(arguments, said):
    objected = objection(as_toolset(weather).tools["weather"], arguments)
    assert objected is None if said is None else said in objected


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("calculater", "Did you mean 'calculator'"),
        ({"name": "workspace", "max_byte": 1}, "Did you mean 'max_bytes'"),
        ({"name": "search"}, "missing 1 required positional argument: 'corpus'"),
        ({"name": "calculator", "digits": 3}, "a function without options"),
        ({"name": "workspace", "max_files": "many"}, "max_files='many' is not accepted: a whole number"),
        ({"name": "mcp"}, "a list, or a url"),
        (17, "17 is not accepted"),
    ],
)
def test_tools_that_cannot_be_are_refused_with_what_is_accepted(item, said):
    with pytest.raises(ConfigError, match=said):
        as_toolset(item)


def test_a_tool_may_be_named_by_its_place_in_a_package():
    assert as_toolset("rl4llm.envs.tools.calculator:calculator").tools["calculator"].function is calculator


def test_a_set_of_ones_own_shares_what_its_methods_need():
    class Counter(ToolSet):
        def __init__(self):
            super().__init__()
            self.count = 0

        @tool
        def count_up(self, by: int) -> int:
            """Count up.

            Args:
                by: How far.
            """
            self.count += by
            return self.count

    counter = as_toolset(Counter)
    assert list(counter.tools) == ["count_up"] and "self" not in counter.tools["count_up"].parameters["properties"]
    assert [counter.tools["count_up"].function(by=2) for _ in range(2)] == [2, 4]


@pytest.fixture
def workspace():
    opened = Workspace(max_bytes=100, max_files=3).open(
        SampleState("p", 0, [], "", {"files": {"notes/one.txt": "Ada\nGrace\n"}})
    )
    yield opened
    opened.close()


def test_files_are_written_read_listed_and_searched(workspace):
    assert workspace.write_file("two.txt", "ada again") == "9 bytes are in two.txt"
    assert workspace.read_file("notes/../two.txt") == "ada again"
    assert workspace.list_files() == "notes/one.txt\ntwo.txt"
    assert workspace.search_files("ADA") == "notes/one.txt:1: Ada\ntwo.txt:1: ada again"
    assert workspace.search_files("nobody") == "No line contains it."


def test_a_workspace_is_gone_with_its_episode_and_others_see_nothing_of_it(workspace):
    other = Workspace().open(SampleState("p", 1, [], ""))
    root = workspace.root
    assert other.list_files() == "There are no files." and root != other.root
    workspace.close()
    other.close()
    assert not root.exists()


def test_no_path_leads_out_of_a_workspace(workspace, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("Ada's secret")
    (workspace.root / "link.txt").symlink_to(secret)
    (workspace.root / "away").symlink_to(tmp_path)
    (workspace.root / "loop").symlink_to("loop")
    up = "../" * 12
    for path in (str(secret), f"{up}{secret}", "link.txt", "away/secret.txt", "loop", "..", ".", "", "a\0b"):
        for use in (workspace.read_file, lambda path: workspace.write_file(path, "overwritten")):
            with pytest.raises(ToolError):
                use(path)
    assert secret.read_text() == "Ada's secret" and sorted(tmp_path.iterdir()) == [secret]
    assert "secret" not in workspace.search_files("secret") + workspace.list_files()


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("big.txt", "x" * 91, "full: at most 100 bytes in 3 files"),
        ("notes", "x", "notes cannot be written: Is a directory"),
        ("notes/one.txt/two", "x", "cannot be written"),
        ("n" * 300, "x", "is no path"),
        ("notes/", "x", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_said(workspace, path, text, said):
    with pytest.raises(ToolError, match=said):
        workspace.write_file(path, text)


def test_a_workspace_takes_halves_of_characters_and_so_many_files(workspace):
    workspace.write_file("a", "\ud800")
    workspace.write_file("b", "")
    workspace.write_file("b", "x" * 80)
    with pytest.raises(ToolError, match="3 files"):
        workspace.write_file("c", "")
    with pytest.raises(ToolError, match="there is no file 'c'"):
        workspace.read_file("c")


@needs_bubblewrap
def test_python_runs_programs_and_shows_what_went_wrong_in_them():
    python = Python(wall_s=1.0)
    assert python.python("print(6 * 7)") == "42\n"
    assert python.python("x = 6 * 7") == "The program printed nothing."
    broken = {"print('so far')\n1 / 0": "ZeroDivisionError.*\nso far", "while True: pass": "timeout", "(": "Syntax"}
    for code, said in broken.items():
        with pytest.raises(ToolError, match=said):
            python.python(code)
    python.close()


class BrokenSandbox:
    def __init__(self, works):
        self.works = works

    def run(self, program, limits=None):
        self.works -= 1
        return Outcome("ok", stdout="42\n") if self.works >= 0 else Outcome("infra_error", "no namespaces here")

    def close(self):
        pass


def test_a_sandbox_that_does_not_work_is_no_fault_of_the_model_and_said_at_once():
    with pytest.raises(SandboxError, match="no namespaces here"):
        Python(sandbox=BrokenSandbox(works=0))
    with pytest.raises(EnvError, match="no namespaces here"):
        Python(sandbox=BrokenSandbox(works=1)).python("print(1)")


DOCUMENTS = [
    {"title": "Ada Lovelace", "text": "She wrote the first program, for a machine that was never built."},
    {"title": "Grace Hopper", "text": "She wrote the first compiler."},
    {"text": "Cats sleep most of the day."},
]


def test_search_finds_the_documents_that_share_words_with_a_query(tmp_path):
    pytest.importorskip("bm25s")
    search = Search(DOCUMENTS, results=2, max_chars=12).search
    assert search("Who wrote the first compiler?") == "Grace Hopper\nShe wrote th\n\nAda Lovelace\nShe wrote th"
    assert search("cats") == "Cats sleep m"
    for nothing in ("", "the", "zebra", "\ud800"):
        assert search(nothing) == "No document has these words."
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ada.md").write_text("Ada wrote a program.")
    assert Search(str(tmp_path)).search("program") == "sub/ada.md\nAda wrote a program."


def test_a_corpus_without_texts_is_refused(tmp_path):
    pytest.importorskip("bm25s")
    with pytest.raises(DataError, match="has no documents"):
        Search([])
    with pytest.raises(DataError, match=r"dataset\[1\].*needs a `text`|needs a `text`"):
        Search([DOCUMENTS[0], {"title": "no text"}])


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
    assert objection(things.tools["add"], {"a": "1", "b": 2}) == "add: the argument 'a' must be of type integer, not '1'"
    assert call(things, "add", a=37, b=48) == "85"
    with pytest.raises(ToolError, match="Error executing tool fail"):
        call(things, "fail")
    with pytest.raises(ToolError, match="Field required"):
        call(things, "add", a=1)


def test_the_tools_of_a_server_over_stdio_are_there_with_its_schemas(things):
    check_things(things)


def test_the_tools_of_a_server_over_http_are_there_with_its_schemas(things_url):
    things = MCP(url=things_url, only=["add", "fail"])
    assert sorted(things.tools) == ["add", "fail"]
    check_things(things)
    things.close()


def test_calls_of_a_server_run_at_once_and_one_that_is_given_up_hinders_nobody(things):
    async def meet():
        function = things.tools["meet"].function
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(function(party="nobody", count=2), 0.2)
        return await asyncio.gather(*(function(party="all", count=20) for _ in range(20)))

    assert asyncio.run(meet()) == ["met"] * 20


def test_a_server_that_dies_fails_the_call_and_is_started_again_for_the_next_one():
    pytest.importorskip("mcp")
    things = MCP(command=THINGS)
    with pytest.raises(EnvError, match="broke while it ran die"):
        call(things, "die")
    assert call(things, "add", a=1, b=2) == "3"
    things.close()


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
