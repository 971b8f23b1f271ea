import io
import math
import os
import pty
import re
import select
import threading

import pytest

from rl4llm.tracking.console import Console, RunProgress, duration


class Hands:
    """A clock that only moves when told."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


class Terminal:
    """A real terminal, and what was written on it."""

    def __init__(self, monkeypatch, columns=100):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(columns))
        self._screen, keyboard = pty.openpty()
        self.file = os.fdopen(keyboard, "w")
        self._read = ""

    def raw(self):
        while select.select([self._screen], [], [], 0)[0]:
            self._read += os.read(self._screen, 65536).decode()
        return self._read

    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw())


def run(console, steps, hands=None, seconds=1.0):
    for step in steps:
        if hands:
            hands.time += seconds
        console.step(step, {"reward/mean": step / 10, "tokens/s": 4100.0})


def test_a_step_without_an_update_is_marked():
    file = io.StringIO()
    with Console(2, every=1, file=file, now=Hands()) as console:
        console.step(1, {"reward/mean": 0.0, "update/empty": 1.0})
        console.step(2, {"reward/mean": 0.5, "update/empty": 0.5, "loss": 0.1})
    first, second = file.getvalue().splitlines()
    assert first.endswith("reward 0.000  update none: nothing to learn from")
    assert "update" not in second


def test_a_file_gets_the_first_last_and_every_kth_step():
    file, hands = io.StringIO(), Hands()
    with Console(20, every=8, file=file, now=hands) as console:
        console.evaluation(0, {"accuracy": 0.125})
        run(console, range(1, 21), hands)
    assert file.getvalue().splitlines() == [
        "held-out success at step 0: 12.5%",
        "step 1/20  0:19 left  reward 0.100  held-out 12.5% (step 0)  tokens/s 4100",
        "step 8/20  0:12 left  reward 0.800  held-out 12.5% (step 0)  tokens/s 4100",
        "reward ▁▂▃▃▄▅▆▆▇█ 0.100 → 1.000  steps 1 to 10",
        "step 16/20  0:04 left  reward 1.600  held-out 12.5% (step 0)  tokens/s 4100",
        "step 20/20  reward 2.000  held-out 12.5% (step 0)  tokens/s 4100",
        "reward ▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▇▇▇██ 0.100 → 2.000  steps 1 to 20",
    ]


def bars(total, rewards, **options):
    file = io.StringIO()
    with Console(total, file=file, now=Hands(), **options) as console:
        for step, reward in enumerate(rewards, start=1):
            console.step(step, {"reward/mean": reward})
    return [line for line in file.getvalue().splitlines() if line.startswith("reward ")]


def test_reward_is_drawn_as_bars_ten_times_a_run():
    drawn = bars(1000, [0.0] * 500 + [1.0] * 500)
    assert len(drawn) == 10 and drawn[0] == f"reward {'▁' * 40} 0.000 → 0.000  steps 1 to 100"
    assert drawn[-1] == f"reward {'▁' * 20}{'█' * 20} 0.000 → 1.000  steps 1 to 1000"
    assert bars(10, [1.0, math.nan, *[0.5] * 6, 0.0, math.inf]) == []  # too few that are finite
    assert len(bars(15, [0.5] * 15)) == 2  # the last step has one too
    assert bars(10, [0.5] * 10, mode="quiet") == [] and bars(9, [0.5] * 9) == []


def test_bars_are_left_out_where_they_cannot_be_spelled():
    raw = io.BytesIO()
    with Console(10, file=io.TextIOWrapper(raw, encoding="latin-1")) as console:
        run(console, range(1, 11))
    assert b"step 10/10  reward 1.000" in raw.getvalue() and b"?" not in raw.getvalue()


def test_slow_steps_print_a_line_at_least_every_ten_seconds():
    file, hands = io.StringIO(), Hands()
    with Console(1000, every=500, file=file, now=hands) as console:
        run(console, range(1, 13), hands, seconds=4)
    told = [line.split("/")[0] for line in file.getvalue().splitlines()]
    assert told == ["step 1", "step 4", "step 7", "step 10"]


def test_a_file_gets_each_phase_once():
    file = io.StringIO()
    with Console(2, file=file) as console:
        for phase in ("rollout", "update", "rollout", "update"):
            console.phase(phase)
    assert file.getvalue().splitlines() == ["phase: rollout", "phase: update"]


def test_quiet_shows_warnings_and_nothing_else():
    file = io.StringIO()
    with Console(2, mode="quiet", file=file) as console:
        console.phase("rollout")
        run(console, [1, 2])
        console.note("a note")
        console.table([["a", "b"]])
        console.warn("the disk is full")
    assert file.getvalue() == "Warning: the disk is full\n"


def test_a_full_disk_behind_the_output_does_not_stop_training():
    file = io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        file.write("a line")
    with Console(3, file=file) as console:
        run(console, [1, 2, 3])
        console.warn("still here")


def test_text_that_the_output_cannot_spell_is_replaced():
    raw = io.BytesIO()
    with Console(1, file=io.TextIOWrapper(raw, encoding="ascii")) as console:
        console.note("größer [bold]1[/]")
    assert raw.getvalue() == b"gr??er [bold]1[/]\n"


def test_a_table_in_a_file_is_aligned_and_never_cut():
    file = io.StringIO()
    path = "/somewhere/" + "long/" * 40
    Console(1, file=file).table([["curve", path], ["m", 0.5]], header=["what", "where"], title="files")
    assert file.getvalue().splitlines() == ["files", "what   where", f"curve  {path}", "m      0.5"]


def test_a_file_needs_no_thread():
    threads = set(threading.enumerate())
    with Console(1, file=io.StringIO()):
        assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_terminal_is_given_back_whatever_happens(monkeypatch, error):
    terminal, threads = Terminal(monkeypatch), set(threading.enumerate())
    with pytest.raises(error), Console(10, file=terminal.file) as console:
        console.phase("rollout")
        run(console, [1, 2])
        raise error
    assert terminal.raw().rindex("\x1b[?25h") > terminal.raw().rindex("\x1b[?25l")
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive()
    terminal.file.write("afterwards\n")


def test_a_terminal_shows_progress_in_a_panel_that_fits(monkeypatch):
    terminal, hands = Terminal(monkeypatch, columns=90), Hands()
    with Console(10, title="runs/a [b]", file=terminal.file, now=hands) as console:
        console.evaluation(0, {"accuracy": 0.25})
        run(console, [1, 2], hands, seconds=30)
        console.evaluation(2, {"accuracy": 0.5})
        console.phase("update")
        console.note("a [bold]note[/]")
    last = terminal.text().replace("\r", "").split("╭")[-1]
    for shown in (
        "runs/a [b]",
        "update",
        "step 2/10",
        "20%",
        "1:00",
        "4:00 left",
        "reward 0.200",
        "tokens/s 4100",
    ):
        assert shown in last
    assert "held-out 50.0% (step 2, from 25.0%)" in last
    assert "a [bold]note[/]" in terminal.text()
    assert all(len(line) <= 87 for line in last.splitlines())


def test_a_table_on_a_terminal_keeps_long_cells_in_one_piece(monkeypatch):
    terminal = Terminal(monkeypatch, columns=60)
    path = "/somewhere/" + "long/" * 40
    Console(1, file=terminal.file).table([["curve", path]])
    assert f"curve  {path}" in terminal.text()


def test_one_slow_step_does_not_change_the_time_left():
    hands = Hands()
    progress = RunProgress(total_steps=100, now=hands)
    assert progress.seconds_left is None
    progress.start()
    for step, seconds in enumerate((2, 2, 60, 2, 2), start=1):
        hands.time += seconds
        progress.take_step(step, {})
    assert progress.seconds_left == 190
    hands.time += 1
    assert progress.seconds_left == 189


def test_a_resumed_run_counts_only_the_steps_that_remain():
    hands = Hands()
    progress = RunProgress(total_steps=100, now=hands)
    progress.start()
    hands.time += 3
    progress.take_step(91, {})
    assert progress.seconds_left == 27 and progress.share == 0.91


def test_durations_read_as_people_write_them():
    texts = [duration(seconds) for seconds in (0, 7.4, 750, 3599.7, 11_100, 187_800)]
    assert texts == ["0:00", "0:07", "12:30", "1:00:00", "3:05:00", "2 d 04:10"]
