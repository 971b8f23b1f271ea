"""The page in a real browser, as a user would use it: the tests see only what the page shows."""

import os

import pytest
from extensions.view.browser import list_episodes
from extensions.view.runs import episode, write_run, write_seen, write_step
from small_run import SmallRun
from sweeps import sampled

from rl4llm.cli import main
from rl4llm.core.types import Group
from rl4llm.extensions.view.export import export
from rl4llm.extensions.view.run import find_runs
from rl4llm.tracking.episodes import EpisodeLog
from rl4llm.tracking.glossary import find
from rl4llm.tracking.tracker import JsonlTracker

FORMS = ["served", "exported"]  # in each run one of them, and both where they differ: images, hostile texts
NOTHING, MINUS = "\u2013", "\u2212"


def rows(page):
    return page.value(
        "[...document.querySelectorAll('tbody tr[data-row]')].map(row => row.innerText.split('\\t'))"
    )


def test_page_moves_its_token_from_the_address_to_a_cookie(browser, runs, serve):
    url = serve(*runs, token="the-token")
    browser.open(f"{url}?token=the-token")
    browser.until("document.querySelectorAll('svg').length")
    assert browser.value("location.href").split("#")[0] == url and "the-token" not in browser.value(
        "document.cookie"
    )
    browser.call("Page.reload")
    browser.until("document.querySelectorAll('svg').length")


def choose(page, name, value):
    event = "new Event(field.tagName === 'SELECT' ? 'change' : 'input')"
    page.value(f"(() => {{ const field = document.querySelector('[data-filter=\"{name}\"]'); field.value = '{value}';"
               f" field.dispatchEvent({event}); }})()")  # fmt: skip


def test_curves_of_several_runs_show_values_at_the_pointer(page):
    page.until("document.querySelectorAll('.chart[data-metric=\"reward/mean\"] path.main').length === 2")
    page.point('.chart[data-metric="reward/mean"] svg', 0.13)  # the left end: step 1
    tip = page.text('.chart[data-metric="reward/mean"] .tip')
    assert tip.split() == ["step", "1", "one", "0.1", "two", "0.4"]
    page.value("document.querySelector('.chart[data-metric=\"reward/mean\"] svg').focus()")
    page.press("ArrowLeft", "ArrowRight")
    page.press("ArrowRight")
    assert "step 3" in page.text('.chart[data-metric="reward/mean"] .tip')
    page.click(".runs label:nth-child(2) input")
    assert (
        page.value("document.querySelectorAll('.chart[data-metric=\"reward/mean\"] path.main').length") == 1
    )


def test_episodes_are_sorted_filtered_and_searched(page):
    list_episodes(page)
    assert page.text("#count").startswith("76 of 76 episodes")
    page.click("[data-sort=mismatch]")
    assert rows(page)[0][-1] == "0.006" and rows(page)[0][1] == "6"
    choose(page, "run", "two")
    choose(page, "reward-from", "1")
    assert page.text("#count").startswith("6 of 76") and {row[0] for row in rows(page)} == {"two"}
    choose(page, "step-to", "2")
    choose(page, "stop", "done")
    assert [row[1] for row in rows(page)] == ["2", "2", "1", "1"]
    page.click(".controls button")  # clear
    page.press("/")
    page.type("it is 43")
    page.press("Enter")
    page.until("document.getElementById('count').innerText.startsWith('18 of 76')")
    page.press("Escape")  # which empties the field
    choose(page, "set", "failed")
    assert page.text("#count").startswith("4 of 76") and "failed: env/timeout" in page.text("tbody")
    choose(page, "reward-from", "0")
    assert page.text("#count").startswith("0 of 76") and "No episode matches" in page.text("tbody")


@pytest.mark.parametrize("form", sampled(FORMS, ["served"]))
def test_a_link_stays_that_of_its_episode_as_the_run_grows(browser, tokenizer, tmp_path, form, serve):
    run, report = write_run(tmp_path / "run", tokenizer, steps=1), tmp_path / "report.html"
    url = serve(run)
    browser.open(url)
    list_episodes(browser)
    browser.press("j", "j", "j", "Enter")  # not the first line of its file
    browser.until("document.querySelector('.tokens')")
    link, title = browser.value("location.hash"), browser.text("h1")
    assert title == "Step 1, prompt 1-0 sample 2"
    write_step(EpisodeLog(run / "episodes", resume_step=1), tokenizer, 2)  # which is read first
    export(find_runs([run]), report)
    url = serve(run)
    browser.open((url if form == "served" else report.as_uri()) + link)
    browser.until("document.querySelector('.tokens')")
    assert browser.text("h1") == title


