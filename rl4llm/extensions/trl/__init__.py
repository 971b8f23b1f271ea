"""Scripts written for TRL: its names, and what each becomes in rl4llm.

    from rl4llm.extensions.trl import GRPOConfig, GRPOTrainer  # from trl import GRPOConfig, GRPOTrainer

Each name is imported on first use. `table` is the table of options, `joint` combines those that belong together, and
`arguments` has TRL's configs. `script` turns a script's arguments into configuration keys for `trainers`, and `rows` and
`rewards` read TRL's datasets and call its reward functions. docs/migration.md shows the table.
"""

from rl4llm.core.registry import lazy

_ARGUMENTS, _DATA, _FUNCTIONS, _PARSER, _TRAINERS = (
    f"rl4llm.extensions.trl.{name}" for name in ("arguments", "data_utils", "functions", "parser", "trainers")
)
_OF = ("DPO", "GRPO", "KTO", "RLOO", "Reward", "SFT")
_HOMES = {
    **{f"{name}Trainer": _TRAINERS for name in _OF},
    **{f"{name}Config": _ARGUMENTS for name in _OF},
    **dict.fromkeys(
        (
            *("DatasetConfig", "DatasetMixtureConfig", "ModelConfig", "ScriptArguments", "TrlParser"),
            *("get_dataset", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
        ),
        _PARSER,
    ),
    **dict.fromkeys(
        (
            *("accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward"),
            *("get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward"),
        ),
        _FUNCTIONS,
    ),
    **dict.fromkeys(
        (
            *("apply_chat_template", "maybe_apply_chat_template", "extract_prompt", "maybe_extract_prompt"),
            *("is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml"),
            *("unpair_preference_dataset", "maybe_unpair_preference_dataset"),
        ),
        _DATA,
    ),
}
"""The names that scripts import from `trl` and its modules, and the modules that have them."""

__getattr__ = lazy(__name__, _HOMES)
__all__ = list(_HOMES)
