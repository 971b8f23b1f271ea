"""The curves in a real browser: bands of seeds, what they are drawn over, the rewards of each step, the download."""

import csv
import json
import time

import pytest
from extensions.view.runs import write_run

from rl4llm.tracking.glossary import find
from rl4llm.tracking.tracker import JsonlTracker

CHART = '.chart[data-metric="reward/mean"]'
LINES = f"document.querySelectorAll('{CHART} path.main').length"


@pytest.fixture(scope="module")
def seeds(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("grpo")
    for seed, offset in enumerate((0.0, 0.1, 0.5)):
        run = write_run(directory / f"seed-{seed}", tokenizer, offset=offset, seed=seed)
        metrics = JsonlTracker(run / "metrics.jsonl", resume_step=3)
        metrics.log(0, {"eval/accuracy": 0.25})
        metrics.log(
            4, {"reward/mean": 0.5, "time/step": 60.0 * (1 + seed), "tokens/s": 100.0, 'a "b", c': 1.5}
        )
        metrics.log(5, {"reward/mean": 0.5, "time/step": 120.0, "time/evaluate": 60.0, "tokens/s": 100.0})
        metrics.close()
    return [directory / f"seed-{seed}" for seed in range(3)]


@pytest.fixture
def curves(browser, seeds, serve):
    url = serve(*seeds)
    browser.open(url)
    yield browser


def tip(page, *keys):
    page.value(f"document.querySelector('{CHART} svg').focus()")
    page.press(*keys)
    return " ".join(page.text(f"{CHART} .tip").split())


def choose(page, axis):
    field = "document.getElementById('axis')"
    page.value(f"({field}.value = '{axis}', {field}.dispatchEvent(new Event('change')))")


def test_seeds_of_a_configuration_are_one_band(curves):
    assert curves.value(LINES) == 1
    edge = curves.value(f"document.querySelector('{CHART} path.band').getAttribute('d').match(/[\\d.]+/g)")
    (left, highest), (again, lowest) = edge[:2], edge[-2:]
    assert left == again and float(lowest) - float(highest) > 50  # of step 1: 0.6 and 0.1
    assert tip(curves, "ArrowRight") == "step 1 0.3 0.1 to 0.6 of 3"
    curves.click(".runs label:nth-child(3) input")
    assert tip(curves, "ArrowRight") == "step 1 0.15 0.1 to 0.2 of 2"
    curves.click("#bands")
    assert curves.value(LINES) == 2
    assert curves.value("document.querySelectorAll('path.band').length") == 0
    swatches = "[...document.querySelectorAll('.runs .swatch')].map(e => getComputedStyle(e).backgroundColor)"
    assert len({*curves.value(swatches)}) == 3
    curves.click("#bands")
    assert len({*curves.value(swatches)}) == 1


def test_curves_are_drawn_over_time_and_tokens(curves):
    assert tip(curves, *["ArrowRight"] * 4).startswith("step 4 ")
    choose(curves, "seconds")  # seeds reach step 4 after 1, 2 and 3 minutes
    assert tip(curves, "ArrowRight").startswith("step 4, 2 min ")
    assert tip(curves, "ArrowRight").startswith("step 5, 5 min ")
    assert "4 min" in curves.value(f"document.querySelector('{CHART} svg').textContent")
    choose(curves, "tokens")
    assert tip(curves, "ArrowRight").startswith("step 4, 12K ")
    assert tip(curves, "ArrowRight").startswith("step 5, 24K ")


def test_curves_are_downloaded_as_csv(curves, tmp_path):
    curves.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    curves.click(".runs label:nth-child(2) input")
    curves.click("#csv")
    deadline = time.monotonic() + 20
    while not (tmp_path / "curves.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with open(tmp_path / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"]) for row in rows] == [
        (f"seed-{seed}", str(step)) for seed in (0, 2) for step in range(6)
    ]
    assert (rows[4]["seconds"], rows[4]["tokens"], rows[4]['a "b", c']) == ("60", "6000", "1.5")
    assert rows[1]["reward/mean"] == "0.1" and rows[0]["reward/mean"] == "" and rows[1]["seconds"] == ""


DRAWN = "[...document.querySelectorAll('section > .charts .chart[data-metric]')].map(e => e.dataset.metric)"


@pytest.mark.parametrize(("names", "first"), [
    (("zebra", "reward/mean", "eval/reward/mean", "eval/accuracy"), ["eval/accuracy", "eval/reward/mean", "reward/mean"]),
    (("test/nll", "env/all/reward/total"), ["env/all/reward/total", "test/nll"]),  # of another program
])  # fmt: skip
def test_the_main_metrics_are_on_top_with_their_meaning(browser, tmp_path, names, first, serve):
    rows = [{"step": step} | dict.fromkeys(names, step / 2) for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = serve(tmp_path)
    browser.open(url)
    assert browser.value(DRAWN) == first
    assert browser.text(".runs .live") == "training"
    meanings = browser.value(
        DRAWN.replace("e.dataset.metric", "e.querySelector('.meaning')?.innerText ?? ''")
    )
    entries = [find(name) for name in first]
    assert all(
        entry.meaning.replace("`", "") in text if entry else not text
        for entry, text in zip(entries, meanings, strict=True)
    )
    assert browser.value("document.getElementById('bands').checkVisibility()") is False
