"""An agent's run on the page and as text: its conversations, the files that it changed, and what the tests found."""

import json
from dataclasses import replace

import pytest
from extensions.view.runs import encoded, episode, policy, write_run
from extensions.view.test_terminal import printed

from rl4llm.core.types import Group, Origin, TokenSpan
from rl4llm.extensions.view.agent import changed_files, conversations, in_lines
from rl4llm.extensions.view.export import export
from rl4llm.extensions.view.run import find_runs
from rl4llm.extensions.view.texts import TokenTexts
from rl4llm.tracking.episodes import EpisodeLog

DIFF = """\
diff --git a/src/sum.py b/src/sum.py
index 1..2 100644
--- a/src/sum.py
+++ b/src/sum.py
@@ -1,3 +1,4 @@
 def add(a, b):
--- a removed line that looks like a header
+++ an added one
+    return a + b
 # end
--- a/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/picture.png b/picture.png
Binary files differ
"""
HOSTILE = "<img src=x onerror='window.hacked=1'> \u202e </script>"
TASK = {
    "reward": 0.5,
    "tests": {"adds": True, f"subtracts {HOSTILE}": False},
    "output": f"E assert 1 == 2 {HOSTILE}",
}


def agents_episode(tokenizer, **extras):
    """A conversation that continues from its summary, and a helper that the second one called."""
    one = episode(tokenizer, "fix the sum", answer=f"Done. {HOSTILE}", **extras)

    def record(question, *answers):
        for answer in answers:
            yield TokenSpan.context(encoded(tokenizer, question))
            yield policy(encoded(tokenizer, answer))

    forks = (
        tuple(record("fix the sum, é, summary: listed\n", "I fix it.", "Done.")),
        tuple(record("list the files\n", "There are two.")),
        tuple(record("what is this about?\n", "Sums.")),
    )
    return replace(one, forks=forks, origins=(Origin("continues", 0, 2), Origin("called", 1, 1), None))


def write_agents_run(directory, tokenizer, **extras):
    run = write_run(directory / "run", tokenizer, steps=1)
    one = agents_episode(
        tokenizer, **{"task": TASK, "changes": DIFF.replace("a + b", f"a + b {HOSTILE}"), **extras}
    )
    EpisodeLog(run / "episodes", resume_step=1).log(2, [Group(one.prompt_id, (one,))])
    return run


def test_conversations_name_where_each_comes_from(tokenizer, tmp_path):
    run = write_agents_run(tmp_path, tokenizer)
    row = json.loads((run / "episodes" / "step-000002.jsonl").read_text())
    rows = conversations(row)
    assert [item["parent"] for item in rows] == [None, 0, 1, None]
    assert [item["turns"] for item in rows] == [2, 2, 1, 1]
    assert [bool(item["how"]) for item in rows] == [False, True, True, False]
    assert conversations({**row, "forks": []}) == []


def test_tokenizer_that_is_missing_is_looked_for_once(tmp_path):
    looked = []
    texts = TokenTexts(tmp_path, lambda: looked.append("config.yaml"))
    turns = [{"author": author, "token_ids": [1]} for author in ("user", "policy") * 32]
    rows = conversations({"spans": turns, "forks": [turns] * 7}, texts)
    assert [row["turns"] for row in rows] == [32] * 8 and len(looked) == 1


@pytest.mark.parametrize("origins", [
    None, 7, [7, None], [{"relation": "continues", "record": 5, "turn": 1}] * 3, [{"relation": [], "record": 0}],
    [{"relation": "continues", "record": 1, "turn": 1}], [{"relation": "continues", "record": "0"}],
])  # fmt: skip
def test_origins_that_cannot_be_are_unknown(tokenizer, origins):
    spans = [{"author": "policy", "token_ids": [1, "x", None]}, {"author": 3, "token_ids": 5}]
    rows = conversations({"spans": spans, "forks": [spans, 7, None], "origins": origins})
    assert rows[0]["parent"] is rows[1]["parent"] is None
    assert all(row["parent"] is None or row["parent"] < number for number, row in enumerate(rows))


