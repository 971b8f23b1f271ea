"""Episodes that are played while the steps before them train, with a bound on the age of each token."""

import asyncio
import contextlib
import itertools
import json
import threading
import time
from unittest.mock import patch

import pytest
import torch
from ended_runs import TwoTurns, metrics, weights
from fault_server import FaultServer, small_model
from vowels import Vowels, prompts

from rl4llm.algorithms.grpo import GRPO
from rl4llm.api import GRPOTrainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import (
    ConfigError,
    MismatchError,
    RunDirError,
    StaleWeightsError,
    TooManyFailuresError,
)
from rl4llm.core.types import ChatMessage
from rl4llm.envs.stored import is_played
from rl4llm.envs.stream import Staleness

WAIT_S = 30.0
begun, trained = threading.Event(), threading.Event()
played_by = set()
ended, waiting = [], []
published = {}


class Interrupted(Exception):
    """Something that ends a run like a kill: nothing is saved behind it."""


class Meets(GRPO):
    """Its first step is not over before the episodes of the second have begun."""

    def after_step(self, metrics):
        assert begun.wait(WAIT_S), "the next episodes wait for this step"
        trained.set()


class Early(Vowels):
    """Tells when it scores episodes of the second step."""

    def score_batch(self, samples):
        if any(step_of(sample) >= 1 for sample in samples):
            begun.set()
        return super().score_batch(samples)


class Solvable(Vowels):
    """Says which answers count as successes, for a curriculum."""

    success_at = 0.2


class Distinct(BaseRewardFunction):
    """Every answer is worth another amount, except those to two of the six prompts."""

    def __init__(self):
        super().__init__("distinct")
        self.amounts = itertools.count()

    def __call__(self, messages, ground_truth, **kwargs):
        return 0.5 if messages[0].content in ("Say 1.", "Say 4.") else next(self.amounts) / 100


class Pauses(Distinct):
    """In every second step all answers are worth the same."""

    def score_batch(self, samples):
        return [
            0.5 if step_of(sample) % 2 else score
            for sample, score in zip(samples, super().score_batch(samples), strict=True)
        ]

    def __call__(self, messages, ground_truth, **kwargs):
        return next(self.amounts) / 100


class Breaks(GRPO):
    """Fails in its fourth step."""

    steps = 0

    def after_step(self, metrics):
        type(self).steps += 1
        if type(self).steps == 4:
            raise Interrupted


def step_of(sample):
    """Return how many steps were done before the one that the episode is for."""
    return int(sample.session.partition("/")[0])


class Asks(BaseMDPEnv):
    """Tells when the episodes of the second step play."""

    continue_truncated = True

    async def respond(self, sample):
        if step_of(sample) >= 1:
            begun.set()
            played_by.add(threading.get_ident())
        return []


class Fails(BaseMDPEnv):
    """Cannot be played from the third step on."""

    continue_truncated = True

    async def respond(self, sample):
        if step_of(sample) >= 2:
            raise OSError("nobody is there")
        return []


class Patient(BaseMDPEnv):
    """Takes a second turn when the weights that train it are published; only the first step's episodes do not wait."""

    continue_truncated = True

    async def respond(self, sample):
        if sample.current_step == 2:
            return []
        if step_of(sample) > 0:
            await asyncio.to_thread(published[step_of(sample)].wait, WAIT_S)
        return [ChatMessage("user", "Again.")]


class Tells(BaseMDPEnv):
    """Say what is wrong with each answer, and how it ended."""

    continue_truncated = True

    async def respond(self, sample):
        sample.extras["feedback"] = f"Not {sample.messages[-1].content[-3:]}."
        return []


class Waits(BaseMDPEnv):
    """The second step's episodes of one prompt, the first that takes a turn, do not end before `begun`."""

    continue_truncated = True

    async def respond(self, sample):
        if step_of(sample) == 1:
            waiting.append(sample.prompt_id)
        while sample.prompt_id in waiting[:1] and not begun.is_set():
            await asyncio.sleep(0.01)
        return []


class Endless(BaseMDPEnv):
    """Never end from the second step on."""

    continue_truncated = True

    async def respond(self, sample):
        if step_of(sample) == 1:
            begun.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
        return []


