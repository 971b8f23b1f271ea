"""Several ranks are one trainer: the same steps, one writer, and a checkpoint that any number of ranks can resume."""

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from ended_runs import TwoTurns, metrics
from fault_server import FaultServer, serving
from forked_python import python
from sweeps import sampled
from vowels import prompts

from rl4llm.api import PolicyTrainer
from rl4llm.backends.models import load_model, load_tokenizer
from rl4llm.backends.tiny import build_model, save_model
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.base_env import BaseRewardFunction
from rl4llm.core.errors import ConfigError, RunDirError
from rl4llm.envs import stored
from rl4llm.runs.checkpoint import latest_checkpoint
from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.watchdog import Watchdog


class Letters(BaseRewardFunction):
    """How late in the alphabet the last letter comes; prompt 0 pays nothing, so its group has no difference."""

    def __init__(self, name="letters", **kwargs):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return 0.0 if ground_truth == "0" else (ord(messages[-1].content[-1:] or "a") % 32) / 32


class OneInThree(Letters):
    """Two prompts of six have groups with a difference."""

    def __call__(self, messages, ground_truth, **kwargs) -> float:
        return super().__call__(messages, "1" if ground_truth in "15" else "0")


class Named(PolicyTrainer):
    """Of whatever algorithm the test names."""

    algorithm = "grpo"


ROWS = prompts()


def trainer(ranks, model_dir, directory, algorithm, backend, **options):
    """Return a trainer with a global batch of four prompts for any number of ranks."""
    reward, env = options.pop("reward", Letters)(), options.pop("env_class", TwoTurns)
    return Named(
        str(model_dir), ROWS, [reward], env=env, eval_dataset=ROWS[:3], algorithm=algorithm,
        output={"dir": str(directory)}, backend=backend,
        **{"deterministic": True, "model.autocast": "none", "rollout.prompts": 4 // ranks.size, "rollout.group_size": 4,
           "rollout.max_tokens": 5, "training.lr": 3e-3, "training.max_tokens_per_batch": 64, "env.max_steps": 2,
           "eval.every": 2, "checkpoint.every": 1, "max_steps": 2, "timeout_s": 60} | options,
    )  # fmt: skip


def trained(ranks, model_dir, directory, algorithm, backend, max_steps=2, options=()):
    """Return the weights after a run, on the first rank."""
    run = (
        trainer(ranks, model_dir, directory, algorithm, backend, max_steps=max_steps, **dict(options))
        .train()
        .trainer
    )
    weights = {name: tensor.clone() for name, tensor in run.backend.weights()}
    return weights if ranks.is_first else None


def assert_close(left, right, atol):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


ALGORITHMS = {
    "grpo": {"name": "grpo", "kl_coef": 0.05, "entropy_coef": 0.01},
    "dapo": {"name": "dapo", "resampling_rounds": 0, "scale_rewards": "batch"},
    "ppo": {"name": "ppo", "critic_lr": 1e-2},
    "sdpo": {"name": "sdpo", "teacher": "ema", "solved_at": 0.5},
}
ADAPTER = {"model.lora": {"rank": 4}, "training.lr": 1e-2}


