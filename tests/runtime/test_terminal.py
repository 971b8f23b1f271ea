"""What others wrote is shown on terminals and never obeyed."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.panel import Panel
from rich.table import Table

from rl4llm.runtime.terminal import Terminal, visible
from rl4llm.tracking.console import Console

HOSTILE = "a\x1b]0;TITLE\x07\x1b[2J\x9b2J\x08\r\x7f\u202eb\u2066\u200f\u061c\u200b\u2028\ufeff\U000e0041c"
SHOWN = r"a\x1b]0;TITLE\x07\x1b[2J\x9b2J\x08\x0d\x7f\u202eb\u2066\u200f\u061c\u200b\u2028\ufeff\U000e0041c"


SOURCES = (
    "said",
    "result",
    "title",
    "cell",
    "noted",
    "warned",
    "logged",
    "warning",
    "thread",
    "unraisable",
    "error",
)


def test_controls_become_escapes_and_the_rest_stays():
    assert visible(HOSTILE) == SHOWN
    assert visible("\ud800") == r"\ud800"
    text = "tab\tline\n größer 日本 שלום \u200d 👩\u200d🔬 \\x1b"
    assert visible(text) == text


def written(capsys, stream="out"):
    return getattr(capsys.readouterr(), stream)


@pytest.mark.parametrize("wrap", [str, Panel.fit, lambda text: Panel(Panel.fit(text))])
def test_rich_colours_its_own_text_and_escapes_that_of_others(wrap, capsys):
    terminal = Terminal(
        force_terminal=True, width=200, color_system="standard", highlight=False, markup=False
    )
    terminal.print(wrap(HOSTILE), style="red")
    text = written(capsys)
    assert SHOWN in text and "\x1b[31m" in text
    assert not any(character in text for character in "\x07\x08\r\x7f\x9b\u202e\u2066")


def test_a_table_of_foreign_text_keeps_its_edges(capsys):
    table = Table("name")
    table.add_row(HOSTILE)
    table.add_row("b")
    Terminal(force_terminal=True, width=200, color_system=None).print(table)
    assert len({len(line) for line in written(capsys).splitlines()}) == 1


def test_the_line_of_a_file_is_no_emoji(capsys):
    table = Table("rows.jsonl:100: column")
    Terminal(width=200, markup=False).print("rows.jsonl:100: text", table)
    assert written(capsys).count("rows.jsonl:100:") == 2


EVERYWHERE = """
import logging, sys, threading, warnings
import rl4llm.cli as cli
from rl4llm.commands.output import say, show
from rl4llm.core.errors import DataError
from rl4llm.commands.output import Facts
from rl4llm.tracking.console import Console

text = {hostile!r}
def command(arguments):
    say("said " + text)
    show("result " + text, Facts("name", "title " + text, ["column"], [["cell " + text + text]]).table())
    with Console(2, {mode!r}) as console:
        console.note("noted " + text)
        console.warn("warned " + text)
        console.table([[text, "cell"]], title="table")
        console.alerts({{text: 1}})
        console.step(2, {{"reward/mean": 1.0}})
    logging.getLogger("rl4llm.rewards").warning("logged %s", text)
    warnings.warn("warning " + text)
    thread = threading.Thread(target=exec, args=("raise ValueError(given)", {{"given": "thread " + text}}))
    thread.start()
    thread.join()
    class Broken:
        def __del__(self):
            raise ValueError("unraisable " + text)
    Broken()
    raise DataError("error " + text)
class Parsed:
    debug, resumes, run = {debug}, False, staticmethod(command)
cli._parsed = lambda argv: Parsed
cli.console_script()
"""


def on_terminal(code):
    """Return the exit code of a program on a wide terminal, and what it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 100, 300, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ | {"TERM": "xterm"}, **streams)
    os.close(theirs)
    raw = b""
    try:
        while data := os.read(ours, 65536):
            raw += data
    except OSError:  # the program has ended
        os.close(ours)
    return process.wait(), raw.decode()


@pytest.mark.parametrize("debug", [False, True])
def test_a_run_on_a_terminal_obeys_no_foreign_text(debug):
    code, raw = on_terminal(EVERYWHERE.format(hostile=HOSTILE, mode="auto", debug=debug))
    assert code == 1
    text = re.sub(r"\x1b\[[0-9;]*m", "", raw)  # colours
    assert not re.search("[\x1b\x9b\x07\x08\x7f\u202e\u2066\u200f]", text)
    for what in SOURCES:
        assert f"{what} {SHOWN}" in text, what


def test_a_line_in_a_log_file_is_escaped_too(tmp_path):
    path = tmp_path / "out.log"
    with path.open("w") as file, Console(1, file=file) as console:
        console.note(HOSTILE)
    assert path.read_text() == SHOWN + "\n"


def test_the_log_of_a_server_that_boots_is_escaped():
    code = f"from rl4llm.commands.output import say; import logging; say({HOSTILE!r}); "
    code += "assert logging.lastResort.formatter is None"  # only the program changes what Python prints
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"COLUMNS": "200"}
    )
    assert SHOWN in done.stderr