@pytest.fixture(scope="module")
def served(tokenizer, tmp_path_factory):
    """Return the directory of a model and the address of a server that has it, over HTTP, in a separate thread."""
    directory, model = tmp_path_factory.mktemp("base"), small_model(tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    server, loop = FaultServer(model, tokenizer, one_by_one=True), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield directory, server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def trainer(served, tmp_path):
    """Return trainer("name", key=value): a run in a directory of that name, which may exist."""
    begun.clear()
    trained.clear()
    played_by.clear()
    ended.clear()
    waiting.clear()
    published.clear()
    directory, server = served
    url = server.url

    def make(name, env=BaseMDPEnv, **options):
        keys = {
            "rollout.max_staleness": 1,
            "checkpoint.every": 3,
            "max_steps": 6,
            "training.lr": 3e-3,
            "deterministic": True,
        }
        keys |= {
            "inference": {"name": "sglang", "url": url},
            "output.dir": str(tmp_path / name),
            "eval.every": 0,
        }
        keys |= {"rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_tokens": 6}
        rewards = options.pop("rewards", None) or [Vowels()]
        return GRPOTrainer(str(directory), prompts(), rewards, env=env, **(keys | options))

    return make


def test_the_next_episodes_play_while_a_step_trains(trainer, tmp_path):
    trainer("run", Asks, algorithm={"name": f"{__name__}:Meets"}, **{"env.max_steps": 2}, max_steps=3).train()
    assert trained.is_set()
    assert [row["staleness"] for row in metrics(tmp_path / "run")] == [0, 1, 1]
    # what a thread started may die with it
    assert len(played_by) == 1 and threading.get_ident() not in played_by


def test_the_next_episodes_are_scored_while_a_step_trains(trainer):
    trainer("run", rewards=[Early()], algorithm={"name": f"{__name__}:Meets"}, max_steps=2).train()
    assert trained.is_set()


def test_without_it_they_wait(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WAIT_S", 1.0)
    with pytest.raises(AssertionError, match="wait for this step"):
        trainer(
            "run",
            Asks,
            algorithm={"name": f"{__name__}:Meets"},
            **{"env.max_steps": 2, "rollout.max_staleness": 0},
        ).train()


def test_replayed_groups_of_asynchronous_runs_keep_their_bound(trainer, tmp_path):
    keys = {"rollout.replay": 2, "checkpoint.every": 0, "max_steps": 5}
    trainer("run", rewards=[Pauses()], **keys).train()
    rows = metrics(tmp_path / "run")
    # A step of equal rewards replays both groups of the step before, which had begun one version before that.
    assert [row["replay/groups"] for row in rows] == [0, 2, 0, 2, 0]
    assert [row["replay/age"] for row in rows] == [0, 1, 0, 2, 0]
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 2, 1]
    assert rows[3]["staleness"] > 1 and "mismatch/max" not in rows[3] and "update/empty" not in rows[3]
    trainer("bound", rewards=[Pauses()], **(keys | {"rollout.replay": 1})).train()
    assert [row["replay/groups"] for row in metrics(tmp_path / "bound")] == [0, 2, 0, 0, 0]


def test_a_repeatable_run_plays_nothing_across_a_checkpoint(trainer, tmp_path):
    trainer("run").train()
    rows = metrics(tmp_path / "run")
    assert [row["staleness"] for row in rows] == [0, 1, 1, 0, 1, 1]
    measured = ["mismatch/max" in row for row in rows]
    assert measured == [True, False, False, True, False, False]  # where a token has the newest weights
    assert all(row["mismatch/max"] < 1e-4 for row in rows if "mismatch/max" in row)
    # The ratio is relative to the policy before the update, whatever sampled.
    assert all(row["ratio/max"] == 1 and row["clip_fraction/first"] == 0 for row in rows)


def test_an_interrupted_run_resumes_and_skips_no_prompt(trainer, tmp_path):
    whole = weights(trainer("whole").train())
    Breaks.steps = 0
    with pytest.raises(Interrupted):
        trainer("broken", algorithm={"name": f"{__name__}:Breaks"}).train()
    Breaks.steps = 100
    again = weights(trainer("broken", algorithm={"name": f"{__name__}:Breaks"}).train())
    assert len(metrics(tmp_path / "broken")) == 6
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def stop_after_one(trainer, name, **options):
    """Train a step, and save when one prompt of the second has been played."""
    stopped = trainer(name, **options)
    save = stopped.trainer.save

    def save_later():
        until = time.monotonic() + WAIT_S
        units = stopped.trainer.stream.rounds[0].units
        while not any(map(is_played, units)) and time.monotonic() < until:
            time.sleep(0.01)
        save()

    stopped.trainer.save = save_later
    stopped.trainer._stop_requested.set()
    stopped.train()
    assert stopped.trainer.step == 1
    ahead = stopped.trainer.staleness.limit
    assert stopped.trainer.prompts.state()["consumed"] == 2 + 2 * ahead  # those of the next steps are begun


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"curriculum": 0.3, "rewards": [Solvable()]},
        {"env": Tells, "algorithm": {"name": "sdpo", "teacher": "ema", "solved_at": 2.0}},
    ],
    ids=["", "curriculum", "sdpo"],
)
def test_a_resumed_run_trains_what_was_played_before(trainer, served, tmp_path, options):
    whole = weights(trainer("whole", **options).train())
    stop_after_one(trainer, "stopped", **options)
    before = len(served[1].rids)
    again = trainer("stopped", **options).train()
    assert again.trainer.stream.kept == 2
    assert "curriculum" not in options or metrics(tmp_path / "whole")[-1]["curriculum/skipped"] > 0
    assert "env" not in options or all(row["grad_norm"] > 0 for row in metrics(tmp_path / "whole"))
    played = [rid for rid in served[1].rids[before:] if rid.startswith("1/")]
    assert not played and any(rid.startswith("2/") for rid in served[1].rids[before:])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(again).items())


