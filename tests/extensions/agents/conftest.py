"""Plays episodes of agents against an engine, scripted or embedded, that remembers what it was asked and said."""

import pytest

from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.agents.env import AgentEnv
from rl4llm.inference.local import LocalClient
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.runner import Runner
from rl4llm.testing import ScriptedClient


class Remembering(LocalClient):
    """The embedded engine, and every (session, prompt, completion) of it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.record = []

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        self.record.append((session, tuple(prompt_ids), completion))
        return completion


def right(completions, ground_truth, **columns):
    """Score as `math` does here, without its processes."""
    return [float(truth in said) for said, truth in zip(completions, ground_truth, strict=True)]


@pytest.fixture
def play(tokenizer):
    """Plays one prompt's episodes with an agent, by default against a policy that says `turns` in this order."""
    runner = Runner()

    def run(
        agent=None,
        turns=("Answer: 85",),
        *,
        client=None,
        size=1,
        columns=None,
        params=None,
        said=None,
        env_class=AgentEnv,
        **options,
    ):
        client = client or ScriptedClient(tokenizer, {"": list(turns)})
        runner.run(client.load(WeightRef(0)))
        row = {
            "messages": [{"role": "user", "content": "How many?"}],
            "ground_truth": "85",
            **(columns or {}),
        }
        env = env_class([row], tokenizer, [as_reward_function(right)], 1, size, agent=agent, **options)
        env.report_to((said if said is not None else []).append)
        rollout = Rollout(env, client, Renderer(tokenizer), runner, seed=0, max_failed_share=1.0)
        result = rollout.play([0], step=0, sampling_params=params or SamplingParams(max_tokens=300))
        env.close()
        return result, client

    yield run
    runner.close()


@pytest.fixture
def remembering(model, tokenizer):
    return Remembering(model, tokenizer)


@pytest.fixture
def calculator():
    """A tool as an agent describes it."""
    return {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
