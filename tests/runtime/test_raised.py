"""An error in a user's code is reported with its type, its text, and the line that the user can fix."""

import importlib.util
import inspect
import json
import logging

import pytest

from rl4llm.core.errors import EnvError
from rl4llm.rewards.ask import as_list
from rl4llm.runtime.raised import kind_and_line, raised

HERE = "tests/runtime/test_raised.py"


def caught(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error


def reads_json():
    return json.loads("{")


def calls_the_library():
    return as_list("odd", 7, 1)


def line(function, add=1):
    return inspect.getsourcelines(function)[1] + add


@pytest.mark.parametrize("function", [reads_json, calls_the_library])
def test_the_innermost_line_of_user_code_is_named(function):
    error = caught(function)
    said = raised("reward 'odd'", error)
    assert said == f"reward 'odd' raised {type(error).__name__}: {error} ({HERE}:{line(function)})"
    assert kind_and_line(error) == f"{type(error).__name__} at test_raised.py:{line(function)}"


def test_a_secret_that_an_error_quotes_is_hidden(caplog):
    def asks():
        raise ValueError("401 for https://judge/v1?api_key=own-secret")

    with caplog.at_level(logging.DEBUG, "rl4llm"):
        said = raised("reward 'judge'", caught(asks))
    assert "api_key=(hidden) (" in said
    assert "Traceback" in caplog.text and "own-secret" not in said + caplog.text


def test_a_package_line_is_named_only_without_user_code(tmp_path):
    package = tmp_path / "site-packages" / "shop.py"
    package.parent.mkdir()
    package.write_text("def sell(what):\n    return {}[what]\n")
    spec = importlib.util.spec_from_file_location("shop", package)
    shop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shop)

    def buys():
        return shop.sell("eggs")

    assert raised("it", caught(buys)) == f"it raised KeyError: 'eggs' ({HERE}:{line(buys)})"
    error = caught(buys)
    alone = error.with_traceback(error.__traceback__.tb_next.tb_next)
    assert raised("it", alone) == f"it raised KeyError: 'eggs' ({package}:2)"


def test_an_error_of_the_library_or_without_a_line_has_none():
    error = caught(calls_the_library)
    assert (
        raised("it", error.with_traceback(error.__traceback__.tb_next.tb_next))
        == f"it raised RewardError: {error}"
    )
    assert raised("it", EnvError("gone")) == "it raised EnvError: gone"
    assert kind_and_line(KeyError("a")) == "KeyError"
    assert len(raised("it", ValueError("x" * 10_000))) < 600


def test_a_traceback_is_logged_once_where_it_is_asked_for(caplog):
    def reads_more():
        return json.loads("[")

    caplog.set_level(logging.WARNING, "rl4llm")
    raised("it", caught(reads_more))
    assert not caplog.records
    caplog.set_level(logging.DEBUG, "rl4llm")
    for _ in range(2):
        raised("it", caught(reads_more))
    (record,) = caplog.records
    assert 'return json.loads("[")' in record.getMessage() and "json/decoder.py" in record.getMessage()


def test_a_function_called_with_other_arguments_is_named():
    class Mine:
        def respond(self):
            return []

    error = caught(lambda: None) or TypeError("respond() takes 1 positional argument but 2 were given")
    for function in (Mine().respond, reads_json):
        assert raised("it", error, function).endswith(f"({HERE}:{line(function, 0)})")
    assert HERE not in raised("it", error, as_list)
