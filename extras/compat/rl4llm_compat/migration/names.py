"""Python names of other projects, and what stands for them in rl4llm."""

from __future__ import annotations

_CHAT = "use `rl4llm.envs.ChatEnv`, which works with every engine, or no environment: a dataset and rewards are enough"
_BUILT = "`GRPOTrainer` and `PPOTrainer` of rl4llm take a model, a dataset and rewards, and build it"
_OPTIONS = "the trainer takes the options as keywords"
_CRITIC = "PPO with `algorithm.critic_warmup_steps` at `max_steps` trains the critic alone"
_EXPLORES = "set `algorithm.name=explore_grpo` in a file for `rl4llm train`"
_AHEAD = (
    "use `GRPOTrainer` with `rollout.max_staleness`, which samples with a server while the trainer learns"
)

NAMES: dict[str, str] = {
    # michaelnny/rl4llm
    "SglMDPEnv": f"of michaelnny/rl4llm: {_CHAT}.",
    "HFMDPEnv": f"of michaelnny/rl4llm: {_CHAT}.",
    "LocalLLMEnv": f"of michaelnny/rl4llm: {_CHAT}.",
    "HfMDPEnv": f"of michaelnny/rl4llm: {_CHAT}.",
    "HTTPInferenceEnv": f"of michaelnny/rl4llm: {_CHAT}.",
    **dict.fromkeys(
        ("ExploreLocalLLMEnv", "ExploreSglMDPEnv", "ExploreGRPOConfig", "ExploreGRPOTrainer"),
        f"of michaelnny/rl4llm: {_EXPLORES}.",
    ),
    **dict.fromkeys(("ValueNetConfig", "ValueNetTrainer"), f"of michaelnny/rl4llm: {_CRITIC}."),
    "PPOConfig": f"of michaelnny/rl4llm and TRL: {_OPTIONS}. The one learning rate of TRL is `PPOTrainer(model, dataset, "
    "training={'lr': 3e-6}, algorithm={'critic_lr': 3e-6})`.",
    "DAPOConfig": f"of michaelnny/rl4llm: {_OPTIONS}: `DAPOTrainer(model, dataset, training={{'lr': 1e-6}})`.",
    "ENV_TOOL_SCHEMAS": "of michaelnny/rl4llm: set `env.name=tool env.tools=[python]`, whose schemas the tools bring.",
    "LoggingManager": "of michaelnny/rl4llm: the section `tracking` configures it, and every run logs to `output.dir`.",
    "DistributedManager": f"of michaelnny/rl4llm: {_BUILT}.",
    "DistributedOps": f"of michaelnny/rl4llm: {_BUILT}.",
    "set_seed": "of michaelnny/rl4llm: set `seed`, which every run and trainer applies.",
    "math_problem_grader": "of michaelnny/rl4llm: use the reward `math`, `rl4llm.rewards.MathReward`.",
    "load_multiple_datasets": "of michaelnny/rl4llm: set `data.path`, or `parts` for several datasets.",
    "load_yaml_config_file": "of michaelnny/rl4llm: use `rl4llm.load_config`.",
    **dict.fromkeys(
        ("build_model_and_tokenizer", "build_policy_model_and_tokenizer"),
        "of michaelnny/rl4llm: use `rl4llm.load_model` and `rl4llm.load_tokenizer`.",
    ),
    "build_value_model_and_tokenizer": "of michaelnny/rl4llm: `PPOTrainer` builds it, from `algorithm.critic_path`.",
    # TRL
    **{
        name: f"of TRL: write `from rl4llm_compat.trl import {name}`."
        for name in (
            *(
                "DPOConfig",
                "GRPOConfig",
                "KTOConfig",
                "RLOOConfig",
                "RewardConfig",
                "SFTConfig",
                "ModelConfig",
            ),
            *("ScriptArguments", "TrlParser", "get_dataset", "get_peft_config", "get_quantization_config"),
        )
    },
    "AsyncGRPOTrainer": f"of TRL: {_AHEAD}.",
    "AsyncGRPOConfig": f"of TRL: {_AHEAD}.",
    "RichProgressCallback": "of TRL: there are no callbacks; `output.console` chooses how progress is shown.",
    # verl
    "RayPPOTrainer": f"of verl: {_BUILT}. `rl4llm import run.sh` converts a command.",
    "DataProto": "of verl: a batch is `rl4llm.core.types.TrainBatch`.",
    "NaiveRewardManager": "of verl: `rewards` lists what scores an answer, and `compute_score` calls a function of verl.",
    "compute_score": "of verl: `rewards: [{name: compute_score, path: FILE.py}]` calls the function in your file.",
}
"""A sentence by the last part of a name. It begins with the project, and ends with the next step."""


def of_name(name: str) -> str:
    """Return what to import or to write instead of a name of another project; "" for other names.

    >>> of_name("rl4llm.utils.set_seed")
    "of michaelnny/rl4llm: set `seed`, which every run and trainer applies."
    """
    return NAMES.get(name.rpartition(".")[2], "")