def test_episodes_that_still_played_are_played_again(trainer, served):
    stop_after_one(trainer, "stopped", env=Waits, **{"env.max_steps": 2, "deterministic": False})
    begun.set()
    before = len(served[1].rids)
    again = trainer("stopped", Waits, **{"env.max_steps": 2, "deterministic": False}, max_steps=2).train()
    assert again.trainer.stream.kept == 1
    played = {rid.split("/")[1] for rid in served[1].rids[before:] if rid.startswith("1/")}
    assert len(played) == 1  # of two prompts


def test_what_would_be_too_old_after_a_resume_is_played_again(trainer):
    """All of version 0, two prompts for step 2 and two for step 3."""
    stop_after_one(trainer, "stopped", **{"rollout.max_staleness": 2})
    for limit, kept in ((2, 4), (1, 2), (0, 0)):
        resumed = trainer("stopped", **{"rollout.max_staleness": 2})
        resumed.trainer.staleness = Staleness(limit, repeatable=True)
        with contextlib.closing(resumed.trainer):
            resumed.trainer.resume()
            assert (resumed.trainer.stream.left, resumed.trainer.stream.kept) == (4, kept)


def test_what_fails_ahead_stops_the_step_that_would_train_on_it(trainer, tmp_path):
    with pytest.raises(TooManyFailuresError):
        trainer("run", Fails, **{"env.max_steps": 2}).train()
    assert len(metrics(tmp_path / "run")) == 2


def test_a_run_that_ends_gives_up_what_plays_ahead(trainer, tmp_path):
    class Stops(Meets):
        def after_step(self, metrics):
            super().after_step(metrics)
            raise Interrupted

    globals()["Stops"] = Stops
    with pytest.raises(Interrupted):
        trainer("run", Endless, algorithm={"name": f"{__name__}:Stops"}, **{"env.max_steps": 2}).train()
    assert set(ended) == {"cancelled"}


def test_engines_stay_open_for_episodes_that_do_not_end(trainer):
    loop = trainer("run").trainer
    with patch.object(loop.stream, "close", return_value=False), patch.object(loop, "warn") as warn:
        loop.close()
    try:
        assert "leaving the engines running" in warn.call_args.args[0]
        assert loop.inference.run(asyncio.sleep(0, "open")) == "open"
    finally:
        loop.inference.close()


