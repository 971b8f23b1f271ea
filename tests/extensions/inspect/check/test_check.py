"""Each check passes on a setup that is whole, and fails on one that is broken on purpose."""

import asyncio
import copy
import inspect
import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from broken_parts import REWRITES_HISTORY, Lies, Talks, misspelled
from forked_python import python

from rl4llm.backends.lora import LoraAdapter
from rl4llm.config import load_config
from rl4llm.core.errors import EnvError
from rl4llm.core.types import TokenSpan
from rl4llm.extensions.inspect.check.bench import Bench
from rl4llm.extensions.inspect.check.laws import check_mask, check_sampled
from rl4llm.extensions.inspect.check.run import CHECKS, _result, check
from rl4llm.inference.local import LocalClient
from rl4llm.sync.inference import MemoryPublisher

ROOT = Path(__file__).parents[4]
NAMED = {item.name: item for item in CHECKS}
OF_EPISODES = ("rewards", "environment", "episodes", "log-probs", "publish")


@pytest.fixture(scope="module")
def small(model_dir, tmp_path_factory):
    """config(**overrides): a small setup that is whole."""
    directory = tmp_path_factory.mktemp("check")

    def config(overrides=None):
        own = {
            "model.path": str(model_dir),
            "model.autocast": "none",
            "data.path": "arithmetic",
            "data.limit": 4,
            "eval.every": 0,
            "rewards": [{"name": "length", "unit": "chars", "max_length": 1, "margin": 40}],
            "rollout.prompts": 2,
            "rollout.group_size": 2,
            "rollout.max_tokens": 4,
            "output.dir": str(directory / "run"),
        }
        return load_config(None, own | (overrides or {}))

    return config


@pytest.fixture(scope="module")
def bench(small):
    """The parts of a whole setup, after each check passed on it; tests put back what they change."""
    made, before = Bench(small()), {}
    for item in CHECKS:
        before[item.name] = _result(item, made, before)
    yield made, before
    made.close()


def on(config, *names):
    """What came of some checks, by name."""
    before = {}
    with closing(Bench(config)) as made:
        for name in names:
            before[name] = _result(replace(NAMED[name], needs=()), made, before)
    return before


def status(config, *names):
    """The status of the last of some checks."""
    return on(config, *names)[names[-1]].status


def test_a_setup_that_is_whole_passes_and_nothing_is_left_of_it(bench, small):
    _, results = bench
    statuses = {name: result.status for name, result in results.items()}
    assert {statuses.pop(name) for name in ("servers", "sandbox", "merge")} == {"skipped"}
    assert set(statuses.values()) == {"passed"}, results
    assert not Path(small().output.dir).exists()


def test_a_dataset_is_checked_without_an_engine(model_dir, small, tmp_path):
    said = [
        {"role": "user", "content": "How many coins are 37 and 48?"},
        {"role": "assistant", "content": "Answer: 85"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(4)))
    config = small({"algorithm.name": "sft", "data.path": str(tmp_path), "data.limit": None, "rewards": None})
    results = {result.name: result for result in check(config)}
    skipped = {name for name, result in results.items() if result.status == "skipped"}
    assert skipped == {*OF_EPISODES, "servers", "sandbox", "merge"}
    assert {results[name].status for name in NAMED.keys() - skipped} == {"passed"}, results


def test_check_of_missing_data_fails_and_skips_what_needs_it(small):
    results = {result.name: result.status for result in check(small({"data.path": "/nowhere/train.jsonl"}))}
    passed = {"tokenizer", "sandbox", "servers", "disk"}
    assert results["data"] == "failed" and results["disk"] == results["tokenizer"] == "passed"
    assert {results[name] for name in results.keys() - passed - {"data"}} == {"skipped"}


JUDGE = {"name": "llm_judge", "url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "NOT_SET_ANYWHERE"}


@pytest.mark.parametrize("reward", ["broken_parts:Lies", JUDGE])
def test_a_reward_that_lies_or_cannot_be_made_fails(reward, small):
    assert status(small({"rewards": [reward]}), "data", "tokenizer", "rewards") == "failed"


def test_a_template_that_rewrites_history_fails(small, tokenizer, tmp_path, model_dir):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = REWRITES_HISTORY
    for file in model_dir.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    broken.save_pretrained(tmp_path)
    config = small({"model.path": str(tmp_path), "env": {"name": "broken_parts:Talks", "max_steps": 3}})
    assert status(config, "data", "tokenizer", "rewards", "environment") == "failed"
    with closing(Bench(config)) as made:
        for name in ("data", "tokenizer"):
            NAMED[name].run(made)
        made.parts[0].env = Talks(
            made.parts[0].dataset, made.tokenizer, [Lies()], batch_size=1, group_size=1, max_steps=3
        )
        assert _result(replace(NAMED["template"], needs=()), made, {}).status == "failed"


def test_a_tool_that_raises_fails_with_its_line(small):
    config = small({"env": {"name": "tool", "tools": ["broken_parts:misspelled"]}})
    result = on(config, "data", "tokenizer", "rewards", "environment")["environment"]
    line = inspect.getsourcelines(misspelled)[1] + 6
    assert result.status == "failed" and f"broken_parts.py:{line})" in result.text


def test_episodes_without_a_tool_call_are_named(small):
    names = ("data", "tokenizer", "rewards", "environment", "template", "model", "episodes")
    tools = {"env": {"name": "tool", "tools": ["calculator"]}}
    assert "0 tool calls: see what the model writes" in on(small(tools), *names)["episodes"].text
    assert "tool calls" not in on(small(), *names)["episodes"].text


@pytest.mark.parametrize(("name", "keys"), [
    ("servers", {"inference": {"name": "sglang", "url": "http://127.0.0.1:9"}}),
    ("servers", {"rewards": [{"name": "llm_judge", "url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r"}]}),
    ("data", {"env": {"name": "chat", "remote": "127.0.0.1:9"}}),  # a host may have rows of its own
])  # fmt: skip
def test_a_missing_server_or_host_fails_at_once(name, keys, small):
    result = on(small(keys), name)[name]
    assert result.status == "failed" and "127.0.0.1:9" in result.text and result.seconds < 5


@pytest.mark.parametrize(("free", "expected"), [(10**6, "failed"), (10**8, "passed")])
def test_a_disk_that_is_too_small_fails(small, monkeypatch, free, expected):
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=free))
    assert status(small(), "disk") == expected