BACKENDS = [
    pytest.param({"name": "torch", "shard": "ddp"}, id="ddp"),
    pytest.param({"name": "torch", "shard": "fsdp2"}, id="fsdp2"),
    *(
        pytest.param(
            {"name": "deepspeed", "zero_stage": stage}, marks=pytest.mark.deepspeed, id=f"zero-{stage}"
        )
        for stage in range(4)
    ),
]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run with one process came to."""

    weights: dict
    metrics: list


@pytest.fixture(scope="module")
def alone():
    return Ranks()


@pytest.fixture(scope="module")
def single(model_dir, alone, tmp_path_factory):
    """Return the run of one process with an algorithm, made once."""
    runs = {}

    def run(name):
        if name not in runs:
            directory = tmp_path_factory.mktemp(name)
            weights = trained(alone, model_dir, directory, ALGORITHMS[name], {"name": "torch"})
            runs[name] = Run(weights, metrics(directory))
        return runs[name]

    return run


PAIRS = [
    pytest.param(name, *backend.values, marks=backend.marks, id=f"{name}-{backend.id}")
    for name in ALGORITHMS
    for backend in BACKENDS
]
SAMPLE = ("grpo-zero-2", "dapo-ddp", "ppo-zero-3", "sdpo-fsdp2")
"""Each backend that holds other parts of a model, and each estimate that ranks share; FSDP2 takes the same steps below."""


@pytest.mark.parametrize(("name", "backend"), sampled(PAIRS, lambda case: case.id in SAMPLE))
def test_two_ranks_take_the_steps_of_one(on_ranks, single, model_dir, tmp_path, name, backend):
    two, _ = on_ranks(trained, model_dir, tmp_path / "two", ALGORITHMS[name], backend)
    one = single(name)
    assert_close(two, one.weights, atol=2e-4)
    for ours, theirs in zip(metrics(tmp_path / "two"), one.metrics, strict=True):
        assert measured(ours) == pytest.approx(measured(theirs), abs=3e-4), ours["step"]


@pytest.fixture(scope="module")
def teacher(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher")
    tokenizer = load_tokenizer(model_dir)
    save_model(build_model(tokenizer, seed=7, hidden_size=48, num_layers=1), tokenizer, directory)
    return str(directory)


@pytest.mark.parametrize(
    ("shard", "top_k"),
    sampled([("ddp", 0), ("ddp", 4), ("fsdp2", 0), ("fsdp2", 4)], lambda case: case[0] == "fsdp2"),
)
def test_two_ranks_compare_distributions_as_one(on_ranks, alone, model_dir, teacher, tmp_path, shard, top_k):
    """The teacher has another width, and FSDP2 shares its output layer among the ranks."""
    distill = {"name": "distill", "teacher_path": teacher, "divergence": "jensen_shannon", "top_k": top_k}
    two, _ = on_ranks(trained, model_dir, tmp_path / "two", distill, {"name": "torch", "shard": shard})
    one = trained(alone, model_dir, tmp_path / "one", distill, {"name": "torch"})
    assert_close(two, one, atol=2e-4)
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert ours.get("teacher_divergence", 1) > 1e-3
        assert measured(ours) == pytest.approx(measured(theirs), abs=3e-4), ours["step"]


def measured(row):
    """Return the metrics of a step without those of time, memory and rounding errors, and what DeepSpeed lacks."""
    apart = ("time/", "memory/", "resources/", "tokens/s", "mismatch/", "update_ratio", "critic/update_ratio")
    return {name: value for name, value in row.items() if not name.startswith(apart)}


SAID = [
    f"{name} {name * 3}" * length for name, length in zip("abcdefgh", (1, 4, 2, 1, 3, 1, 5, 2), strict=True)
]
ANSWERS = [
    {"prompt": f"Say {row}.", "chosen": text, "rejected": text[::-1] + "!"} for row, text in enumerate(SAID)
]
LEARNED = {
    "sft": [
        {
            "messages": [
                {"role": role, "content": text} for role, text in (("user", "Go."), ("assistant", said))
            ]
        }
        for said in SAID
    ],
    "kto": [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": row["prompt"] > "Say 3"}
        for row in ANSWERS
    ],
    **dict.fromkeys(("dpo", "reward_model"), ANSWERS),
}


class Learner(PolicyTrainer):
    """Of whatever dataset and algorithm the test names."""

    algorithm = "sft"


def learned(ranks, model_dir, directory):
    """Train and measure with every method that learns from a dataset."""
    for name, rows in LEARNED.items():
        Learner(
            str(model_dir), rows[:4], eval_dataset=rows[3:], algorithm={"name": name}, output={"dir": str(directory / name)},
            max_steps=2, deterministic=True,
            **{"rollout.prompts": 4 // ranks.size, "training.max_tokens_per_batch": 64 // ranks.size, "training.lr": 3e-3,
               "eval.every": 1, "checkpoint.every": 0, "timeout_s": 60},
        ).train()  # fmt: skip


def test_two_ranks_measure_what_one_measures(on_ranks, alone, model_dir, tmp_path):
    learned(alone, model_dir, tmp_path / "one")
    on_ranks(learned, model_dir, tmp_path / "two")
    for name in LEARNED:
        for ours, theirs in zip(
            metrics(tmp_path / "two" / name), metrics(tmp_path / "one" / name), strict=True
        ):
            assert measured(ours) == pytest.approx(measured(theirs), rel=1e-3, abs=3e-4), (name, ours["step"])


@pytest.fixture(scope="module")
def single_adapter(model_dir, alone, tmp_path_factory):
    """Return an adapter and the model under it after a run of one process."""
    pytest.importorskip("peft")
    return trained(
        alone, model_dir, tmp_path_factory.mktemp("one"), ALGORITHMS["grpo"], {"name": "torch"}, 2, ADAPTER
    )


@pytest.mark.sweep  # tests/backends/test_sharded.py and tests/extensions/deepspeed step adapters on two ranks
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_and_the_model_under_it_take_the_same_steps(
    on_ranks, single_adapter, model_dir, tmp_path, backend
):
    two, _ = on_ranks(trained, model_dir, tmp_path / "two", ALGORITHMS["grpo"], backend, 2, ADAPTER)
    assert_close(two, single_adapter, atol=2e-4)


def test_a_checkpoint_of_two_ranks_resumes_with_one_and_back(on_ranks, alone, model_dir, tmp_path):
    backend, algorithm = {"name": "torch", "shard": "fsdp2"}, ALGORITHMS["grpo"]
    whole = trained(alone, model_dir, tmp_path / "whole", algorithm, {"name": "torch"}, max_steps=3)
    on_ranks(trained, model_dir, tmp_path / "parts", algorithm, backend, 1)
    trained(alone, model_dir, tmp_path / "parts", algorithm, {"name": "torch"}, max_steps=2)
    back, _ = on_ranks(trained, model_dir, tmp_path / "parts", algorithm, backend, 3)
    assert_close(back, whole, atol=5e-4)
    assert [row["step"] for row in metrics(tmp_path / "parts") if "loss" in row] == [1, 2, 3]


def test_any_number_of_ranks_draws_the_same_replacements(on_ranks, alone, model_dir, tmp_path):
    """Also when the number changes on the way."""
    given, options = (
        (model_dir, tmp_path / "one", {"name": "dapo", "resampling_rounds": 10}),
        {"reward": OneInThree},
    )
    one = trained(alone, *given, {"name": "torch"}, 3, options)
    given = given[0], tmp_path / "two", given[2]
    on_ranks(trained, *given, {"name": "torch", "shard": "ddp"}, 2, options)
    two = trained(alone, *given, {"name": "torch"}, 3, options)
    assert_close(two, one, atol=2e-4)
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for key in ("groups/refills", "groups/dropped", "trajectories", "update/tokens"):
            assert ours.get(key) == theirs.get(key), (ours["step"], key)
    steps = [row for row in metrics(tmp_path / "one") if "loss" in row]
    # of a single prompt one rank plays none
    assert any(2 * row["groups/refills"] > row["groups/dropped"] for row in steps)
    cursors = [latest_checkpoint(tmp_path / name / "checkpoints").state["prompts"] for name in ("one", "two")]
    assert cursors[0] == cursors[1]


def drawn(ranks, model_dir, directory):
    """Return the replies to each prompt of a step on this rank, where all prompts are the same row."""
    options = {"data.limit": 1, "rollout.prompts": 2 // ranks.size, "eval.every": 0}
    with trainer(
        ranks, model_dir, directory, ALGORITHMS["grpo"], {"name": "torch"}, **options
    ).trainer as loop:
        loop.publish()
        return [(one.extras["sample"], one.token_ids) for one in loop.collect().trajectories]


def test_a_row_that_two_ranks_play_is_sampled_as_twice_on_one(on_ranks, alone, model_dir, tmp_path):
    first, second = on_ranks(drawn, model_dir, tmp_path / "two")
    assert first + second == drawn(alone, model_dir, tmp_path / "one")
    assert [sample for sample, _ in first + second] == list(range(8))
    assert len({tuple(token_ids) for _, token_ids in first + second}) > 4


def test_sharded_ranks_publish_to_one_shared_server(on_ranks, alone, model_dir, tokenizer, tmp_path):
    sharded, ended = {"name": "torch", "shard": "fsdp2"}, {}
    for name, run, backend in (("one", trained, {"name": "torch"}), ("two", on_ranks, sharded)):
        model = load_model(model_dir)
        with serving(FaultServer(model, tokenizer, one_by_one=True)) as server:
            inference = {"name": "sglang", "url": server.url, "deadline_s": 30.0}
            given = model_dir, tmp_path / name, ALGORITHMS["grpo"], backend, 2, {"inference": inference}
            ended[name] = run(alone, *given) if run is trained else run(trained, *given)[0]
            assert len(set(server.rids)) == len(server.rids)
    assert_close(ended["two"], ended["one"], atol=2e-4)
    assert [row["mismatch/max"] < 1e-4 for row in metrics(tmp_path / "two") if "loss" in row] == [True] * 2


class SlowOnOne(TwoTurns):
    """Takes longer on the second rank."""

    async def respond(self, sample):
        await asyncio.sleep(0.1 * int(os.environ["RANK"]))
        return super().respond(sample)


def trained_ahead(ranks, model_dir, directory, options):
    """Return steps, weights and the canary's mismatch after a run whose episodes may begin before their step."""
    run = trainer(
        ranks, model_dir, directory, ALGORITHMS["grpo"], {"name": "torch"}, env_class=SlowOnOne, **options
    )
    ended = run.train().trainer
    weights = torch.cat([tensor.flatten() for _, tensor in ended.backend.weights()])
    return ended.step, weights, ended.inference.canary.apart


