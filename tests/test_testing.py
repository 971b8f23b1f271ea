import asyncio
import copy

import pytest

from rl4llm.core.errors import EngineError
from rl4llm.core.types import Completion, SamplingParams, WeightRef
from rl4llm.inference.local import LocalClient
from rl4llm.testing import ScriptedClient, check_client

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


def test_check_client_passes_a_client_that_keeps_the_contract(model, tokenizer):
    client = LocalClient(model, tokenizer)
    asyncio.run(client.load(WeightRef(0)))
    check_client(client, PROMPTS)


def say(client, session="", **params):
    return asyncio.run(client.generate(PROMPTS[0], SamplingParams(**params), session=session))


def test_a_scripted_client_says_each_sessions_replies_in_order_and_repeats_the_last(tokenizer):
    client = ScriptedClient(tokenizer, {"": ["Answer: 4"], "a": ["one", "two"]})
    assert [say(client, "a").text for _ in range(3)] == ["one", "two", "two"]
    assert say(client, "b").text == "Answer: 4"
    assert [call.session for call in client.calls] == ["a", "a", "a", "b"]


def test_a_scripted_reply_ends_with_the_end_token_unless_it_is_cut(tokenizer):
    client = ScriptedClient(tokenizer, lambda session, prompt_ids: f"{len(prompt_ids)} tokens")
    whole = say(client)
    assert (whole.text, whole.token_ids[-1], whole.finish_reason) == ("5 tokens", tokenizer.eos_token_id, "stop")
    cut = say(client, max_tokens=2)
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:2], "length")


def test_a_scripted_client_without_a_reply_says_which_sessions_it_knows(tokenizer):
    with pytest.raises(EngineError, match=r"no reply for session 'b'; it knows \['a'\]"):
        say(ScriptedClient(tokenizer, {"a": ["one"]}), "b")


def test_a_scripted_client_refuses_what_an_engine_refuses(tokenizer):
    client = ScriptedClient(tokenizer, {"": ["one"]}, context_length=8)
    for prompt in ([], [len(tokenizer)], [1] * 8):
        with pytest.raises(EngineError):
            asyncio.run(client.generate(prompt, SamplingParams()))
