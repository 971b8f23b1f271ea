"""A configuration with every role, what engines receive, and programs that stand for those of a cluster."""

import os
import stat
import time
from pathlib import Path

import psutil

EVERY_ROLE = {
    "model": {"path": "model", "device": "cpu"},
    "data": {"path": "arithmetic"},
    "rewards": ["math"],
    "inference": {"name": "sglang"},
    "env": {"name": "tool"},
    "launch": {"nodes": 2, "nproc": 4, "servers": 3, "server_gpus": 0, "router": True, "env_hosts": 2},
}
COUNTS = {"trainer": 2, "server": 3, "router": 1, "env": 2}
SECRETS = {"RL4LLM_SERVER_KEY": "5ecret one", "RL4LLM_ENV_TOKEN": "5ecret two's"}

RL4LLM = """#!/usr/bin/env bash
# Stands for rl4llm: notes what it was started with; a trainer ends with 75 once all others run, or on SIGTERM.
role="${@: -1}" note="$NOTES/${@: -1}-$RL4LLM_NUMBER"
{ printf '%s\\n' "$@"; echo; env; } > "$note.part"
mv "$note.part" "$note"
[ "$role" = trainer ] || exec sleep 60
trap 'touch "$NOTES/told"; exit 75' TERM
for _ in {1..200}; do [ "$(ls "$NOTES" | grep -c '^[a-z]*-[0-9]$')" -lt 8 ] || exit 75; sleep 0.05; done
exit 9
"""


class Cluster:
    """A directory of stand-ins that comes first in PATH, and what the processes noted that were started with them."""

    def __init__(self, directory: Path):
        self.programs, self.notes = directory / "programs", directory / "notes"
        self.programs.mkdir()
        self.notes.mkdir()
        self.add("rl4llm", RL4LLM)
        path = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        self.environ = {**os.environ, "PATH": path, "NOTES": str(self.notes), **SECRETS}

    def add(self, name, text):
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(stat.S_IRWXU)

    def started(self):
        """Words and environment of every process, by role and number."""
        found = {}
        for file in self.notes.glob("*-[0-9]"):
            words, environ = file.read_text().split("\n\n", 1)
            pairs = (line.partition("=") for line in environ.splitlines())
            found[file.name] = words.split("\n"), {name: value for name, _, value in pairs}
        return found

    def left(self, seconds=15):
        """Processes of it that still run after so long."""
        end = time.monotonic() + seconds
        while (
            found := [process.pid for process in psutil.process_iter() if self._ours(process)]
        ) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _ours(self, process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("NOTES") == str(
                self.notes
            )
        except psutil.Error:
            return False
