"""Programs that are run and written again: what the policy reads, what it never reads, and whose fault a failure is."""

import json
import threading
import time

import pytest

from rl4llm.core.errors import ConfigError, DataError, SandboxError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.sandbox import Outcome, Stdin
from rl4llm.extensions.sandbox.code_env import CodeEnv
from rl4llm.extensions.sandbox.code_reward import CodeReward
from rl4llm.extensions.sandbox.code_tests import examples_in
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient, check_env
from rl4llm.tracking.summary import summarize

HIDDEN = "assert add(40, 2) == 42\nassert add(-1, 1) == 0"
RIGHT = "```python\ndef add(a, b): return a + b\n```"
WRONG = "```python\ndef add(a, b): return a - b\n```"
KNOWN = ["assert add(0, 0) == 0", "assert add(1, 2) == 3"]


class Scripted:
    """A runner that says what a function of the program makes of it."""

    def __init__(self, outcome, slots=2):
        self.outcome, self.slots, self.running, self.most = outcome, slots, 0, 0
        self._lock = threading.Lock()

    def run(self, program, limits=None):
        if program.source == "print(6 * 7)":
            return Outcome("ok", stdout="42\n")
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self.outcome(program)
        finally:
            with self._lock:
                self.running -= 1

    def close(self):
        pass


@pytest.fixture
def play(tokenizer):
    """Plays the episodes of rows; the policy says `turns` in this order. Returns the result and the client."""
    runner = Runner()

    def run(turns, sandbox, *, rows=({},), prompt="Write add.", **options):
        client = ScriptedClient(tokenizer, {"": turns} if isinstance(turns, list) else turns)
        runner.run(client.load(WeightRef(0)))
        messages = [{"role": "user", "content": prompt}]
        shared = {"messages": messages, "ground_truth": HIDDEN, "entry_point": "add"}
        limits = {name: options[name] for name in ("wall_s", "total_s") if name in options}
        rewards = [CodeReward(sandbox=sandbox, **limits)]
        env = CodeEnv(
            [shared | row for row in rows], tokenizer, rewards, len(rows), 1, sandbox=sandbox, **options
        )
        rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=0, max_failed_share=1.0)
        return rollout.play(range(len(rows)), step=0, sampling_params=SamplingParams(max_tokens=2000)), client

    yield run
    runner.close()


def told(trajectory):
    """What the environment said, without its last line, which is always the same."""
    said = [message.content for message in trajectory.messages[1:] if message.role == "user"]
    assert all(text.splitlines()[-1].startswith("Correct the program") for text in said)
    return [text.rpartition("\n")[0] for text in said]


def test_failed_program_gets_its_failure_and_another_turn(play, sandbox):
    result, _ = play([WRONG, RIGHT], sandbox, rows=[{"public_tests": KNOWN}])
    (trajectory,) = result.trajectories
    assert told(trajectory) == ["Test 2 of 2 failed:\nassert add(1, 2) == 3\nadd(1, 2) returned -1"]
    assert (trajectory.reward, trajectory.stop_reason, trajectory.num_turns) == (1.0, "done", 2)
    assert trajectory.extras["metrics"] == {"runs": 2, "first_try": 0, "repaired": 1}
    assert [span.author for span in trajectory.spans] == ["context", "policy"] * 2


def test_program_that_passes_visible_tests_ends_the_episode(play, sandbox):
    knows = "```python\ndef add(a, b): return {(0, 0): 0, (1, 2): 3}[a, b]\n```"
    for turn, reward in ((RIGHT, 1.0), (knows, 0.0)):
        result, _ = play([turn], sandbox, rows=[{"public_tests": KNOWN}])
        (trajectory,) = result.trajectories
        assert (trajectory.num_turns, trajectory.reward) == (1, reward)
        assert trajectory.extras["metrics"] == {"runs": 1, "first_try": 1, "repaired": 0}


def test_the_last_of_max_steps_programs_is_the_one_that_counts(play, sandbox):
    turns = [RIGHT.replace("+ b", "* b"), WRONG, WRONG, RIGHT]
    result, _ = play(turns, sandbox, rows=[{"public_tests": KNOWN}])
    (trajectory,) = result.trajectories
    assert (trajectory.num_turns, trajectory.stop_reason, trajectory.reward) == (3, "max_steps", 0.0)
    assert trajectory.extras["metrics"] == {"runs": 3, "first_try": 0, "repaired": 0}


