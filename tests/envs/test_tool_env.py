"""Episodes with tools: which calls are run, what the policy reads about the others, and whose fault a failure is."""

import asyncio
import copy
import dataclasses
import inspect
import json
import re
import sqlite3
import tempfile
import threading
import time

import numpy as np
import pytest
import torch

from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.message import CUT
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.sgl_tool_env import SglToolMDPEnv
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools import ToolError, ToolSet, tool
from rl4llm.envs.tools.formats import FORMATS
from rl4llm.extensions.toolbox.workspace import Workspace
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient, check_env
from rl4llm.tracking.episodes import EpisodeLog
from rl4llm.tracking.summary import summarize
from rl4llm.tracking.tracker import read_jsonl


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def play(tokenizer):
    """Plays one prompt's episodes; the policy says `turns` in this order. Returns the result, client and environment."""
    runner = Runner()

    def run(
        turns,
        *,
        client=None,
        tokenizer=tokenizer,
        group_size=1,
        columns=None,
        env_class=ToolMDPEnv,
        **options,
    ):
        client = client or ScriptedClient(tokenizer, {"": turns} if isinstance(turns, list) else turns)
        runner.run(client.load(WeightRef(0)))
        rows = [
            {"messages": [{"role": "user", "content": "How many?"}], "ground_truth": "85", **(columns or {})}
        ]
        options = {"describe_tools": False, "max_steps": 8, **options}
        env = env_class(rows, tokenizer, [as_reward_function("tool_use")], 1, group_size, **options)
        renderer = Renderer(tokenizer, env.tool_schemas, roles=env.reply_roles)
        rollout = Rollout(env, client, renderer, runner, seed=0, max_failed_share=1.0)
        result = rollout.play([0], step=0, sampling_params=SamplingParams(max_tokens=10_000))
        env.close()
        return result, client, env

    run.tokenizer = tokenizer
    yield run
    runner.close()


@pytest.fixture
def answers(play):
    """What the environment says to a first turn of the policy."""

    def ask(turn, **options):
        result, _, _ = play([turn, "Answer: 85"], **options)
        (trajectory,) = result.trajectories
        return [message.content for message in trajectory.messages if message.role == "tool"]

    return ask


def test_the_seeds_name_is_the_same_environment():
    assert SglToolMDPEnv is ToolMDPEnv


def test_calls_are_run_until_a_turn_has_none(play):
    result, _, _ = play(
        [call("calculator", expression="37+48"), call("calculator", expression="2*85"), "Answer: 170"]
    )
    (trajectory,) = result.trajectories
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["85", "170"]
    assert trajectory.stop_reason == "done" and trajectory.extras["metrics"] == {
        "tool_calls": 2,
        "tool_errors": 0,
    }
    assert [span.author for span in trajectory.spans] == ["context", "policy"] * 3
    assert trajectory.rewards["tool_use"] == 1.0


def test_each_answer_holds_the_call_that_it_answers(play):
    turns = [
        call("calculator", expression="37+48") + call("no_such_tool", x=1),
        call("calculator") * 3,
        "Answer: 85",
    ]
    result, _, _ = play(turns, max_calls=2)
    told = [message for message in result.trajectories[0].messages if message.role == "tool"]
    calls = [message.tool_calls[0] for message in told]
    names = ["calculator", "unknown", "calculator", "calculator", "calculator"]
    assert [item["function"]["name"] for item in calls] == names
    assert [item["id"] for item in calls] == [f"call{number:05}" for number in range(5)]
    assert calls[0]["function"]["arguments"] == {"expression": "37+48"}
    assert all(set(message.to_dict()) == {"role", "content"} for message in told)


