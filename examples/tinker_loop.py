"""Train on sums with GRPO through the Tinker SDK: `rl4llm serve tinker` does what the cloud would do, on this machine.

    rl4llm serve tinker --model HuggingFaceTB/SmolLM2-135M-Instruct     # in one terminal
    python examples/tinker_loop.py --steps 30                           # in another, where `pip install tinker` was run

Nothing here knows of rl4llm. Each step samples a group of answers to each of some sums, compares the answers of a group
with each other, and trains on how much better than the others each was.
"""

import argparse
import random
import re

import tinker
import torch
from tinker import types

PROMPTS, GROUP = 4, 8
SYSTEM = {"role": "system", "content": "Answer with one number."}
PARAMS = types.SamplingParams(max_tokens=16, temperature=1.0)


def problem(rng):
    """Return a question and its answer."""
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    return f"{first} + {second} = ?", str(first + second)


def reward(text, answer):
    """Return 1 if the last number of a text is the answer."""
    return float(re.findall(r"\d+", text)[-1:] == [answer])


def tensor(values, dtype=torch.float32):
    return types.TensorData.from_torch(torch.tensor(values, dtype=dtype))


def datum(prompt, sequence, advantage):
    """Return a sample as the loss reads it: at each place the next token, and 0 for what the model did not write."""
    tokens, unwritten = prompt + list(sequence.tokens), len(prompt) - 1
    written = len(sequence.tokens)
    inputs = {
        "target_tokens": tensor(tokens[1:], torch.int64),
        "logprobs": tensor([0.0] * unwritten + list(sequence.logprobs)),
        "advantages": tensor([0.0] * unwritten + [advantage] * written),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def step(training, tokenizer, rng, learning_rate):
    """Take a step of training; return the mean reward of what it was taken on."""
    sampling = training.save_weights_and_get_sampling_client().result()
    asked = []
    for question, answer in (problem(rng) for _ in range(PROMPTS)):
        chat = [SYSTEM, {"role": "user", "content": question}]
        prompt = tokenizer.encode(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        )
        samples = sampling.sample(
            types.ModelInput.from_ints(prompt), num_samples=GROUP, sampling_params=PARAMS
        )
        asked.append((prompt, answer, samples))
    data, rewards = [], []
    for prompt, answer, samples in asked:
        sequences = samples.result().sequences
        found = [reward(tokenizer.decode(one.tokens, skip_special_tokens=True), answer) for one in sequences]
        mean = sum(found) / len(found)
        data += [datum(prompt, one, own - mean) for one, own in zip(sequences, found, strict=True)]
        rewards += found
    computed = training.forward_backward(data, loss_fn="importance_sampling")
    stepped = training.optim_step(types.AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0))
    computed.result()
    stepped.result()
    return sum(rewards) / len(rewards)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="its name on the server"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=2e-4)
    given = parser.parse_args()
    training = (
        tinker.ServiceClient().create_lora_training_client(base_model=given.model, rank=16, seed=0).result()
    )
    tokenizer, rng = training.get_tokenizer(), random.Random(0)
    for number in range(1, given.steps + 1):
        mean = step(training, tokenizer, rng, given.lr)
        print(f"step {number:3}: mean reward {mean:.3f} {'#' * round(50 * mean)}", flush=True)
    print(training.save_weights_for_sampler("sums").result().path)


if __name__ == "__main__":
    main()
