"""A shell completes with the script of `rl4llm info --completion`; the tests press Tab in bash."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl4llm.algorithms import ALGORITHMS
from rl4llm.cli import main
from rl4llm.commands.completers import names, overrides
from rl4llm.envs import ENVIRONMENTS

ROOT = Path(__file__).parents[1]
TYPED = {
    "rl4llm tra": "rl4llm train",
    "rl4llm info --completion z": "rl4llm info --completion zsh",
    "rl4llm eval configs/gsm8k_grp": "rl4llm eval configs/gsm8k_grpo.yaml",
    "rl4llm eval configs/gsm8k_grpo.yaml --fail-if": "rl4llm eval configs/gsm8k_grpo.yaml --fail-if-worse",
    "rl4llm train configs/sft.yaml training.weight_d": "rl4llm train configs/sft.yaml training.weight_decay=",
    "rl4llm train configs/sft.yaml algorithm.name=cis": "rl4llm train configs/sft.yaml algorithm.name=cispo",
    "rl4llm train configs/sft.yaml model.dtype=bf": "rl4llm train configs/sft.yaml model.dtype=bfloat16",
}


class Bash:
    """An interactive bash behind a terminal, in which `rl4llm` is this Python's."""

    def __init__(self, programs):
        self._terminal, inner = pty.openpty()
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        environ = {
            **os.environ,
            "PATH": path,
            "TERM": "dumb",
            "PS1": "$ ",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "400",
        }
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=inner, stdout=inner, stderr=inner, cwd=ROOT, env=environ, start_new_session=True,
        )  # fmt: skip
        os.close(inner)

    def send(self, keys, until):
        """Press keys and return what is shown, up to and including `until`."""
        os.write(self._terminal, keys.encode())
        shown, deadline = "", time.monotonic() + 120
        while until not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([self._terminal], [], [], 1.0)[0]:
                shown += os.read(self._terminal, 65536).decode(errors="replace")
        return shown

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    programs = tmp_path_factory.mktemp("programs")
    (programs / "rl4llm").write_text(f'#!/bin/sh\nexec {sys.executable} -m rl4llm "$@"\n')
    (programs / "rl4llm").chmod(0o755)
    shell = Bash(programs)
    shell.send(
        'bind "set enable-bracketed-paste off"; eval "$(rl4llm info --completion bash)"; echo rea""dy\n',
        "ready",
    )
    yield shell
    shell.close()


@pytest.mark.parametrize("typed", TYPED)
def test_bash_completes_commands_files_options_keys_and_names(bash, typed):
    first_column, last_column = "\x01", "\x05"
    shown = bash.send(f"{typed}\t{first_column}printf '<%s> ' {last_column}; echo do''ne\n", "done")
    line = next(line for line in reversed(shown.splitlines()) if line.startswith("<rl4llm>"))
    assert line.partition("done")[0].replace("> <", " ").strip("<> ") == TYPED[typed]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_of_every_shell_is_printed(shell, capsys):
    assert main(["info", "--completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def test_completion_offers_the_registered_names():
    assert set(names("algorithm.name")) == set(ALGORITHMS)
    assert set(names("env.name")) == {
        name for name in ENVIRONMENTS if ENVIRONMENTS[name].__module__.startswith("rl4llm.")
    }
    assert "algorithm.name=grpo" in overrides("algorithm.name=g")
    assert "rollout.group_size=" in overrides("rollout.")
