"""Files as tools: what they answer, what they refuse, and that no path leads out of the directory."""

import tracemalloc

import pytest

from rl4llm.core.base_env import SampleState
from rl4llm.envs.tools import ToolError
from rl4llm.extensions.toolbox.workspace import Workspace


@pytest.fixture
def workspace():
    opened = Workspace(max_bytes=4196, max_files=3).open(  # with a directory, which counts as 4096
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


def test_workspace_is_private_to_its_episode(workspace):
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


@pytest.mark.parametrize("path", [
    "notes", "notes/", "notes/one.txt/two", "n" * 300, "d/" * 40_000, "d/" * 17 + "f", "e/f",
])  # fmt: skip
def test_invalid_writes_are_refused_and_write_nothing(workspace, path):
    with pytest.raises(ToolError):
        workspace.write_file(path, "x")
    assert [path.name for path in workspace.root.rglob("*")] == ["notes", "one.txt"]


def test_a_workspace_bounds_files_directories_and_their_bytes(workspace):
    with pytest.raises(ToolError):
        workspace.write_file("big.txt", "x" * 91)
    workspace.write_file("big.txt", "x" * 80)
    roomy = Workspace(max_files=3)
    roomy.write_file("a/b/c/f", "x")
    with pytest.raises(ToolError):
        roomy.write_file("d/f", "x")
    roomy.write_file("a/b/g", "x")
    roomy.close()
    deep = Workspace()
    deep.write_file("d/" * 16 + "f", "x")
    deep.close()


def test_a_search_of_a_workspace_holds_only_what_it_shows():
    workspace = Workspace()
    workspace.write_file("/".join(["d" * 200] * 16), "\n" * 20_000)
    tracemalloc.start()
    found = workspace.search_files("").splitlines()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    workspace.close()
    assert len(found) == 51 and found[-1] == "and 19950 more lines"
    assert peak_bytes < 10 * 2**20


def test_workspace_takes_lone_surrogates_and_limits_files(workspace):
    workspace.write_file("a", "\ud800")
    workspace.write_file("b", "")
    workspace.write_file("b", "x" * 80)
    for use in (lambda: workspace.write_file("c", ""), lambda: workspace.read_file("c")):
        with pytest.raises(ToolError):
            use()
