"""Tools and sets of tools, each alone: their schemas, the arguments that they take, and what is refused."""

import shutil
from typing import Literal

import pytest

from rl4llm.core.errors import ConfigError, EnvError, SandboxError
from rl4llm.envs.tools import Tool, ToolError, ToolSet, as_toolset, calculator, tool
from rl4llm.envs.tools.arguments import objection
from rl4llm.extensions.sandbox import Outcome
from rl4llm.extensions.sandbox.python_tool import Python

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed; scripts/install_sandbox.sh does it"
)


@tool(timeout_s=2.5)
def weather(city: str, days: int = 1, near: list[str] | None = None) -> str:
    """The weather forecast.

    Args:
        city: Name of a city.
        days: How many days ahead.
        near: Other cities.
    """
    return f"{city}+{days}: rain"


def test_tool_schema_comes_from_type_hints_and_docstring():
    made = as_toolset(weather).tools["weather"]
    assert made.schema["function"]["description"] == "The weather forecast."
    assert made.parameters["properties"]["days"] == {"type": "integer", "description": "How many days ahead."}
    assert made.parameters["required"] == ["city"] and made.timeout_s == 2.5
    assert weather("Rome") == "Rome+1: rain"


def test_a_function_that_says_too_little_of_itself_is_no_tool():
    def mute(city):
        """The weather."""

    for function in (mute, lambda city: city):
        with pytest.raises(ConfigError):
            tool(function)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": "Rome", "days": 3, "near": None}, None),
        ({}, "the argument 'city' is missing; arguments: city, days, near"),
        ({"city": "Rome", "town": 1}, "no argument 'town'"),
        ({"city": 5}, "'city' must be of type string, not 5"),
        ({"city": "Rome", "days": True}, "'days' must be of type integer, not True"),
        ({"city": "Rome", "near": "Ostia"}, "'near' must be of type array"),
        ({"city": "Rome", "near": ["Ostia", 5]}, "'near' holds 5, which must be of type string"),
        ({"city": "Ro\ud800me"}, "'city' must be valid Unicode"),
        ({"city": "Rome", "days": float("nan")}, "'days' must be a finite number, not nan"),
    ],
)
def test_arguments_of_other_names_and_types_are_objected_to(arguments, said):
    objected = objection(as_toolset(weather).tools["weather"], arguments)
    assert objected is None if said is None else said in objected


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({}, []),
        ({"additionalProperties": True}, []),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, [1]),
        ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, []),
        ({"properties": {"a": {}}, "additionalProperties": False}, [1, "x"]),
        ({"properties": {"a": {}}}, [1, "x"]),
        ({"properties": {}}, [1, "x"]),
    ],
)
def test_schema_tells_whether_further_arguments_are_allowed(schema, refused):
    found = Tool({"name": "f", "parameters": {"type": "object", **schema}}, print)
    assert [value for value in (1, "x") if objection(found, {"b": value})] == refused


def test_arguments_inside_of_others_are_objected_to_too():
    @tool
    def book(
        kind: Literal["bus", "train"], seats: dict[str, int], at: int | str, place: tuple[int, str]
    ) -> str:
        """Book seats.

        Args:
            kind: What to ride on.
            seats: How many, by name.
            at: When.
            place: Where.
        """

    right = {"kind": "bus", "seats": {"Ada": 1}, "at": "noon", "place": [1, "a"]}
    wrong = {
        "kind": ("car", "one of 'bus', 'train', not 'car'"),
        "seats": ({"Ada": "one"}, "'seats' holds 'one', which must be of type integer"),
        "at": (1.5, "of type integer or string"),
        "place": ([1, 2], "'place' holds 2, which must be of type string"),
    }
    made = as_toolset(book).tools["book"]
    assert objection(made, right) is None
    for name, (value, said) in wrong.items():
        assert said in objection(made, right | {name: value})
    either = {"anyOf": [{"type": "integer"}, {"type": "object", "required": ["x"]}]}
    made = Tool({"name": "any", "parameters": {"properties": {"a": either}}}, print)
    assert [objection(made, {"a": value}) for value in (1, {"x": 1})] == [None, None]
    assert "of type integer or an object with 'x'" in objection(made, {"a": {}})


@pytest.mark.parametrize(
    "item",
    [
        "calculater",
        {"name": "workspace", "max_byte": 1},
        {"name": "calculator", "digits": 3},
        {"name": "workspace", "max_files": "many"},
        {"name": "mcp"},
        17,
    ],
)
def test_tools_that_cannot_be_are_refused(item):
    with pytest.raises(ConfigError):
        as_toolset(item)


def test_a_tool_may_be_named_by_its_place_in_a_package():
    assert as_toolset("rl4llm.envs.tools.calculate:calculator").tools["calculator"].function is calculator


def test_a_set_of_ones_own_shares_what_its_methods_need():
    class Counter(ToolSet):
        def __init__(self):
            super().__init__()
            self.count = 0

        @tool
        def count_up(self, by: int) -> int:
            """Count up.

            Args:
                by: How far.
            """
            self.count += by
            return self.count

    counter = as_toolset(Counter)
    assert (
        list(counter.tools) == ["count_up"]
        and "self" not in counter.tools["count_up"].parameters["properties"]
    )
    assert [counter.tools["count_up"].function(by=2) for _ in range(2)] == [2, 4]


@needs_bubblewrap
def test_python_runs_programs_and_shows_what_went_wrong_in_them():
    python = Python(wall_s=1.0)
    assert python.python("print(6 * 7)") == "42\n"
    assert python.python("x = 6 * 7") == "The program printed nothing."
    for code in ("print('so far')\n1 / 0", "while True: pass", "("):
        with pytest.raises(ToolError):
            python.python(code)
    python.close()


class BrokenSandbox:
    def __init__(self, works):
        self.works = works

    def run(self, program, limits=None):
        self.works -= 1
        return (
            Outcome("ok", stdout="42\n") if self.works >= 0 else Outcome("infra_error", "no namespaces here")
        )

    def close(self):
        pass


def test_broken_sandbox_raises_at_once_and_is_not_a_tool_error():
    with pytest.raises(SandboxError):
        Python(sandbox=BrokenSandbox(works=0))
    with pytest.raises(EnvError):
        Python(sandbox=BrokenSandbox(works=1)).python("print(1)")
