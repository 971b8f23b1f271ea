"""A run on a terminal that closes finishes its step and saves, as after SIGTERM."""

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from rl4llm.runtime.watchdog import stop_on_signals, stop_signals

RUN = """
import fcntl, os, signal, sys, termios, threading, time
from rl4llm.runtime.watchdog import stop_on_signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
requested = threading.Event()
with stop_on_signals(requested, print), open(sys.argv[1], "w") as saved:
    print("ready", flush=True)
    while not requested.is_set():  # `wait` would hold the lock of the event that the signal sets
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    print("saving", flush=True)
    print("saving", file=sys.stderr, flush=True)
    saved.write("saved")
"""


def test_run_saves_when_its_terminal_closes(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, str(tmp_path / "file")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    assert b"ready" in os.read(ours, 100)
    os.close(ours)
    assert process.wait(30) == 0
    assert (tmp_path / "file").read_text() == "saved"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_the_second_signal_interrupts_unless_it_is_sighup(number):
    requested, causes = threading.Event(), []
    before = signal.getsignal(number)
    with stop_on_signals(requested, causes.append):
        signal.raise_signal(number)
        assert requested.is_set() and causes == [number.name]
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(number) is before


def test_sighup_stays_ignored_below_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(pytest.fail):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
