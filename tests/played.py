"""Plays the first prompt of an environment."""

from rl4llm.core.types import SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.runtime.runner import Runner


def played(env, client, *, roles=("user",), params=None, **options):
    """Return the episodes of the first prompt, and those that failed, however many."""
    with Runner() as runner:
        runner.run(client.load(WeightRef(0)))
        renderer = Renderer(env.tokenizer, roles=roles)
        rollout = Rollout(env, client, renderer, runner, seed=1, max_failed_share=1.0)
        params = params or SamplingParams(max_tokens=64)
        return rollout.play([0], step=0, sampling_params=params, **options)
