"""A real browser, and the page of two runs in it."""

from contextlib import ExitStack

import pytest
from extensions.view.browser import Browser, find_browser
from extensions.view.runs import write_run
from extensions.view.serving import served


@pytest.fixture(scope="session")
def started(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no browser is installed; `apt-get install chromium`, or name one in RL4LLM_BROWSER")
    with Browser.start(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def serve():
    """serve(*runs): the address of their page, until the test ends."""
    with ExitStack() as stack:
        yield lambda *runs, **options: stack.enter_context(served(*runs, **options))


@pytest.fixture
def browser(started, serve):
    """The browser, which leaves each page before its server stops; no page logs an error."""
    started.errors.clear()
    started.requests.clear()
    yield started
    started.call("Page.navigate", url="about:blank")
    assert not started.errors


@pytest.fixture(scope="module")
def runs(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    second = write_run(directory / "two", tokenizer, lr="2.0e-4", offset=0.3)
    return write_run(directory / "one", tokenizer, steps=6), second


@pytest.fixture
def page(browser, runs, serve):
    url = serve(*runs)
    browser.open(url)
    yield browser
    assert not [address for address in browser.requests if not address.startswith((url, "data:", "about:"))]
