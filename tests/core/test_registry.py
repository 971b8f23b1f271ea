"""Names of a configuration, and what is found by its place."""

import os
import sys

import pytest

from rl4llm.__main__ import program
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry, imported


def test_the_program_finds_modules_of_the_directory_that_it_is_run_in_behind_all_others(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own_games.py").write_text("from rl4llm import BaseMDPEnv\n\n\nclass Guess(BaseMDPEnv):\n    pass\n")
    before = [place for place in sys.path if place not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.setattr(sys, "argv", ["rl4llm", "--version"])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit):
            program()
    assert sys.path == [*before, str(tmp_path)]
    assert issubclass(Registry("env.name", BaseMDPEnv)["my_own_games:Guess"], BaseMDPEnv)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gues", r"env\.name='gues' is unknown\. .*Did you mean 'guess'\? One of your own is 'package\.module:Name'"),
        ("nowhere:Guess", r"cannot be imported: No module named 'nowhere'.*the directory that the command is run in"),
        ("pathlib:Pth", r"cannot be imported: module 'pathlib' has no attribute 'Pth'"),
        ("pathlib:Path", r"env\.name='pathlib:Path' is <class 'pathlib.*'>\. Accepted: a subclass of BaseMDPEnv"),
        ("os:getcwd", r"env\.name='os:getcwd' is <built-in function getcwd>\. Accepted: a subclass of BaseMDPEnv"),
    ],
)
def test_what_a_name_does_not_stand_for_is_told(name, message):
    environments = Registry("env.name", BaseMDPEnv)
    environments.register("guess")(BaseMDPEnv)
    with pytest.raises(ConfigError, match=message):
        environments[name]


def test_a_function_is_named_by_its_place_alone():
    assert imported("env.agent", "os:getcwd") is os.getcwd
    with pytest.raises(ConfigError, match=r"env\.agent='getcwd' cannot be imported: there is no ':' in it"):
        imported("env.agent", "getcwd")
