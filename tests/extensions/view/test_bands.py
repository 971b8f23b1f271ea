import pytest

from rl4llm.extensions.view.bands import described
from rl4llm.extensions.view.run import find_runs

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
