"""The loop of `loop.py` against a server: only the client and the publisher differ.

    rl4llm serve --engine sglang --model-path MODEL --port 30000
    python examples/loop_sglang.py --model MODEL [--url http://127.0.0.1:30000] [--steps 30]

The server must see the directory that versions of the weights are written to.
"""

import argparse
import tempfile

from custom_env import Closeness, GuessTheNumber
from shared import prompts

import rl4llm as rl
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.sync.filesystem import FilesystemPublisher
from rl4llm.extensions.servers.sync.store import WeightStore


def loop(model, url, rows, steps):
    """Train the model of a directory with GRPO, and have the server hold each version of it."""
    tokenizer, algorithm = rl.load_tokenizer(model), rl.GRPO()
    backend = rl.TorchBackend(rl.load_model(model), lr=3e-3)
    sizes = backend.model.config
    client = SGLangClient(
        url, tokenizer, vocab_size=sizes.vocab_size, context_length=sizes.max_position_embeddings
    )
    store = WeightStore(tempfile.mkdtemp(prefix="rl4llm-weights-"))
    publisher = FilesystemPublisher(client, store, tokenizer.save_pretrained)
    env = GuessTheNumber(rows, tokenizer, [Closeness()], group_size=16, max_steps=3)
    rollout = rl.Rollout(env, client)
    stream = rl.PromptStream(num_rows=len(rows), batch_size=4)
    batching = rl.Batching(aggregation=algorithm.aggregation, pad_token_id=tokenizer.pad_token_id)
    preparation = rl.Preparation(algorithm=algorithm, policy=backend, batching=batching)
    sampling = rl.SamplingParams(max_tokens=4)
    for step in range(steps):
        rollout.run(publisher.publish(backend, step))
        groups = rollout.play(stream.next_batch(), step=step, sampling_params=sampling).groups
        for update in preparation.prepare(groups, step).updates:
            for batch in update.batches:
                backend.forward_backward(batch, algorithm.token_losses)
            backend.optim_step()
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
        print(f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}")
    rollout.run(client.close())
    return backend


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    task = prompts("Guess my number from 0 to 9.", answers=["3", "4", "5", "6"])
    loop(options.model, options.url, task, options.steps)