def returns(value):
    @tool
    def give() -> str:
        """Give something."""
        if isinstance(value, BaseException):
            raise value
        return value

    return give


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "no result"),
        (5, "5"),
        ({"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        (float("nan"), "NaN"),
        (object, "\"<class 'object'>\""),
        ("grüß".encode(), "grüß"),
        ({"out": b"1\xff"}, '{"out": "1\ufffd"}'),
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        ([torch.tensor(1.5), torch.arange(3)], "[1.5, [0, 1, 2]]"),
        ([np.datetime64("2024-01-02T03:04:05", "ns")], '["2024-01-02T03:04:05.000000000"]'),
        ("x" * 10_000_000, "x" * 1987 + CUT),
        ("half \ud800.", "half ?."),
        ("", ""),
        (KeyError("b"), "Error: KeyError: 'b'"),
        (SystemExit(1), "Error: SystemExit: 1"),
        (TimeoutError("the shop is closed"), "Error: TimeoutError: the shop is closed"),
        (ValueError("x" * 10_000_000), "Error: ValueError: " + "x" * 1968 + CUT),
        (10**5000, "Error: the result cannot be shown: Exceeds the limit (4300 digits)"),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int | set) else type(value).__name__,
)
def test_tool_results_and_errors_become_short_valid_text(answers, value, shown):
    (answer,) = answers(call("give"), tools=[returns(value)], on_error="answer")
    assert answer == shown or (isinstance(value, int) and answer.startswith(shown))


@pytest.mark.parametrize("value", [object(), [iter([1])]])
def test_a_tool_result_without_text_fails_the_sample(play, value):
    """Its address in memory is all that the model could read, another one in each process."""
    result, _, _ = play([call("give")], tools=[returns(value)], on_error="answer")
    assert result.failed[0].failure_class == "tool/give"
    assert "it returned an object of type" in result.failed[0].failure


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            '<tool_call>{"name": "calculator", "arguments": </tool_call>',
            "Error: the call cannot be read: Expecting value",
        ),
        ('<tool_call>{"name": "calculator"}', "Error: the call is not closed by </tool_call>"),
        (call("calcalutor", expression="1"), "Error: no tool 'calcalutor'; tools: calculator"),
        (call("calculator", text="1"), "Error: calculator: no argument 'text'; arguments: expression"),
        (
            call("calculator", expression=85),
            "Error: calculator: the argument 'expression' must be of type string, not 85",
        ),
        (call("calculator", expression="1/0"), "Error: division by zero"),
        (call("\ud800"), r"Error: no tool '\ud800'; tools: calculator"),
        (
            call("calculator", expression="\ud800"),
            "Error: calculator: the argument 'expression' must be valid",
        ),
        (call("calculator", expression="1e999"), "Error: the numbers are too large"),
        (call("calculator", expression="9" * 1500), "Error: the expression is longer than 200 characters"),
    ],
)
def test_what_the_model_got_wrong_is_answered_with_a_short_error(answers, said, told):
    (answer,) = answers(said)
    assert answer.startswith(told) and len(answer) < 250


def test_failed_calls_are_marked_whatever_their_text_says(play):
    @tool
    def log(fail: bool) -> str:
        """Read the last line of a log.

        Args:
            fail: Whether to break.
        """
        if fail:
            raise ValueError("all is well")
        return "Error: disk full"

    @tool
    def refuse() -> str:
        """Refuse."""
        raise ToolError("no")

    turns = [
        call("log", fail=False) + call("log", fail=True) + call("refuse"),
        call("nothing") + call("log") + call("log", fail=False) * 3,
        "done",
    ]
    result, _, _ = play(turns, tools=[log, refuse], on_error="answer", max_calls=3)
    (trajectory,) = result.trajectories
    told = [message for message in trajectory.messages if message.role == "tool"]
    assert [message.failed for message in told] == [False, True, True, True, True, False, True]
    assert not any("failed" in message.to_dict() for message in told)  # templates never see it
    assert trajectory.rewards["tool_use"] == pytest.approx(2 / 7)
    assert trajectory.extras["metrics"]["tool_errors"] == sum(message.failed for message in told)


