"""Whatever happens to its servers on the way, a run ends with the weights of the run that nothing happened to."""

import math
import random

import pytest
import torch
from ended_runs import TwoTurns, assert_same_weights, metrics, weights
from fault_server import (
    FaultServer,
    edited,
    half_body,
    hang,
    kill,
    lie,
    reset,
    serving,
    small_model,
    status,
    text,
)
from vowels import Vowels

from rl4llm.api import GRPOTrainer

STEPS, PROMPTS, GROUP, TURNS, SERVERS = 4, 3, 4, 2, 3
REQUESTS = STEPS * PROMPTS * GROUP * TURNS


def nan_logprobs(answer):
    for row in answer["meta_info"].get("output_token_logprobs", ()):
        row[0] = math.nan


def seeded_faults(seed, struck):
    """Return ten faults of ten kinds, by path and number of the request; `struck` gets the name of each that struck."""
    draw = random.Random(seed)
    kinds = {
        "killed": kill(), "killed after its work": kill(after=True), "reset": reset(), "500": status(500),
        "hung": hang(), "half a body": half_body(), "no JSON": text("<html>"), "NaN log-probs": edited(nan_logprobs),
    }  # fmt: skip

    def noted(name, kind):
        async def fault(*arguments):
            struck.append(name)
            return await kind(*arguments)

        return fault

    numbers = draw.sample(range(5, REQUESTS), len(kinds))
    faults = {
        ("/generate", number): noted(*item) for number, item in zip(numbers, kinds.items(), strict=True)
    }
    updates = draw.sample(range(SERVERS, 8), 2)  # which are reached even when a server misses some of them
    for number, item in zip(
        updates, [("killed in an update", kill()), ("lied about an update", lie())], strict=True
    ):
        faults["/update_weights_from_disk", number] = noted(*item)
    return faults


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """Return a model and the directory that the trainer takes it from."""
    directory = tmp_path_factory.mktemp("base")
    model = small_model(tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, directory


@pytest.fixture
def train(base, tokenizer):
    """Train through servers with `faults`; return the final weights, the metrics of each step, and the servers."""

    def run(directory, faults):
        model, model_dir = base
        servers = [FaultServer(model, tokenizer, one_by_one=True) for _ in range(SERVERS)]
        for server in servers[1:]:
            server.shares_faults_with(servers[0])
        for (path, number), fault in faults.items():
            servers[0].at(path, {number: fault})
        rows = [
            {"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""}
            for i in range(PROMPTS)
        ]
        with serving(*servers, revive=True):
            done = GRPOTrainer(
                str(model_dir),
                rows,
                [Vowels()],
                env=TwoTurns,
                output={"dir": str(directory)},
                inference={"name": "sglang", "url": [server.url for server in servers], "deadline_s": 2.0},
                rollout={"prompts": PROMPTS, "group_size": GROUP, "max_tokens": 6},
                training={"lr": 3e-3},
                deterministic=True,
                max_steps=STEPS,
                **{"env.max_steps": TURNS},
            ).train()
        steps = metrics(directory)
        return weights(done), steps, servers

    return run


def test_ten_seeded_faults_do_not_change_the_final_weights(base, train, tmp_path):
    struck = []
    quiet, steps, _ = train(tmp_path / "quiet", {})
    assert steps[-1]["fleet/failures"] == 0
    assert not all(torch.equal(tensor, base[0].state_dict()[name]) for name, tensor in quiet.items())
    stormy, steps, servers = train(tmp_path / "stormy", seeded_faults(0, struck))
    assert len(struck) == len(set(struck)) == 10
    assert steps[-1]["fleet/failures"] > 0
    assert steps[-1]["fleet/left"] > 0
    assert [(step["trajectories"], step["failures"]) for step in steps] == [(PROMPTS * GROUP, 0)] * STEPS
    for server in servers:
        assert len(set(server.rids)) == len(server.rids)
    assert_same_weights(quiet, stormy)
