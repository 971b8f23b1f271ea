import io
import math

import pytest
from hands import Hands

from rl4llm.tracking.console import Console, RunProgress, duration


def run(console, steps, hands=None, seconds=0.5):
    for step in steps:
        if hands:
            hands.time += seconds
        console.step(step, {"reward/mean": step / 10, "tokens/s": 41000.0})


def test_fast_steps_have_the_first_last_and_every_kth_line():
    file, hands = io.StringIO(), Hands()
    with Console(400, file=file, now=hands) as console:
        console.evaluation(0, {"accuracy": 0.125})
        run(console, range(1, 401), hands, seconds=0.01)
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step ")]
    assert len(lines) == 51
    assert lines[0] == "step 1/400  0:04 left  reward 0.100  held-out 12.5% (step 0)  tokens/s 41.0k"
    assert lines[-1].startswith("step 400/400  reward 40.000") and "left" not in lines[-1]


def test_slow_steps_have_a_line_each():
    file, hands = io.StringIO(), Hands()
    with Console(1000, file=file, now=hands) as console:
        run(console, range(1, 6), hands, seconds=1)
    assert [line.split("/")[0] for line in file.getvalue().splitlines()] == [f"step {n}" for n in range(1, 6)]


def test_a_step_without_an_update_is_marked():
    file = io.StringIO()
    with Console(2, file=file, now=Hands()) as console:
        console.step(1, {"reward/mean": 0.0, "update/empty": 1.0})
        console.step(2, {"loss": 0.5, "update/empty": 0.5})
    first, second = file.getvalue().splitlines()
    assert first.endswith("reward 0.000  update none: nothing to learn from")
    assert second == "step 2/2  loss 0.500"


@pytest.mark.parametrize(("total", "rewards", "lines"), [
    (1000, [0.0] * 500 + [1.0] * 500, 10),
    (10, [1.0, math.nan, *[0.5] * 6, 0.0, math.inf], 0),  # too few that are finite
    (15, [0.5] * 15, 2),  # the last step has one too
    (9, [0.5] * 9, 0),
])  # fmt: skip
def test_reward_is_drawn_as_bars_ten_times_a_run(total, rewards, lines):
    file = io.StringIO()
    with Console(total, file=file, now=Hands()) as console:
        for step, reward in enumerate(rewards, start=1):
            console.step(step, {"reward/mean": reward})
    drawn = [line for line in file.getvalue().splitlines() if line.startswith("reward ")]
    assert len(drawn) == lines
    assert total < 1000 or drawn[-1] == f"reward {'▁' * 20}{'█' * 20} 0.000 → 1.000  steps 1 to 1000"


@pytest.mark.parametrize(("mode", "shown"), [
    ("plain", {"phase: rollout", "held-out success at step 0: 50.0%", "a note", "a  b"}),
    ("verbose", {"phase: rollout", "held-out success at step 0: 50.0%", "a note", "a  b"}),
    ("quiet", set()),
])  # fmt: skip
def test_the_mode_selects_how_much_is_printed(mode, shown):
    file = io.StringIO()
    with Console(2, mode, file=file, now=Hands()) as console:
        for phase in ("rollout", "rollout"):
            console.phase(phase)
        console.evaluation(0, {"accuracy": 0.5})
        console.step(1, {"loss": 1.0, "reward/mean": 1.0, "time/update": 2.0})
        console.note("a note")
        console.table([["a", "b"]])
        console.warn("the disk is full")
    lines = file.getvalue().splitlines()
    assert {line for line in lines if not line.startswith("step")} == {*shown, "Warning: the disk is full"}
    assert ("update 2.0 s" in file.getvalue()) == (mode == "verbose")
    assert lines.count("phase: rollout") == (mode != "quiet")


def test_a_full_disk_behind_the_output_does_not_stop_training():
    file = io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True)  # noqa: SIM115
    with Console(3, file=file) as console:
        run(console, [1, 2, 3])
        console.warn("still here")


def test_text_that_the_output_cannot_spell_is_replaced():
    raw = io.BytesIO()
    with Console(1, file=io.TextIOWrapper(raw, encoding="ascii")) as console:
        console.note("größer [bold]1[/]\x1b[2J")
    assert raw.getvalue() == b"gr??er [bold]1[/]\\x1b[2J\n"


def test_a_table_is_aligned_and_never_cut():
    file = io.StringIO()
    path = "/somewhere/" + "long/" * 40
    Console(1, file=file).table([["curve", path], ["m", 0.5]], header=["what", "where"], title="files")
    assert file.getvalue().splitlines() == ["files", "what   where", f"curve  {path}", "m      0.5"]


def test_time_left_is_at_the_median_pace_of_this_start():
    hands = Hands()
    progress = RunProgress(total_steps=100, now=hands)
    assert progress.seconds_left is None
    progress.start()
    for step, seconds in enumerate((2, 2, 60, 2, 2), start=91):  # one slow step does not change it
        hands.time += seconds
        progress.take_step(step, {})
    assert progress.seconds_left == 10
    hands.time += 1
    assert progress.seconds_left == 9


def test_durations_read_as_people_write_them():
    texts = [duration(seconds) for seconds in (0, 7.4, 750, 3599.7, 11_100, 187_800)]
    assert texts == ["0:00", "0:07", "12:30", "1:00:00", "3:05:00", "2 d 04:10"]


def test_progress_is_compared_with_the_first_evaluation():
    console = Console(20, file=(file := io.StringIO()), now=Hands())
    console.recall(10, {"accuracy": 1.0})
    console.evaluation(11, {"accuracy": 0.0})
    console.step(12, {"loss": 1.0})
    assert "held-out 0.0% (step 11, from 100.0%)" in file.getvalue()
