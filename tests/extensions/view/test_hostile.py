"""What a model wrote is only ever text, in the page and in its exported file."""

import pytest
from extensions.view.browser import list_episodes
from extensions.view.runs import episode, write_run

from rl4llm.core.types import Group
from rl4llm.extensions.view.export import export
from rl4llm.extensions.view.run import find_runs
from rl4llm.tracking.episodes import EpisodeLog

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'> \ud800 \u202e &lt;b&gt;"
)


def write_hostile_run(directory, tokenizer):
    run = write_run(directory / "run</script>", tokenizer, steps=1)
    said = episode(
        tokenizer, HOSTILE, answer=HOSTILE + "y" * (10 << 20), note={HOSTILE: HOSTILE}, reward=float("inf")
    )
    EpisodeLog(run / "episodes", resume_step=1).log(2, [Group(said.prompt_id, (said,))])
    (run / "config.yaml").write_text(
        '"</script><script>window.hacked=3</script>": "<img src=x onerror=hacked=4>"\n'
    )
    return run


@pytest.mark.parametrize("form", ["served", "exported"])
def test_nothing_that_a_model_wrote_is_ever_run(browser, tokenizer, tmp_path, form, serve):
    run = write_hostile_run(tmp_path, tokenizer)
    report = tmp_path / "report.html"
    url = serve(run)
    if form == "exported":
        assert export(find_runs([run]), report) == 9
        assert report.read_text().lower().count("</script>") == 3
    browser.open(url if form == "served" else report.as_uri())
    browser.press("3")
    browser.until("document.querySelector('.config')")
    list_episodes(browser)
    browser.press("j", "Enter")
    browser.until("document.querySelector('.tokens')")
    assert "<script>window.hacked=1</script><img src=x" in browser.text(".message.assistant:last-child")
    assert browser.value("document.body.innerText.length") < 200_000
    browser.click(".message .more")
    browser.press("Escape")
    browser.until("document.querySelector('[data-search]')")
    browser.press("/")
    browser.type("WINDOW.hacked=1</SCRIPT>")
    browser.press("Enter")
    browser.until("document.getElementById('count')?.innerText.startsWith('1 of 9')")
    assert browser.value("typeof window.hacked") == "undefined"
    if form == "exported":
        assert {asked.split(":")[0] for asked in browser.requests} <= {"file", "data", "about"}


def test_text_that_turns_the_direction_reorders_nothing(browser, tokenizer, tmp_path, serve):
    run = write_run(tmp_path / "run", tokenizer, steps=1)
    said = episode(
        tokenizer, "is \u202eit", answer="yes \u202ecba\u2066 no", note={"\u202enote": "\u200fvalue"}
    )
    EpisodeLog(run / "episodes", resume_step=1).log(2, [Group(said.prompt_id, (said,))])
    url = serve(run)
    browser.open(url)
    list_episodes(browser)
    browser.press("j", "Enter")
    browser.until("document.querySelector('.tokens')")
    assert "yes \\u202ecba\\u2066 no" in browser.text(".message.assistant:last-child")
    assert "is \\u202eit" in browser.text("h1")
    shown = browser.value("document.documentElement.textContent")
    assert "\\u202enote" in shown and "\\u200fvalue" in shown
    assert not {"\u202e", "\u2066", "\u200f"} & set(shown)