@pytest.mark.parametrize(
    ("turn", "known", "said"),
    [
        ("No idea.\n```\n```", KNOWN, "The answer holds no code."),
        ("```python\ndef add(a, b) return 1\n```", KNOWN, "SyntaxError: expected ':' (program.py, line 1)"),
        ("```python\ndef add(a, b):\n    c = 0\n    return a / c\n```", KNOWN, "division by zero (line 3)"),
        ("```python\ndef add(a): return a\n```", KNOWN, "takes 1 positional argument but 2 were given"),
        ("```python\nx = 1\n```", KNOWN, "the program defines no 'add'"),
        ("```python\ndef add(a, b):\n    while True: pass\n```", KNOWN, "add(0, 0): timeout: the call took too long"),
        (WRONG, [{"fn": "add", "args": [1, 2], "expected": 3}], "add(1, 2) returned -1\nExpected: 3"),
        ("```python\nprint(1)\n```", [{"input": "1 2", "output": "3"}], "Input:\n1 2\nExpected output:\n3\nOutput:\n1"),
        ("```python\nprint(1 / 0)\n```", [{"input": "1", "output": "3"}], "line 1, in <module>\nZeroDivisionError"),
        ("```python\ndef add(a, b):\n  return oops\nadd(1, 2)\n```", None, "line 2, in add\nNameError: name 'oops'"),
        ("```python\nwhile True: pass\n```", None, "The program failed:\ntimeout: "),
    ],
)  # fmt: skip
def test_failure_messages_are_short_and_useful(turn, known, said, play, sandbox):
    limits = {"wall_s": 0.7, "total_s": 1.4} if "while True" in turn else {}
    result, _ = play([turn, RIGHT], sandbox, rows=[{"public_tests": known}], max_steps=2, **limits)
    (trajectory,) = result.trajectories
    (text,) = told(trajectory)
    assert said in text
    assert len(text) <= 1000


def test_hidden_tests_are_never_told_whatever_the_program_does(play, sandbox):
    hidden = "assert add(31337, 1) == 31338"
    spy = "```python\ndef add(a, b):\n    raise ValueError((a, b, list(globals())))\n```"
    turns = [spy, "```python\nprint(open('/proc/self/cmdline').read())\n1/0\n```", WRONG]
    result, client = play(
        turns, sandbox, rows=[{"public_tests": KNOWN, "ground_truth": hidden}, {"ground_truth": hidden}]
    )
    assert len(client.calls) == 4  # the second row has no known tests, and its program is only run
    for trajectory in result.trajectories:
        assert "3133" not in "".join(message.content for message in trajectory.messages)


def test_hostile_program_cannot_make_messages_long(play, sandbox):
    huge = "```python\ndef add(a, b): return 'x' * 500_000 + '\\ud800'\n```"
    raising = "```python\nclass E(Exception):\n    def __str__(self): return '\\udc80' * 10**6\n" \
        "def add(a, b): raise E\n```"  # fmt: skip
    deep = "```python\ndef add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x\n```"
    turns, rows = [huge, raising, deep, RIGHT], [{"public_tests": KNOWN}]
    result, _ = play(turns, sandbox, rows=rows, max_steps=4, max_reply_chars=200)
    (trajectory,) = result.trajectories
    said = told(trajectory)
    assert len(said) == 3 and all(0 < len(text) <= 200 for text in said)
    assert all(text.endswith("[... cut ...]") for text in said[:2])
    assert trajectory.reward == 1.0


def test_examples_in_the_prompt_are_the_default_visible_tests(play, sandbox):
    prompt = 'def add(a, b):\n    """Add.\n    >>> add(2, 3)\n    5\n    """\n'
    result, _ = play([WRONG, "    return a + b"], sandbox, rows=[{"prompt": prompt}])
    (trajectory,) = result.trajectories
    assert told(trajectory) == ["Test 1 of 1 failed:\nassert add(2, 3) == 5\nadd(2, 3) returned -1"]
    assert trajectory.reward == 1.0
    result, _ = play([WRONG, RIGHT], sandbox, prompt="Write add, such that add(2, 2) == 4.")
    (reply,) = told(result.trajectories[0])
    assert reply == "Test 1 of 1 failed:\nassert add(2, 2) == 4\nadd(2, 2) returned 0"


