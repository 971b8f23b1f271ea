"""The live panel on real terminals, read with a terminal emulator."""

import pytest
from small_run import SmallRun
from tracking.screen import Screen

PANEL = """
import logging, os, sys, time
logging.basicConfig()  # a handler that has the terminal from before
from rl4llm.tracking.console import Console

waits = []
with Console(100, {mode!r}, title="runs/a/very/long/name/" + "of-a-run/" * 20, waiting=lambda: waits) as console:
    for step in (1, 2, 3):
        console.phase("rollout")
        metrics = {{"reward/mean": 0.4, "tokens/s": 41000.0, "completion_length/mean": 55.0, "failures": 2.0, "loss": 0.1}}
        console.step(step, metrics)
        time.sleep(0.3)  # the panel is drawn
        logging.getLogger("library").warning("logged in step %d", step)
        print("printed in step", step)
        sys.stderr.write(f"written in step {{step}}\\n")
    console.evaluation(3, {{"accuracy": 0.25}})
    console.alerts({{"constant reward": 2}})
    waits += ["rank 0 waits for the others in prepare, for 0:45", "rank 1 is in rollout, for 0:45"]
    console.warn("the disk is nearly full")
    time.sleep(0.6)
    {end}
"""


def panel_of(lines):
    start = max(number for number, line in enumerate(lines) if line.startswith("╭"))
    return lines[:start], lines[start:]


@pytest.mark.parametrize("columns", [40, 60, 80, 160])
def test_output_appears_above_one_whole_panel_even_when_killed(columns):
    screen = Screen.of(PANEL.format(mode="auto", end="os.kill(os.getpid(), 9)"), columns=columns)
    assert screen.ended() == -9
    above, panel = panel_of(screen.lines())
    assert sum(line.count("╭") + line.count("╰") for line in above) == 0  # no rest of an earlier one
    said = " ".join(above)
    for step in (1, 2, 3):
        for how in ("logged", "printed", "written"):
            assert said.count(f"{how} in step {step}") == 1
    assert "held-out success at step 3: 25.0%" in said and "the disk is nearly full" in said
    assert all(
        line[0] in "╭│╰" and line[-1] in "╮│╯" and len(line) == len(panel[0]) <= columns for line in panel
    )
    shown = " ".join(" ".join(panel).replace("│", " ").split())
    for fact in (
        "step 3/100",
        "3%",
        "reward 0.400",
        "tokens/s 41.0k",
        "failures 2",
        "left",
        "constant reward since step 2",
    ):
        assert fact in shown
    if columns > 60:
        assert "rank 0 waits for the others in prepare, for 0:45 rank 1 is in rollout, for 0:45" in shown
        assert "held-out 25.0% (step 3)" in shown
    assert screen.shows_cursor


def test_without_colours_there_are_none():
    screen = Screen.of(PANEL.format(mode="auto", end="pass"), NO_COLOR="1")
    assert screen.ended() == 0
    assert b"\x1b[3" not in screen.raw and b"38;5" not in screen.raw
    coloured = Screen.of(PANEL.format(mode="auto", end="pass"))
    assert coloured.ended() == 0
    assert b"\x1b[3" in coloured.raw


@pytest.mark.parametrize(("mode", "panels", "steps"), [("plain", 0, 2), ("quiet", 0, 0), ("verbose", 1, 3)])
def test_the_screen_level_selects_how_much_is_printed(mode, panels, steps):
    screen = Screen.of(PANEL.format(mode=mode, end="pass"), columns=100)
    assert screen.ended() == 0
    text = "\n".join(screen.lines())
    assert (text.count("╰"), sum(line.startswith("step ") for line in screen.lines())) == (panels, steps)
    assert ("loss 0.1" in text) == (mode == "verbose")
    assert "the disk is nearly full" in text
    assert ("held-out success" in text) == (mode != "quiet")


def test_errors_that_go_to_a_file_do_not_come_to_the_terminal(tmp_path):
    code = f"import os; os.dup2(os.open({str(tmp_path / 'err')!r}, os.O_WRONLY | os.O_CREAT), 2)\n"
    screen = Screen.of(code + PANEL.format(mode="auto", end="pass"))
    assert screen.ended() == 0
    assert "written in step" not in "".join(screen.lines())
    assert (tmp_path / "err").read_text().count("in step") == 6


def test_ctrl_c_finishes_the_step_saves_and_restores_the_screen(model_dir, warm_python, tmp_path):
    small = SmallRun.at(tmp_path, model_dir)
    words = small.into("run", "max_steps=100000", "timeout_s=300")
    screen = Screen([warm_python, "-m", "rl4llm", "train", *words], columns=100)
    screen.read_until("reward")
    screen.type("\x03")
    assert screen.ended() == 75
    above, panel = panel_of(screen.lines())
    text = "\n".join([*above, *panel])
    assert "SIGINT: finishing step" in text and "The same command resumes" in text and "Traceback" not in text
    end = next(number for number, line in enumerate(panel) if line.startswith("╰"))
    assert all(line[0] in "╭│╰" for line in panel[: end + 1])
    assert screen.shows_cursor
