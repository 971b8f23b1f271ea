"""From prompts to trajectories: who wrote which token, who waits for whom, and what becomes of failures."""

import asyncio
import dataclasses
import inspect
import itertools
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forked_python import python

from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.core.errors import ConfigError, EnvError, UnreachableError
from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout, play_together
from rl4llm.envs.stored import dump, take_over
from rl4llm.inference.local import LocalClient
from rl4llm.rewards import RewardFailure
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient

PARAMS = SamplingParams(max_tokens=6, temperature=1.0)


class Length(BaseRewardFunction):
    """The number of letters the policy said last."""

    def __init__(self, name="length", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return float(len(messages[-1].content))


class ThreeTurns(BaseMDPEnv):
    """Answers every turn with a tool message; plays on when a turn was cut short."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage("tool", f"result {sample.current_step}")]


@pytest.mark.parametrize("reward", [lambda completions: [1.0], Length, "math", None])
def test_environment_refuses_what_is_not_a_reward(reward):
    with pytest.raises(ConfigError):
        BaseMDPEnv(dataset(), None, [Length(), reward])
    assert [one.name for one in BaseMDPEnv(dataset(), None, iter([Length()])).reward_functions] == ["length"]


def dataset(size=2):
    return [
        {
            "prompt_id": f"p{i}",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"How many are {i}?"},
            ],
            "ground_truth": i,
        }
        for i in range(size)
    ]


@pytest.fixture
def play(model, tokenizer):
    """Plays a rollout of an environment class against the embedded engine."""
    runner = Runner()
    client = LocalClient(model, tokenizer)
    runner.run(client.load(WeightRef(0)))
    envs = []

    def run(
        env_class,
        *,
        rows=(0, 1),
        group_size=3,
        max_steps=3,
        params=PARAMS,
        rewards=None,
        how=None,
        transform=None,
        **options,
    ):
        sizes = {"batch_size": 2, "group_size": group_size, "max_steps": max_steps}
        env = env_class(dataset(), tokenizer, rewards or [Length()], reward_transform_fn=transform, **sizes)
        envs.append(env)
        rollout = Rollout(env, client, Renderer(tokenizer, roles=("user", "tool")), runner, seed=1, **options)
        return rollout.play(rows, step=0, sampling_params=params, **(how or {}))

    yield run
    for env in envs:
        env.close()
    runner.run(client.close())
    runner.close()


@pytest.fixture
def play_scripted(tokenizer):
    """Plays a rollout against an engine without a model, with an environment made for one prompt and one attempt."""
    runner = Runner()

    def run(env_class, client, *, prompts=2, group_size=3, max_steps=2, rewards=None, max_failed_share=1.0):
        runner.run(client.load(WeightRef(0)))
        rewards = [Length()] if rewards is None else rewards
        env = env_class(dataset(prompts), tokenizer, rewards, 1, 1, max_steps=max_steps)
        rollout = Rollout(
            env,
            client,
            Renderer(tokenizer, roles=("user", "tool")),
            runner,
            seed=1,
            max_failed_share=max_failed_share,
        )
        return rollout.play(range(prompts), step=0, sampling_params=SamplingParams(), group_size=group_size)

    yield run
    runner.close()


def alternating(trajectory):
    return [span.author for span in trajectory.spans]


def test_trajectory_alternates_context_and_the_sampled_tokens(play, tokenizer):
    result = play(ThreeTurns)
    assert len(result.groups) == 2
    for trajectory in result.trajectories:
        assert alternating(trajectory) == ["context", "policy"] * 3
        said = [message for message in trajectory.messages if message.role == "assistant"]
        for span, message in zip(trajectory.policy_spans, said, strict=True):
            assert tokenizer.decode(span.token_ids, skip_special_tokens=True) == message.content
            assert len(span.logprobs) == len(span.token_ids)
            assert span.version == 0


def test_a_group_shares_its_prompt_and_nothing_else(play):
    for group in play(ThreeTurns).groups:
        assert len({trajectory.spans[0] for trajectory in group.trajectories}) == 1
        assert len({trajectory.spans[1] for trajectory in group.trajectories}) > 1


def test_trajectory_logprobs_equal_the_models_on_its_tokens(play, model):
    for trajectory in play(ThreeTurns).trajectories:
        token_ids = torch.tensor([trajectory.token_ids])
        with torch.no_grad():
            logprobs = model(token_ids).logits[0].log_softmax(-1)
        at = 0
        for span in trajectory.spans:
            for i, token in enumerate(span.token_ids):
                if span.author == "policy":
                    assert logprobs[at - 1, token].item() == pytest.approx(span.logprobs[i], abs=1e-5)
                at += 1


class AppendsOnly(ThreeTurns):
    """Level 3: a synchronous loop that knows nothing of tokens and even trims the text."""

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for turn in range(self.max_steps):
            outputs = llm.generate([sample.messages for sample in env_state.sample_states], sampling_params)
            for sample, output in zip(env_state.sample_states, outputs, strict=True):
                sample.messages.append(ChatMessage("assistant", output.text.strip()))
                sample.current_step += 1
                if turn + 1 < self.max_steps:
                    sample.messages.extend(self.respond(sample))
                else:
                    sample.done = True
        return env_state


def test_loop_that_appends_messages_gives_the_default_tokens(play):
    default, own = play(ThreeTurns), play(AppendsOnly)
    for expected, found in zip(default.trajectories, own.trajectories, strict=True):
        assert alternating(found) == alternating(expected)
        assert found.token_ids == expected.token_ids


class PassesStrings(ThreeTurns):
    """A loop as michaelnny/rl4llm has it, but with the template's text as prompts."""

    as_text = True

    def prompts_of(self, env_state):
        if not self.as_text:
            return self._convert_to_batch_prompts(env_state)
        rendered = (
            [{"role": m.role, "content": m.content} for m in s.messages] for s in env_state.sample_states
        )
        return [
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in rendered
        ]

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        outputs = llm.generate(prompts=self.prompts_of(env_state), sampling_params=sampling_params)
        for i, sample in enumerate(env_state.sample_states):
            sample.messages.append(ChatMessage(role="assistant", content=outputs[i].get("text", "").strip()))
            sample.done = True
        return env_state


@pytest.mark.parametrize("as_text", [True, False])
def test_prompts_of_strings_keep_the_sampled_tokens(play, as_text):
    one_turn = play(type("OneTurn", (ThreeTurns,), {"respond": lambda self, sample: []}))
    own = play(type("Strings", (PassesStrings,), {"as_text": as_text}))
    assert [alternating(found) for found in own.trajectories] == [
        alternating(it) for it in one_turn.trajectories
    ]


class PutsWordsIntoItsMouth(AppendsOnly):
    """Says something in the policy's place after its first turn."""

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample in env_state.sample_states:
            sample.messages.append(ChatMessage("assistant", "Answer: 7, as I said"))
            sample.messages.append(ChatMessage("user", "Go on."))
        for sample, reply in zip(
            env_state.sample_states,
            llm.chat([s.messages for s in env_state.sample_states], sampling_params),
            strict=True,
        ):
            sample.messages.append(reply)
            sample.done = True
        return env_state


def test_text_that_the_model_did_not_write_is_context(play, tokenizer):
    for trajectory in play(PutsWordsIntoItsMouth).trajectories:
        assert alternating(trajectory) == ["context", "context", "context", "policy"]
        assert tokenizer.decode(trajectory.spans[1].token_ids) == "Answer: 7, as I said"


class WaitsForTheOthers(ThreeTurns):
    """The first sample's tool returns only when every other sample has finished all its turns."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.others_done = threading.Semaphore(0)

    def respond(self, sample):
        first = sample.prompt_id == "p0" and sample.index == 0
        if first and sample.current_step == 1:
            for _ in range(5):
                assert self.others_done.acquire(timeout=60)
        if not first and sample.current_step == self.max_steps:
            self.others_done.release()
        return super().respond(sample)


def test_a_slow_tool_holds_up_nobody(play):
    result = play(WaitsForTheOthers)
    assert not result.failed
    assert len(result.trajectories) == 6


class AsyncTurns(ThreeTurns):
    async def respond(self, sample):
        await asyncio.sleep(0)
        return ThreeTurns.respond(self, sample)


def test_respond_may_be_async(play):
    in_turn, in_threads = play(AsyncTurns), play(ThreeTurns)
    assert [t.token_ids for t in in_turn.trajectories] == [t.token_ids for t in in_threads.trajectories]


def test_an_episode_that_never_ends_is_cut_at_its_turn_limit(play):
    for trajectory in play(ThreeTurns, max_steps=2).trajectories:
        assert trajectory.stop_reason == "max_steps"
        assert len(trajectory.policy_spans) == 2


class Stumbles(ThreeTurns):
    """Raises the first time that a certain sample responds."""

    stumbled = False

    def respond(self, sample):
        if (sample.prompt_id, sample.index) == ("p1", 2) and not self.stumbled:
            self.stumbled = True
            raise OSError("the disk hiccuped")
        return super().respond(sample)


def test_sample_is_replayed_from_its_seed_after_an_env_error(play):
    stumbled, smooth = play(Stumbles), play(ThreeTurns)
    assert not stumbled.failed
    again = [
        t.extras["played_again_after"] for t in stumbled.trajectories if "played_again_after" in t.extras
    ]
    assert again and set(again) == {"env/raised"}
    assert [t.token_ids for t in stumbled.trajectories] == [t.token_ids for t in smooth.trajectories]


class Broken(ThreeTurns):
    def respond(self, sample):
        if (sample.prompt_id, sample.index) == ("p0", 1):
            raise ValueError("no such tool")
        return super().respond(sample)


def test_a_failed_sample_is_left_out_and_never_scored(play):
    result = play(Broken, max_failed_share=0.5)
    assert [(sample.prompt_id, sample.index) for sample in result.failed] == [("p0", 1)]
    assert "respond raised ValueError: no such tool" in result.failed[0].failure
    assert [len(group.trajectories) for group in result.groups] == [2, 3]


def test_too_many_failures_stop_the_run(play):
    with pytest.raises(EnvError) as error:
        play(Broken, max_failed_share=0.1)
    assert [sample.failure_class for sample in error.value.failed] == ["env/raised"]


class Worth(BaseRewardFunction):
    """Gives turn k of the policy k + 1."""

    per_turn = True

    def __call__(self, messages, ground_truth, **kwargs):
        said = [message for message in messages if message.role == "assistant"]
        return [turn + 1.0 for turn in range(len(said))]


def test_turn_rewards_reach_the_turns_and_add_to_the_reward(play):
    for trajectory in play(ThreeTurns, rewards=[Worth("worth"), Length()]).trajectories:
        assert trajectory.turn_rewards == (1.0, 2.0, 3.0) and trajectory.rewards["worth"] == 6.0
        assert trajectory.reward == trajectory.rewards["length"] + 6.0


class PutsWordsInItsMouth(ThreeTurns):
    """A loop that ends with an assistant message which the policy did not write."""

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        super()._run_interaction_loop(env_state, llm, sampling_params, **kwargs)
        for sample in env_state.sample_states:
            sample.messages += [ChatMessage("user", "And?"), ChatMessage("assistant", "Nothing.")]
        return env_state


def test_rewards_for_turns_not_sampled_fail_the_sample(play):
    result = play(PutsWordsInItsMouth, rewards=[Worth("worth")], max_failed_share=1.0)
    assert {sample.failure_class for sample in result.failed} == {"env/contract"} and len(result.failed) == 6


class Capricious(Length):
    """Breaks in another way, and with another text, for each sample."""

    def score_batch(self, samples):
        return [self(sample) for sample in samples]

    def __call__(self, sample):
        missing = RewardFailure(f"no worker for {id(sample)}")
        return [missing, float("nan"), None, missing, 1.0, 1.0][
            sample.index + 3 * int(sample.prompt_id == "p1")
        ]


def test_reward_failures_have_their_class(play):
    with pytest.raises(EnvError) as error:
        play(ThreeTurns, rewards=[Capricious()], max_failed_share=0.5)
    classes = sorted(sample.failure_class for sample in error.value.failed)
    assert classes == ["length/invalid"] * 2 + ["length/unavailable"] * 2


@pytest.mark.parametrize("answer", [None, "text", ["text"], [ChatMessage("assistant", "me")]])
def test_what_respond_returns_is_checked(play, answer):
    class Wrong(ThreeTurns):
        def respond(self, sample):
            return answer

    with pytest.raises(EnvError):
        play(Wrong)


def test_a_hanging_environment_fails_its_sample_at_the_deadline(play):
    class Hangs(AsyncTurns):
        respond_timeout_s = 0.05

        async def respond(self, sample):
            if (sample.prompt_id, sample.index) == ("p0", 0):
                await asyncio.Event().wait()
            return await super().respond(sample)

    result = play(Hangs, max_failed_share=0.5)
    assert [sample.failure for sample in result.failed] == ["Hangs.respond took more than 0.05 s"]


def test_a_loop_of_ones_own_that_raises_is_named(play):
    class Raises(ThreeTurns):
        def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
            raise KeyError("board")

    with pytest.raises(EnvError):
        play(Raises)


def test_prompt_drawn_twice_becomes_two_groups_with_new_samples(play):
    result = play(ThreeTurns, rows=(0, 0), group_size=2)
    assert [len(group.trajectories) for group in result.groups] == [2, 2]
    assert len({t.spans[1] for t in result.trajectories}) > 2
    assert [trajectory.extras["sample"] for trajectory in result.trajectories] == [0, 1, 2, 3]


@pytest.mark.parametrize("baseline", [False, True])
def test_a_row_on_two_ranks_is_sampled_as_twice_on_one(play, baseline):
    both = play(ThreeTurns, rows=(0, 0), group_size=2, how={"greedy_baseline": baseline})
    first = play(ThreeTurns, rows=(0,), group_size=2, how={"greedy_baseline": baseline})
    second = play(ThreeTurns, rows=(0,), group_size=2, how={"greedy_baseline": baseline, "earlier": {0: 1}})
    apart = [*first.trajectories, *second.trajectories]
    assert [t.extras["sample"] for t in apart] == [t.extras["sample"] for t in both.trajectories]
    assert [t.token_ids for t in apart] == [t.token_ids for t in both.trajectories]
    assert len({t.spans[1] for t in second.trajectories} - {t.spans[1] for t in first.trajectories}) == 2


def test_results_do_not_depend_on_the_order_of_prompts(play):
    forward, backward = play(ThreeTurns, rows=(0, 1)), play(ThreeTurns, rows=(1, 0))
    by_id = {group.prompt_id: [t.token_ids for t in group.trajectories] for group in forward.groups}
    assert by_id == {group.prompt_id: [t.token_ids for t in group.trajectories] for group in backward.groups}


def test_an_episode_that_fills_the_context_ends_there(model, tokenizer):
    runner = Runner()
    client = LocalClient(model, tokenizer, context_length=48)
    runner.run(client.load(WeightRef(0)))
    env = ThreeTurns(dataset(), tokenizer, [Length()], batch_size=1, group_size=2, max_steps=50)
    rollout = Rollout(env, client, Renderer(tokenizer, roles=("user", "tool")), runner, seed=1)
    result = rollout.play([0], step=0, sampling_params=PARAMS)
    assert {trajectory.stop_reason for trajectory in result.trajectories} == {"context"}
    assert all(trajectory.num_tokens <= 48 for trajectory in result.trajectories)
    env.close()
    runner.close()


class SaysItOtherwise(ScriptedClient):
    """Says a word in as many tokens as the tokenizer would take for it, but in other ones."""

    def __init__(self, tokenizer):
        self.sampled, word = other_tokens(tokenizer)
        super().__init__(tokenizer, {"": [word]})

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        return dataclasses.replace(completion, token_ids=(*self.sampled, completion.token_ids[-1]))


def other_tokens(tokenizer):
    """Two tokens whose text the tokenizer splits into two others, and that text."""
    pieces = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids}
    letters = [i for i, piece in pieces.items() if piece.isascii() and piece.isalpha()]
    for pair in itertools.product(letters, letters):
        word = pieces[pair[0]] + pieces[pair[1]]
        usual = tuple(tokenizer.encode(word, add_special_tokens=False))
        if len(usual) == 2 and usual != pair:
            return pair, word
    raise AssertionError("every word of two tokens has but one spelling")


@pytest.mark.parametrize("env_class", [ThreeTurns, AppendsOnly])
def test_sampled_tokens_are_kept_if_retokenizing_would_differ(play_scripted, tokenizer, env_class):
    client = SaysItOtherwise(tokenizer)
    said = (*client.sampled, tokenizer.eos_token_id)
    for trajectory in play_scripted(env_class, client, max_steps=3).trajectories:
        assert [span.token_ids for span in trajectory.policy_spans] == [said] * 3
    prompts = [list(call.prompt_ids) for call in client.calls if call.session == "0/p1/2"]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier) + len(said)] == [*earlier, *said]


class Swaps(AppendsOnly):
    """Gives each attempt the reply that was sampled for the next one of its prompt."""

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        samples = env_state.sample_states
        replies = llm.chat([sample.messages for sample in samples], sampling_params)
        for place, sample in enumerate(samples):
            first = place - place % 3
            sample.messages.append(replies[first + (place + 1) % 3])
            sample.done = True
        return env_state


def test_siblings_that_swap_what_was_sampled_keep_its_tokens(play):
    own, swapped = play(AppendsOnly, max_steps=1), play(Swaps, max_steps=1)
    for group, given in zip(own.groups, swapped.groups, strict=True):
        expected = [trajectory.token_ids for trajectory in group.trajectories]
        assert len(set(map(tuple, expected))) == 3
        assert [trajectory.token_ids for trajectory in given.trajectories] == [*expected[1:], expected[0]]


class Edits(AppendsOnly):
    @torch.inference_mode()
    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        for sample in env_state.sample_states:
            reply = llm.chat([sample.messages], sampling_params)[0]
            sample.messages.append(ChatMessage("assistant", reply.content + " (edited)"))
        return env_state


def test_loop_that_edits_sampled_text_fails_with_advice(play_scripted, tokenizer):
    result = play_scripted(Edits, ScriptedClient(tokenizer, {"": ["85"]}))
    causes = {sample.failure for sample in result.failed}
    said = "Edits ended the episode without the sampled text as an assistant message; append it unchanged"
    assert causes == {said} and not result.trajectories


def test_loop_that_never_asks_the_policy_fails_with_the_cause(play_scripted, tokenizer):
    class Silent(ThreeTurns):
        def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
            return env_state

    result = play_scripted(Silent, ScriptedClient(tokenizer, {"": ["85"]}))
    assert {sample.failure for sample in result.failed} == {
        "Silent ended the episode before the policy took a turn"
    }


class GivesUp(ScriptedClient):
    """Gives up the first `times` replies of one session half-way."""

    def __init__(self, tokenizer, times):
        super().__init__(tokenizer, {"": ["Answer: 85"]})
        self.times = times

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        if session != "0/p1/2" or not self.times:
            return completion
        self.times -= 1
        return dataclasses.replace(
            completion, token_ids=completion.token_ids[:1], logprobs=(-0.5,), text="A", finish_reason="abort"
        )


class AnswersThePolicyAlone(ThreeTurns):
    def respond(self, sample):
        assert sample.last_message.content == "Answer: 85"
        return super().respond(sample)


@pytest.mark.parametrize("env_class", [AnswersThePolicyAlone, AppendsOnly])
@pytest.mark.parametrize("times", [1, 100])
def test_sample_is_played_once_more_after_an_aborted_reply(play_scripted, tokenizer, env_class, times):
    result = play_scripted(env_class, GivesUp(tokenizer, times))
    failed = {(sample.prompt_id, sample.index): sample.failure for sample in result.failed}
    cause = "the engine aborted a reply of the policy after 1 of at most 256 tokens"
    assert failed == ({} if times == 1 else {("p1", 2): cause})
    for trajectory in result.trajectories:
        assert [message.content for message in trajectory.messages if message.role == "assistant"] == [
            "Answer: 85"
        ] * 2


def test_every_sample_has_its_own_thread_however_many_there_are(play_scripted, tokenizer):
    class Meets(ThreeTurns):
        all_of_them = threading.Barrier(12)

        def respond(self, sample):
            self.all_of_them.wait(timeout=20)
            return []

    result = play_scripted(Meets, ScriptedClient(tokenizer, {"": ["85"]}), prompts=4)
    assert not result.failed and len(result.trajectories) == 12


class TimesOut(ThreeTurns):
    def respond(self, sample):
        raise TimeoutError("the shop did not answer")


class TimesOutAsync(ThreeTurns):
    async def respond(self, sample):
        raise TimeoutError("the shop did not answer")


@pytest.mark.parametrize("env_class", [TimesOut, TimesOutAsync])
def test_timeout_inside_an_environment_is_not_the_deadline(play_scripted, tokenizer, env_class):
    result = play_scripted(env_class, ScriptedClient(tokenizer, {"": ["85"]}))
    where = f"tests/envs/test_rollout.py:{inspect.getsourcelines(env_class.respond)[1] + 1}"
    cause = f"{env_class.__name__}.respond raised TimeoutError: the shop did not answer ({where})"
    assert {sample.failure for sample in result.failed} == {cause}


class Wins(BaseMDPEnv):
    """Rewards the second turn, and a total of 2 is a success."""

    success_at = 2.0

    def respond(self, sample):
        if sample.current_step == 2:
            sample.reward_turn(float(sample.last_message.content))
        return [ChatMessage("tool", "again")]


def test_without_rewards_an_episode_earns_what_its_turns_do(play_scripted, tokenizer, caplog):
    client = ScriptedClient(tokenizer, {"0/p0/0": ["0", "2"], "0/p1/0": ["0", "1"]})
    result = play_scripted(Wins, client, rewards=[], group_size=1)
    earned = {item.prompt_id: (item.rewards, item.reward, item.success) for item in result.trajectories}
    assert earned == {"p0": ({}, 2.0, True), "p1": ({}, 1.0, False)}
    assert caplog.messages == []


HANGS_FOREVER = """
import sys, threading
from rl4llm.runtime.runner import Runner
from transformers import AutoTokenizer
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.core.types import SamplingParams
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.testing import ScriptedClient

class One(BaseRewardFunction):
    def __call__(self, messages, ground_truth, **kwargs):
        return 1.0

class Hangs(BaseMDPEnv):
    respond_timeout_s = 0.1

    def respond(self, sample):
        threading.Event().wait()

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
rows = [{"messages": [{"role": "user", "content": "How many?"}], "ground_truth": "1"}]
env = Hangs(rows, tokenizer, [One("one")], 1, 1)
with Runner() as runner:
    client = ScriptedClient(tokenizer, {"": ["85"]})
    rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=0, max_failed_share=1.0)
    result = rollout.play([0], step=0, sampling_params=SamplingParams())
