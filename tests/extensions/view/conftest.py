"""A real browser, and the page of two runs in it."""

import pytest
from extensions.view.browser import Browser, find_browser
from extensions.view.runs import write_run
from extensions.view.serving import served


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no browser is installed; `apt-get install chromium`, or name one in RL4LLM_BROWSER")
    with Browser.start(program, tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def runs(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return write_run(directory / "one", tokenizer, steps=6), write_run(
        directory / "two", tokenizer, lr="2.0e-4", offset=0.3
    )


@pytest.fixture
def page(browser, runs):
    browser.errors.clear()
    browser.requests.clear()
    with served(*runs) as url:
        browser.open(url)
        yield browser
        browser.call("Page.navigate", url="about:blank")
    assert not browser.errors
    assert not [asked for asked in browser.requests if not asked.startswith((url, "data:", "about:"))]
