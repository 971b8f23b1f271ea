"""Runs of a sweep side by side in a real browser: their keys, how they end, and which prompts only one solves."""

import pytest
from extensions.view.runs import episode, write_run

from rl4llm.core.types import Group
from rl4llm.extensions.view.export import export
from rl4llm.extensions.view.run import find_runs
from rl4llm.tracking.episodes import EpisodeLog
from rl4llm.tracking.tracker import JsonlTracker

KEYS = (
    "algorithm: {{name: grpo, kl_coef: {kl}}}\ntraining: {{lr: {lr}}}\noutput: {{dir: {lr}-{kl}}}\nseed: 0\n"
)
POINTS = {("1.0e-5", 0): 0.25, ("1.0e-4", 0): 0.75, ("1.0e-5", 0.1): 0.5, ("1.0e-4", 0.1): 0.5}


@pytest.fixture(scope="module")
def sweep(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep")
    for (lr, kl), accuracy in POINTS.items():
        run = write_run(directory / f"{lr}-{kl}", tokenizer, steps=1)
        (run / "config.yaml").write_text(KEYS.format(lr=lr, kl=kl))
        metrics, log = JsonlTracker(run / "metrics.jsonl", resume_step=1), EpisodeLog(run / "episodes")
        for step, value in ((0, 0.1), (1, accuracy)):
            metrics.log(step, {"eval/accuracy": value})
            right = [step and number / 4 < accuracy for number in range(4)]
            made = [
                episode(tokenizer, f"q{i}", answer=f"says {is_right}", reward=float(is_right))
                for i, is_right in enumerate(right)
            ]
            log.log(step, [Group(one.prompt_id, (one,)) for one in made], kind="eval")
        metrics.close()
    return directory


@pytest.fixture(params=["served", "exported"])
def page(request, browser, sweep, serve, tmp_path):
    runs = [run.path for run in find_runs([sweep])]
    if request.param == "exported":
        export(find_runs([sweep]), tmp_path / "report.html")
    browser.open(serve(*runs) if request.param == "served" else (tmp_path / "report.html").as_uri())
    browser.until("document.querySelectorAll('.compare tbody tr').length")
    return browser


def cells(page):
    return page.value(
        "[...document.querySelectorAll('.compare tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )


def choose(page, name, value):
    field = f"document.querySelector('[data-compare={name}]')"
    page.value(f"({field}.value = '{value}', {field}.dispatchEvent(new Event('change')))")


def test_a_table_has_the_keys_that_differ_and_sorts_by_them(page):
    assert [row[1:] for row in cells(page)] == [
        ["0", "0.0001", "75 %", "1"], ["0.1", "0.0001", "50 %", "1"],
        ["0", "0.00001", "25 %", "1"], ["0.1", "0.00001", "50 %", "1"],
    ]  # fmt: skip
    page.click(".compare [data-sort='training.lr']")
    assert [row[2] for row in cells(page)] == ["0.00001", "0.00001", "0.0001", "0.0001"]
    page.click(".compare [data-sort='end']")
    assert [row[3] for row in cells(page)] == ["75 %", "50 %", "50 %", "25 %"]
    page.click(".compare [data-sort='end']")
    assert [row[3] for row in cells(page)] == ["25 %", "50 %", "50 %", "75 %"]


def test_the_end_of_runs_is_drawn_and_grouped_over_a_key(page):
    choose(page, "key", "training.lr")
    labels = "[...document.querySelectorAll('.over text[text-anchor=middle]')].map(text => text.textContent)"
    assert page.value(labels) == ["0.00001", "0.0001"]
    assert page.value("document.querySelectorAll('.over circle').length") == 4
    line = page.value(
        "document.querySelector('.over .means').getAttribute('d').match(/[\\d.]+/g).map(Number)"
    )
    assert line[0] < line[2] and line[1] > line[3]  # 37.5 % and then 62.5 %, upwards
    page.click("#group")
    assert sorted(cells(page)) == [
        ["2", "0.00001", "37.5 %", "25 % to 50 %"],
        ["2", "0.0001", "62.5 %", "50 % to 75 %"],
    ]
    page.click(".runs label:nth-child(1) input")  # hides 1.0e-4, 0
    assert ["1", "0.0001", "50 %", "50 % to 50 %"] in cells(page)


def test_prompts_that_only_one_run_solves_are_listed(page):
    assert (
        page.text(".solved .quiet") == "Of 4 held-out prompts, both solve 1, and neither 1."
    )  # the worst and the best
    page.value("document.querySelector('.solved details').open = true")
    answers = "[...document.querySelectorAll('.solved details[open] li')].map(item => item.innerText)"
    assert page.value(answers) == [f"How much is q{i}? says False → says True" for i in (1, 2)]
    choose(page, "a", page.value("document.querySelector('[data-compare=b]').value"))
    assert page.text(".solved .quiet") == "Of 4 held-out prompts, both solve 3, and neither 1."
    page.value("document.querySelector('.solved details').open = true")
    assert page.value(answers) == []


def test_seeds_of_one_configuration_are_not_compared(browser, tokenizer, tmp_path, serve):
    browser.open(serve(*(write_run(tmp_path / f"seed-{seed}", tokenizer, seed=seed) for seed in range(2))))
    assert browser.value("document.querySelectorAll('.compare *').length") == 0
