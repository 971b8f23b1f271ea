"""Episodes with tools: which calls are run, what the policy is told of the others, and whose fault a failure is."""

import asyncio
import copy
import dataclasses
import json
import threading

import pytest

from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.types import SamplingParams, WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.sgl_tool_env import SglToolMDPEnv
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools import ToolSet, Workspace, tool
from rl4llm.rewards import as_reward_function
from rl4llm.testing import ScriptedClient, check_env
from rl4llm.tracking.summary import summarize


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def play(tokenizer):
    """Plays one prompt's episodes; the policy says `turns` in this order. Returns the result, client and environment."""
    runner = asyncio.Runner()

    def run(turns, *, client=None, tokenizer=tokenizer, group_size=1, columns=None, env_class=ToolMDPEnv, **options):
        client = client or ScriptedClient(tokenizer, {"": turns} if isinstance(turns, list) else turns)
        runner.run(client.load(WeightRef(0)))
        rows = [{"messages": [{"role": "user", "content": "How many?"}], "ground_truth": "85", **(columns or {})}]
        options = {"describe_tools": False, "max_steps": 8, **options}
        env = env_class(rows, tokenizer, [as_reward_function("tool_use")], 1, group_size, **options)
        renderer = Renderer(tokenizer, env.tool_schemas, roles=env.reply_roles)
        rollout = Rollout(env, client, renderer, runner, seed=0, max_failed_share=1.0)
        result = rollout.play([0], step=0, sampling_params=SamplingParams(max_tokens=2000))
        env.close()
        return result, client, env

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
    result, _, _ = play([call("calculator", expression="37+48"), call("calculator", expression="2*85"), "Answer: 170"])
    (trajectory,) = result.trajectories
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["85", "170"]
    assert trajectory.stop_reason == "done" and trajectory.extras["metrics"] == {"tool_calls": 2, "tool_errors": 0}
    assert [span.author for span in trajectory.spans] == ["context", "policy"] * 3
    assert trajectory.rewards["tool_use"] == 1.0


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
        ("x" * 10_000_000, "x" * 2000),
        ("half \ud800.", "half ?."),
        ("", ""),
        (KeyError("b"), "Error: KeyError: 'b'"),
        (SystemExit(1), "Error: SystemExit: 1"),
        (TimeoutError("the shop is closed"), "Error: TimeoutError: the shop is closed"),
        (ValueError("x" * 10_000_000), "Error: ValueError: " + "x" * 1981),
        (10**5000, "Error: ValueError: Exceeds the limit (4300 digits)"),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else "number",
)
def test_whatever_a_tool_returns_or_raises_becomes_a_short_text_that_a_tokenizer_takes(answers, value, shown):
    (answer,) = answers(call("give"), tools=[returns(value)])
    assert answer == shown or (isinstance(value, int) and answer.startswith(shown))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('<tool_call>{"name": "calculator", "arguments": </tool_call>', "Error: the call cannot be read: Expecting value"),
        ('<tool_call>{"name": "calculator"}', "Error: the call is not closed by </tool_call>"),
        (call("calcalutor", expression="1"), "Error: no tool 'calcalutor'; tools: calculator"),
        (call("calculator", text="1"), "Error: calculator: no argument 'text'; arguments: expression"),
        (call("calculator", expression=85), "Error: calculator: the argument 'expression' must be of type string, not 85"),
        (call("calculator", expression="1/0"), "Error: ValueError: division by zero"),
        (call("\ud800"), r"Error: no tool '\ud800'; tools: calculator"),
        (call("calculator", expression="\ud800"), "Error: ValueError: cannot read"),
        (call("calculator", expression="9" * 1500), "Error: ValueError: the expression is longer than 200 characters"),
    ],
)
def test_what_the_model_got_wrong_is_answered_with_a_short_error(answers, said, told):
    (answer,) = answers(said)
    assert answer.startswith(told) and len(answer) < 250


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


def test_calls_to_what_belongs_to_the_episode_are_made_in_the_order_in_which_they_were_written(answers):
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
def test_a_tool_that_hangs_fails_the_sample_at_its_deadline_or_is_told_of_as_one_chooses(play, answers, function):
    result, _, _ = play([call(function.__name__)], tools=[function])
    assert [sample.failure for sample in result.failed] == [f"the tool {function.__name__} took more than 0.05 s"]
    assert result.failed[0].failure_class == "env/timeout"
    told = answers(call(function.__name__), tools=[function], on_timeout="error")
    assert told == [f"Error: {function.__name__} took more than 0.05 s"]


