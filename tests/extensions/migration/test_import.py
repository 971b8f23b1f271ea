"""`rl4llm import`: commands and configurations of other projects become ours, and each line says what it was."""

import shutil
from pathlib import Path

import pytest
import yaml

from rl4llm.cli import main
from rl4llm.config import flatten, load_config
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.migration.convert import convert
from rl4llm.extensions.migration.original import ORIGINAL
from rl4llm.extensions.migration.projects import PROJECTS, trl
from rl4llm.extensions.migration.read import read
from rl4llm.extensions.migration.row import DataFacts
from rl4llm.extensions.migration.shell import commands
from rl4llm.extensions.migration.verl import VERL

SOURCES = Path(__file__).parent / "sources"
EXPECTED = {
    "verl.sh": {
        "model.path": "Qwen/Qwen3-4B", "data.path": "/data/gsm8k/train.parquet", "eval.path": "/data/gsm8k/test.parquet",
        "data.bad_rows": "skip", "rollout.prompts": 64, "rollout.group_size": 5, "rollout.max_tokens": 2048,
        "rollout.top_k": 0, "training.updates_per_rollout": 2, "training.lr": 2e-6, "training.warmup_steps": 42,
        "algorithm.name": "grpo", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.dual_clip": 3.0,
        "algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "k3", "algorithm.aggregation": "sequence",
        "inference.name": "vllm", "tracking.wandb": True, "output.dir": "runs/qwen3", "launch.nproc": 8,
        "checkpoint.every": 0, "eval.every": 5, "max_steps": 210,
    },
    "original.yaml": {
        "seed": 117, "output.dir": "./runs/dapo", "data.path": "openai/gsm8k:main", "data.prompt_column": "question",
        "model.path": "Qwen/Qwen2.5-0.5B", "algorithm.name": "dapo", "rollout.prompts": 32, "rollout.group_size": 16,
        "training.updates_per_rollout": 4, "training.lr": 1e-6, "training.max_grad_norm": 0.0, "rollout.top_k": 0,
        "algorithm.clip_high": 0.28, "backend.name": "deepspeed", "backend.zero_stage": 3,
        "backend.offload_optimizer": True, "eval.every": 20, "max_steps": 200, "model.autocast": "bfloat16",
    },
    "trl.yaml": {
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct", "data.path": "rows.jsonl", "training.lr": 1e-5,
        "rollout.group_size": 4, "rollout.prompts": 2, "rollout.max_tokens": 64, "max_steps": 20,
        "algorithm.name": "grpo", "algorithm.aggregation": "token", "training.schedule": "linear",
    },
}  # fmt: skip
"""What each source becomes, with a dataset of 7,473 rows."""


def converted(source, rows=7473):
    found = read(str(source))
    return convert(found.project, found.values, DataFacts(rows))