def test_diff_is_split_into_files_by_its_counts():
    files = changed_files(DIFF)
    assert [(file["name"], file["added"], file["removed"]) for file in files] == [
        ("src/sum.py", 2, 1),
        ("old.txt", 0, 1),
        ("picture.png", 0, 0),
    ]
    kinds = [kind for kind, _ in files[0]["lines"]]
    assert kinds == ["head"] * 4 + ["hunk", "same", "removed", "added", "added", "same"]
    assert "\n".join(line for file in files for _, line in file["lines"]) == DIFF.removesuffix("\n")
    assert changed_files(None) == changed_files("") == changed_files({"a": 1}) == []
    assert [file["name"] for file in changed_files("no diff at all\x0c\u2028")] == [
        "no diff at all\x0c\u2028"
    ]


@pytest.mark.parametrize("form", ["served", "exported"])
def test_agents_run_is_a_tree_with_changes_and_tests(browser, tokenizer, tmp_path, form, serve):
    run = write_agents_run(tmp_path, tokenizer)
    url, report = serve(run), tmp_path / "report.html"
    if form == "exported":
        export(find_runs([run]), report)
    browser.open(url if form == "served" else report.as_uri())
    browser.value("location.hash = document.querySelector('.card, .dot')?.getAttribute('href') ?? ''")
    browser.value("location.hash = '#/episode/0/step-000002.jsonl/0'")
    browser.until("document.querySelector('.tree') && document.querySelector('.diff')")
    depth = "document.querySelector('.tree > li > .tree > li > .tree > li > details > summary').innerText"
    assert browser.value(depth).startswith("3 called by conversation 2 in turn 1")
    assert browser.value("document.querySelectorAll('.tree .message').length") == 0
    browser.click(".tree > li > .tree summary")
    browser.until("document.querySelectorAll('.tree .message').length === 4")
    assert "é" in browser.text(".tree .message .content")
    assert browser.value(
        "[...document.querySelectorAll('.diff')].map((e) => e.querySelectorAll('.added').length)"
    ) == [2, 0, 0]
    shown = browser.value("document.body.innerText")
    assert "1 of 2 passed, reward 0.5" in shown and "E assert 1 == 2 <img" in shown
    assert "<img src=x" in browser.text(".diff .added:last-of-type, .diff .added:nth-of-type(9)")
    assert browser.value("typeof window.hacked") == "undefined" and "\u202e" not in shown
    more = browser.value("[...document.querySelectorAll('.config th')].map((e) => e.innerText)")
    assert not [name for name in more if name in ("extras.task", "extras.changes", "origins")]


@pytest.mark.parametrize("extras", [
    {"task": 7, "changes": ["x"]}, {"task": {"tests": [1], "output": {"a": 1}, "reward": HOSTILE}, "changes": HOSTILE},
    {"task": {"tests": {"a": "yes"}}, "changes": "@@ -1,99999999999 +1 @@\n+"}, {"task": {}, "changes": "+" * 200_000},
    {"changes": "--- a/x\n+++ b/x\n@@ -0,0 +1,3000 @@\n" + "+line\n" * 3000},
])  # fmt: skip
def test_extras_of_any_form_break_neither_page_nor_text(browser, tokenizer, tmp_path, serve, extras):
    run = write_agents_run(tmp_path, tokenizer, **{"task": None, **extras})
    row = json.loads((run / "episodes" / "step-000002.jsonl").read_text())
    assert [*in_lines(row)]
    browser.open(serve(run))
    browser.value("location.hash = '#/episode/0/step-000002.jsonl/0'")
    browser.until("document.querySelector('.tree')")
    assert browser.value("document.querySelectorAll('.diff div').length") <= 1000
    assert browser.value("typeof window.hacked") == "undefined"


def opened(browser, url):
    """The page of the agent's episode, drawn to its end; the names in its last table."""
    browser.open(url)
    browser.value("location.hash = '#/episode/0/step-000002.jsonl/0'")
    browser.until("document.querySelector('.tokens')")
    return browser.value("[...document.querySelectorAll('.config th')].map((e) => e.innerText)")