def test_staleness_needs_servers(trainer):
    for inference in ({"name": "local"}, {"name": "sglang", "cohost": True}):
        with pytest.raises(ConfigError):
            trainer("run", inference=inference)


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, ("recomputed", "tis", 1.5)),
        ({"old_logprobs": "recomputed", "correction_high": 3.0}, ("recomputed", "tis", 3.0)),
        ({"old_logprobs": "recomputed", "correction": "icepop"}, ("recomputed", "icepop", None)),
        ({"old_logprobs": "recomputed", "correction": None}, ("recomputed", None, None)),
        ({"old_logprobs": "sampled"}, ("sampled", None, None)),
    ],
)
def test_old_samples_have_weights_unless_the_user_chose(trainer, tmp_path, capsys, options, used):
    """The run stores and shows what it uses, and a run with the same values resumes it."""
    trainer("run", algorithm={"name": "grpo", **options}, max_steps=2).train()
    stored = load_config(tmp_path / "run" / "config.yaml").algorithm
    names = "old_logprobs", "correction", "correction_high"
    assert tuple(stored.get(name) for name in names) == used
    assert f"algorithm.old_logprobs={used[0]}" in " ".join(capsys.readouterr().out.split())
    ratios = [row["ratio/max"] for row in metrics(tmp_path / "run")]
    assert (ratios[1] == 1) == (used[0] == "recomputed")
    trainer("run", algorithm=stored, max_steps=3).train()
    with pytest.raises(RunDirError):
        trainer("run", algorithm=stored | {"correction_high": 9.0}, max_steps=3)
    synchronous = {"rollout.max_staleness": 0}
    assert trainer("by turns", algorithm={"name": "grpo"}, **synchronous).trainer.algorithm == GRPO()


