"""A program in a real terminal, whose screen is read as a person would see it."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest


class Screen:
    """Runs a command in a terminal of `columns` columns; `lines()` is its screen when it has ended."""

    def __init__(self, command, columns=80, rows=40, **environ):
        pyte = pytest.importorskip(
            "pyte", reason="pip install 'rl4llm[dev]' brings pyte, which reads the screen"
        )
        self.columns = columns
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        variables = {"TERM": "xterm-256color", **os.environ, **environ}
        for name in ("COLUMNS", "LINES", "CI", *(["NO_COLOR"] if "NO_COLOR" not in environ else [])):
            variables.pop(name, None)
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, preexec_fn=_of_this_terminal
        )
        os.close(theirs)

    @classmethod
    def of(cls, code, **how):
        return cls([sys.executable, "-c", code], **how)

    def read_until(self, text):
        """Go on until this stands on the screen."""
        while not any(text in line for line in self._screen.display):
            assert self._read(), f"the program ended, and {text!r} was never there: {self.lines()}"

    def type(self, text):
        os.write(self._ours, text.encode())

    def ended(self):
        """Return the exit code."""
        while self._read():
            pass
        os.close(self._ours)
        return self._process.wait()

    def lines(self):
        return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def shows_cursor(self):
        return not self._screen.cursor.hidden

    def _read(self):
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # all have closed it
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)


def _of_this_terminal():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