@pytest.mark.parametrize(
    ("text", "examples"),
    [
        (">>> f(1)\n2\n>>> f([1,\n... 2])\n3\n>>> print(f(1))\nx y", ["f(1) == 2"]),
        ("f(1) => 2\nf('a') ➞ ['b'].\nf(2) == 3\nf(3) -> 4\nf(4) # returns 5\nf(5) returns '6'",
         ["f(1) == 2", "f('a') == ['b']", "f(2) == 3", "f(3) == 4", "f(4) == 5", "f(5) == '6'"]),
        ("f(x) == 2\nf(1) == y\nf(1) => true\nf(1)\ng(1) == 2\nf(1 == 2", []),
        (">>> f(k=1)\n2.5\n>>> f(k=open('x'))\n1\n>>> __import__('os').system('x')\n0", ["f(k=1) == 2.5"]),
        ("def f(n):\n    '''\n    f(1) == 2\n    f(1) == 2\n    '''", ["f(1) == 2"]),
        ("", []),
    ],
)  # fmt: skip
def test_examples_are_calls_of_literals_with_a_literal_result(text, examples):
    assert examples_in(text, "f") == [f"assert {example}" for example in examples]


def test_program_with_unknown_input_is_not_run(play):
    ran = []

    def run(program):
        ran.append(program.tests)
        return Outcome("ok")

    tests = {"inputs": ["1"], "outputs": ["2"]}
    result, _ = play([RIGHT], Scripted(run), rows=[{"ground_truth": tests}])
    assert ran == [Stdin((("1", "2"),))]  # by the reward
    assert (result.trajectories[0].num_turns, result.trajectories[0].stop_reason) == (1, "done")


def test_sandbox_failure_is_retried_and_masks_only_its_sample(play):
    def broken(program):
        if "broken" in program.source:
            return Outcome("infra_error", "no namespaces")
        return Outcome("ok")

    script = {"": [RIGHT], "0/1/0": ["```python\nbroken\n```"]}
    result, client = play(script, Scripted(broken), rows=[{}, {}, {}])
    (failed,) = result.failed
    assert (failed.prompt_id, failed.failure_class) == ("1", "env/sandbox")
    assert failed.extras["played_again_after"] == "env/sandbox"
    assert [call.session for call in client.calls].count("0/1/0") == 2
    metrics = summarize(result.groups, result.failed)
    assert metrics["failures/env/sandbox"] == metrics["reward/mean"] == metrics["env/first_try"] == 1.0


def test_slow_program_delays_no_other_and_slots_are_a_limit(play):
    release, fast = threading.Event(), []

    def run(program):
        if "slow" in program.source:
            assert release.wait(20)
        else:
            time.sleep(0.01)
            fast.append(program)
            if len(fast) == 7:
                release.set()
        return Outcome("ok")

    runner = Scripted(run)
    result, _ = play({"": [RIGHT], "0/0/0": ["```python\nslow\n```"]}, runner, rows=[{}] * 8)
    assert len(result.trajectories) == 8
    assert runner.most == 2


def test_the_environment_keeps_its_contract(tokenizer, sandbox):
    tests = [{"fn": "add", "args": [1, 2], "expected": 3}]
    prompts = [[{"role": "user", "content": f"Write add, {number}."}] for number in range(2)]
    rows = [{"messages": prompt, "ground_truth": tests, "public_tests": tests} for prompt in prompts]
    env = CodeEnv(rows, tokenizer, [CodeReward(sandbox=sandbox)], 1, 1, max_steps=2, sandbox=sandbox)
    check_env(env, [WRONG, RIGHT])


def test_invalid_rows_and_options_are_refused_at_the_start(tokenizer):
    runner = Scripted(lambda program: Outcome("ok"))

    def make(columns=(), sandbox=runner, **options):
        rows = [
            {"prompt_id": "p7", "messages": [{"role": "user", "content": "x"}], "ground_truth": HIDDEN, **dict(columns)},
        ]  # fmt: skip
        return CodeEnv(rows, tokenizer, [CodeReward(sandbox=sandbox)], 1, 1, sandbox=sandbox, **options)

    with pytest.raises(DataError, match="'p7'"):
        make({"public_tests": {"inputs": ["1"]}})
    for option in ({"max_reply_chars": 0}, {"wall_s": 0}, {"max_steps": 0}):
        with pytest.raises(ConfigError):
            make(**option)
    runner.run = lambda program, limits=None: Outcome("infra_error", "bwrap is gone")
    with pytest.raises(SandboxError):
        make()


def test_known_tests_that_do_not_run_are_the_datasets_fault(play, sandbox):
    rows = [{"public_tests": "x = 1 / 0\nassert x"}, {"public_tests": KNOWN}]
    result, _ = play([RIGHT], sandbox, rows=rows)
    (failed,) = result.failed
    assert (failed.prompt_id, failed.failure_class) == ("0", "env/sandbox")
    assert json.dumps(result.trajectories[0].extras["metrics"])
