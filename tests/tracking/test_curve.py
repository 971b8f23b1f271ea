import io
import math

from matplotlib.image import imread

from rl4llm.tracking.curve import BLUE, ORANGE, bars, mean, picture, points, smooth


def has_colour(png, colour):
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((abs(imread(io.BytesIO(png))[..., :3] - wanted) < 0.01).all(-1).any())


def test_the_picture_has_one_panel_per_available_curve():
    rows = [{"step": step, "reward/mean": step / 30, "loss": 1 / step} for step in range(1, 31)]
    evaluations = [{"step": step, "accuracy": step / 30} for step in (0, 10, 20, 30)]
    both, reward = picture(rows, evaluations, "a $run"), picture(rows, [], "a $run")
    assert has_colour(both, BLUE) and has_colour(both, ORANGE)
    assert has_colour(reward, ORANGE) and not has_colour(reward, BLUE)
    assert imread(io.BytesIO(reward)).shape[0] < imread(io.BytesIO(both)).shape[0]
    loss = [{"step": row["step"], "loss": row["loss"]} for row in rows]
    assert picture(loss, [], "") not in (picture(rows, [], ""), b"")


def test_a_single_point_is_not_drawn():
    rows = [{"step": 1, "reward/mean": None}, {"step": 2, "loss": 1.0}, {"step": 3, "reward/mean": 0.5}]
    assert picture(rows, [], "") == picture([], [], "") == b""


def test_points_are_finite_and_the_last_of_their_step():
    rows = [
        {"step": 2, "x": 1},
        {"step": 1, "x": math.nan},
        {"step": 2, "x": 3},
        {"step": 0, "x": 0.5},
        {"step": 4},
    ]
    assert points(rows, "x") == [(0, 0.5), (2, 3.0)]


def test_mean_of_runs_is_over_those_that_have_the_step():
    assert mean([[(1, 0.0), (2, 1.0)], [(2, 2.0), (3, 4.0)]]) == [(1, 0.0), (2, 1.5), (3, 4.0)]


def test_bars_are_means_of_about_as_many_points():
    assert bars([(step, float(step > 50)) for step in range(1, 101)]) == (
        f"{'▁' * 20}{'█' * 20} 0.000 → 1.000  steps 1 to 100"
    )
    assert bars([(step, float(step % 2)) for step in range(80)]).startswith(f"{'▁' * 40} 0.500 → 0.500")
    assert bars([(3, 2.0)]) == "▁ 2.000 → 2.000  steps 3 to 3"


def test_smoothing_keeps_length_and_level_and_calms_noise():
    assert smooth([2.0] * 7) == [2.0] * 7
    calm = smooth([0.0, 1.0] * 50)
    assert len(calm) == 100 and max(calm) - min(calm) < 0.4
