"""A shell completes with what argcomplete returns for `rl4llm`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl4llm.algorithms import ALGORITHMS
from rl4llm.cli import main
from rl4llm.commands.completers import names

ROOT = Path(__file__).parents[1]
TYPED = {
    "rl4llm tra": "train",
    "rl4llm info --completion z": "zsh",
    "rl4llm eval configs/gsm8k_grp": "configs/gsm8k_grpo.yaml",
    "rl4llm eval configs/gsm8k_grpo.yaml --fail-if": "--fail-if-worse",
    "rl4llm train configs/sft.yaml training.weight_d": "training.weight_decay=",
    "rl4llm train configs/sft.yaml algorithm.name=cis": "algorithm.name=cispo",
    "rl4llm train configs/sft.yaml model.dtype=bf": "model.dtype=bfloat16",
}


@pytest.mark.parametrize("typed", TYPED)
def test_commands_files_options_keys_and_names_are_completed(typed, tmp_path):
    """As the code that `rl4llm info --completion bash` prints calls it: the answer is on descriptor 8."""
    variables = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": typed,
        "COMP_POINT": str(len(typed)),
        "PYTHONPATH": str(ROOT),
    }
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"), "COMP_TYPE": "9"}
    command = [sys.executable, "-m", "rl4llm"]
    subprocess.run(command, env=os.environ | variables, cwd=ROOT, timeout=120, capture_output=True)
    assert TYPED[typed] in [word.strip() for word in (tmp_path / "answer").read_text().split("\v")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_of_every_shell_is_printed(shell, capsys):
    assert main(["info", "--completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def test_completion_offers_the_registered_names():
    assert set(names("algorithm.name")) == set(ALGORITHMS)