class Slow(ToolSet):
    """A tool of the episode, whose calls wait for each other."""

    def open(self, sample):
        return self

    @tool
    def nap(self, seconds: float) -> str:
        """Sleep.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"


def test_an_answer_has_the_time_of_its_call_alone(play, tmp_path):
    turns = [call("nap", seconds=0.3) + call("nap", seconds=0.01) + call("nothing"), "done"]
    result, _, _ = play(turns, tools=[Slow()])
    EpisodeLog(tmp_path).log(1, result.groups)
    (row,) = read_jsonl(tmp_path / "step-000001.jsonl")
    told = [message for message in row["messages"] if message["role"] == "tool"]
    long, short = (message["seconds"] for message in told[:2])
    assert long >= 0.3 and 0.01 <= short < 0.25 and "seconds" not in told[2]
    assert not any("seconds" in message.to_dict() for message in result.trajectories[0].messages)


def test_calls_of_a_turn_run_at_once_and_are_answered_in_order(answers):
    together = threading.Barrier(3)

    @tool
    def meet(name: str) -> str:
        """Meet the others.

        Args:
            name: Who comes.
        """
        together.wait(timeout=20)
        return name

    assert answers("".join(call("meet", name=name) for name in "abc"), tools=[meet]) == ["a", "b", "c"]


def test_calls_to_tools_of_an_episode_run_in_written_order(answers):
    texts = [str(number) for number in range(4)]
    written = "".join(call("write_file", path="a", text=text) + call("read_file", path="a") for text in texts)
    assert answers(written, tools=["workspace"], max_calls=8)[1::2] == texts


def test_a_turn_and_an_episode_have_a_budget_of_calls(play, answers):
    five = call("calculator", expression="1") * 5
    assert answers(five, max_calls=3) == ["1", "1", "1", "Error: at most 3 calls per turn"]
    result, _, _ = play([call("calculator", expression="1") * 2] * 3 + ["Answer: 1"], budget=3)
    told = [message.content for message in result.trajectories[0].messages if message.role == "tool"]
    used_up = "Error: all 3 calls of this task are used up"
    assert told == ["1", "1", "1", used_up, used_up]


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>',
        '[TOOL_CALLS]calculator[ARGS]{"expression": "1"}',
        "<function=calculator><parameter=expression>1</parameter></function>",
    ],
)
def test_call_in_the_form_of_another_model_is_an_error(answers, said):
    (answer,) = answers(said)
    assert answer.startswith("Error: the call is not in the form") and "<tool_call>" in answer
    assert answers(said.replace("calculator", "abacus")) == []


def test_what_is_called_in_a_thought_is_not_run(answers):
    thought = "<think>I could " + call("calculator", expression="1+1") + "</think>"
    assert answers(thought + call("calculator", expression="2+2")) == ["4"]
    assert answers(thought + "No.") == []


@tool(timeout_s=0.05)
def hang() -> str:
    """Never comes back."""
    threading.Event().wait()


@tool(timeout_s=0.05)
async def hang_too() -> str:
    """Never comes back either."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("function", [hang, hang_too])
def test_tool_that_hangs_fails_the_sample_or_answers_an_error(play, answers, function):
    result, _, _ = play([call(function.__name__)], tools=[function])
    assert [sample.failure for sample in result.failed] == [
        f"the tool {function.__name__} took more than 0.05 s"
    ]
    assert result.failed[0].failure_class == "env/timeout"
    told = answers(call(function.__name__), tools=[function], on_timeout="error")
    assert told == [f"Error: {function.__name__} took more than 0.05 s"]


def test_env_deadline_is_later_than_those_of_its_tools(play):
    @tool(timeout_s=500)
    def slow() -> str:
        """Take long."""

    _, _, env = play(["Answer: 85"], tools=[slow])
    assert env.respond_timeout_s > 500


def test_tool_that_raises_env_error_fails_the_sample(play):
    for on_error in ("fail", "answer"):
        result, _, _ = play(
            [call("give")], tools=[returns(EnvError("the shop is closed"))], on_error=on_error
        )
        assert result.failed[0].failure.startswith("the tool give raised EnvError: the shop is closed")


@tool
def broken(text: str) -> str:
    """Has a slip of the pen in it.

    Args:
        text: Anything.
    """
    return re.sub("a", lambda found: txet, text)  # noqa: F821


SLIP = inspect.getsourcelines(broken)[1] + 7