@pytest.mark.parametrize("name", EXPECTED)
def test_source_becomes_a_valid_configuration(name, tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    assert main(["import", str(SOURCES / name), "--out", str(out), "--rows", "7473"]) == 0, (
        capsys.readouterr().err
    )
    found = flatten(yaml.safe_load(out.read_text()))
    assert {key: found.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    assert flatten(load_config(out))["model.path"] == EXPECTED[name]["model.path"]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_of_a_source_is_named_in_a_comment(name):
    source = read(str(SOURCES / name))
    text = converted(SOURCES / name).text("head")
    comments = [line.partition("#")[2] for line in text.splitlines()]
    for key in source.project.prepare(source.values):
        shown = key.removeprefix("method.")
        if shown not in ("name", "env.kwargs"):
            assert any(shown in comment for comment in comments), f"{key} is not answered"
    assert all("#" in line or line.endswith(":") for line in text.splitlines())


def test_all_47_keys_of_verls_qwen3_script_are_answered():
    lines = (SOURCES / "verl_keys.txt").read_text().split()
    found = convert(VERL, read(f"verl.trainer.main_ppo {' '.join(map(repr, lines))}").values, DataFacts(7473))
    assert len(lines) == 47
    assert not found.open
    assert all(VERL.row(line.partition("=")[0]) for line in lines)


ORIGINALS = sorted(path.stem for path in (SOURCES / "original").glob("*.yaml"))


@pytest.mark.parametrize("name", ORIGINALS)
def test_every_key_of_the_originals_files_has_an_answer(name):
    assert converted(SOURCES / "original" / f"{name}.yaml").open == []


def test_deepspeed_sections_of_policy_and_critic_are_read():
    keys = converted(SOURCES / "original" / "ppo.yaml").keys
    assert (keys["training.lr"][0], keys["algorithm.critic_lr"][0]) == (5e-7, 1e-6)
    assert (keys["training.betas"][0], keys["training.weight_decay"][0]) == ([0.9, 0.999], 0.0)
    assert (keys["model.autocast"][0], keys["backend.zero_stage"][0]) == ("bfloat16", 3)


def test_scheduler_of_deepspeed_becomes_schedule_and_warmup():
    scheduler = {"type": "WarmupDecayLR", "params.warmup_num_steps": 20, "params.warmup_max_lr": 5e-6}
    given = {f"policy_deepspeed.scheduler.{name}": value for name, value in scheduler.items()}
    keys = convert(ORIGINAL, {"deepspeed.optimizer.params.lr": 1e-3} | given, DataFacts()).keys
    found = {name: keys[f"training.{name}"][0] for name in ("schedule", "warmup_steps", "lr")}
    assert found == {"schedule": "linear", "warmup_steps": 20, "lr": 5e-6}
    unknown = convert(ORIGINAL, {"deepspeed.scheduler.type": "OneCycle"}, DataFacts())
    assert "scheduler.type=OneCycle has no counterpart. Accepted: WarmupLR" in unknown.open[0]


def test_explore_grpo_is_recognized_and_has_both_ladders():
    keys = converted(SOURCES / "original" / "explore_grpo.yaml").keys
    assert keys["algorithm.name"][0] == "explore_grpo"
    temperatures, top_ps = keys["algorithm.temperatures"][0], keys["algorithm.top_ps"][0]
    assert (len(temperatures), temperatures[0], temperatures[-1]) == (16, 0.6, 1.2)
    assert (len(top_ps), top_ps[0], top_ps[-1]) == (16, 0.8, 1.0)


def test_value_model_is_trained_alone(tmp_path):
    out = tmp_path / "ours.yaml"
    assert main(["import", str(SOURCES / "original" / "value_net.yaml"), "--out", str(out)]) == 0
    config = load_config(out)
    assert (config.model.path, config.max_steps) == ("Qwen/Qwen2.5-0.5B", 1)
    expected = {"name": "ppo", "critic_warmup_steps": 1, "critic_epochs": 2, "lam": 1.0, "value_clip": None}
    assert config.algorithm | expected == config.algorithm
    assert config.training.lr == 5e-6 and config.training.updates_per_rollout == 32
    keys = convert(ORIGINAL, {"value_net_config.max_steps": 7}, DataFacts()).keys
    assert keys["algorithm.critic_warmup_steps"][0] == keys["max_steps"][0] == 7


def test_command_of_the_value_model_learns_from_one_rollout():
    file = SOURCES / "original" / "value_net.yaml"
    found = converted_words(f"deepspeed --num_gpus 2 scripts/run_train_value_net.py --config-file {file}")
    assert (found.keys["max_steps"][0], found.keys["rollout.prompts"][0]) == (1, 256)


def test_unknown_key_is_to_be_decided():
    found = convert(ORIGINAL, {"grpo.group_size": 4, "policy_deepseed.lr": 1}, DataFacts())
    assert found.open == ["policy_deepseed.lr=1: not a key of michaelnny/rl4llm that is known here"]


def test_value_without_a_counterpart_is_to_be_decided():
    words = "verl.trainer.main_ppo algorithm.adv_estimator=gpg actor_rollout_ref.model.path=$NOT_SET_HERE"
    found = converted_words(words)
    assert "algorithm.adv_estimator=gpg has no counterpart. Accepted: gae, grpo" in found.open[1]
    assert "NOT_SET_HERE: set the variable" in found.open[0]
    assert "max_steps is rows x 30 epochs / 1024 prompts" in found.open[2]
    assert "algorithm.name" not in found.keys
    assert "# To be decided:\n#   actor_rollout_ref.model.path" in found.text("head")


def converted_words(words):
    source = read(words)
    return convert(source.project, source.values, DataFacts())


@pytest.mark.parametrize(
    ("command", "project", "key", "value"),
    [
        ("deepspeed --num_gpus=4 scripts/run_train_grpo.py --config-file {original} --use-infer-server --infer-host h "
         "--infer-cohost-mode", "michaelnny/rl4llm", "inference.url", "http://h:30000"),
        ("deepspeed --num_gpus=4 scripts/run_train_grpo.py --config-file {original}", "michaelnny/rl4llm",
         "rollout.prompts", 8),
        ("trl grpo --config {trl} --learning_rate 3e-6", "TRL", "training.lr", 3e-6),
        ("trl dpo --model_name_or_path m --beta 0.3 --max_steps 4", "TRL", "algorithm.beta", 0.3),
    ],
)  # fmt: skip
def test_commands_of_each_project_are_read(command, project, key, value):
    files = {path.stem: path for path in SOURCES.glob("*.yaml")}
    source = read(command.format(**files))
    assert source.project.name == project
    assert convert(source.project, source.values, DataFacts()).keys[key][0] == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing.yaml", "The file nothing.yaml does not exist"),
        ("echo hello world", "contains no command of a project that is known here"),
        ("{dir}/ours.yaml", "has no key of a project that is known here"),
    ],
)
def test_what_cannot_be_read_is_refused(given, message, tmp_path):
    (tmp_path / "ours.yaml").write_text("something: else\n")
    with pytest.raises(ConfigError, match=message):
        read(given.format(dir=tmp_path))


