"""The loop of `loop.py`, with a server that plays the episodes of the next steps while this one trains.

    rl4llm serve --engine embedded MODEL --port 30200
    python examples/loop_async.py --model MODEL [--url http://127.0.0.1:30200] [--steps 30] [--staleness 1]

No token is more than `staleness` versions older than the weights that it trains. With `deterministic` no episode plays
during a publish. The server must see the directory that versions of the weights are written to.
"""

import argparse
import tempfile

from custom_env import Closeness, GuessTheNumber
from shared import prompts

import rl4llm as rl
from rl4llm.envs.stream import GroupStream
from rl4llm.extensions.servers.clients.embedded import EmbeddedClient
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore


def loop(model, url, rows, steps, staleness=1, group_size=16, deterministic=False):
    """Train the model of a directory with GRPO, and have the server sample meanwhile."""
    tokenizer = rl.load_tokenizer(model)
    algorithm = rl.GRPO(**(rl.GRPO.stale_options({}) if staleness else {}))  # for samples of older weights
    backend = rl.TorchBackend(rl.load_model(model), lr=3e-3)
    client = EmbeddedClient(url, tokenizer, vocab_size=backend.model.config.vocab_size, context_length=512)
    store = WeightStore(tempfile.mkdtemp(prefix="rl4llm-weights-"))
    publisher = FilesystemPublisher(client, store, tokenizer.save_pretrained)
    env = GuessTheNumber(rows, tokenizer, [Closeness()], group_size=group_size, max_steps=3)
    rollout, draws = rl.Rollout(env, client), rl.PromptStream(num_rows=len(rows), batch_size=4)
    sampling = {"sampling_params": rl.SamplingParams(max_tokens=4)}
    stream = GroupStream(rollout, draws, rollout.runner, lambda: sampling)
    batching = rl.Batching(aggregation=algorithm.aggregation, pad_token_id=tokenizer.pad_token_id)
    preparation = rl.Preparation(algorithm=algorithm, policy=backend, batching=batching)
    for step in range(steps):
        rollout.run(publisher.publish(backend, step))  # episodes under way continue with these weights
        while stream.left < 4 * min(staleness + 1, steps - step):
            stream.admit(4)
        groups = rollout.finish(stream.take(4)[1]).groups
        for update in preparation.prepare(groups, step).updates:
            for batch in update.batches:
                backend.forward_backward(batch, algorithm.token_losses)
            backend.optim_step()
        if deterministic:
            stream.drain()
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
        print(f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}")
    rollout.run(client.close())
    return backend


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, value in {"model": None, "url": "http://127.0.0.1:30200", "steps": 30, "staleness": 1}.items():
        parser.add_argument(f"--{name}", required=value is None, type=type(value or ""), default=value)
    options = parser.parse_args()
    task = prompts("Guess my number from 0 to 9.", answers=["3", "4", "5", "6"])
    loop(options.model, options.url, task, options.steps, options.staleness)
