import pytest
from extensions.view.runs import write_run

from rl4llm.extensions.view.bands import described
from rl4llm.extensions.view.index import COLUMNS
from rl4llm.extensions.view.run import find_runs
from rl4llm.extensions.view.story import histogram

CONFIG = """
model: {{path: {model}, dtype: float32}}
training: {{lr: {lr}}}
sync: {{dir: /tmp/{seed}}}
output: {{dir: {name}}}
seed: {seed}
"""


def bands(directory, *runs):
    for name, seed, model, lr in runs:
        (directory / name).mkdir(parents=True)
        (directory / name / "metrics.jsonl").write_text("")
        if model:
            text = CONFIG.format(name=name, seed=seed, model=model, lr=lr)
            (directory / name / "config.yaml").write_text(text)
    abouts = described(find_runs([directory / name for name, *_ in runs]))
    return [(about["band"], about["band_name"]) for about in abouts]


def test_runs_that_differ_in_seed_and_paths_are_a_band(tmp_path):
    same = [(f"grpo-{seed}", seed, f"runs/{seed}/warm", 1e-4) for seed in range(3)]
    assert bands(tmp_path, *same) == [(0, "grpo")] * 3


@pytest.mark.parametrize(
    "other",
    [("b-1", 1, "runs/0/warm", 2e-4), ("b-1", 1, "runs/0/cold", 1e-4), ("b-1", 0, "runs/1/warm", 1e-4)],
    ids=["other key", "other model", "same seed"],
)
def test_other_configurations_are_no_band(tmp_path, other):
    one = ("a-0", 0, "runs/0/warm", 1e-4)
    third = ("a-2", 2, "runs/2/warm", 1e-4)
    assert bands(tmp_path, one, other, third) == [(0, "a"), (1, "b-1"), (0, "a")]


def test_bands_have_different_names(tmp_path):
    lrs = (1e-4, 1e-4, 2e-4, 2e-4)
    runs = [(f"seed-{n}", n, "warm", lr) for n, lr in enumerate(lrs)]
    assert bands(tmp_path, *runs, ("seed-x", 9, "warm", 3e-4)) == [
        *[(0, "seed")] * 2, *[(2, "seed-2")] * 2, (4, "seed-x")
    ]  # fmt: skip


def test_runs_without_a_configuration_are_no_band(tmp_path):
    assert bands(tmp_path, ("x", 0, "", 0), ("y", 1, "", 0)) == [(0, "x"), (1, "y")]


def row(**values):
    full = {"set": "step", "more": {}, **values}
    return [full.get(name) for name in COLUMNS]


def test_each_of_a_few_rewards_is_a_bin(tokenizer, tmp_path):
    (run,) = find_runs([write_run(tmp_path / "run", tokenizer)])
    run.index.refresh(60)
    assert any(one[COLUMNS.index("failure")] for one in run.index.rows)
    expected = [[step, step, [6, 2]] for step in (1, 2, 3)]
    assert run.story()["rewards"] == {"bins": [[0, 0], [1, 1]], "columns": expected}


def test_many_rewards_and_steps_are_put_together():
    rows = [row(step=step, reward=step % 17 / 16) for step in range(1, 341)]
    found = histogram(rows)
    assert found["bins"][0] == [0, 0.0625] and found["bins"][-1] == [0.9375, 1] and len(found["bins"]) == 16
    assert [column[:2] for column in found["columns"]][::112] == [[1, 3], [337, 339]]
    totals = [sum(counts) for counts in zip(*(counts for *_, counts in found["columns"]), strict=True)]
    assert totals == [20] * 15 + [40]  # the last bin has its upper edge
    others = [row(step=1, reward=9.0, **more) for more in ({"set": "eval"}, {"more": {"frozen": True}})]
    assert histogram(rows + others) == found and histogram([]) == {"bins": [], "columns": []}


def test_rewards_may_be_as_large_as_floats():
    found = histogram([row(step=1, reward=reward) for reward in (1e999, -1e308, 1e308, *range(12))])
    assert found["bins"][0][0] == -1e308 and found["columns"] == [[1, 1, [1, *[0] * 7, 12, *[0] * 6, 1]]]
