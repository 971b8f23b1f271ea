import asyncio
import copy
import inspect
import itertools
import json
import random
from typing import Literal

import pytest

from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import EngineError, EnvError
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, TokenSpan
from rl4llm.core.weights import WeightRef
from rl4llm.envs import ENVIRONMENTS, ToolMDPEnv
from rl4llm.envs.tools import ToolError, ToolSet, tool
from rl4llm.envs.tools.trial import example
from rl4llm.inference.local import LocalClient
from rl4llm.testing import ScriptedClient, check_client, check_env

PROMPTS = [[5, 9, 40, 33, 7], [8, 100, 21]]


def altered(completion, **changes):
    parts = {name: getattr(completion, name) for name in Completion.__slots__}
    return Completion(**{**parts, **changes})


class SharesOneStream(LocalClient):
    async def generate(self, prompt_ids, sampling_params, *, session=""):
        return await super().generate(prompt_ids, sampling_params.replace(seed=0), session=session)


class ReportsUnscaledScores(LocalClient):
    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        return altered(completion, logprobs=tuple(logprob * 1.01 for logprob in completion.logprobs))


class DropsTheStopToken(LocalClient):
    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        end = -1 if completion.finish_reason == "stop" else None
        return altered(completion, token_ids=completion.token_ids[:end], logprobs=completion.logprobs[:end])


class ForgetsTheVersion(LocalClient):
    async def version(self):
        return 7


class TakesAnything(LocalClient):
    async def generate(self, prompt_ids, sampling_params, *, session=""):
        room = self.context_length - 20
        ids = [token % self.vocab_size for token in prompt_ids[:room]] or [0]
        return await super().generate(ids, sampling_params, session=session)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (SharesOneStream, "different seeds give different tokens"),
        (ReportsUnscaledScores, "log-probs equal score"),
        (DropsTheStopToken, "a stop token ends the completion and is kept"),
        (ForgetsTheVersion, "version of the weights"),
        (TakesAnything, "an empty prompt raises EngineError"),
    ],
)
def test_check_client_names_the_law_that_a_client_breaks(model, tokenizer, broken, law):
    client = broken(copy.deepcopy(model), tokenizer)
    asyncio.run(client.load(WeightRef(0)))
    with pytest.raises(EngineError, match=law):
        check_client(client, PROMPTS)


def say(client, session="", **params):
    return asyncio.run(client.generate(PROMPTS[0], SamplingParams(**params), session=session))


def test_a_scripted_client_replies_in_order_and_repeats_the_last(tokenizer):
    client = ScriptedClient(tokenizer, {"": ["Answer: 4"], "a": ["one", "two"]})
    assert [say(client, "a").text for _ in range(3)] == ["one", "two", "two"]
    assert say(client, "b").text == "Answer: 4"
    assert [call.session for call in client.calls] == ["a", "a", "a", "b"]


def test_a_scripted_reply_has_an_end_token_unless_truncated(tokenizer):
    client = ScriptedClient(tokenizer, lambda session, prompt_ids: f"{len(prompt_ids)} tokens")
    whole = say(client)
    assert (whole.text, whole.token_ids[-1], whole.finish_reason) == (
        "5 tokens",
        tokenizer.eos_token_id,
        "stop",
    )
    cut = say(client, max_tokens=2)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:2], "length")


def test_a_scripted_client_without_a_reply_raises(tokenizer):
    with pytest.raises(EngineError):
        say(ScriptedClient(tokenizer, {"a": ["one"]}), "b")


def test_a_scripted_client_refuses_what_an_engine_refuses(tokenizer):
    client = ScriptedClient(tokenizer, {"": ["one"]}, context_length=8)
    for prompt in ([], [len(tokenizer)], [1] * 8):
        with pytest.raises(EngineError):
            asyncio.run(client.generate(prompt, SamplingParams()))


class Always(BaseRewardFunction):
    def __call__(self, messages, ground_truth, **kwargs):
        return 1.0


ROWS = [
    {"prompt_id": f"p{i}", "messages": [{"role": "user", "content": f"Guess {i}."}], "ground_truth": str(i)}
    for i in range(3)
]


def environment(env_class, tokenizer, rows=ROWS, **options):
    return env_class(rows, tokenizer, [Always("always")], batch_size=1, group_size=1, **options)


NEED_MORE = {
    "agent",
    "code",
    "gymnasium",
    "openenv",
    "stepped",
    "textarena",
    "verifiers",
}  # than rows: a program, a task; they have tests of their own


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - NEED_MORE))
def test_every_bundled_environment_keeps_the_contract(tokenizer, name):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'
    check_env(environment(ENVIRONMENTS[name], tokenizer), ["85", call])


