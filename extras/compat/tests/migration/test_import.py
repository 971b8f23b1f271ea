"""`rl4llm import`: commands and configurations of verl become ours, and each line says what it was."""

import shutil
from pathlib import Path

import pytest
import yaml

from rl4llm.algorithms import ALGORITHMS
from rl4llm.cli import main
from rl4llm.compose import build_algorithm
from rl4llm.config import flatten, load_config
from rl4llm.core.errors import ConfigError
from rl4llm_compat.migration.convert import convert
from rl4llm_compat.migration.read import read
from rl4llm_compat.migration.rules import RULES, DataFacts
from rl4llm_compat.migration.shell import commands
from rl4llm_compat.migration.table import CONVERTERS, DEFAULTS, ROWS, row_of

SOURCES = Path(__file__).parent / "sources"
SCRIPT = SOURCES / "verl.sh"
EXPECTED = {
    "model.path": "Qwen/Qwen3-4B", "data.path": "/data/gsm8k/train.parquet", "eval.path": "/data/gsm8k/test.parquet",
    "data.bad_rows": "skip", "rollout.prompts": 64, "rollout.group_size": 5, "rollout.max_tokens": 2048,
    "rollout.top_k": 0, "training.updates_per_rollout": 2, "training.lr": 2e-6, "training.warmup_steps": 42,
    "algorithm.name": "grpo", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.dual_clip": 3.0,
    "algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "k3", "algorithm.aggregation": "sequence",
    "inference.name": "vllm", "tracking.wandb": True, "output.dir": "runs/qwen3", "launch.nproc": 8,
    "checkpoint.every": 0, "eval.every": 5, "max_steps": 210,
}  # fmt: skip
"""What the script becomes, with a dataset of 7,473 rows."""


def converted(source, rows=None):
    return convert(read(str(source)), DataFacts(rows))