@pytest.mark.parametrize("text", ["a", "b"])
def test_a_tool_that_raises_fails_the_sample_with_its_line(play, text):
    result, _, _ = play([call("broken", text=text)] * 2 + ["Answer: 85"], tools=[broken], group_size=2)
    metrics = summarize(result.groups, result.failed)
    assert metrics["tool/broken/calls"] == (2.0 if text == "a" else 4.0)
    if text == "b":  # the line is not reached
        assert not result.failed and "failures/tool/broken" not in metrics
        return
    said = (
        f"the tool broken raised NameError: name 'txet' is not defined (tests/envs/test_tool_env.py:{SLIP})"
    )
    said += ". If the model's arguments were wrong, the tool should raise rl4llm.ToolError"
    assert all(sample.failure.startswith(said) for sample in result.failed)
    assert [sample.failure_class for sample in result.failed] == ["tool/broken"] * 2
    assert metrics[f"tool/broken/raised/NameError at test_tool_env.py:{SLIP}"] == 2.0
    assert (metrics["failures/tool/broken"], metrics["trajectories"]) == (2.0, 0.0)


def test_what_a_tool_raises_is_its_answer_where_one_chooses_so(play):
    result, _, _ = play([call("broken", text="a"), "Answer: 85"], tools=[broken], on_error="answer")
    (trajectory,) = result.trajectories
    assert trajectory.messages[2].content == "Error: NameError: name 'txet' is not defined"
    metrics = summarize(result.groups)
    assert (
        metrics[f"tool/broken/raised/NameError at test_tool_env.py:{SLIP}"]
        == metrics["env/tool_errors"]
        == 1.0
    )


class StopsAtTokens(ScriptedClient):
    """Stops at stop tokens, as engines do."""

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        ends = [i for i, token in enumerate(completion.token_ids) if token in sampling_params.stop_token_ids]
        kept = completion.token_ids[: ends[0] + 1]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return dataclasses.replace(
            completion, token_ids=kept, logprobs=completion.logprobs[: len(kept)], text=text
        )


def test_generation_stops_after_a_call_and_context_ends_the_turn(play, tokenizer):
    made_up = call("calculator", expression="37+48") + "85, as the tool said"
    client = StopsAtTokens(tokenizer, {"": [made_up, "Answer: 85"]})
    result, _, _ = play(None, client=client, max_calls=1)
    (trajectory,) = result.trajectories
    end = tokenizer.convert_tokens_to_ids("</tool_call>")
    assert trajectory.spans[1].token_ids[-1] == end
    assert trajectory.spans[2].token_ids[0] == tokenizer.eos_token_id
    assert trajectory.messages[1].content == call("calculator", expression="37+48")
    assert "85, as" not in tokenizer.decode(trajectory.token_ids)


def test_an_end_of_calls_that_is_several_tokens_is_a_stop_string(play):
    _, client, _ = play(["Answer: 85"], format="deepseek")
    assert client.calls[0].params.stop == ("<｜tool▁calls▁end｜>",)