def test_long_values_stay_on_one_line():
    values = {"grpo.system_prompt": "Think.\nThen answer: " + "x" * 200, "grpo.group_size": 4}
    text = convert(ORIGINAL, values, DataFacts()).text("head")
    comment = next(line for line in text.splitlines() if "system_prompt=" in line)
    assert "# system_prompt=Think. Then answer: xxx" in comment and comment.endswith("...")
    assert yaml.safe_load(text)["data"]["system_prompt"] == values["grpo.system_prompt"]


def test_existing_file_is_not_overwritten(tmp_path, capsys):
    shutil.copy(SOURCES / "trl.yaml", tmp_path / "trl.yaml")
    assert main(["import", str(tmp_path / "trl.yaml"), "--out", str(tmp_path / "trl.yaml")]) == 2
    assert "trl.yaml exists. Next: remove it" in " ".join(capsys.readouterr().err.split())


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
    found = convert(VERL, values, DataFacts())
    assert "tracking.project: the secret is not written here" in found.open[-1]
    assert "sk-" not in found.text("head")


def test_variable_in_the_name_of_a_file_to_read_is_replaced(monkeypatch):
    monkeypatch.setenv("FILES", str(SOURCES))
    assert (
        read("trl grpo --config $FILES/trl.yaml").values["model_name_or_path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    )


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
        "run",
        "k=x y",
        "l=$A",
        "m=['8','${oc.env:HOME}']",
        "n=8",
        "o=$(hostname)",
        "q=${oc.env:HOME}/x",
        "r=1e-6",
        "",
    ]
    assert commands(text.replace("; if", "\nif"))[-1] == [word for word in expected if word]


@pytest.mark.parametrize(
    "project", [*PROJECTS, trl("grpo"), trl("dpo"), trl("sft")], ids=lambda project: project.name
)
def test_rows_name_keys_that_exist(project):
    """Each key that a rule or a default of a table names has a row."""
    names = {name for rule in project.rules for name in rule.names} | set(project.defaults)
    assert not [name for name in names if project.row(name) is None]