def test_programs_without_walls_fail(small):
    config = small({"rewards": ["code"], "sandbox.level": "rlimits"})
    assert status(config, "data", "tokenizer", "rewards", "sandbox") == "failed"


def test_check_finds_other_weights_and_a_publish_without_effect(bench):
    made, before = bench
    trainer, groups, completions = made.trainer, made.groups, made.completions
    inference = trainer.inference
    frozen = LocalClient(copy.deepcopy(trainer.backend.model), made.tokenizer)
    try:  # its weights are a copy, which no publisher here reaches
        trainer.inference = replace(inference, client=frozen, publisher=MemoryPublisher(frozen), canary=None)
        assert _result(NAMED["publish"], made, before).status == "failed"
        with torch.no_grad():
            frozen._model.model.norm.weight.mul_(1.5)
        assert _result(NAMED["episodes"], made, before).status == "passed"
        assert _result(NAMED["log-probs"], made, before).status == "failed"
    finally:
        trainer.inference, made.groups, made.completions = inference, groups, completions
        asyncio.run(frozen.close())
    assert _result(NAMED["log-probs"], made, before).status == "passed"


def test_tracker_without_its_package_fails(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    assert status(small({"tracking.wandb": True}), "model") == "failed"


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_a_loss_that_is_a_mean_of_its_micro_batch_fails(small, autocast):
    config = small({"algorithm.name": "broken_parts:MeanOfMicroBatch", "model.autocast": autocast})
    results = {result.name: result.status for result in check(config)}
    assert (results["loss"], results["log-probs"]) == ("failed", "passed")


def test_a_method_that_remembers_rewards_passes(small):
    results = on(small({"algorithm": {"name": "rae"}}), "data", "rewards", *NAMED)
    assert results["loss"].status == "passed", results["loss"]


def test_a_loss_without_an_effect_fails(small):
    results = on(small({"algorithm.name": "broken_parts:Unmoved"}), "data", "rewards", *NAMED)
    assert results["loss"].status == "failed"


@pytest.mark.parametrize("lost", ["", "layers.1.mlp.down_proj"])
def test_adapter_that_is_not_merged_whole_fails(small, lost, monkeypatch):
    merged = LoraAdapter.merged_parameters

    def without(self):
        base = dict(self.base_parameters())
        return ((name, base[name] if lost and lost in name else tensor) for name, tensor in merged(self))

    monkeypatch.setattr(LoraAdapter, "merged_parameters", without)
    names = (
        "data", "tokenizer", "rewards", "environment", "template", "model", "episodes", "merge", "publish",
    )  # fmt: skip
    results = on(small({"model.lora.rank": 2}), *names)
    assert results["merge"].status == ("failed" if lost else "passed")
    assert results["publish"].status == "passed"  # all weights are as they were


def test_equal_samples_skip_the_check_of_the_loss(small):
    result = on(small({"rollout.top_k": 1, "rollout.group_size": 4}), "data", "rewards", *NAMED)["loss"]
    assert result.status == "skipped", result


def test_a_mask_that_is_not_what_was_sampled_fails(bench):
    made, _ = bench
    trajectories = [trajectory for group in made.groups for trajectory in group.trajectories]
    batches = made.trainer.preparation.batching.pack(trajectories, [1.0] * len(trajectories))
    check_sampled(made.completions, trajectories)
    check_mask(trajectories, batches)
    shifted = [replace(batch, mask_BT=batch.mask_BT.roll(1, dims=1)) for batch in batches]
    with pytest.raises(EnvError):
        check_mask(trajectories, shifted)
    first, *others = trajectories
    said = first.spans[1]
    made_up = TokenSpan((said.token_ids[0] + 1, *said.token_ids[1:]), "policy", said.logprobs, 0)
    with pytest.raises(EnvError):
        check_sampled(made.completions, [replace(first, spans=(first.spans[0], made_up)), *others])


def test_check_prints_a_line_per_check_or_json(model_dir, tmp_path):
    words = ["-m", "rl4llm", "check", "configs/quickstart.yaml", f"model.path={model_dir}"]
    own = [f"output.dir={tmp_path / 'run'}", "rollout.max_tokens=8", "data.limit=8", "eval.limit=4", "--json"]
    own += ["rollout.prompts=2", "rollout.group_size=2"]
    done = python(*words, *own)
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    assert told["passed"] and [item["name"] for item in told["checks"]] == list(NAMED)
    assert not (tmp_path / "run").exists()
