"""A program of the warm Python ends as one of another Python does, and so does the process that stands in for it."""

import os
import signal
import subprocess
import time

import psutil
import pytest

PROGRAM = """
import os, pathlib, signal, sys, time
print("said", os.environ["NAME"], "torch" in sys.modules, os.getcwd(), sys.argv[1:])
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
pathlib.Path("pid").write_text(str(os.getpid()))
if sys.argv[1] == "waits":
    time.sleep(60)
os.kill(os.getpid(), signal.SIGUSR2) if sys.argv[1] == "dies" else sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(warm_python, tmp_path):
    """Return start(word): the program in its directory."""
    (tmp_path / "program.py").write_text(PROGRAM)
    where = {"cwd": tmp_path, "env": os.environ | {"NAME": "a b"}, "stdout": subprocess.PIPE, "text": True}
    return lambda word: subprocess.Popen([warm_python, "-u", "program.py", word], **where)


@pytest.mark.parametrize(("word", "code"), [("0", 0), ("3", 3), ("dies", -signal.SIGUSR2)])
def test_its_output_and_its_end_are_those_of_the_program(start, tmp_path, word, code):
    process = start(word)
    assert process.communicate()[0] == f"said a b True {tmp_path} ['{word}']\n"
    assert process.returncode == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGKILL, -9)])
def test_a_signal_reaches_the_program(start, tmp_path, number, code):
    with start("waits") as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        program = psutil.Process(int((tmp_path / "pid").read_text()))
        process.send_signal(number)
        assert process.wait(30) == code
    psutil.wait_procs([program], timeout=30)
    assert not program.is_running()


def test_other_programs_run_in_a_new_process(warm_python):
    words = [warm_python, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "False\n"