def test_an_episode_is_read_token_by_token_from_the_keyboard(page):
    list_episodes(page)
    page.press("j", "j", "Enter")
    page.until("document.querySelector('.tokens')")
    assert "reward\n0" in page.text(".facts") and "ground truth 42" in page.text(".facts")
    roles = page.value(
        "[...document.querySelectorAll('article > section:nth-of-type(1) .role')].map(e => e.innerText)"
    )
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert 'calculator {"expression":"6*7"}' in " ".join(page.text(".call").split())
    page.until("document.querySelectorAll('.beside .column .messages').length === 4")
    text = page.value("[...document.querySelectorAll('.token')].map(e => e.innerText).join('')")
    assert text.startswith("How much is 6-0?") and text.endswith("It is 40.")
    page.press("ArrowRight")
    assert page.value(
        "document.querySelector('.token.policy').classList.contains('chosen')"
    )  # the first sampled one
    page.press("ArrowLeft")
    assert facts(page)["author"] == "context" and facts(page)["advantage"] == NOTHING
    page.press("ArrowRight")
    told = facts(page)
    assert (told["author"], told["weights' version"]) == ("policy", "3")
    assert (told[f"trainer {MINUS} engine"], told["advantage"]) == ("+0.006", f"{MINUS}0.5")
    assert told["clipped"] in ("yes", "no") and float(told["weight in the loss"]) > 0
    assert page.value("document.querySelectorAll('.token.clipped').length") > 0
    page.press("c", "c")
    assert page.value("document.getElementById('colour').value") == "advantage"
    page.press("n")
    page.until("document.querySelector('h1').innerText.includes('sample 1')")
    page.press("Escape")
    page.until("document.querySelector('table.list')")


def facts(page):
    return dict(
        page.value("[...document.querySelectorAll('[data-fact]')].map(e => [e.dataset.fact, e.innerText])")
    )


def test_samples_of_a_prompt_are_one_row_with_a_dot_each(page):
    list_episodes(page, by="prompt")
    assert page.text("#count").startswith("76 of 76 episodes")
    assert len(rows(page)) == 9 * 2 + 4
    first = page.value("[...document.querySelectorAll('tbody tr:first-child .dot')].map(e => e.ariaLabel)")
    assert first == [f"sample {i}: reward {int(i == 2)}, done" for i in range(4)]
    fill = page.value(
        "[...document.querySelectorAll('tbody tr:first-child .dot')].map(e => e.style.getPropertyValue('--fill'))"
    )
    assert fill == ["0%", "0%", "100%", "0%"]
    assert page.text("tbody tr:first-child .question") == "How much is 6-0?"
    assert page.text("tbody tr:first-child .answer") == "It is 42."  # the best one's
    page.click("tbody tr:first-child .dot:nth-child(3)")
    page.until("document.querySelector('h1')?.innerText.includes('sample 2')")


@pytest.fixture
def odd_run(tokenizer, tmp_path):
    """Three evaluations of one prompt, which is learned, a group of equal rewards and one that differs in the last step."""
    run = write_run(tmp_path / "run", tokenizer, steps=1)
    log, metrics = (
        EpisodeLog(run / "episodes", resume_step=1),
        JsonlTracker(run / "metrics.jsonl", resume_step=1),
    )
    for step, reward in ((0, 0.0), (10, 0.0), (20, 1.0)):
        metrics.log(step, {"eval/accuracy": reward, "time/step": 60.0, "flat": 1.0, "twin": reward})
        said = episode(tokenizer, "h/1 &", answer=f"It is {step}.", reward=reward)
        log.log(step, [Group("h/1 &", (said,))], kind="eval")
    groups = {"equal": (1.0, 1.0), "mixed": (0.0, 1.0)}
    made = [
        Group(
            name,
            tuple(episode(tokenizer, name, i, reward=one, answer="so " * 40) for i, one in enumerate(pair)),
        )
        for name, pair in groups.items()
    ]
    log.log(20, made, credits=[[0.0, 0.0], [-1.0, 1.0]])
    metrics.close()
    return run


