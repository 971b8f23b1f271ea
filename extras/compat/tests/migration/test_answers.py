"""Keys and names of other projects are answered with their counterpart."""

import contextlib
import re
import subprocess
import sys
from functools import partial
from types import ModuleType

import pytest

import rl4llm
from rl4llm.cli import main
from rl4llm.compose import build_algorithm
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError
from rl4llm.core.registry import lazy
from rl4llm_compat.migration.answers import of_key
from rl4llm_compat.migration.names import NAMES, of_name


@pytest.mark.parametrize(("key", "said"), [
    ("data.train_batch_size", "a key of verl: here it is `rollout.prompts`"),
    ("+actor_rollout_ref.rollout.n", "a key of verl: here it is `rollout.group_size`"),
    ("actor_rollout_ref.rollout.enforce_eager", "no counterpart: an option of the server"),
    ("num_generation", "Did you mean 'num_generations'? It is a key of TRL: here it is `rollout.group_size`"),
    ("num_generations", "a key of TRL: here it is `rollout.group_size`"),
    ("train_dataset", "a key of TRL: here it is `dataset`"),
    ("args.learning_rate", "a key of TRL: here it is `keywords of the trainer"),
    ("rollout.num_generations", "a key of TRL: here it is `rollout.group_size`"),
])  # fmt: skip
def test_unknown_key_of_another_project_is_answered(key, said):
    with pytest.raises(ConfigError, match="Unknown configuration key: ") as caught:
        load_config(overrides={"model.path": "m", key: 1})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "said"),
    [("algorithm.adv_estimator", "`algorithm.name`"), ("algorithm.use_kl_in_reward", "`kl_in=reward`")],
)
def test_option_of_another_project_is_answered(key, said):
    with pytest.raises(ConfigError, match="a key of verl") as caught:
        build_algorithm(load_config(overrides={"model.path": "m", key: "x"}))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "key", ["algorithm.gamma", "training.num_generations", "rollout.max_token", "nonsense"]
)
def test_other_keys_have_no_answer(key):
    assert of_key(key) == ""


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lrr", "training.lr"), ("rolout.max_tokens", "rollout.max_tokens"), ("max_step", "max_steps"),
        ("value_net_config.lr", "training.lr"),
        ("lr", "training.lr"), ("training.warmup", "training.warmup_steps"), ("output_directory", "output.dir"),
        ("eval.evry", "eval.every"), ("model.lora.rnk", "model.lora.rank"), ("training.decay", None),
        ("model.padding", None), ("training.algo", None), ("checkpoint.directory", None),
    ],
)  # fmt: skip
def test_suggestion_weighs_the_whole_path(key, meant):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"model.path": "m", key: 1})
    hint = f"Did you mean '{meant}'?" if meant else "Did you mean"
    assert (hint in str(caught.value)) == (meant is not None)


@pytest.mark.parametrize(("line", "said"), [
    ("train --actor_rollout_ref.rollout.n 3 x.yaml", "is a key of verl: here it is `rollout.group_size`"),
    ("train configs/dpo.yaml --learning-rate=1e-4", "'learning_rate' is a key of TRL: here it is `training.lr`"),
    ("train x.yaml --output-dir x", "here it is `output.dir`"),
    ("train configs/dpo.yaml training.num_train_epochs=3", "a key of TRL: here it is `training.epochs` with a dataset"),
    ("train configs/dpo.yaml learning_rat=1", "Did you mean 'learning_rate'? It is a key of TRL"),
    ("train configs/dpo.yaml --foo", "unrecognized arguments: --foo"),
    ("eval --model", "argument --model: expected one argument"),
])  # fmt: skip
def test_command_line_is_answered(line, said, capsys):
    with contextlib.suppress(SystemExit):
        assert main(line.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_import_of_a_foreign_name_is_answered(name):
    if name in rl4llm.__all__:
        pytest.skip("rl4llm has this name")
    with pytest.raises(ImportError, match=f"'rl4llm' has no attribute '{name}'. The name is of "):
        exec(f"from rl4llm import {name}")
    assert of_name(f"theirs.core.{name}") == NAMES[name] != ""


@pytest.mark.parametrize(("line", "said"), [
    ("from rl4llm.envs.sgl_tool_env import ENV_TOOL_SCHEMAS", "env.tools=[python]"),
    ("from rl4llm.envs import SglMDPEnv, HFMDPEnv", "ChatEnv"),
    ("from rl4llm.data import load_multiple_datasets", "`data.path`"),
    ("from rl4llm.envs import ExploreSglMDPEnv, SglMDPEnv", "algorithm.name=explore_grpo"),
    ("from rl4llm import GRPOConfig, GRPOTrainer", "from rl4llm_compat.trl import GRPOConfig"),
])  # fmt: skip
def test_names_of_other_projects_are_answered(line, said):
    with pytest.raises(ImportError) as caught:
        exec(line)
    assert said in str(caught.value)


SUGGESTED = {name: re.search(r"`(\w+Trainer\(.+\))`", says) for name, says in NAMES.items()}


@pytest.mark.parametrize("name", sorted(name for name, found in SUGGESTED.items() if found))
def test_suggested_trainer_can_be_built(name, model_dir, tmp_path):
    """The suggestion for PPO keeps the meaning of TRL, whose one learning rate is also that of the critic."""
    rows = [{"prompt": "What is 1 + 1?", "ground_truth": "2"}] * 4
    names = {"model": str(model_dir), "dataset": rows, "tmp_path": tmp_path}
    for made in ("PPOTrainer", "DAPOTrainer"):
        trainer = getattr(rl4llm, made)
        names[made] = partial(trainer, reward_functions=["math"], output={"dir": str(tmp_path / made)})
    built = eval(SUGGESTED[name][1], names).trainer
    rates = {model.optimizer.options.lr for model in (built.backend, built.critic) if model is not None}
    assert len(rates) == 1 and (built.critic is not None) == (name == "PPOConfig")


def test_trainer_with_arguments_of_another_project_is_answered():
    with pytest.raises(ConfigError, match="Did you mean 'num_generations'"):
        rl4llm.GRPOTrainer("model", num_generation=4)
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        rl4llm.PPOTrainer(max_steps=1)


@pytest.mark.parametrize("name", ["MRLTrainer", "nothing_like_this", "__wrapped__"])
def test_unknown_attribute_is_missing_without_an_import_error(name):
    assert not hasattr(rl4llm, name) and getattr(rl4llm, name, None) is None
    with pytest.raises(AttributeError, match=f"module 'rl4llm' has no attribute '{name}'"):
        getattr(rl4llm, name)


@pytest.mark.parametrize("home", ["rl4llm.extensions.no_such_extension.x", "no_such_package.x"])
def test_name_of_a_missing_package_raises_the_reason(home, tmp_path, monkeypatch):
    module = ModuleType("needs_more")
    (tmp_path / "needs_more.pyi").write_text(f"from {home} import Thing as Thing\n")
    module.__getattr__, _ = lazy("needs_more", str(tmp_path / "needs_more.py"))
    monkeypatch.setitem(sys.modules, "needs_more", module)
    with pytest.raises(ImportError, match="no_such_"):
        module.Thing  # noqa: B018
    with pytest.raises(ImportError, match="no_such_"):
        exec("from needs_more import Thing")


def test_ordinary_attributes_are_missing_as_usual():
    assert not hasattr(rl4llm, "nothing_like_this")
    code = "import rl4llm, sys; hasattr(rl4llm, '__wrapped__'); assert not [m for m in sys.modules if 'migration' in m]"
    subprocess.run([sys.executable, "-c", code], check=True)