def test_ranks_train_the_same_draws_ahead_of_a_slow_one(on_ranks, model_dir, tokenizer, tmp_path):
    """No rank waits for another's tail for ever, takes other steps or other prompts, or exceeds the bound."""
    played = {}
    for bound in (0, 2):
        with serving(FaultServer(load_model(model_dir), tokenizer, one_by_one=True)) as server:
            options = {
                "inference": {"name": "sglang", "url": server.url, "deadline_s": 30.0}, "rollout.max_staleness": bound,
                "deterministic": False, "eval.every": 0, "max_steps": 4, "tracking.episodes_every": 1,
                "tracking.episodes_per_step": 100,
            }  # fmt: skip
            (steps, weights, apart), (others, same, shared) = on_ranks(
                trained_ahead, model_dir, tmp_path / str(bound), options
            )
        assert steps == others == 4 and torch.equal(weights, same) and apart == shared > 0
        files = sorted((tmp_path / str(bound) / "episodes").glob("step-*.jsonl"))
        rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        played[bound] = [sorted((row["prompt_id"], row["sample"]) for row in step) for step in rows]
    assert played[0] == played[2] and len(played[0]) == 8  # files of steps and ranks
    told = {row["step"]: (row["staleness"], row["staleness/max"]) for row in metrics(tmp_path / "2")}
    assert told == {step: pytest.approx(ages_of(step, rows)) for step in range(1, 5)}  # of all ranks
    assert 1 <= max(oldest for _, oldest in told.values()) <= 2