def test_script_becomes_a_valid_configuration(tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    assert main(["import", str(SCRIPT), "--out", str(out), "--rows", "7473"]) == 0, capsys.readouterr().err
    found = flatten(yaml.safe_load(out.read_text()))
    assert {key: found.get(key) for key in EXPECTED} == EXPECTED
    assert flatten(load_config(out).values())["model.path"] == EXPECTED["model.path"]


def test_every_key_of_a_script_is_named_in_a_comment():
    text = converted(SCRIPT, 7473).text("head")
    comments = [line.partition("#")[2] for line in text.splitlines()]
    for key in read(str(SCRIPT)):
        assert any(key in comment for comment in comments), f"{key} is not answered"
    assert all("#" in line or line.endswith(":") for line in text.splitlines())


def test_all_47_keys_of_verls_qwen3_script_are_answered():
    lines = (SOURCES / "verl_keys.txt").read_text().split()
    found = converted(f"verl.trainer.main_ppo {' '.join(map(repr, lines))}", 7473)
    assert len(lines) == 47
    assert not found.open
    assert all(row_of(line.partition("=")[0]) for line in lines)


def test_a_column_of_images_turns_vision_on():
    found = flatten(yaml.safe_load(converted("verl.trainer.main_ppo data.image_key=images").text("head")))
    assert found["model.vision"] == "frozen"
    other = converted("verl.trainer.main_ppo data.image_key=pictures")
    assert "#   data.image_key=pictures: `model.vision` (frozen for image or images" in other.text(
        "head"
    ) and "vision:" not in other.text("head")


@pytest.mark.parametrize(("given", "said"), [
    ("", {"critic_lr: 1.0e-05": "critic.optim.lr=1.0e-05, the default of verl"}),
    ("critic.optim.lr=3e-6", {"critic_lr: 3.0e-06": "critic.optim.lr=3.0e-06"}),
    ("actor_rollout_ref.actor.ppo_epochs=2", {"critic_passes: 2": "actor_rollout_ref.actor.ppo_epochs=2"}),
    ("critic.ppo_epochs=3", {"critic_passes: 3": "critic.ppo_epochs=3"}),
    ("trainer.critic_warmup=5", {"critic_warmup_steps: 5": "trainer.critic_warmup=5"}),
])  # fmt: skip
def test_critic_has_the_numbers_of_verl(given, said):
    lines = converted(f"verl.trainer.main_ppo {given}").text("head").splitlines()
    others = {"value_clip: 0.5": "critic.cliprange_value=0.5, the default of verl"}
    for line, source in (said | others).items():
        assert f"  {line}  # {source}" in lines


def test_only_ppo_has_a_critic():
    found = converted("verl.trainer.main_ppo algorithm.adv_estimator=grpo critic.optim.lr=3e-6")
    assert not {name for name in found.keys if "critic" in name or "value_clip" in name}
    assert [given for given, _ in found.without] == ["critic.optim.lr=3.0e-06"]


def test_unknown_key_is_to_be_decided():
    found = convert({"data.train_batch_sise": 4, "trainer.total_training_steps": 1}, DataFacts())
    assert found.open == ["data.train_batch_sise=4: not a key of verl that is known here"]


def test_zero_processes_are_to_be_decided():
    found = convert({"trainer.n_gpus_per_node": 0}, DataFacts())
    assert "trainer.n_gpus_per_node x trainer.nnodes is 0. Accepted: 1 or more." in found.open


@pytest.mark.parametrize(("mode", "name"), [("dppo_tv", "dppo"), ("dppo_kl", "dppo_kl")])
def test_divergence_ppo_is_built_with_its_bounds(mode, name, tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    words = (
        f"verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode={mode} "
        "actor_rollout_ref.model.path=M data.train_files=rows.parquet trainer.total_training_steps=5 "
        "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.clip_ratio_c=20"
    )
    assert main(["import", words, "--out", str(out)]) == 0, capsys.readouterr().err
    algorithm = build_algorithm(load_config(out))
    assert type(algorithm) is ALGORITHMS[name]
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.log_ratio_coef) == (0.2, 0.2, 0.0)
    text = out.read_text()
    without = text[text.index("# Without a counterpart") :]
    assert "actor_rollout_ref.actor.clip_ratio_c=20" in without
    assert "log-probs before the updates" in without


def test_value_without_a_counterpart_is_to_be_decided():
    words = "verl.trainer.main_ppo algorithm.adv_estimator=gpg actor_rollout_ref.model.path=$NOT_SET_HERE"
    found = converted(words)
    assert "algorithm.adv_estimator=gpg has no counterpart. Accepted: gae, grpo" in found.open[1]
    assert "NOT_SET_HERE: set the variable" in found.open[0]
    assert "max_steps is rows x 30 epochs / 1024 prompts" in found.open[2]
    assert "algorithm.name" not in found.keys
    assert "# To be decided:\n#   actor_rollout_ref.model.path" in found.text("head")


@pytest.mark.parametrize(("given", "message"), [
    ("nothing.yaml", "The file nothing.yaml does not exist"),
    ("echo hello world", "contains no command of verl"),
    ("{dir}/ours.yaml", "has no key of verl"),
    ("{dir}/binary", "binary is not UTF-8"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(given, message, tmp_path):
    (tmp_path / "ours.yaml").write_text("something: else\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=message):
        read(given.format(dir=tmp_path))


def test_long_values_stay_on_one_line():
    values = {"actor_rollout_ref.model.path": "Think.\nThen answer: " + "x" * 200}
    text = convert(values, DataFacts()).text("head")
    comment = next(line for line in text.splitlines() if "model.path=" in line)
    assert "# actor_rollout_ref.model.path=Think. Then answer: xxx" in comment and comment.endswith("...")
    assert yaml.safe_load(text)["model"]["path"] == values["actor_rollout_ref.model.path"]


def test_existing_file_is_not_overwritten(tmp_path, capsys):
    shutil.copy(SCRIPT, tmp_path / "verl.sh")
    assert main(["import", str(tmp_path / "verl.sh"), "--out", str(tmp_path / "verl.sh")]) == 2
    assert "verl.sh exists. Next: remove it" in " ".join(capsys.readouterr().err.split())


VERL_YAML = """
data: {train_files: "${oc.env:DATA}/x.parquet", train_batch_size: 64, custom: {token: hf-geheim}}
actor_rollout_ref: {model: {path: "${oc.env:WORD}"}, actor: {ppo_mini_batch_size: "${data.train_batch_size}"}}
trainer: {project_name: "${trainer.experiment_name}", experiment_name: "${oc.env:WORD}", total_training_steps: 5}
"""
VERL_SCRIPT = """
NAME=${PROJECT:-$WORD}
python3 -m verl.trainer.main_ppo data.train_files=$DATA/x.parquet actor_rollout_ref.model.path="$WORD" \\
  data.train_batch_size=64 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.project_name=$NAME +data.custom.token=hf-geheim \\
  trainer.total_training_steps=${STEPS:-5}
"""


@pytest.mark.parametrize(("suffix", "text"), [(".yaml", VERL_YAML), (".sh", VERL_SCRIPT)])
def test_variables_stay_references_and_secrets_are_hidden(suffix, text, tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "geheim-1")
    monkeypatch.setenv("DATA", "/geheim-2")
    (tmp_path / f"source{suffix}").write_text(text)
    out = tmp_path / "ours.yaml"
    assert main(["import", str(tmp_path / f"source{suffix}"), "--out", str(out)]) == 0
    assert "geheim" not in out.read_text()
    found = flatten(yaml.safe_load(out.read_text()))
    expected = {"data.path": "${oc.env:DATA}/x.parquet", "model.path": "${oc.env:WORD}", "max_steps": 5}
    expected |= {"tracking.project": "${oc.env:WORD}", "rollout.prompts": 64 // 8}
    assert {name: found[name] for name in expected} == expected
    assert load_config(out).data.path == "/geheim-2/x.parquet"


def test_secret_of_a_key_of_ours_is_left_out():
    values = {"trainer.project_name": "sk-0123456789abcdef0123", "trainer.total_training_steps": 5}
    found = convert(values, DataFacts())
    assert "tracking.project: the secret is not written here" in found.open[-1]
    assert "sk-" not in found.text("head")


def test_script_words_have_variables_arrays_and_quotes(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = """A=${A:-x y}
N=$((2 * 4)); if true; then
N=99
fi
D=(
  k=${A}   # said
  l='$A'
  m="['$N','$HOME']"
)
export E=1
F=2 run "${D[@]}" n=$N o=$(hostname) q=${U:-$HOME/x} \\
   r=1e-6 $@ > log"""
    expected = [
        "run", "k=x y", "l=$A", "m=['8','${oc.env:HOME}']", "n=8", "o=$(hostname)", "q=${oc.env:HOME}/x", "r=1e-6",
        "",
    ]  # fmt: skip
    assert commands(text.replace("; if", "\nif"))[-1] == [word for word in expected if word]


def test_rows_name_keys_that_exist():
    """Each key that a rule or a default names has a row, and each row a converter and a key of ours."""
    names = {name for rule in RULES for name in rule.names} | set(DEFAULTS)
    assert not [name for name in names if row_of(name) is None]
    assert {row.by for row in ROWS.values()} <= CONVERTERS.keys()
    ours = {row.to for row in ROWS.values() if row.to and not row.to.startswith(("algorithm.", "env."))}
    assert ours <= flatten(load_config(overrides={"model.path": "m"}).values()).keys() | {"tracking.project"}


def test_longest_pattern_of_a_key_counts():
    assert "no Megatron" in row_of("actor_rollout_ref.actor.megatron.x").note
    assert row_of("actor_rollout_ref.actor.other").note == "rl4llm has no such option"