env.close()
print(result.failed[0].failure)
"""


def test_an_environment_that_hangs_does_not_keep_the_process(model_dir, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS_FOREVER)
    ended = python(tmp_path / "hangs.py", model_dir, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "Hangs.respond took more than 0.1 s"


class HangsOn(Length):
    """Hangs on the samples of one prompt."""

    score_timeout_s = 1.5

    def __init__(self, prompt):
        super().__init__()
        self.prompt, self.released = prompt, threading.Event()

    def __call__(self, messages, ground_truth, **kwargs):
        if ground_truth == self.prompt:
            self.released.wait(20)
        return 1.0


def test_reward_that_hangs_fails_all_its_samples_at_its_deadline(play_scripted, tokenizer):
    reward = HangsOn(prompt=0)
    result = play_scripted(ThreeTurns, ScriptedClient(tokenizer, {"": ["85"]}), rewards=[reward])
    reward.released.set()
    assert {sample.failure for sample in result.failed} == {
        "reward 'length' took more than 1.5 s on 3 samples"  # a batch is the groups that have ended
    }
    assert {trajectory.prompt_id for trajectory in result.trajectories} == {"p1"}


class Gate(Length):
    """Notes the batches that it gets, and opens `scored` after the first."""

    def __init__(self):
        super().__init__()
        self.batches, self.scored = [], threading.Event()
        self.running, self.most = 0, 0

    def score_batch(self, samples):
        self.running += 1
        self.most = max(self.most, self.running)
        self.batches.append([(sample.prompt_id, sample.index) for sample in samples])
        time.sleep(0.01)  # so that calls in several threads would meet
        self.running -= 1
        self.scored.set()
        return super().score_batch(samples)


def test_groups_are_scored_while_others_play_and_only_once(play):
    gate, seen = Gate(), []

    class Waits(ThreeTurns):
        async def respond(self, sample):
            if sample.prompt_id == "p1":
                assert await asyncio.to_thread(gate.scored.wait, 20), "the other group is not scored"
            return super().respond(sample)

    def transform(rewards):
        seen.append(len(rewards["length"]))
        return rewards["length"]

    result = play(Waits, rewards=[gate], transform=transform)
    assert not result.failed and seen == [6]  # the transform sees all samples of a step
    assert gate.batches == [[(prompt, index) for index in range(3)] for prompt in ("p0", "p1")]


def test_a_reward_that_rollouts_share_runs_in_one_thread(play):
    gate = Gate()
    with ThreadPoolExecutor(4) as pool:
        played = [pool.submit(play, ThreeTurns, rewards=[gate], max_steps=1) for _ in range(4)]
        assert sum(len(one.result().trajectories) for one in played) == 24
    assert gate.most == 1 and sum(map(len, gate.batches)) == 24


class Notes(ThreeTurns):
    """Rewards turns, and attaches what it is given."""

    note = ("a tuple",)

    def respond(self, sample):
        sample.reward_turn(0.5)
        sample.extras["note"] = self.note
        return super().respond(sample)


def played_and_stored(model, tokenizer, note, rows):
    """Return the groups of two rows as they were played, and as others that read them have them; and what was written."""
    with Runner() as runner:
        client = LocalClient(model, tokenizer)
        runner.run(client.load(WeightRef(0)))
        env = Notes(rows, tokenizer, [Gate()], 2, 3, max_steps=3)
        env.note = note
        rollout = Rollout(env, client, Renderer(tokenizer, roles=("user", "tool")), runner, seed=1)
        units, others = (rollout.begin((0, 1), step=0, sampling_params=PARAMS) for _ in range(2))
        runner.run(play_together(units))
        texts = [dump(unit) for unit in units]
        for unit, text in zip(others, texts, strict=True):
            assert text is None or take_over(unit, json.loads(text), oldest=0)
        found = [rollout.finish(one).groups if texts[0] else () for one in (units, others)]
        return [list(map(repr, groups)) for groups in found], texts, len(env.reward_functions[0].batches)


def test_a_stored_group_comes_back_equal_and_scored(model, tokenizer):
    (played, stored), _, batches = played_and_stored(model, tokenizer, {"seen": [1.5, None]}, dataset())
    assert played == stored and len(played) == 2 and batches == 2


def test_a_group_with_objects_or_other_prompts_is_not_stored(model, tokenizer):
    assert played_and_stored(model, tokenizer, ("a tuple",), dataset())[1] == [None, None]
    _, texts, _ = played_and_stored(model, tokenizer, "", dataset())
    other = dataset()
    other[0]["messages"][1]["content"] = "What is 7?"
    with Runner() as runner:
        env = Notes(other, tokenizer, [Gate()], 2, 3, max_steps=3)
        units = Rollout(env, ScriptedClient(tokenizer, {}), runner=runner).begin(
            (0, 1), step=0, sampling_params=PARAMS
        )
        assert [
            take_over(unit, json.loads(text), oldest=0) for unit, text in zip(units, texts, strict=True)
        ] == [False, True]


class SetsSignals(Length):
    def __call__(self, messages, ground_truth, **kwargs):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return 1.0


def test_reward_for_the_main_thread_is_named_and_can_run_there(play_scripted, tokenizer):
    client = ScriptedClient(tokenizer, {"": ["85"]})
    result = play_scripted(ThreeTurns, client, rewards=[SetsSignals()])
    assert all(
        "with score_timeout_s = None it runs in the main thread" in sample.failure for sample in result.failed
    )
    assert len(result.failed) == 6
    unlimited = SetsSignals()
    unlimited.score_timeout_s = None
    assert not play_scripted(ThreeTurns, client, rewards=[unlimited]).failed


def test_unanswered_sample_is_retried_and_then_dropped_alone(tokenizer, play_scripted):
    class Unreachable(ScriptedClient):
        """Never answers the second sample of the first prompt, nor the first request for the third."""

        async def generate(self, prompt_ids, sampling_params, *, session=""):
            asked = sum(call.session == session for call in self.calls)
            completion = await super().generate(prompt_ids, sampling_params, session=session)
            if session == "0/p0/1" or (session == "0/p0/2" and asked == 0):
                raise UnreachableError("POST http://gpu-1:30000/generate did not answer within 600 s.")
            return completion

    client = Unreachable(tokenizer, {"": ["yes"]})
    result = play_scripted(BaseMDPEnv, client, max_steps=1)
    assert [sample.failure for sample in result.failed] == [
        "no server answered: POST http://gpu-1:30000/generate did not answer within 600 s."
    ]
    assert [len(group.trajectories) for group in result.groups] == [2, 3]


@pytest.mark.parametrize("steps", [0, 1.5, "abc", None])
def test_invalid_max_steps_is_refused_by_name(tokenizer, steps):
    with pytest.raises(ConfigError):
        ThreeTurns(dataset(), tokenizer, [Length()], batch_size=1, group_size=2, max_steps=steps)