def ages_of(step, files):
    """Return the mean and the greatest age of the tokens that a step trains, from the episodes of all ranks."""
    spans = [span for file in files for row in file if row["step"] == step for span in row["spans"]]
    spans = [
        (step - 1 - span["version"], len(span["token_ids"])) for span in spans if span["author"] == "policy"
    ]
    return sum(age * size for age, size in spans) / sum(size for _, size in spans), max(spans)[0]


def stopped_ahead(ranks, *given):
    """Stop after a step, with the episodes of the next two in the checkpoint."""
    run = trainer(ranks, *given[:-1], ALGORITHMS["grpo"], {"name": "torch"}, **given[-1])
    run.trainer._stop_requested.set()
    run.train()


def taken_over(ranks, *given):
    """Return how many draws this rank takes over from a checkpoint, which of its files it reads, and what the run says."""
    run = trainer(ranks, *given[:-1], ALGORITHMS["grpo"], {"name": "torch"}, **given[-1])
    with (
        run.trainer as loop,
        patch.object(stored, "read_played", wraps=stored.read_played) as read,
        patch.object(loop.tracker, "note") as note,
    ):
        loop.resume()
        files = sorted(file.name for file in read.call_args.args[0])
        return loop.stream.kept, files, note.call_args.args[0]


def test_a_rank_reads_what_it_played_and_another_number_all(on_ranks, alone, model_dir, tokenizer, tmp_path):
    with serving(FaultServer(load_model(model_dir), tokenizer, one_by_one=True)) as server:
        options = {
            "inference": {"name": "sglang", "url": server.url}, "rollout.max_staleness": 2, "checkpoint.every": 0,
            "max_steps": 3,
        }  # fmt: skip
        given = model_dir, tmp_path, options
        on_ranks(stopped_ahead, *given)
        said = "8 prompts have been played; 0 are played again, from their seeds"
        own = [(4, [f"played-{rank}.jsonl"], said) for rank in range(2)]
        assert on_ranks(taken_over, *given) == own
        assert taken_over(alone, *given) == (8, ["played-0.jsonl", "played-1.jsonl"], said)