@pytest.mark.parametrize("form", sampled(FORMS, ["served"]))
def test_first_page_says_what_happened_and_links_episodes(browser, odd_run, tmp_path, form, serve):
    report = tmp_path / "report.html"
    export(find_runs([odd_run]), report, episodes=6)
    url = serve(odd_run)
    browser.open(url if form == "served" else report.as_uri())
    assert browser.text(".story h1") == "Held-out accuracy 0 % \u2192 100 % in 20 steps, 3 min, GRPO"
    shown = browser.value("[...document.querySelectorAll('.cards.shown .card')].map(e => e.innerText)")
    assert len(shown) == 3 and "step 0" in shown[0] and "It is 0." in shown[0]
    assert "same prompt, held-out, step 20" in shown[1].lower() and "It is 20." in shown[1]
    odd = browser.value("[...document.querySelectorAll('.cards.suspicious .card')].map(e => e.innerText)")
    assert len(odd) == 1 and "high reward for an odd answer" in odd[0] and "repeats itself" in odd[0]
    browser.click(".cards.shown .card:nth-child(2)")
    browser.until("document.querySelector('.message.assistant:last-child')?.innerText.includes('It is 20.')")


def test_groups_without_gradient_come_last_and_are_marked(browser, odd_run, serve):
    url = serve(odd_run)
    browser.open(url)
    list_episodes(browser, by="prompt")
    listed = [row[2].strip().split("\n")[0] for row in rows(browser)]
    assert listed[:3] == ["How much is mixed?", "How much is h/1 &?", "How much is equal?"]
    marked = browser.value(
        "[...document.querySelectorAll('tr[data-row]')].filter(e => e.innerText.includes('no gradient')).length"
    )
    assert marked == 1 and "no gradient" in rows(browser)[2][2]


def test_configurations_are_compared(page):
    page.press("3")
    page.until("document.querySelector('.config')")
    table = page.value(
        "[...document.querySelectorAll('.config tr.row-differs')].map(row => row.innerText.split('\\t'))"
    )
    assert table == [["≠ training.lr", "0.0001", "0.0002"]]
    page.click("#only-differences")
    assert "algorithm.name" in page.text(".config")


def test_a_run_that_trains_is_followed(browser, tokenizer, tmp_path, serve):
    run = write_run(tmp_path / "run", tokenizer, steps=1)
    url = serve(run)
    browser.open(url)
    list_episodes(browser)
    assert browser.text("#count").startswith("8 of 8")
    metrics = JsonlTracker(run / "metrics.jsonl", resume_step=1)
    metrics.log(2, {"reward/mean": 0.75})
    write_step(EpisodeLog(run / "episodes", resume_step=1), tokenizer, 2)
    browser.until("document.getElementById('count').innerText.startsWith('17 of 17')")
    browser.until("document.querySelector('.runs').innerText.includes('step 2 of 20')")
    EpisodeLog(run / "episodes", resume_step=1)  # resumed: the second step is taken again
    browser.until("document.getElementById('count').innerText.startsWith('8 of 8')")
    metrics.close()


def test_one_file_holds_all_of_the_page(browser, runs, tmp_path):
    report = tmp_path / "report.html"
    assert export(find_runs(runs), report, episodes=10) == 20
    browser.open(report.as_uri())
    browser.until("document.querySelectorAll('.chart[data-metric=\"reward/mean\"] path.main').length === 2")
    list_episodes(browser)
    browser.press("j", "j", "Enter")  # behind the one that failed
    browser.until("document.querySelector('.token.policy')")
    browser.press("3")
    browser.until("document.querySelector('.config tr.row-differs')")
    about = "This file contains 20 of 76 episodes: some of each step, and the extremes."
    assert browser.text("#status") == about  # once for both runs
    assert os.path.getsize(report) < 2 << 20


