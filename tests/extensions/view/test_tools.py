"""Tool calls as cards, in a real browser."""

import pytest
from extensions.view.runs import policy, write_run

from rl4llm.core.types import ChatMessage, Group, TokenSpan, Trajectory
from rl4llm.tracking.episodes import EpisodeLog

CARDS = "[...document.querySelectorAll('article > section:nth-of-type(1) .card')]"


def call(name, arguments, number=None):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    """Yield calls in the text of the policy, as the engine samples them, and calls with ids, as servers return them."""
    known = call("calculator", {"expression": "1/0"})
    yield (
        ChatMessage("assistant", '<tool_call>{"name": "calculator"}</tool_call>'),
        ChatMessage("tool", "ZeroDivisionError", tool_calls=(known,), failed=True, seconds=0.01234),
        ChatMessage("assistant", "It is infinite."),
    )
    two = (call("search", {"query": "x" * 500}, "a"), call("add", '{"a": 1}', "b"), call("stop", {}, "c"))
    yield (
        ChatMessage("assistant", "", tool_calls=two),
        ChatMessage("tool", "2", tool_call_id="b", seconds=61.5),
        ChatMessage("tool", "first line\n" + "y" * 500, tool_call_id="a"),
    )


@pytest.fixture
def url(tokenizer, tmp_path, serve):
    run = write_run(tmp_path / "run", tokenizer, steps=1)
    spans = (TokenSpan.context([5]), policy([8, 9]))
    groups = [
        Group(str(n), (Trajectory(str(n), spans, (ChatMessage("user", "?"), *said), {}, 1.0, "done", {}),))
        for n, said in enumerate(conversations())
    ]
    EpisodeLog(run / "episodes", resume_step=9).log(9, groups, credits=[[0.0], [0.0]])
    address = serve(run)
    yield address


def cards(page):
    return [" ".join(text.split()) for text in page.value(f"{CARDS}.map(e => e.innerText)")]


def test_tool_calls_are_cards_with_their_answers(browser, url):
    browser.open(f"{url}#/episode/0/step-000009.jsonl/0")
    browser.until("document.querySelector('.card')")
    assert cards(browser) == ['calculator failed 12.3 ms {"expression":"1/0"} ZeroDivisionError']
    assert browser.value(f"{CARDS}[0].classList.contains('failed')")
    browser.press("n")
    browser.until("document.querySelectorAll('article > section:nth-of-type(1) .card').length === 3")
    waiting, add, search = cards(browser)
    assert waiting == "stop {} no answer" and add == 'add 61.5 s {"a": 1} 2'
    assert search == f'search {{"query":"{"x" * 110} … 512 characters first line … 511 characters'
    assert browser.value(f"{CARDS}[2].querySelectorAll('details:not([open])').length") == 2
    browser.click(".message:nth-child(4) .card > details > summary")
    assert "y" * 500 in cards(browser)[2]