class Hints(BaseMDPEnv):
    """Three guesses, with a hint after each that depends on the prompt, the sample and the turn alone."""

    def respond(self, sample):
        if sample.last_message.content == sample.ground_truth:
            return []
        chance = random.Random(f"{self.seed} {sample.prompt_id} {sample.index} {sample.current_step}")
        return [ChatMessage("user", f"No, try {chance.randint(0, 99)}")]


class HintsAsync(Hints):
    async def respond(self, sample):
        return Hints.respond(self, sample)


class OwnLoop(Hints):
    """A custom loop over all samples that does what an author should."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for turn in range(self.max_steps):
            for sample, reply in self.ask(env_state, llm, sampling_params):
                sample.messages.append(reply)
                sample.current_step += 1
                self.go_on(sample, last=turn + 1 == self.max_steps)
        return env_state

    def ask(self, env_state, llm, sampling_params):
        open_ones = [sample for sample in env_state.sample_states if not sample.done]
        replies = llm.chat(open_ones, sampling_params) if open_ones else []
        return [pair for pair in zip(open_ones, replies, strict=True) if not pair[0].done]

    def go_on(self, sample, last):
        try:
            replies = self.respond(sample)
        except RuntimeError as error:
            sample.fail(str(error))
            return
        if last or not replies:
            sample.finish("max_steps" if replies else "done")
        else:
            sample.messages.extend(replies)


@pytest.mark.parametrize("env_class", [Hints, HintsAsync, OwnLoop])
def test_check_env_passes_environments_that_keep_the_contract(tokenizer, env_class):
    check_env(environment(env_class, tokenizer, max_steps=3), ["1", "2"])


class ReadsJson(Hints):
    def respond(self, sample):
        return [ChatMessage("user", str(json.loads(sample.last_message.content)))]


class ReturnsNothing(Hints):
    def respond(self, sample):
        return None


class BeginsOtherwise(OwnLoop):
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample in env_state.sample_states:
            sample.messages.append(ChatMessage("user", f"You are player {sample.index}."))
        return super()._run_interaction_loop(env_state, llm, sampling_params, **kwargs)


class RewritesItsPrompt(OwnLoop):
    def go_on(self, sample, last):
        sample.messages[0] = ChatMessage("user", "Something else.")
        super().go_on(sample, last)


class SpeaksForThePolicy(OwnLoop):
    def go_on(self, sample, last):
        super().go_on(sample, last)
        if sample.done:
            sample.messages.append(ChatMessage("assistant", "I am done."))


class SpeaksAsATool(Hints):
    def respond(self, sample):
        return [ChatMessage("tool", "No.")]


class AsksOnceMore(OwnLoop):
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        self.max_steps += 1
        try:
            return super()._run_interaction_loop(env_state, llm, sampling_params, **kwargs)
        finally:
            self.max_steps -= 1


class AsksUntilItIsRight(OwnLoop):
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        while any(sample.messages[-1].content != sample.ground_truth for sample in env_state.sample_states):
            for sample, reply in self.ask(env_state, llm, sampling_params):
                sample.messages += [reply, ChatMessage("user", "No.")]
        return env_state


class CountsOnText(OwnLoop):
    """Never looks whether the engine gave a turn at all."""

    def ask(self, env_state, llm, sampling_params):
        samples = [sample for sample in env_state.sample_states if not sample.done]
        outputs = llm.generate(samples, sampling_params)
        assert all(output.token_ids for output in outputs)
        return [
            (sample, ChatMessage("assistant", output.text))
            for sample, output in zip(samples, outputs, strict=True)
        ]


class ClaimsItsOwnWords(Hints):
    def respond(self, sample):
        tokens = tuple(self.tokenizer.encode("Well done.", add_special_tokens=False))
        sample.spans.append(TokenSpan(tokens, "policy", (-0.5,) * len(tokens), 0))
        return super().respond(sample)


class SharesItsChance(Hints):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.chance = random.Random(0)

    def respond(self, sample):
        return [ChatMessage("user", f"No, try {self.chance.randint(0, 10**9)}")]


class CountsEpisodes(Hints):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.played = itertools.count()

    def respond(self, sample):
        sample.reward_turn(float(next(self.played)))
        return super().respond(sample)


class LetsOneStopAll(OwnLoop):
    def go_on(self, sample, last):
        replies = self.respond(sample)
        sample.messages.extend(replies if not last else [])
        sample.done = last or not replies


class ScoresWhatBroke(OwnLoop):
    def go_on(self, sample, last):
        try:
            super().respond(sample)
            self.respond(sample)
        except RuntimeError:
            sample.finish("done")
        sample.messages.extend([] if last else [ChatMessage("user", "No.")])


class StopsWhenOneIsMissing(OwnLoop):
    def ask(self, env_state, llm, sampling_params):
        pairs = super().ask(env_state, llm, sampling_params)
        if any(sample.failure_class.startswith("engine") for sample in env_state.sample_states):
            raise EnvError("a player is missing")
        return pairs


class Counted(ToolSet):
    """Counts the calls that its episodes make."""

    def __init__(self, book=None):
        super().__init__()
        self.book = [] if book is None else book

    def open(self, sample):
        return Counted(self.book)

    def close(self):
        self.book.append("close")

    @tool
    def count(self, by: int, kind: Literal["up", "down"], words: list[str], nothing: str = "") -> str:
        """Count.

        Args:
            by: How far.
            kind: Where to.
            words: What to say.
            nothing: Left out.
        """
        self.book.append((by, kind, words, nothing))
        if len(self.book) % 2:
            raise ToolError("no")
        return "one"


def test_check_env_calls_each_tool_once_in_a_separate_episode(tokenizer):
    counted = Counted()
    check_env(environment(ToolMDPEnv, tokenizer, tools=[counted]), rows=[0])
    assert counted.book == [(1, "up", ["example"], ""), "close"]


def test_check_env_says_which_tools_raise_and_on_which_line(tokenizer):
    @tool
    def misspelled(text: str) -> str:
        """Give it back.

        Args:
            text: Anything.
        """
        return txet  # noqa: F821

    line = inspect.getsourcelines(misspelled)[1] + 7
    said = f"arguments made from its schema.*with {{'text': 'example'}}: the tool misspelled raised NameError.*:{line}"
    with pytest.raises(EnvError, match=said):
        check_env(environment(ToolMDPEnv, tokenizer, tools=["calculator", misspelled]), rows=[0])
    check_env(environment(ToolMDPEnv, tokenizer, tools=[misspelled], on_error="answer"), rows=[0])


def test_an_example_fits_its_schema():
    definitions = {
        "$defs": {"Point": {"type": "object", "required": ["x"], "properties": {"x": {"type": "number"}}}}
    }
    cases = {
        "example": {"type": "string"},
        3: {"type": "integer", "minimum": 3},
        "b": {"enum": ["b", "c"]},
        "later": {"type": "string", "default": "later"},
        1: {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    for value, schema in cases.items():
        assert example(schema) == value
    points = {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 2}
    assert example(points, definitions) == [{"x": 1.0}, {"x": 1.0}]
    assert example(
        {"type": "array", "prefixItems": [{"type": ["integer", "string"]}, {"type": "boolean"}]}
    ) == [1, True]


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (
            ReadsJson,
            r"whatever the policy says, no episode raises or fails. Seen: prompt 'p0', sample 0, .*JSONDecodeError",
        ),
        (ReturnsNothing, "no episode raises or fails.*must return a list of ChatMessage"),
        (BeginsOtherwise, r"a group shares its prompt.*prompts \['p0', 'p1'\] had several beginnings"),
        (RewritesItsPrompt, "leaves the messages of its prompt as they are. Seen: 'p0', sample 0"),
        (SpeaksForThePolicy, r"roles alternate.*'assistant', 'assistant'"),
        (SpeaksAsATool, r"speaks in its reply_roles, \('user',\)"),
        (AsksOnceMore, "at most max_steps turns.*asks for turn 4, and max_steps is 3"),
        (AsksUntilItIsRight, "at most max_steps turns"),
        (CountsOnText, "an episode that fills the context ends there and counts.*AssertionError"),
        (
            ClaimsItsOwnWords,
            "only what the policy said at that very point is marked as its own.*Seen:.*Well done",
        ),
        (SharesItsChance, "the same seed gives the same episode.*No, try"),
        (CountsEpisodes, "the same seed gives the same episode"),
        (LetsOneStopAll, "a step that raises fails its own episode.*check_env makes this step raise"),
        (ScoresWhatBroke, "a step that raises fails its own episode, which is left out"),
        (StopsWhenOneIsMissing, "a reply that never comes fails its own episode.*a player is missing"),
    ],
)
def test_check_env_names_the_law_that_an_environment_breaks(tokenizer, wrong, law):
    with pytest.raises(EnvError, match=f"check_env: {wrong.__name__} breaks this law: .*{law}"):
        check_env(environment(wrong, tokenizer, max_steps=3), ["1", "2"])