def test_calls_are_read_from_tokens_that_messages_leave_out(play, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    turns = ['[TOOL_CALLS]calculator[ARGS]{"expression": "37+48"}', "Answer: 85"]
    result, _, _ = play(
        None, client=ScriptedClient(tokenizer, {"": turns}), tokenizer=tokenizer, format="mistral"
    )
    said = [message.content for message in result.trajectories[0].messages[1:]]
    assert said == ['calculator{"expression": "37+48"}', "85", "Answer: 85"]


def test_auto_finds_the_format_with_the_template_arguments(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<TOOLCALL>[' if listed else '<tool_call>' }}{{ c.function | tojson }}"
        "{{ ']</TOOLCALL>' if listed else '</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    rows = [{"messages": [{"role": "user", "content": "How many?"}], "ground_truth": "85"}]
    for args, name in (({"listed": True}, "nemotron"), ({}, "hermes")):
        env = ToolMDPEnv(rows, tokenizer, [as_reward_function("tool_use")], 1, 1)
        env.template_args = args
        assert env.call_example == env.format.example == FORMATS[name].example
        env.close()


def test_an_answer_has_the_id_that_the_policy_wrote(play):
    begin, end = "<|tool_call_begin|>functions.calculator:{}<|tool_call_argument_begin|>", "<|tool_call_end|>"
    turns = [f'{begin.format(number)}{{"expression": "{number}"}}{end}' for number in range(2)]
    result, _, _ = play(["".join(turns), "Answer: 85"], format="kimi")
    said = [message for message in result.trajectories[0].messages if message.role == "tool"]
    ids = ["functions.calculator:0", "functions.calculator:1"]
    assert [message.tool_calls[0]["id"] for message in said] == ids


def test_calls_and_errors_of_an_episode_are_metrics(play):
    result, _, _ = play([call("calculator", expression="1") + call("oops"), "Answer: 85"], group_size=2)
    metrics = summarize(result.groups)
    assert (metrics["env/tool_calls"], metrics["env/tool_errors"]) == (2.0, 1.0)


@pytest.mark.parametrize("tools", [["calculator"], ["workspace", hang_too]])
def test_the_environment_keeps_the_contract(tokenizer, tools):
    rows = [
        {"messages": [{"role": "user", "content": f"How many are {i}?"}], "ground_truth": "85"}
        for i in range(2)
    ]
    env = ToolMDPEnv(rows, tokenizer, [as_reward_function("tool_use")], 1, 1, tools=tools, on_timeout="error")
    check_env(
        env,
        [
            call("calculator", expression="37+48"),
            call("write_file", path="a", text="b") * 2,
            call("hang_too"),
        ],
    )
    env.close()


class Notes(ToolSet):
    """Counts its episodes that are open."""

    def __init__(self, book=None):
        super().__init__()
        self.book = [] if book is None else book
        self.notes = []

    def open(self, sample):
        self.book.append("open")
        return Notes(self.book)

    def close(self):
        self.book.append("close")

    @tool
    def note(self, text: str) -> str:
        """Note something.

        Args:
            text: What to note.
        """
        self.notes.append(text)
        return ", ".join(self.notes)


def test_each_episode_has_its_own_tools_and_closes_them(play):
    notes = Notes()
    result, _, _ = play(
        [call("note", text="a"), call("note", text="b"), "Answer: 1"], tools=[notes], group_size=3
    )
    for trajectory in result.trajectories:
        assert [message.content for message in trajectory.messages if message.role == "tool"] == ["a", "a, b"]
    assert sorted(notes.book) == ["close"] * 4 + ["open"] * 3 and notes.book[-1] == "close"


def test_an_episode_that_fails_closes_its_tools_too(play):
    notes = Notes()
    play([call("note", text="a"), call("hang")], tools=[notes, hang])
    assert notes.book == [
        "open",
        "close",
        "close",
    ]  # the last with the run; played once more, it hangs without a note


class OwnLoop(ToolMDPEnv):
    """Requests no replies and ends no episode."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample in env_state.sample_states:
            sample.messages.append(llm.chat([sample.messages], sampling_params)[0])
            sample.messages += llm.run(self.respond(sample))
        return env_state


def test_tools_left_open_by_a_custom_loop_close_with_the_env(play):
    notes = Notes()
    result, _, _ = play([call("note", text="a")], tools=[notes], env_class=OwnLoop, group_size=2)
    assert [trajectory.messages[-1].content for trajectory in result.trajectories] == ["a", "a"]
    assert notes.book == ["open"] * 2 + ["close"] * 3


class Sql(ToolSet):
    """A database for each episode, which its own thread alone may use."""

    def open(self, sample):
        opened = Sql()
        opened.db = sqlite3.connect(":memory:")
        opened.threads = {threading.get_ident()}
        sample.extras["opened"] = opened
        return opened

    def close(self):
        if hasattr(self, "db"):
            self.db.close()
            self.threads.add(threading.get_ident())

    @tool
    def query(self, sql: str) -> str:
        """Run SQL.

        Args:
            sql: One SELECT.
        """
        self.threads.add(threading.get_ident())
        return str(self.db.execute(sql).fetchall())


def test_tools_of_an_episode_open_run_and_close_in_one_thread(play):
    turns = [call("query", sql="SELECT 1") * 2, call("query", sql="SELECT 2"), "Answer: 85"]
    result, _, _ = play(turns, tools=[Sql], group_size=4)
    assert not result.failed
    for trajectory in result.trajectories:
        told = [message.content for message in trajectory.messages if message.role == "tool"]
        assert told == ["[(1,)]", "[(1,)]", "[(2,)]"] and len(trajectory.extras["opened"].threads) == 1


class Sticks(Notes):
    """Cannot be closed where it holds a certain note, and opens only for some."""

    def open(self, sample):
        if sample.index == 2:
            raise ToolError("no room for more")
        return Sticks(self.book)

    def close(self):
        super().close()
        if "stick" in self.notes:
            raise OSError("it sticks")


def test_tools_that_fail_to_open_or_close_fail_only_their_sample(play):
    script = {f"0/0/{index}": [call("note", text="a"), "Answer: 1"] for index in range(3)}
    script["0/0/1"] = [call("note", text="stick"), "Answer: 1"] * 2  # for it is played again
    script["0/0/2"] = [call("note", text="a")] * 2
    client = ScriptedClient(play.tokenizer, script)
    result, _, _ = play(None, client=client, tools=[Sticks()], group_size=3)
    assert [trajectory.extras["sample"] for trajectory in result.trajectories] == [0]
    failed = {sample.index: (sample.failure_class, sample.failure) for sample in result.failed}
    line = inspect.getsourcelines(Sticks.close)[1] + 3
    said = f"ToolMDPEnv.end_episode raised OSError: it sticks (tests/envs/test_tool_env.py:{line})"
    assert failed[1] == ("env/raised", said)
    assert failed[2][0] == "tool/note" and "Sticks.open: no room for more" in failed[2][1]


def test_deep_directories_of_a_workspace_are_refused_and_removed(play, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calls = "".join(call("write_file", path="d/" * depth + "f", text="x") for depth in (300, 600, 900, 1200))
    client = ScriptedClient(
        play.tokenizer, {"": [calls, call("list_files"), "Answer: 85"]}, context_length=1 << 16
    )
    result, _, _ = play(None, client=client, tools=["workspace"])
    (trajectory,) = result.trajectories
    assert all("too deep" in message.content for message in trajectory.messages[2:6])
    assert trajectory.messages[7].content == "There are no files." and not list(tmp_path.iterdir())


def test_a_call_that_hangs_leaves_its_episode_to_be_closed_later(play):
    released = threading.Event()

    class Hangs(Notes):
        def open(self, sample):
            return Hangs(self.book)

        @tool(timeout_s=0.05)
        def wait(self) -> str:
            """Wait."""
            released.wait()

    hangs = Hangs()
    result, _, _ = play([call("wait"), "Answer: 1"], tools=[hangs], on_timeout="error")
    assert not result.failed and hangs.book == ["close"]  # the set of all, with the environment
    released.set()
    while len(hangs.book) < 2:
        threading.Event().wait(0.001)


def test_a_workspace_begins_with_the_files_of_its_row(play):
    turns = [call("write_file", path="b.txt", text="85"), call("search_files", text="8"), "Answer: 85"]
    result, _, _ = play(turns, tools=["workspace"], columns={"files": {"a.txt": "48"}}, group_size=2)
    for trajectory in result.trajectories:
        assert trajectory.messages[4].content == "a.txt:1: 48\nb.txt:1: 85"


def test_tools_are_shown_to_the_policy_by_the_chat_template(play, tokenizer):
    _, client, env = play(["Answer: 85"], tools=["calculator", Workspace], describe_tools=True)
    assert '"search_files"' in tokenizer.decode(client.calls[0].prompt_ids)
    assert [schema["function"]["name"] for schema in env.tool_schemas] == list(env.tools)


def test_options_that_cannot_work_are_refused(play):
    with pytest.raises(ConfigError):
        play([], on_timeout="retry")
    with pytest.raises(ConfigError):
        play([], on_error="mask")
    with pytest.raises(ConfigError):
        play([], tools=["calculator", "calculator"])
    for option in ("max_calls", "budget", "tool_timeout_s", "max_reply_chars"):
        with pytest.raises(ConfigError):
            play([], **{option: 0})