class Sleeper(FaultServer):
    """Notes what is asked of it while it sleeps; every other prompt takes longer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asleep, self.disturbed, self.naps = set(), 0, 0

    async def _release_memory_occupation(self, body):
        self.asleep |= set(body["tags"])
        self.naps += 1

    async def _resume_memory_occupation(self, body):
        self.asleep -= set(body["tags"])

    async def _generate(self, body):
        await asyncio.sleep(0.1 * (sum(body["input_ids"]) % 2))
        self.disturbed += bool(self.asleep)
        return await super()._generate(body)


@pytest.mark.parametrize("shard", sampled(["ddp", "fsdp2"], ["fsdp2"]))
def test_a_colocated_server_sleeps_when_no_rank_samples(on_ranks, model_dir, tokenizer, tmp_path, shard):
    with serving(Sleeper(load_model(model_dir), tokenizer, one_by_one=True)) as server:
        options = {"inference": {"name": "sglang", "url": server.url, "cohost": True, "deadline_s": 30.0}}
        on_ranks(
            trained, model_dir, tmp_path, ALGORITHMS["grpo"], {"name": "torch", "shard": shard}, 2, options
        )
    assert server.naps == 3  # before the first publish, and for each step
    assert server.disturbed == 0
    assert [row["mismatch/max"] < 1e-4 for row in metrics(tmp_path) if "loss" in row] == [True] * 2


def refused(ranks, model_dir, directory, way):
    options = {"inference": {"name": "sglang", "url": "http://127.0.0.1:1"}, "sync.name": way}
    with pytest.raises(ConfigError) as told:
        trainer(
            ranks, model_dir, directory, ALGORITHMS["grpo"], {"name": "torch", "shard": "fsdp2"}, **options
        )
    return str(told.value)


def test_sharded_weights_refuse_sync_that_servers_may_pull(on_ranks, model_dir, tmp_path):
    for told in on_ranks(refused, model_dir, tmp_path / "run", "distributed"):
        assert "if each rank holds a part of the weights" in told
    assert not (tmp_path / "run").exists()


def test_another_number_of_prompts_over_all_ranks_is_another_run(on_ranks, alone, model_dir, tmp_path):
    trained(alone, model_dir, tmp_path, ALGORITHMS["grpo"], {"name": "torch"}, max_steps=1)
    options = {"rollout.prompts": 1, "max_steps": 2}
    with pytest.raises(RunDirError):
        trainer(alone, model_dir, tmp_path, ALGORITHMS["grpo"], {"name": "torch"}, **options)


def told_of_another_run(ranks, model_dir, directory):
    with pytest.raises(RunDirError) as told:
        trainer(ranks, model_dir, directory, ALGORITHMS["grpo"], {"name": "torch"}, **{"training.lr": 1.0})
    return str(told.value)


def test_a_refused_run_ends_every_rank_and_rank_0_says_why(on_ranks, alone, model_dir, tmp_path):
    trained(alone, model_dir, tmp_path, ALGORITHMS["grpo"], {"name": "torch"}, max_steps=1)
    first, second = on_ranks(told_of_another_run, model_dir, tmp_path)
    assert "training.lr: 0.003 -> 1.0" in first
    assert "See the error of rank 0" in second


def dies_before_the_backward_pass(ranks, model_dir, directory, backend):
    if ranks.rank == 1:
        TorchBackend.forward_backward = lambda *args, **options: os._exit(9)
    trained(ranks, model_dir, directory, ALGORITHMS["grpo"], backend)


@pytest.mark.parametrize("shard", sampled(["ddp", "fsdp2"], ["fsdp2"]))
def test_a_rank_that_loses_the_others_reports_it(on_ranks, model_dir, tmp_path, shard):
    with pytest.raises(
        AssertionError,
        match=r"RanksError: Rank 0 of 2 lost the connection to the others: [\s\S]* resumes from the last",
    ):
        on_ranks(dies_before_the_backward_pass, model_dir, tmp_path, {"name": "torch", "shard": shard})


def hangs(ranks, directory):
    os.dup2(os.open(directory / str(ranks.rank), os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    # it waits for nobody, so it is last
    phase, deadline_s = ("rollout", 2.0) if ranks.is_first else ("prepare", 1.0)
    with Watchdog(ranks, deadline_s=deadline_s) as watchdog, watchdog.phase("step"), watchdog.phase(phase):
        if ranks.is_first:
            time.sleep(300)
        ranks.wait()


def test_a_rank_that_hangs_ends_the_run_with_every_ranks_place(on_ranks, tmp_path):
    with pytest.raises(
        AssertionError, match=r"rank 0 died with exit code 1[\s\S]*rank 1 died with exit code 1"
    ):
        on_ranks(hangs, tmp_path)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert "Rank 0 of 2 has been in phase rollout in step for more than 2 s" in first
    assert "Rank 1 of 2 has been in phase prepare in step for more than 1 s" in second
    assert "in hangs" in first  # the stacks
    assert "in wait" in second


COMES_BACK = """
import time
from rl4llm.runtime.ranks import Ranks
from rl4llm.runtime.watchdog import Watchdog

others = Ranks()
others.size = 2
with Watchdog(others, deadline_s=0.2) as watchdog:
    with watchdog.phase("rollout"):
        time.sleep(1)
        print("is back", flush=True)
    print("goes on", flush=True)
"""


def test_a_run_that_must_end_stays_ended_after_a_hang(tmp_path):
    """Else one rank may get to the end of training before it ends, and the launcher of the others waits for it for ever."""
    (tmp_path / "back.py").write_text(COMES_BACK)
    done = python(tmp_path / "back.py")
    assert (done.returncode, done.stdout) == (1, "is back\n")
    assert "has been in phase rollout for more than 0.2 s" in done.stderr


def test_one_process_alone_is_not_watched(alone):
    with Watchdog(alone, deadline_s=0.01) as watchdog, watchdog.phase("rollout"):
        torch.ones(1)