def test_the_environments_own_deadline_is_behind_those_of_its_tools(play):
    @tool(timeout_s=500)
    def slow() -> str:
        """Take long."""

    _, _, env = play(["Answer: 85"], tools=[slow])
    assert env.respond_timeout_s > 500


def test_a_tool_that_says_it_is_not_the_models_fault_fails_the_sample(play):
    result, _, _ = play([call("give")], tools=[returns(EnvError("the shop is closed"))])
    assert [sample.failure for sample in result.failed] == ["ToolMDPEnv.respond raised EnvError: the shop is closed"]


class StopsAtTokens(ScriptedClient):
    """Stops at stop tokens, as engines do."""

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        ends = [i for i, token in enumerate(completion.token_ids) if token in sampling_params.stop_token_ids]
        kept = completion.token_ids[: ends[0] + 1]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return dataclasses.replace(completion, token_ids=kept, logprobs=completion.logprobs[: len(kept)], text=text)


def test_with_one_call_a_turn_generation_stops_behind_it_and_the_turn_is_closed_as_context(play, tokenizer):
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


def test_calls_are_read_from_special_tokens_that_the_text_of_a_message_leaves_out(play, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    turns = ['[TOOL_CALLS]calculator[ARGS]{"expression": "37+48"}', "Answer: 85"]
    result, _, _ = play(None, client=ScriptedClient(tokenizer, {"": turns}), tokenizer=tokenizer, format="mistral")
    said = [message.content for message in result.trajectories[0].messages[1:]]
    assert said == ['calculator{"expression": "37+48"}', "85", "Answer: 85"]


def test_calls_and_errors_of_an_episode_are_metrics(play):
    result, _, _ = play([call("calculator", expression="1") + call("oops"), "Answer: 85"], group_size=2)
    metrics = summarize(result.groups)
    assert (metrics["env/tool_calls"], metrics["env/tool_errors"]) == (2.0, 1.0)


@pytest.mark.parametrize("tools", [["calculator"], ["workspace", hang_too]])
def test_the_environment_keeps_the_contract(tokenizer, tools):
    rows = [{"messages": [{"role": "user", "content": f"How many are {i}?"}], "ground_truth": "85"} for i in range(2)]
    env = ToolMDPEnv(rows, tokenizer, [as_reward_function("tool_use")], 1, 1, tools=tools, on_timeout="error")
    check_env(env, [call("calculator", expression="37+48"), call("write_file", path="a", text="b") * 2, call("hang_too")])
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


def test_each_episode_has_tools_of_its_own_which_are_closed_with_it(play):
    notes = Notes()
    result, _, _ = play([call("note", text="a"), call("note", text="b"), "Answer: 1"], tools=[notes], group_size=3)
    for trajectory in result.trajectories:
        assert [message.content for message in trajectory.messages if message.role == "tool"] == ["a", "a, b"]
    assert sorted(notes.book) == ["close"] * 4 + ["open"] * 3 and notes.book[-1] == "close"


def test_an_episode_that_fails_closes_its_tools_too(play):
    notes = Notes()
    play([call("note", text="a"), call("hang")], tools=[notes, hang])
    assert notes.book == ["open", "close", "close"]  # the last with the run; played once more, it hangs without a note


class OwnLoop(ToolMDPEnv):
    """Asks for no replies of its own accord, and ends no episode."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample in env_state.sample_states:
            sample.messages.append(llm.chat([sample.messages], sampling_params)[0])
            sample.messages += llm.run(self.respond(sample))
        return env_state


def test_what_a_loop_of_ones_own_leaves_open_is_closed_with_the_environment(play):
    notes = Notes()
    result, _, _ = play([call("note", text="a")], tools=[notes], env_class=OwnLoop, group_size=2)
    assert [trajectory.messages[-1].content for trajectory in result.trajectories] == ["a", "a"]
    assert notes.book == ["open"] * 2 + ["close"] * 3


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
    with pytest.raises(ConfigError, match="on_timeout='retry' is not accepted: mask or error"):
        play([], on_timeout="retry")
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        play([], tools=["calculator", "calculator"])
    for option in ("max_calls", "budget", "tool_timeout_s", "max_reply_chars"):
        with pytest.raises(ConfigError, match=f"env.{option}=0 is not accepted"):
            play([], **{option: 0})
