"""The code reward: layouts of tests, partial credit, what is stored, and whose fault a failure is."""

import json

import pytest

from rl4llm.core.base_env import SampleState
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.types import ChatMessage
from rl4llm.extensions.sandbox import Outcome, TestResult
from rl4llm.extensions.sandbox.code_reward import CodeReward
from rl4llm.extensions.sandbox.code_tests import code_in, stored_tests
from rl4llm.rewards import RewardFailure, as_reward_function
from rl4llm.rewards.scoring import check_examples, score

ASSERTS = "assert double(2) == 4\nassert double(3) == 6\nassert double(0) == 0\nassert double(-1) == -2"


class Recorded:
    """A runner that gives a fixed outcome and remembers what it was asked."""

    slots = 2

    def __init__(self, outcome):
        self.outcome = outcome
        self.programs = []

    def run(self, program, limits=None):
        self.programs.append(program)
        return self.outcome

    def close(self):
        self.programs = None


def sample(reply, tests=ASSERTS, **columns):
    made = SampleState("p", 0, [ChatMessage("user", "Write it.")], tests, columns)
    made.messages.append(ChatMessage("assistant", reply))
    return made


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


def test_the_examples_of_every_form_of_the_reward_hold(sandbox):
    for options in ({}, {"partial": True}, {"syntax_weight": 0.2, "format_weight": 0.1}):
        check_examples([CodeReward(sandbox=sandbox, **options)])


@pytest.mark.parametrize(("code", "full", "partial", "weighted"), [
    ("def double(x): return 2 * x", 1.0, 1.0, 1.0),
    ("def double(x): return x * x", 0.0, 0.5, 0.5 * 0.7 + 0.3),
    ("def double(x): return abs(2 * x)", 0.0, 0.75, 0.75 * 0.7 + 0.3),
    ("def double(x) return 2 * x", 0.0, 0.0, 0.1),
    ("def triple(x): return 3 * x", 0.0, 0.0, 0.3),
])  # fmt: skip
def test_tests_passed_syntax_and_format_make_the_score(code, full, partial, weighted, sandbox):
    messages = [ChatMessage("assistant", fenced(code))]
    options = [{}, {"partial": True}, {"partial": True, "syntax_weight": 0.2, "format_weight": 0.1}]
    scores = [CodeReward(sandbox=sandbox, **each)(messages, ASSERTS) for each in options]
    assert scores == pytest.approx([full, partial, weighted])


def test_what_came_of_each_test_is_kept_with_the_episode(sandbox):
    reward = CodeReward(sandbox=sandbox, wall_s=2.0, total_s=2.0)
    replies = (fenced("def double(x): return x * x"), fenced("while True: pass"), "No idea.\n```\n```")
    samples = [sample(reply) for reply in replies]
    assert list(score(samples, [reward]).rewards["code"]) == [0.0, 0.0, 0.0]
    kept = samples[0].extras["tests"]["code"]
    assert (kept["status"], kept["sandbox"]) == ("wrong", "prefork")
    assert [test["status"] for test in kept["tests"]] == ["ok", "wrong", "ok", "wrong"]
    assert samples[1].extras["reward_notes"]["code"].startswith("model_error: timeout")
    assert samples[2].extras["reward_notes"]["code"] == "no_code"
    json.dumps([item.extras for item in samples])


def test_rows_of_humaneval_mbpp_apps_and_suites_are_understood(sandbox):
    reward = CodeReward(sandbox=sandbox)
    prompt = 'def double(x):\n    """Twice x."""\n'
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    rows = [
        (fenced("def double(x): return 2 * x"), sample("", check, entry_point="double", prompt=prompt)),
        ("    return 2 * x", sample("", check, entry_point="double", prompt=prompt)),
        (fenced("def double(x): return 2 * x"), sample("", ["assert double(2) == 4", "assert double(pi) > 6"],
                                                       test_imports=["from math import pi"])),
        (fenced("print(2 * int(input()))"), sample("", '{"inputs": ["2\\n", ["4", "5"]], "outputs": ["4\\n", ["8"]]}')),
        (fenced("print(2 * int(input()))"), sample("", [{"input": ["2", ""], "output": ["4"]}])),
        (fenced("class Solution:\n    def double(self, x): return 2 * x"),
         sample("", {"fn_name": "Solution.double", "inputs": [[2]], "outputs": [4]})),
        (fenced("def double(x): return 2 * x"), sample("", [{"fn": "double", "args": [2], "expected": 4}])),
        (fenced("def double(x): return 2 * x"),
         sample("", {"files": {"t.py": "from solution import double\ndef test_a(): assert double(1) == 2"},
                     "required": ["t.py::test_a"]})),
    ]  # fmt: skip
    samples = [row for _, row in rows]
    for reply, row in rows:
        row.messages[-1] = ChatMessage("assistant", reply)
    scores = reward.score_batch(samples)
    assert scores == [1.0] * len(rows), [row.extras for row in samples]


