"""What episodes that begin early take, and what they would give."""

import json
import random

import pytest
import torch

from rl4llm.cli import main
from rl4llm.core.sample import SampleState
from rl4llm.core.types import ChatMessage, TokenSpan
from rl4llm.envs.stored import _row
from rl4llm.extensions.inspect.plan.staleness import STORED, Overlap


@pytest.fixture
def plan(model_dir, tmp_path, capsys):
    """Return plan("key=value", ...): the exit code, and what the command printed."""
    (tmp_path / "run.yaml").write_text(
        "data: {path: arithmetic, limit: 8}\neval: {every: 0}\ninference: {name: embedded}\n"
        "rollout: {prompts: 4, group_size: 2, max_tokens: 16}\n"
    )

    def run(*words):
        code = main(["plan", str(tmp_path / "run.yaml"), f"model.path={model_dir}", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def timed(tmp_path):
    """Return timed(key=value): the directory of a run whose steps take 8 seconds, 6 of them to play."""

    def run(**more):
        steps = [{"step": step, "time/step": 8.0, "time/rollout": 6.0, **more} for step in range(1, 4)]
        rows = [{"step": 0, "time/evaluate": 1.0}, *steps]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return run


def test_the_plan_counts_what_plays_at_once(plan):
    code, said = plan("rollout.max_staleness=2", "--json")
    found = json.loads(said)
    one = json.loads(plan("--json")[1])
    assert code == 0 and "under_way" not in one
    assert (found["under_way"]["groups"], found["under_way"]["sequences"]) == (12, 24)
    assert found["under_way"]["tokens"] == 24 * found["counts"]["longest"] * 68
    assert found["under_way"]["stored"] == 16 * found["counts"]["longest"] * STORED
    each = found["under_way"]["cache"] / 24
    model = found["model"]
    assert each == pytest.approx(
        2 * 4 * model["layers"] * model["kv_heads"] * model["head_dim"] * found["counts"]["longest"], rel=0.01
    )
    said = " ".join(plan("rollout.max_staleness=2")[1].split())
    assert "up to 12 groups of 24 sequences" in said and "A checkpoint stores up to" in said
    assert "rollout.max_staleness=2: older samples train with algorithm.old_logprobs=recomputed," in said


def test_a_stored_token_takes_what_the_plan_assumes():
    choose, count = random.Random(0), 5000
    ids = tuple(choose.randrange(150_000) for _ in range(count))
    logprobs = tuple(torch.tensor([-choose.expovariate(1.0) for _ in range(count)]).tolist())
    sample = SampleState("0", 0, [ChatMessage("assistant", "word" * count)], "")
    sample.spans.append(TokenSpan(ids, "policy", logprobs, 3))
    assert len(json.dumps(_row(sample))) / count == pytest.approx(STORED, abs=1)


def test_the_plan_estimates_steps_from_a_run(plan, timed):
    found = json.loads(plan("--run", str(timed()), "--json")[1])["overlap"]
    assert (found["rollout_s"], found["training_s"]) == (6.0, 2.0)
    assert found["step_s"] == {
        "0": [8.0, 8.0],
        "1": [4.0, 6.0],
        "2": [pytest.approx(8 / 3), 6.0],
        "4": [2.0, 6.0],
    }
    assert "4.0 s with 1, 2.7 s with 2, 2.0 s with 4" in " ".join(plan("--run", str(timed()))[1].split())


def test_times_of_an_asynchronous_run_are_refused(plan, timed):
    code, said = plan("--run", str(timed(staleness=0.5)))
    assert code == 2 and "has rollout.max_staleness above 0" in said
    code, said = plan("--run", "nowhere")
    assert code == 2 and "no finished step that played episodes" in said


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_step_is_shorter_than_its_training(bound):
    overlap = Overlap(rollout_s=5.0, training_s=20.0)
    assert overlap.step_s(bound, 1.0) == (25.0 if bound == 0 else 20.0)
