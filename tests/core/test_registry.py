"""Names of a configuration, and what is found by its place."""

import gc
import importlib
import importlib.metadata
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rl4llm.__main__ import program
from rl4llm.cli import COMMANDS, main
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import Registry, imported, load


def test_modules_of_the_working_directory_are_found_last(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own_games.py").write_text(
        "from rl4llm import BaseMDPEnv\n\n\nclass Guess(BaseMDPEnv):\n    pass\n"
    )
    before = [place for place in sys.path if place not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.setattr(sys, "argv", ["rl4llm", "--version"])
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit):
            program()
    assert sys.path == [*before, str(tmp_path)]
    assert issubclass(
        Registry("env.name", "rl4llm.core.base_env:BaseMDPEnv")["my_own_games:Guess"], BaseMDPEnv
    )


@pytest.mark.parametrize("name", ["gues", "nowhere:Guess", "pathlib:Pth", "pathlib:Path", "os:getcwd"])
def test_an_unknown_name_is_refused(name):
    environments = Registry("env.name", "rl4llm.core.base_env:BaseMDPEnv")
    environments.register("guess")(BaseMDPEnv)
    with pytest.raises(ConfigError):
        environments[name]


def test_a_function_is_named_by_its_place_alone():
    assert imported("env.agent", "os:getcwd") is os.getcwd
    with pytest.raises(ConfigError):
        imported("env.agent", "getcwd")


def test_bare_decorator_registers_under_the_items_name():
    rewards = Registry("rewards.name")

    @rewards.register
    class Exact:
        pass

    @rewards.register()
    def short(completions):
        return [1.0 for _ in completions]

    assert isinstance(Exact, type) and rewards["Exact"] is Exact
    assert rewards["short"] is short and short("ab") == [1.0, 1.0]
    with pytest.raises(ConfigError):
        rewards.register(type("Exact", (), {}))
    assert list(rewards) == ["Exact", "short"]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a registry with an entry point of an installed package."""
    (tmp_path / "mine_for_registry.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("mine", "mine_for_registry:Mine", "rl4llm.tests")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    return Registry("env.name", group="rl4llm.tests")


def test_an_installed_name_may_also_have_a_decorator(installed):
    assert list(installed) == ["mine"]
    mine = importlib.import_module("mine_for_registry").Mine
    assert installed.register("mine")(mine) is mine is installed["mine"]
    with pytest.raises(ConfigError):
        installed.register("mine")(type("Mine", (), {}))


def test_a_broken_package_is_named_and_ends_no_other_command(monkeypatch, capsys):
    list(COMMANDS)  # installed ones are there
    monkeypatch.setitem(COMMANDS._items, "lost", "not_here:Lost")
    with pytest.raises(ConfigError, match="'lost' is not_here:Lost, which cannot be imported"):
        COMMANDS["lost"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


def test_what_a_table_names_is_imported_without_collection(tmp_path, monkeypatch):
    (tmp_path / "asks_the_collector.py").write_text("import gc\ncollects = gc.isenabled()\n")
    (tmp_path / "fails_to_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("asks_the_collector:collects") is False and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        load("fails_to_import")
    assert gc.isenabled()


def test_a_file_that_registers_a_name_twice_is_refused(tmp_path):
    """Only a cell, which has no file, may define what it registers again."""
    defined = "@names.register('one')\nclass One: ...\n\n"
    code = f"from rl4llm.core.registry import Registry\nnames = Registry('names')\n{defined}{defined}"
    (tmp_path / "twice.py").write_text(code)
    done = subprocess.run(
        [sys.executable, tmp_path / "twice.py"], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert "names='one' is already registered" in done.stderr
    done = subprocess.run(
        [sys.executable, "-i"], input=code, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert "Error" not in done.stderr and ">>>" in done.stderr
