"""The loop: it learns, it resumes bit for bit, it proves its weights, and it refuses what cannot work."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from ended_runs import TwoTurns, assert_same_weights, metrics, weights
from rank_processes import RankProcesses
from sweeps import sampled
from vowels import Vowels
from vowels import prompts as rows

from rl4llm.algorithms.grpo import GRPO
from rl4llm.api import DAPOTrainer, GRPOTrainer
from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import (
    ConfigError,
    DivergedError,
    RunDirError,
    StaleWeightsError,
    TooManyFailuresError,
)
from rl4llm.core.weights import WeightRef
from rl4llm.tracking.tracker import read_jsonl
from rl4llm.trainers.base_trainer import Schedule

SMALL = {
    "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 5},
    "training": {"lr": 3e-3},
    "checkpoint": {"every": 2},
}

OF_THE_MACHINE = ("time/", "memory/", "resources/", "tokens/s")


def trainer(model_dir, directory, kind=GRPOTrainer, **overrides):
    options = {**SMALL, "env": TwoTurns, "deterministic": True, **overrides}
    rewards = options.pop("reward_functions", [Vowels()])
    dataset = options.pop("dataset", rows())
    options.setdefault("env.max_steps", 2)
    return kind(str(model_dir), dataset, rewards, output={"dir": str(directory)}, **options)


def test_evals_and_checkpoints_come_at_intervals_and_at_the_end():
    schedule, never = Schedule(max_steps=7, evaluate_every=2, checkpoint_every=3), Schedule(max_steps=7)
    assert [step for step in range(1, 8) if schedule.evaluates_after(step)] == [2, 4, 6, 7]
    assert [step for step in range(1, 8) if schedule.saves_after(step)] == [3, 6, 7]
    assert not any(never.evaluates_after(step) for step in range(1, 8))
    assert [step for step in range(1, 8) if never.saves_after(step)] == [7]


# float32 learns in tests/algorithms/test_learning.py
@pytest.mark.parametrize("dtype", sampled(["float32", "bfloat16"], ["bfloat16"]))
def test_the_loop_learns(model_dir, tmp_path, dtype):
    options = {
        "model.dtype": dtype,
        "rollout": {"prompts": 4, "group_size": 16, "max_tokens": 8},
        "training": {"lr": 6e-3},
        "max_steps": 25,
    }
    trainer(model_dir, tmp_path, env=BaseMDPEnv, dataset=rows(4), **options, **{"env.max_steps": 1}).train()
    rewards = [row["reward/mean"] for row in metrics(tmp_path) if "reward/mean" in row]
    assert len(rewards) == 25
    assert rewards[0] < 0.2
    assert sum(rewards[-3:]) / 3 > 0.6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(model_dir, tmp_path, dtype):
    keys = {"model.dtype": dtype}
    whole = trainer(model_dir, tmp_path / "whole", max_steps=4, **keys).train()
    trainer(model_dir, tmp_path / "parts", max_steps=2, **keys).train()
    parts = trainer(model_dir, tmp_path / "parts", max_steps=4, **keys).train()
    assert_same_weights(weights(whole), weights(parts))
    others = (*OF_THE_MACHINE, "mismatch/canary")  # whose tokens an engine samples at each start
    timeless = [
        [
            {name: value for name, value in row.items() if not name.startswith(others)}
            for row in metrics(tmp_path / name)
        ]
        for name in ("whole", "parts")
    ]
    assert timeless[0] == timeless[1]
    assert [row["step"] for row in timeless[0]] == [1, 2, 3, 4]


def test_proving_the_weights_does_not_change_a_run(model_dir, tmp_path):
    runs = [
        trainer(model_dir, tmp_path / str(proven), max_steps=2, **{"sync.verify": proven}).train()
        for proven in (True, False)
    ]
    assert_same_weights(*map(weights, runs))


def test_slow_tools_do_not_change_a_deterministic_run(model_dir, tmp_path):
    class Dawdles(TwoTurns):
        def respond(self, sample):
            time.sleep(0.01 * ((7 * sample.index + os.getpid()) % 3))
            return super().respond(sample)

    quick = trainer(model_dir, tmp_path / "quick", max_steps=2).train()
    slow = trainer(model_dir, tmp_path / "slow", env=Dawdles, max_steps=2).train()
    assert_same_weights(weights(quick), weights(slow))


def eight_steps(ranks, model_dir, directory):
    return weights(trainer(model_dir, directory, max_steps=8, checkpoint={"every": 1}).train())


def test_a_run_killed_at_any_moment_ends_with_the_same_weights(model_dir, tmp_path, sweep):
    with RankProcesses(size=1) as process:
        (whole,) = process(eight_steps, model_dir, tmp_path / "whole")
        log = tmp_path / "killed" / "metrics.jsonl"
        # killed once this step is logged, wherever the run then is
        for steps in (1, 3, 6) if sweep else (3,):
            process.begin(eight_steps, model_dir, tmp_path / "killed")
            while not log.exists() or log.read_text().count("\n") < steps:
                assert not process.over_within(0.005)
            process.kill(0)
            process.close()
        (killed,) = process(eight_steps, model_dir, tmp_path / "killed")
    assert_same_weights(whole, killed)
    assert [row["step"] for row in metrics(tmp_path / "killed")] == list(range(1, 9))


def test_an_episodes_record_has_the_trainers_numbers(model_dir, tmp_path):
    trainer(model_dir, tmp_path, max_steps=2, training={"lr": 1e-2, "passes_per_rollout": 3}).train()
    spans, weight, log = 0, 0.0, metrics(tmp_path)
    for row in read_jsonl(tmp_path / "episodes" / "step-000002.jsonl"):
        for span in row["spans"]:
            if "weight" in span:
                spans += 1
                weight += span["weight"] * len(span["token_ids"])
                assert span["trainer_logprobs"] == pytest.approx(span["logprobs"], abs=1e-5)
                assert span["advantages"] == pytest.approx([row["credit"]] * len(span["token_ids"]), abs=1e-5)
        assert row["credit"] == 0 or row["mismatch"] < 1e-5
    assert spans >= 8 and weight <= 1 + 1e-6  # those without a spread of rewards weigh, but do not train
    rows = [row for step in (1, 2) for row in read_jsonl(tmp_path / "episodes" / f"step-{step:06d}.jsonl")]
    clipped = any(span.get("clipped") for row in rows for span in row["spans"])
    assert clipped == (max(row["clip_fraction"] for row in log) > 0)
    assert clipped and not any(row["clip_fraction/first"] for row in log)


def test_on_the_policy_the_ratio_is_one(model_dir, tmp_path):
    trainer(model_dir, tmp_path, max_steps=2, kind=DAPOTrainer).train()
    for row in metrics(tmp_path):
        assert row["ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert row["ratio/max"] == pytest.approx(1, abs=1e-5)
        assert row["clip_fraction"] == 0


@pytest.mark.parametrize("temperature", [0.7, 1.7])
@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
def test_log_probs_use_the_temperature_of_the_samples(model_dir, tmp_path, old_logprobs, temperature):
    """Log-probs of the update, the old ones and the reference's all equal those that the engine sampled with."""
    algorithm = {"name": "dapo", "resampling_rounds": 0, "kl_coef": 0.1, "old_logprobs": old_logprobs}
    training = {
        "lr": 0.0,
        "passes_per_rollout": 2,
    }  # several updates recompute before the first, and weights stay as they are
    options = {
        "algorithm": algorithm,
        "rollout.temperature": temperature,
        "max_steps": 1,
        "training": training,
    }
    trainer(model_dir, tmp_path, kind=DAPOTrainer, **options).train()
    (row,) = metrics(tmp_path)
    assert row["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert row["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert row["mismatch/max"] < 1e-4


def test_log_probs_that_an_engine_misstates_warn_at_step_1(model_dir, tmp_path, capsys):
    """The canary scores tokens, which is right here; only what is returned with samples is wrong."""
    run = trainer(model_dir, tmp_path, max_steps=2)
    client = run.trainer.inference.client
    generate = client.generate

    async def misstated(*args, **options):
        completion = await generate(*args, **options)
        return replace(completion, logprobs=tuple(number - 2.8 for number in completion.logprobs))

    client.generate = misstated
    run.train()
    shown = " ".join("".join(capsys.readouterr()).split())
    assert shown.count("Log-probs of engine and trainer differ by 2.8 nats on average") == 1
    assert "Step 1: Log-probs of engine" in shown


def test_a_run_that_diverges_is_called_diverging(model_dir, tmp_path):
    def alternating(completions, **columns):  # differs in each group, whatever is left of the policy
        return [float(number % 2) for number, _ in enumerate(completions)]

    options = {"model.dtype": "bfloat16", "training": {"lr": 3.0}, "reward_functions": [alternating]}
    with pytest.raises(DivergedError):
        trainer(model_dir, tmp_path, max_steps=4, **options).train()


def test_a_run_whose_directory_is_removed_ends_with_its_name(model_dir, tmp_path):
    class Removes(Vowels):
        def __call__(self, *args, **kwargs):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            return super().__call__(*args, **kwargs)

    keys = {"max_steps": 3, "checkpoint": {"every": 0}, "tracking": {"tensorboard": False}}
    run = trainer(model_dir, tmp_path / "run", reward_functions=[Removes()], **keys)
    with pytest.raises(RunDirError):
        run.train()


def gradient(run):
    """Return the gradient of one step's loss, as the trainer computes it."""
    loop = run.trainer
    loop.publish()
    for update in loop.prepare(loop.collect()):
        for batch in update.batches:
            loop.backend.forward_backward(batch, **loop.objective(update))
    return {name: tensor.grad.clone() for name, tensor in loop.backend.model.named_parameters()}


def test_constant_length_defaults_to_the_most_policy_tokens(model_dir, tmp_path):
    lengths = {"a": None, "b": 10, "c": 40}  # two turns of five tokens

    def constant(name):
        options = {"algorithm.aggregation": "constant", "training.constant_length": lengths[name]}
        return gradient(trainer(model_dir, tmp_path / name, **options))

    default, same, quarter = constant("a"), constant("b"), constant("c")
    assert any(tensor.abs().max() > 1e-4 for tensor in default.values())
    for name, tensor in default.items():
        torch.testing.assert_close(same[name], tensor, atol=0, rtol=0)
        torch.testing.assert_close(4 * quarter[name], tensor, atol=1e-7, rtol=1e-4)


def test_rows_without_a_credit_count_in_the_totals(model_dir, tmp_path):
    """One group has different rewards, the other has equal ones."""

    class OneGroup(Vowels):
        def __call__(self, messages, ground_truth, **kwargs):
            return super().__call__(messages, ground_truth) if ground_truth == "0" else 1.0

    class EveryToken(GRPO):
        def needs(self):
            return replace(super().needs(), every_token=True)

    options = {"dataset": rows(2), "reward_functions": [OneGroup()], "data.shuffle": False}
    for aggregation in ("sequence", "token"):
        runs = [
            trainer(
                model_dir, tmp_path / f"{aggregation}{i}", algorithm={"aggregation": aggregation}, **options
            )
            for i in range(2)
        ]
        runs[1].trainer.algorithm = runs[1].trainer.preparation.algorithm = EveryToken(
            aggregation=aggregation
        )
        left_out, whole = map(gradient, runs)
        assert any(tensor.abs().max() > 1e-4 for tensor in whole.values())
        for name, tensor in whole.items():
            torch.testing.assert_close(left_out[name], tensor, atol=1e-6, rtol=1e-4, msg=name)


def test_tokens_of_weights_that_were_not_published_stop_the_run(model_dir, tmp_path):
    loop = trainer(model_dir, tmp_path).trainer
    loop.publish()
    loop.inference.runner.run(loop.inference.client.load(WeightRef(777)))
    with pytest.raises(StaleWeightsError):
        loop.collect()
    loop.close()


def test_an_engine_with_stale_weights_is_found_at_any_step_size(model_dir, tmp_path):
    loop = trainer(model_dir, tmp_path).trainer
    loop.publish()
    said = {}

    class Kept(type(loop.inference.client)):
        """Says what it said the first time."""

        async def score(self, token_ids):
            if tuple(token_ids) not in said:
                said[tuple(token_ids)] = await super().score(token_ids)
            return said[tuple(token_ids)]

    loop.inference.client.__class__ = Kept
    loop.publish()
    loop.publish()  # nothing moved, so nothing is wrong
    with torch.no_grad():
        for parameter in loop.backend.model.parameters():
            parameter += 1e-6 * torch.randn_like(parameter).sign()
    with pytest.raises(StaleWeightsError):
        loop.publish()
    loop.close()


def test_weights_that_did_not_reach_the_engine_stop_the_run(model_dir, tmp_path):
    run = trainer(model_dir, tmp_path, max_steps=1)
    loop = run.trainer
    loop.publish()
    embedding = loop.backend.model.get_input_embeddings().weight
    stale = embedding.detach().clone()

    class Stale(type(loop.inference.client)):
        """Scores with the embeddings of before."""

        async def score(self, token_ids):
            fresh = embedding.detach().clone()
            embedding.data.copy_(stale)
            try:
                return await super().score(token_ids)
            finally:
                embedding.data.copy_(fresh)

    loop.inference.client.__class__ = Stale
    embedding.data += 0.5 * torch.randn_like(embedding)
    with pytest.raises(StaleWeightsError):
        loop.publish()
    loop.close()


def penalties(loop):
    """Return what the KL penalty takes off each trajectory's reward, and what it should take."""
    loop.publish()
    groups = list(loop.collect().groups)
    before = [t for group in groups for t in group.trajectories]
    penalised, _ = loop.preparation._with_kl_in_reward(groups, *loop.algorithm.needs().reward_kl)
    after = [t for group in penalised for t in group.trajectories]
    taken = [old.reward - new.reward for old, new in zip(before, after, strict=True)]
    reference, temperature = loop.preparation.reference.model, loop.sampling_params.temperature
    return taken, [sum_of_differences(reference, trajectory, temperature) for trajectory in before]


def sum_of_differences(reference, trajectory, temperature):
    with torch.no_grad():
        logits = reference(torch.tensor([trajectory.token_ids])).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
    total, at = 0.0, 0
    for span in trajectory.spans:
        for i, token in enumerate(span.token_ids):
            if span.author == "policy":
                total += span.logprobs[i] - logprobs[at - 1, token].item()
            at += 1
    return total


def test_a_kl_penalty_in_the_reward_is_a_sum_that_starts_at_zero(model_dir, tmp_path):
    algorithm = {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    loop = trainer(model_dir, tmp_path, algorithm=algorithm, **{"rollout.temperature": 0.7}).trainer
    taken, _ = penalties(loop)
    assert max(map(abs, taken)) < 1e-4
    with torch.no_grad():
        for parameter in loop.backend.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    taken, sums = penalties(loop)
    assert max(map(abs, sums)) > 0.1
    assert taken == pytest.approx([0.5 * total for total in sums], abs=1e-3)
    loop.close()


@pytest.mark.parametrize(
    "estimator", sampled(["k1", "k2", "k3"], ["k3"])
)  # tests/algorithms has the numbers of each
def test_a_kl_penalty_in_the_loss_holds_the_policy_back(model_dir, tmp_path, estimator):
    free = trainer(model_dir, tmp_path / "free", max_steps=6).train()
    kl = {"kl_coef": 5.0, "kl_in": "loss", "kl_estimator": estimator}
    held = trainer(model_dir, tmp_path / "held", max_steps=6, algorithm=kl).train()
    assert metrics(tmp_path / "held")[0]["kl"] == pytest.approx(0, abs=1e-6)

    def drift(run):
        start = dict(trainer(model_dir, tmp_path / f"start-{id(run)}").trainer.backend.weights())
        return sum((tensor - start[name]).square().sum() for name, tensor in weights(run).items()).sqrt()

    assert drift(held) < drift(free)


def test_a_kl_penalty_in_the_loss_trains_groups_of_equal_rewards(model_dir, tmp_path):
    def always(completions, **columns):
        return [0.3] * len(completions)

    options = {"algorithm": {"kl_coef": 1.0}, "training": {"lr": 1e-3}, "max_steps": 4}
    run = trainer(model_dir, tmp_path, reward_functions=[always], **options)
    with torch.no_grad():
        for parameter in run.trainer.backend.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    run.train()
    log = metrics(tmp_path)
    assert [row["groups/zero_spread"] for row in log] == [1.0] * 4
    assert log[3]["kl"] < 0.7 * log[0]["kl"]  # back towards the reference, by the penalty alone


def test_an_entropy_bonus_is_computed_only_when_asked_for(model_dir, tmp_path):
    trainer(model_dir, tmp_path / "without", max_steps=1).train()
    trainer(model_dir, tmp_path / "with", max_steps=1, algorithm={"entropy_coef": 0.01}).train()
    assert "entropy" not in metrics(tmp_path / "without")[0]
    assert 0 < metrics(tmp_path / "with")[0]["entropy"] < 6


def test_groups_with_equal_rewards_do_not_change_the_weights(model_dir, tmp_path):
    def always(completions, **columns):
        return [0.3] * len(completions)

    run = trainer(model_dir, tmp_path, max_steps=2, reward_functions=[always])
    before = weights(run)
    run.train()
    assert_same_weights(before, weights(run))
    assert [row["groups/zero_spread"] for row in metrics(tmp_path)] == [1.0, 1.0]
    assert [row["update/empty"] for row in metrics(tmp_path)] == [1.0, 1.0]


def test_the_last_step_is_always_saved(model_dir, tmp_path):
    first = trainer(model_dir, tmp_path, max_steps=2, checkpoint={"every": 0}).train()
    again = trainer(model_dir, tmp_path, max_steps=2, checkpoint={"every": 0}).train()
    assert_same_weights(weights(first), weights(again))
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


def test_a_trainer_trains_once(model_dir, tmp_path):
    run = trainer(model_dir, tmp_path, max_steps=1).train()
    with pytest.raises(ConfigError):
        run.train()


def test_held_out_prompts_are_given_and_never_from_training(model_dir, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    held_out = rows(3)
    run = trainer(model_dir, tmp_path / "a", dataset=str(path), eval_dataset=held_out)
    assert len(run.trainer.evaluation.env.dataset) == 3
    run.trainer.close()
    with pytest.raises(ConfigError):
        trainer(model_dir, tmp_path / "b", dataset=str(path), **{"eval.every": 2})
    run = trainer(model_dir, tmp_path / "c", dataset=str(path))
    assert run.trainer.evaluation is None
    run.trainer.close()


def test_held_out_prompts_use_the_evaluations_temperature(model_dir, tmp_path):
    with trainer(model_dir, tmp_path, eval_dataset=rows(3), **{"eval.temperature": 0.0}).trainer as loop:
        loop.publish()
        for group in loop.play_held_out(samples=2).groups:
            one, other = group.trajectories
            assert one.token_ids == other.token_ids


def test_other_prompts_or_rewards_make_another_run(model_dir, tmp_path):
    class Consonants(Vowels):
        pass

    trainer(model_dir, tmp_path, max_steps=1).train()
    for change in ({"dataset": rows(5)}, {"reward_functions": [Consonants()]}, {"env": BaseMDPEnv}):
        with pytest.raises(RunDirError):
            trainer(model_dir, tmp_path, max_steps=2, **change)


def test_updates_of_a_step_are_optimizer_steps(model_dir, tmp_path):
    conversation = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Answer: 85"}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": conversation}) + "\n") * 8)
    overrides = [
        f"model.path={model_dir}", f"data.path={path}", f"output.dir={tmp_path / 'run'}", "algorithm.name=sft",
        "rollout.prompts=4", "training.updates_per_rollout=2", "training.lr=1e-3",
        "training.schedule=linear", "max_steps=2", "eval.every=0",
    ]  # fmt: skip
    with build_trainer(load_config(overrides=overrides)) as loop:
        loop.train()
        assert loop.backend._optimizer.step_number == 4
    last = [1e-3 * left / 4 for left in (2, 1)]
    assert metrics(tmp_path / "run")[-1]["lr"] == pytest.approx(sum(last) / 2)


