import json

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from rl4llm.core.errors import DataError
from rl4llm.tracking.curve import BLUE, ORANGE, plot_learning_curve, smooth


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def has_colour(picture, colour):
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((abs(picture[..., :3] - wanted) < 0.01).all(-1).any())


def test_the_picture_has_one_panel_per_available_curve(tmp_path):
    metrics = write(tmp_path / "m.jsonl", [{"step": step, "reward/mean": step / 30} for step in range(1, 31)])
    evaluations = [{"step": step, "accuracy": step / 30} for step in (0, 10, 20, 30)]
    assert plot_learning_curve(metrics, evaluations, tmp_path / "both.png")
    assert plot_learning_curve(metrics, [], tmp_path / "reward.png")
    both, reward = imread(tmp_path / "both.png"), imread(tmp_path / "reward.png")
    assert has_colour(both, BLUE) and has_colour(both, ORANGE)
    assert has_colour(reward, ORANGE) and not has_colour(reward, BLUE)
    assert reward.shape[0] < both.shape[0]


def test_the_picture_has_the_title_it_is_given(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **_: titles.append(text))
    metrics = write(tmp_path / "m.jsonl", [{"step": step, "reward/mean": 0.5} for step in (1, 2)])
    assert plot_learning_curve(metrics, [], tmp_path / "curve.png", "a $run, model, GRPO")
    assert titles == ["a $run, model, GRPO"]


@pytest.mark.parametrize("shares", [[0.141, 0.163, 1], [0.004, 0.285, 1], [0.9, 0.5, 0], [1, 1]], ids=str)
def test_labels_touch_neither_line_nor_axis(tmp_path, monkeypatch, shares):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    evaluations = [{"step": 20 * at, "accuracy": share} for at, share in enumerate(shares)]
    assert plot_learning_curve(tmp_path / "absent.jsonl", evaluations, tmp_path / "curve.png")
    drawn[0].canvas.draw()
    (axes,) = drawn[0].axes
    line = axes.transData.transform_path(axes.lines[0].get_path())
    boxes = [label.get_window_extent() for label in axes.texts]
    assert len(boxes) == 2
    for box in boxes:
        assert not line.intersects_bbox(box, filled=False)
        assert axes.bbox.x0 < box.x0 and axes.bbox.y0 <= box.y0 + 1 and box.x1 <= drawn[0].bbox.x1


def test_a_single_point_is_not_drawn(tmp_path):
    rows = [{"step": 1, "reward/mean": None}, {"step": 2, "loss": 1.0}, {"step": 3, "reward/mean": 0.5}]
    metrics = write(tmp_path / "m.jsonl", rows)
    assert not plot_learning_curve(metrics, [], tmp_path / "curve.png")
    assert not plot_learning_curve(tmp_path / "absent.jsonl", [], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_a_damaged_log_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step"\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"m\.jsonl:1"):
        plot_learning_curve(tmp_path / "m.jsonl", [], tmp_path / "curve.png")


def test_smoothing_keeps_length_and_level_and_calms_noise():
    assert smooth([2.0] * 7) == [2.0] * 7
    noisy = [0.0, 1.0] * 50
    calm = smooth(noisy)
    assert len(calm) == 100 and max(calm) - min(calm) < 0.4
