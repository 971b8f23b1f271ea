"""A loop of the library's own parts ends with the weights of `rl4llm train`, bit for bit."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from embedded_server import embedded_server
from sweeps import sampled

import rl4llm as rl
from rl4llm.backends.classifier import load_value_head
from rl4llm.runtime.ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 2


def example(name):
    """Import a module of examples/, which is in no package."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def rows():
    return example("shared").prompts("Guess my number from 0 to 9.", answers=["3", "4", "5", "6"])


def trained(trainer, model_dir, directory, ranks, **options):
    """Return what the trainer's run ends with; `rollout.prompts` are those of one rank."""
    game = example("custom_env")
    run = trainer(
        str(model_dir),
        rows(),
        [game.Closeness()],
        env=game.GuessTheNumber,
        deterministic=True,
        training={"lr": 3e-3},
        checkpoint={"every": 0},
        tracking={"tensorboard": False},
        output={"dir": str(directory)},
        **{"env.max_steps": 3, "model.autocast": "none"},  # as the loop computes
        **{"max_steps": STEPS, "rollout": {"prompts": 4 // ranks.size, "group_size": 16, "max_tokens": 4}}
        | options,
    ).train()
    torch.use_deterministic_algorithms(False)  # which the run switched on for the whole process
    return numbers(run.trainer.backend)


def numbers(backend):
    return {name: tensor.clone() for name, tensor in backend.weights()}


def looped(algorithm, model_dir, ranks, with_critic=False):
    """Run the loop of examples/loop.py with everything that GRPO on one process does not need."""
    game, path = example("custom_env"), str(model_dir)
    tokenizer = rl.load_tokenizer(path)
    backend = rl.TorchBackend(rl.load_model(path), lr=3e-3, ranks=ranks)
    models = {"model": (backend, algorithm.token_losses)}
    if with_critic:
        model = rl.load_model(path)
        critic = rl.TorchBackend(model, value_head=load_value_head(path, model), lr=3e-2, ranks=ranks)
        models["critic"] = critic, lambda batch, values_BT, _: algorithm.value_losses(batch, values_BT)
    env = game.GuessTheNumber(rows(), tokenizer, [game.Closeness()], group_size=16, max_steps=3)
    client = rl.LocalClient(backend.model, tokenizer, deterministic=True)
    publisher, rollout = rl.MemoryPublisher(client), rl.Rollout(env, client)
    stream = rl.PromptStream(4, batch_size=4 // ranks.size, rank=ranks.rank, world_size=ranks.size)
    batching = rl.Batching(aggregation=algorithm.aggregation, pad_token_id=tokenizer.pad_token_id)
    preparation = rl.Preparation(
        algorithm=algorithm,
        policy=backend,
        critic=models["critic"][0] if with_critic else None,
        batching=batching,
        ranks=ranks,
    )
    for step in range(STEPS):
        rollout.run(publisher.publish(backend, step))
        played = rollout.play(
            stream.next_batch(),
            step=step,
            sampling_params=rl.SamplingParams(max_tokens=4),
            earlier=stream.earlier,
        )
        for update in preparation.prepare(played.groups, step).updates:
            learner, losses = models[update.model]
            for number, batch in enumerate(update.batches, 1):
                learner.forward_backward(batch, losses, last=number == len(update.batches))
            learner.optim_step()
    return numbers(backend)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def on_each_rank(ranks, model_dir, directory):
    """Return whether a rank's loop and the trainer end with the same weights."""
    return same(looped(rl.GRPO(), model_dir, ranks), trained(rl.GRPOTrainer, model_dir, directory, ranks))


def test_the_example_ends_with_the_weights_of_the_trainer(model_dir, tmp_path):
    ended = numbers(example("loop").loop(str(model_dir), rows(), STEPS))
    assert same(ended, trained(rl.GRPOTrainer, model_dir, tmp_path / "run", Ranks()))
    start = dict(rl.TorchBackend(rl.load_model(str(model_dir)), lr=0.0).weights())
    assert not same(ended, start)


@pytest.mark.parametrize("staleness", sampled([0, 2], [2]))
def test_the_asynchronous_loop_ends_like_the_trainer(model_dir, tmp_path, staleness):
    steps = 3
    with embedded_server(model_dir, "inference.max_rows=1") as (url, _):
        loop = example("loop_async").loop
        ended = numbers(loop(str(model_dir), url, rows(), steps, staleness, group_size=4, deterministic=True))
        run = trained(
            rl.GRPOTrainer,
            model_dir,
            tmp_path / "run",
            Ranks(),
            max_steps=steps,
            inference={"name": "embedded", "url": url},
            rollout={"prompts": 4, "group_size": 4, "max_tokens": 4},
            **{"rollout.max_staleness": staleness},
        )
    assert same(ended, run)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("staleness", 0) for row in metrics] == [min(step, staleness) for step in range(steps)]


def test_the_same_loop_with_a_critic_is_ppo(model_dir, tmp_path):
    torch.manual_seed(42)
    ended = looped(rl.PPO(), model_dir, Ranks(), with_critic=True)
    assert same(ended, trained(rl.PPOTrainer, model_dir, tmp_path / "run", Ranks()))


def test_the_same_loop_on_two_ranks_is_a_run_of_two(on_ranks, model_dir, tmp_path):
    assert on_ranks(on_each_rank, model_dir, tmp_path / "run") == [True, True]