def test_ctrl_c_finishes_the_step_and_the_same_call_resumes(model_dir, tmp_path):
    class Interrupts(Vowels):
        def __call__(self, messages, ground_truth, **kwargs):
            if not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(messages, ground_truth, **kwargs)

    reward = Interrupts()
    reward.sent = False
    stopped = trainer(model_dir, tmp_path / "run", max_steps=4, reward_functions=[reward]).train()
    assert stopped.trainer.stopped
    assert stopped.trainer.step == 1
    resumed = trainer(model_dir, tmp_path / "run", max_steps=4, reward_functions=[reward]).train()
    whole = trainer(model_dir, tmp_path / "whole", max_steps=4).train()
    assert_same_weights(weights(resumed), weights(whole))


def test_a_run_stopped_by_failures_names_classes_and_keeps_rows(model_dir, tmp_path):
    class Moody(Vowels):
        def __call__(self, messages, ground_truth, **kwargs):
            return None if ground_truth in "012" else super().__call__(messages, ground_truth)

    with pytest.raises(TooManyFailuresError):
        trainer(model_dir, tmp_path, reward_functions=[Moody()], max_steps=3).train()
    last = sorted((tmp_path / "episodes").glob("step-*.jsonl"))[-1]
    stored = [json.loads(line) for line in last.read_text().splitlines()]
    assert stored and {episode["failure_class"] for episode in stored} == {"vowels/invalid"}
    assert all(episode["messages"] and "reward" not in episode for episode in stored)
