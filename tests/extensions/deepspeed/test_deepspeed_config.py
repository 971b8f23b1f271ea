"""Any section of DeepSpeed's configuration passes through; what ours says already is refused by name."""

import json
from contextlib import nullcontext

import pytest

from rl4llm.compose import build_algorithm
from rl4llm.compose.choices import check_choices
from rl4llm.compose.models import check_backend
from rl4llm.compose.setup import Given
from rl4llm.config import load_config
from rl4llm.core.base_algorithm import Needs
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.deepspeed.config import OURS, ZeroOptions, engine_config

FP32, BF16 = (
    {"bf16": False, "max_grad_norm": 1.0, "trained": 7},
    {"bf16": True, "max_grad_norm": 1.0, "trained": 7},
)


def test_auto_and_disabled_sections_change_nothing():
    silent = {"fp16": {"enabled": False}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    found = engine_config(dict.fromkeys(OURS, "auto") | silent, ZeroOptions(2), **BF16)
    assert found == engine_config(None, ZeroOptions(2), **BF16)
    assert found["gradient_clipping"] == 1.0 and found["bf16"]["enabled"] is True


AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}  # fmt: skip
FILES = {  # in the styles that files of other projects have
    "all auto": AUTO
    | {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
    "fp16 off": AUTO | {"fp16": {"enabled": False, "loss_scale": 0}, "zero_optimization": {"stage": 3}},
    "untested": AUTO | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
    "optimizer": AUTO
    | {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}},
    "scheduler": AUTO
    | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, "steps_per_print": 1e5},
    "checkpointing off": AUTO
    | {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_leaves_settings_to_the_trainer_is_accepted(name, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(FILES[name]))
    found = engine_config(tmp_path / "ds.json", ZeroOptions(), **BF16)
    assert found["bf16"]["enabled"] is True and not {"fp16", "optimizer", "scheduler"} & found.keys()
    assert found["zero_allow_untested_optimizer"] is True


@pytest.mark.parametrize("section", [
    *({key: 1} for key in sorted(OURS)),
    {"fp16": {"enabled": True, "loss_scale": 0}},
    {"optimizer": {"type": "Lion", "params": {"lr": "auto"}}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
    {"activation_checkpointing": {"partition_activations": True}},
    {"zero_force_ds_cpu_optimizer": True},
], ids=str)  # fmt: skip
def test_a_file_that_sets_our_settings_is_refused(section):
    for source in (AUTO | section, section):
        backend = {"name": "deepspeed", "config": source}
        overrides = {"model.path": "m", "model.dtype": "bfloat16", "backend": backend}
        with pytest.raises(ConfigError):
            check_backend(load_config(overrides=overrides), Needs())


def test_what_both_say_alike_is_accepted():
    bf16 = {"enabled": True, "immediate_grad_update": True}
    given = {"bf16": bf16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    found = engine_config(given, ZeroOptions(3), **BF16)
    assert found["bf16"] == {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True}


@pytest.mark.parametrize(("source", "options", "demands"), [
    ({"gradient_clipping": 0.5}, ZeroOptions(), FP32),
    ({"bf16": {"enabled": True}}, ZeroOptions(), FP32),
    ({"bfloat16": {"enabled": False}}, ZeroOptions(), BF16),
    ({"zero_optimization": {"stage": 3}}, ZeroOptions(2), FP32),
    ({}, ZeroOptions(0, offload_optimizer=True), FP32),
    ({}, ZeroOptions(2, offload_param=True), FP32),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ZeroOptions(), FP32),
])  # fmt: skip
def test_contradictions_are_refused(source, options, demands):
    with pytest.raises(ConfigError):
        engine_config(source, options, **demands)


def test_every_other_section_passes_through():
    given = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "offload_param": {"device": "cpu", "pin_memory": True}},
        "comms_logger": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "wall_clock_breakdown": False,
    }  # fmt: skip
    found = engine_config(given, ZeroOptions(offload_param=True), **BF16)
    assert {key: found[key] for key in given} == given


def test_the_stage_is_2_unless_someone_says_otherwise():
    stages = [
        engine_config(None, ZeroOptions(), **FP32),
        engine_config({"zero_optimization": {"stage": 1}}, ZeroOptions(), **FP32),
        engine_config({"zero_optimization": {"reduce_bucket_size": 5}}, ZeroOptions(3), **FP32),
    ]
    assert [found["zero_optimization"]["stage"] for found in stages] == [2, 1, 3]


def test_gradients_of_a_bf16_model_add_up_in_fp32():
    assert engine_config(None, ZeroOptions(1), **BF16)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in engine_config(None, ZeroOptions(1), **FP32)


def test_config_file_may_be_json_or_yaml(tmp_path):
    sections = {"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}
    (tmp_path / "ds.json").write_text(json.dumps(sections))
    (tmp_path / "ds.yaml").write_text("zero_optimization:\n  stage: 3\n  sub_group_size: 1e9\n")
    found = [engine_config(tmp_path / name, ZeroOptions(), **FP32) for name in ("ds.json", "ds.yaml")]
    assert found[0] == found[1] == engine_config(sections, ZeroOptions(), **FP32)


def test_what_was_given_is_not_changed():
    given = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False}}
    engine_config(given, ZeroOptions(), **FP32)
    assert given == {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False}}


@pytest.mark.parametrize(("trained", "size"), [(0, 1), (1000, 1000), (7 * 10**9, 500_000_000)])
def test_bucket_is_no_larger_than_the_model_by_default(trained, size):
    demands = {"bf16": False, "max_grad_norm": 1.0, "trained": trained}
    assert engine_config(None, ZeroOptions(2), **demands)["zero_optimization"]["reduce_bucket_size"] == size
    given = {"zero_optimization": {"reduce_bucket_size": 5}}
    assert engine_config(given, ZeroOptions(2), **demands)["zero_optimization"]["reduce_bucket_size"] == 5


COHOSTED = {
    "data.path": "arithmetic",
    "model.device": "cuda",
    "inference": {"name": "sglang", "cohost": True},
    "algorithm": {"name": "grpo", "kl_coef": 0.1},
}  # whose models leave the device between updates


@pytest.mark.parametrize(("backend", "cohosted", "refused"), [
    ({"zero_stage": 1}, COHOSTED, True),
    ({"config": {"zero_optimization": {"stage": 1}}}, COHOSTED, True),
    ({"zero_stage": 3}, COHOSTED, True),
    ({"zero_stage": 1, "offload_optimizer": True}, COHOSTED, False),
    ({"zero_stage": 2}, COHOSTED, False),
    ({"zero_stage": 3, "offload_param": True}, COHOSTED, False),
    ({"zero_stage": 0}, {}, True),  # gradients would be summed in bf16
    ({"config": {"zero_optimization": {"stage": 0}}}, {}, True),
    ({"zero_stage": 4}, {}, True),
    ({"zero_stage": 1}, {}, False),
    ({"config": "on_another_machine.json"}, {}, False),
])  # fmt: skip
def test_stage_that_cannot_serve_is_refused_before_a_start(backend, cohosted, refused):
    keys = {"model.path": "MODEL", "model.dtype": "bfloat16", "backend": {"name": "deepspeed", **backend}}
    config = load_config(None, keys | cohosted)
    with pytest.raises(ConfigError) if refused else nullcontext():
        check_choices(config, Given(), build_algorithm(config).needs())