def versions_of(directory):
    """Return the versions that wrote each episode, by step."""
    files = sorted((directory / "episodes").glob("step-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.open()]
    return [
        (row["step"], [span["version"] for span in row["spans"] if span["author"] == "policy"])
        for row in rows
    ]


def train_patiently(made):
    """Train; second turns wait until the weights that train them are published."""
    published.update({step: threading.Event() for step in range(5)})
    publish = made.trainer.publish

    def publish_and_tell():
        publish()
        published[made.trainer.step].set()

    made.trainer.publish = publish_and_tell
    made.train()


def test_records_of_compacted_episodes_keep_the_bound(trainer, tmp_path):
    keys = {"env.max_steps": 3, "env.compact_at": 1, "rollout.max_tokens": 4, "deterministic": False}
    train_patiently(trainer("run", Patient, **keys, max_steps=4))
    for step in (2, 3, 4):
        lines = (tmp_path / "run" / "episodes" / f"step-{step:06d}.jsonl").read_text().splitlines()
        for episode in map(json.loads, lines):
            records = [episode["spans"], *episode["forks"]]
            first, second = ([span["version"] for span in record if "version" in span] for record in records)
            assert step - 2 <= first[0] <= first[1] == second[0] == step - 1  # turn, summary, turn
            assert episode["origins"] == [{"relation": "continues", "record": 0, "turn": 2}]
    rows = metrics(tmp_path / "run")
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert all(row["mismatch/max"] < 1e-4 for row in rows)


def test_compacted_episodes_of_a_checkpoint_train_as_played(trainer):
    keys = {"env.max_steps": 2, "env.compact_at": 1}
    whole = weights(trainer("whole", TwoTurns, **keys).train())
    stop_after_one(trainer, "stopped", env=TwoTurns, **keys)
    again = trainer("stopped", TwoTurns, **keys).train()
    assert again.trainer.stream.kept == 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(again).items())


def test_publishing_does_not_wait_for_episodes(trainer, tmp_path):
    train_patiently(trainer("run", Patient, **{"env.max_steps": 3, "deterministic": False}, max_steps=4))
    found = versions_of(tmp_path / "run")
    assert [versions for step, versions in found if step == 1] == [[0, 0]] * 8
    for step in (
        2,
        3,
        4,
    ):  # first turns are one version older unless they waited for the server, second turns are not
        written = [versions for number, versions in found if number == step]
        assert len(written) == 8 and {versions[-1] for versions in written} == {step - 1}
        assert step - 2 in {versions[0] for versions in written} <= {step - 2, step - 1}
    rows = metrics(tmp_path / "run")
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert all(0 < row["staleness"] < 1 for row in rows[1:])
    assert all(row["mismatch/max"] < 1e-4 for row in rows)  # measured on the newest tokens
    assert all(row["mismatch/newest"] == pytest.approx(1 - row["staleness"]) for row in rows[1:])


@pytest.mark.parametrize("algorithm", ["dapo", "dppo", "grpo", "rae"])
def test_every_prompt_trains_once_and_within_the_bound(trainer, tmp_path, algorithm):
    keys = {"rollout.max_staleness": 2, "deterministic": False}
    trainer("run", algorithm={"name": algorithm}, **keys).train()
    found = versions_of(tmp_path / "run")
    assert all(step - 3 <= min(versions) <= max(versions) <= step - 1 for step, versions in found)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert {step for step, _ in found} == {1, 2, 3, 4, 5, 6}
    assert all(0 < row["mismatch/canary"] < 1e-4 for row in metrics(tmp_path / "run"))


def test_old_tokens_hide_no_mismatch(trainer, tmp_path):
    """Where a step trains old tokens only, the canary's stop a run whose engine computes something else.

    In the first step all tokens are new; its later updates measure nothing, since the weights have moved.
    """
    made = trainer("run", mismatch={"stop_above": 0.01}, training={"updates_per_rollout": 2, "lr": 3e-3})
    compare = made.trainer.inference.canary.compare

    async def compare_far_apart(*given):
        await compare(*given)
        made.trainer.inference.canary.apart = 0.02

    made.trainer.inference.canary.compare = compare_far_apart
    with pytest.raises(MismatchError):
        made.train()
    assert len(metrics(tmp_path / "run")) == 1


def test_a_moving_reference_counts_steps_and_not_draws(trainer, tmp_path):
    algorithm = {"name": "grpo", "kl_coef": 0.1, "reference_every": 2}
    trainer("run", algorithm=algorithm, max_steps=5, **{"checkpoint.every": 0}).train()
    rows = metrics(tmp_path / "run")
    assert rows[2]["staleness"] == 1  # drawn before the reference moved
    still = [row["kl"] == pytest.approx(0, abs=1e-6) for row in rows]
    assert still == [True, False, True, False, True]


def test_dropped_groups_are_replaced_in_the_order_of_draws(trainer, tmp_path):
    played = {}
    for bound in (0, 2):
        keys = {"rollout.max_staleness": bound, "deterministic": False, "tracking.episodes_every": 1}
        name, algorithm = str(bound), {"name": "dapo", "resampling_rounds": 10}
        made = trainer(name, rewards=[Distinct()], algorithm=algorithm, **keys).train()
        rows = metrics(tmp_path / name)
        assert all(row["groups/dropped"] == row["trajectories"] / 4 - 2 for row in rows)  # two train
        assert sum(row["groups/dropped"] for row in rows) > 0
        assert made.trainer.prompts.state()["consumed"] == sum(row["trajectories"] for row in rows) / 4
        files = sorted((tmp_path / name / "episodes").glob("step-*.jsonl"))
        played[bound] = [[json.loads(line)["prompt_id"] for line in file.open()] for file in files]
    assert played[0] == played[2]


def test_a_token_beyond_the_bound_stops_the_run(trainer, monkeypatch):
    made = trainer("run", deterministic=False)
    monkeypatch.setattr(type(made.trainer), "_steps_ahead", lambda self: 4)  # begins too early
    collect = made.trainer.collect

    def collect_when_all_are_played():
        step = collect()
        made.trainer.stream.drain()
        return step

    made.trainer.collect = collect_when_all_are_played
    with pytest.raises(StaleWeightsError):
        made.train()
    assert made.trainer.step == 2  # whose tokens are of version 0, one beyond the bound


def test_an_evaluation_has_one_version_while_episodes_play(trainer, tmp_path):
    """It shares the server with them; learning rates follow the steps, as in a synchronous run."""
    rows = [{"messages": [{"role": "user", "content": "Held out."}], "ground_truth": ""}]
    keys = {"rollout.max_staleness": 2, "deterministic": False, "eval.every": 1, "training.warmup_steps": 4}
    made, found = trainer("run", eval_dataset=rows, max_steps=4, **keys), []
    evaluation = made.trainer.tracker.evaluation

    def note(step, groups, failed):
        spans = [span for group in groups for one in group.trajectories for span in one.policy_spans]
        found.append((step, {span.version for span in spans}, made.trainer.stream.left))
        evaluation(step, groups, failed)

    made.trainer.tracker.evaluation = note
    made.train()
    assert [(step, versions) for step, versions, _ in found] == [(step, {step}) for step in range(5)]
    assert [left for *_, left in found] == [0, 4, 4, 2, 0]  # draws under way meanwhile
    rates = [row["lr"] for row in metrics(tmp_path / "run") if "lr" in row]
    assert rates == pytest.approx([3e-3 * number / 4 for number in range(1, 5)])