MANY = 140_000
NAME = "x" * 10_000
MANY_FILES = "".join(f"--- a/{NAME * (i < 3)}{i}\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n" for i in range(MANY))


def test_many_files_and_tests_hide_no_episode(browser, tokenizer, tmp_path, serve):
    tests = {f"{NAME * (i < 3)}test {i}": i % 2 == 0 for i in range(MANY)}
    run = write_agents_run(tmp_path, tokenizer, task={"tests": tests, "reward": 0}, changes=MANY_FILES)
    names = opened(browser, serve(run))
    assert len([name for name in names if name.startswith("test ")]) == 200 - 3
    assert max(map(len, names)) < 1000
    assert browser.value("document.querySelectorAll('.diff').length") == 200
    assert browser.value("document.querySelectorAll('*').length") < 10_000
    assert browser.value("document.body.innerText.includes('70000 of 140000 passed')")
    browser.value("document.querySelector('section:has(.diff) > .more').click()")
    browser.value("document.querySelector('.config > .more').click()")
    assert browser.value("document.querySelectorAll('.diff').length") == 400
    assert browser.value("document.querySelectorAll('.config:has(> .more) tr').length") == 400


def test_lines_of_a_closed_file_are_made_when_it_opens(browser, tokenizer, tmp_path, serve):
    run = write_agents_run(tmp_path, tokenizer, changes=DIFF * 10)
    opened(browser, serve(run))
    lines = "[...document.querySelectorAll('.diff')].map((e) => e.childElementCount > 0)"
    assert browser.value(lines) == [True] * 20 + [False] * 10
    browser.value("document.querySelectorAll('section:has(.diff) > details')[25].open = true")
    browser.until(f"({lines})[25]")
    assert browser.value(lines) == [True] * 20 + [False] * 5 + [True] + [False] * 4


def test_terminal_shows_only_some_files_and_tests():
    tests = {f"{NAME * (i < 3)}\n{i}": False for i in range(MANY)}
    lines = [*in_lines({"extras": {"task": {"tests": tests}, "changes": MANY_FILES}})]
    assert len(lines) < 100 and max(map(len, lines)) < 10_000 and "\n" not in "".join(lines)
    assert lines[0].startswith("tests: 0 of 140000 passed")


@pytest.mark.parametrize(("extras", "rest"), [
    ({"task": "sort the list", "changes": {"a": 1}}, {"task": "sort the list", "changes": '{"a":1}'}),
    ({"task": {"name": "sort"}, "changes": 0}, {"task": '{"name":"sort"}', "changes": "0"}),
    ({"task": {**TASK, "seed": 3}, "changes": DIFF}, {"task": '{"seed":3}'}),
    ({"task": {"reward": 1, "tests": ["a"]}, "changes": ["b"]}, {"task": '{"tests":["a"]}', "changes": '["b"]'}),
])  # fmt: skip
def test_extras_that_are_not_drawn_are_listed(browser, tokenizer, tmp_path, serve, extras, rest):
    opened(browser, serve(write_agents_run(tmp_path, tokenizer, **extras)))
    rows = "[...document.querySelectorAll('.config tr')].map((row) => [...row.cells].map((e) => e.innerText))"
    listed = {name: value for name, value in browser.value(rows) if name.startswith("extras.")}
    assert listed == {f"extras.{name}": value for name, value in rest.items()}


def test_tests_without_names_are_shown_by_their_reward():
    lines = [*in_lines({"extras": {"task": {"reward": 1.0, "tests": {}, "output": ""}}})]
    assert lines == ["tests: reward 1.0"]


def test_agents_run_is_shown_as_text(tokenizer, tmp_path):
    text = printed(write_agents_run(tmp_path, tokenizer))
    assert "\nconversation 2 continues conversation 1 after turn 2, compacted: 2 turns\n" in text
    assert (
        "\ntests: 1 of 2 passed; failed: subtracts <img" in text and "\nchanged src/sum.py: +2 -1\n" in text
    )
    assert "\u202e" not in text
