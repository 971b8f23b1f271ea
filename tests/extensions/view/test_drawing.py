"""What a notebook shows: the picture of a run that is training, and its page."""

import math
import time
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from rl4llm.extensions.view.drawing import MOST_POINTS, Curve, draw
from rl4llm.extensions.view.notebook import NotebookPage

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves, lines=("run",), total_steps=10):
    """Return the texts of a picture, and the points of each of its lines."""
    picture = ElementTree.fromstring(draw(lines, curves, total_steps))
    found = [line.get("points").split() for line in picture.iter(f"{SVG}polyline")]
    points = [[tuple(map(float, point.split(","))) for point in line] for line in found]
    return ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")], points


def test_a_curve_ends_where_the_run_is():
    texts, ((first, last),) = drawn(Curve("reward", [(1, -2.0), (5, 4.0)]), total_steps=10)
    _, ((_, later),) = drawn(Curve("reward", [(1, -2.0), (10, 4.0)]), total_steps=10)
    assert {"reward", "-2", "4", "step 10"} <= set(texts)
    assert first[1] > last[1] == later[1]  # y grows downwards
    assert last[0] - 52 == pytest.approx((later[0] - 52) / 2, abs=0.1)


def test_a_long_curve_is_smoothed_and_thinned():
    noisy = Curve("reward", [(step, float(step % 2)) for step in range(5001)])
    _, (raw, smooth) = drawn(noisy, total_steps=5000)
    assert len(raw) == len(smooth) <= MOST_POINTS and raw[-1][0] == pytest.approx(720 - 18)
    span = [max(y for _, y in line) - min(y for _, y in line) for line in (raw, smooth)]
    assert span[0] == pytest.approx(150, abs=0.2) and span[1] < 20


def test_held_out_success_is_never_smoothed():
    success = Curve("held-out success", [(step, float(step > 5)) for step in range(11)], percent=True)
    texts, (line,) = drawn(success)
    assert len({y for _, y in line}) == 2 and {"0%", "100%"} <= set(texts)


@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5, 0.5], [math.nan, 1.0, math.inf], [1e30, -1e30]])
def test_any_values_are_drawn_inside_the_picture(values):
    _, lines = drawn(Curve("reward", list(enumerate(values))), Curve("held-out success", [], percent=True))
    assert all(0 <= x <= 720 and 0 <= y <= 300 for line in lines for x, y in line)


def test_no_values_are_no_axes():
    texts, lines = drawn(Curve("reward", [(1, math.nan)]), lines=["a", "b"])
    assert texts == ["a", "b"] and not lines


def test_texts_are_escaped_and_cut():
    texts, _ = drawn(lines=["</svg><script>alert(1)</script>\x1b[2J", "x" * 500])
    assert (
        texts[0] == "</svg><script>alert(1)</script>\\x1b[2J"
        and len(texts[1]) < 100
        and texts[1].endswith("...")
    )


def test_page_works_in_the_frame_of_a_notebook(browser, runs, tmp_path):
    frame = NotebookPage(runs[0], episodes=6)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><html data-ready=yes><body>{frame}")
    browser.open((tmp_path / "cell.html").as_uri())
    deadline = time.monotonic() + 60
    while True:  # its document is out of reach, so what it draws is seen
        browser.screenshot(tmp_path / "cell.png")
        pixels = imread(tmp_path / "cell.png")[20:700, 20:1200, :3]
        if (dark := (pixels.max(axis=2) < 0.6).mean()) > 0.005:
            break
        assert time.monotonic() < deadline, dark
    assert browser.value("document.querySelector('iframe').contentDocument") is None
    browser.call("Page.navigate", url="about:blank")
