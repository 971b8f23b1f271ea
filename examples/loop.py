"""All of rl4llm in one loop: prompts, rollout, advantages, loss, optimizer step, publish.

    python examples/loop.py [--model DIRECTORY] [--steps 30]

In float32 it ends with the weights of `rl4llm train`, bit for bit. `loop_sglang.py` is the same against a server.
"""

from custom_env import Closeness, GuessTheNumber
from shared import arguments, prompts

import rl4llm as rl


def loop(model, rows, steps):
    """Train the model of a directory with GRPO; returns the backend that holds it."""
    tokenizer, algorithm = rl.load_tokenizer(model), rl.GRPO()
    backend = rl.TorchBackend(rl.load_model(model), lr=3e-3)
    client = rl.LocalClient(backend.model, tokenizer, deterministic=True)
    publisher = rl.MemoryPublisher(client)
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
    return backend


if __name__ == "__main__":
    options = arguments(__doc__)
    loop(options.model, prompts("Guess my number from 0 to 9.", answers=["3", "4", "5", "6"]), options.steps)