@pytest.mark.parametrize("form", ["served", "exported"])
def test_images_are_shown_small_and_their_tokens_are_one(browser, tokenizer, tmp_path, form, serve):
    run, report = write_run(tmp_path / "run", tokenizer, steps=1), tmp_path / "report.html"
    file = write_seen(run)
    export(find_runs([run]), report)
    url = serve(run)
    if form == "exported":
        file.unlink()
    browser.open((url if form == "served" else report.as_uri()) + "#/episode/0/step-000099.jsonl/0")
    browser.until("document.querySelector('img.picture')?.naturalWidth")
    size = browser.value("(({ naturalWidth: w, naturalHeight: h }) => [w, h])(document.querySelector('img'))")
    assert size == [256, 128]
    shown = browser.value("[...document.querySelectorAll('.token')].map((token) => token.innerText)")
    assert len(shown) == 5 and shown[1] == "[image, 40 tokens]"
    headings = browser.value("[...document.querySelectorAll('h2')].map((heading) => heading.innerText)")
    assert "Tokens 44" in headings


def test_alerts_are_on_top_while_they_last(browser, tokenizer, tmp_path, serve):
    run, report = write_run(tmp_path / "run", tokenizer, steps=3), tmp_path / "report.html"
    alerts = JsonlTracker(run / "alerts.jsonl")
    sick = {
        "name": "constant reward",
        "seen": "all <b>earn</b> the same",
        "why": "Why.",
        "look_at": "rewards",
    }
    url = serve(run)
    browser.open(url)
    assert browser.text(".warning[data-alert]") is None
    alerts.append(sick | {"step": 3, "since": 2, "until": None})
    browser.until("document.querySelector('.warning[data-alert]')")
    expected = "run: constant reward since step 2: all <b>earn</b> the same. Why. Look at rewards."
    expected += f" {find('groups/zero_spread').sentence()}"
    assert browser.text(".warning[data-alert]") == expected
    export(find_runs([run]), report)
    alerts.append({"name": "constant reward", "step": 6, "since": 2, "until": 3})
    browser.until("!document.querySelector('.warning[data-alert]')")
    assert "constant reward (steps 2 to 3)" in browser.text(".story p")
    browser.open(report.as_uri())
    assert browser.text(".warning[data-alert]") == expected
    alerts.close()


def test_the_panel_shows_what_the_model_answers(browser, serve, model_dir, tmp_path):
    assert main(["train", *SmallRun.at(tmp_path, model_dir).into("run")]) == 0
    browser.open(f"{serve(tmp_path / 'run', token='the-token')}?token=the-token#/episodes")
    browser.until("document.querySelector('.chat')")
    browser.click(".chat summary")
    assert talked(browser, "one") == ["one"] and talked(browser, "two") == ["one", "two"]
    browser.click(".chat button[type=button]")
    browser.until("document.querySelectorAll('.chat .message').length === 0")


def talked(browser, line):
    """Say a line in the panel; return the lines that it shows once it is answered."""
    browser.value(f"document.querySelector('[data-chat=line]').value = '{line}'")
    browser.click(".chat form button")
    browser.until("!document.querySelector('[data-chat=line]').disabled")
    count = browser.value("document.querySelectorAll('.chat .message.assistant').length")
    lines = browser.value(
        "[...document.querySelectorAll('.chat .message.user .content')].map(one => one.innerText)"
    )
    assert len(lines) == count
    return lines


def test_a_panel_shows_no_lines_that_the_model_does_not_read(browser, serve, model_dir, tmp_path):
    assert main(["train", *SmallRun.at(tmp_path, model_dir).into("run")]) == 0
    url = serve(tmp_path / "run", token="the-token")
    browser.open(f"{url}?token=the-token#/episodes")
    browser.until("document.querySelector('.chat')")
    browser.click(".chat summary")
    assert talked(browser, "one") == ["one"]
    other = "{method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{\"page\": \"2\", \"line\": \"x\"}'}"
    browser.value(f"fetch('/api/runs/0/chat', {other}).then(() => document.body.dataset.other = 'done')")
    browser.until("document.body.dataset.other")
    assert talked(browser, "two") == ["two"]


def test_a_page_without_a_token_has_no_panel(page):
    list_episodes(page)
    assert page.value("document.querySelector('.chat')") is None