@pytest.mark.parametrize(
    "tests",
    ["", "  ", None, 7, [], {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, "{not json", [{"in": 1}],
     {"files": {"a.py": ""}, "required": []}, {"files": {"a.py": ""}, "required": ["b.py::x"]}, [1, 2]],
)  # fmt: skip
def test_tests_in_no_known_layout_are_the_datasets_fault(tests):
    with pytest.raises(DataError):
        stored_tests(tests, {})
    samples = [sample("```python\nx = 1\n```", tests), sample("```python\nx = 1\n```")]
    score(samples, [CodeReward(sandbox=Recorded(Outcome("ok")))])
    assert samples[0].failure_class == "code/unavailable"
    assert samples[1].failure is None


def test_sandbox_failure_masks_the_sample():
    reward = CodeReward(sandbox=Recorded(Outcome("infra_error", "no namespaces")))
    samples = [sample(fenced("def double(x): return 2 * x"))]
    scores = score(samples, [reward])
    assert "no namespaces" in samples[0].failure
    assert scores.reward.isnan().all()
    with pytest.raises(RewardFailure):
        reward([ChatMessage("assistant", fenced("x"))], ASSERTS)


def test_a_machine_without_a_sandbox_is_found_before_training(monkeypatch):
    from rl4llm.core.errors import RewardError
    from rl4llm.extensions.sandbox import sandbox as sandbox_module

    monkeypatch.setattr(sandbox_module, "find_bwrap", lambda: None)
    with pytest.raises(RewardError):
        check_examples([CodeReward()])


@pytest.mark.parametrize(("reply", "code", "closed"), [
    ("```python\nx = 1\n```", "x = 1\n", True),
    ("```py\nx = 1\n```\nand\n```\noutput\n```", "x = 1\n", True),
    ("```python\na\n```\n```python\nb\n```", "b\n", True),
    ("```\nx\n```", "x\n", True),
    ("```python\nx = 1", "x = 1", False),
    ("    return 1", "    return 1", False),
    ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n", True),
    ("- ```python\n  x = 1\n  ```", "x = 1\n", True),
    ("> ```python\n> if x:\n>     y\n>\n> z\n> ```", "if x:\n    y\n\nz\n", True),
    ("   ```python\nif x:\n  y\n   ```", "if x:\n  y\n", True),
    ("```python\n    return 1\n```", "    return 1\n", True),
    ("~~~python\nx = '```'\n~~~", "x = '```'\n", True),
    ("````python\nx = \"\"\"\n```\n\"\"\"\n````", "x = \"\"\"\n```\n\"\"\"\n", True),
    ("```python title=\"a.py\"\nx\n```\n```json\n{}\n```", "x\n", True),
    ("```{.python}\nx\n```\n```pycon\n>>> x\n```", "x\n", True),
    ("So: ```python\nx = 1```", "x = 1", True),
    ("Use ```f``` as\n```python\nx\n```", "x\n", True),
    ("print('```')\n", "print('```')\n", False),
    ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n", True),
    ("<think>```python\nnever ends\n```", "", False),
    ("", "", False),
])  # fmt: skip
def test_the_last_block_of_python_is_the_code(reply, code, closed):
    assert code_in(reply) == (code, closed)


def test_block_with_the_entry_point_is_preferred():
    reply = "```python\ndef f(x): return 0\n```\n```python\ndef f(x): return x\n```\nUse:\n```python\nprint(f(1))\n```"
    assert code_in(reply, "f") == ("def f(x): return x\n", True)
    assert code_in(reply, "g") == code_in(reply) == ("print(f(1))\n", True)


HUGE = "```python\n" + "x" * 10_000_000 + "\n```"


@pytest.mark.parametrize("reply", [HUGE, "```python\n" + "#" * 150_000, "\udc80" * 9, ""])
def test_replies_that_no_program_is_are_0_and_cost_nothing(reply, sandbox):
    reward = CodeReward(sandbox=sandbox)
    samples = [sample(reply)]
    assert reward.score_batch(samples) == [0.0]
    note = samples[0].extras["reward_notes"]["code"]
    assert note.partition(":")[0] in ("too_long", "no_code", "model_error")


def test_config_passes_its_sandbox_to_the_rewards():
    runner = Recorded(Outcome("ok", tests=(TestResult("a", "ok"),)))
    options = {"name": "code", "label": "mine", "partial": True}
    reward = as_reward_function(options, provided={"sandbox": runner})
    assert (reward.name, reward.partial, reward.sandbox) == ("mine", True, runner)
    as_reward_function("format", provided={"sandbox": runner})
    reward.close()
    assert runner.programs is None


@pytest.mark.parametrize("options", [
    {"syntax_weight": -1},
    {"format_weight": "x"},
    {"syntax_weight": 0.6, "format_weight": 0.6},
    {"wall_s": 0},
])  # fmt: skip
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        CodeReward(**options)
