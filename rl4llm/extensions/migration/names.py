"""Python names of other projects, and what stands for them in rl4llm."""

from __future__ import annotations

_CHAT = "use `rl4llm.envs.ChatEnv`, which works with every engine, or no environment: a dataset and rewards are enough"
_TASKS = "set `data.path`, for example to `arithmetic`, which generates problems"
_STEPPED = "a class with `reset` and `step` works unchanged: `env.name=stepped env.task=package.module:Class`"
_PLAIN = "environments and rewards exchange `rl4llm.ChatMessage`, and rewards are numbers"
_BUILT = "`GRPOTrainer` and `PPOTrainer` of rl4llm take a model, a dataset and rewards, and build it"
_OPTIONS = "the trainer takes the options as keywords"
_CRITIC = "PPO with `algorithm.critic_warmup_steps` at `max_steps` trains the critic alone"
_EXPLORES = "set `algorithm.name=explore_grpo` in a file for `rl4llm train`"
_AHEAD = "use `GRPOTrainer` with `rollout.one_step_off_policy`, which samples with a server while the trainer learns"
_KEYS = "write a YAML file for `rl4llm train`, or pass its keys to a trainer: `PPOTrainer(model, dataset, training={...})`"

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
    "PPOConfig": f"of michaelnny/rl4llm and TRL: {_OPTIONS}: `PPOTrainer(model, dataset, learning_rate=1e-6)`.",
    "DAPOConfig": f"of michaelnny/rl4llm: {_OPTIONS}: `DAPOTrainer(model, dataset, learning_rate=1e-6)`.",
    "ENV_TOOL_SCHEMAS": "of michaelnny/rl4llm: set `env.name=tool env.tools=[python]`, whose schemas the tools bring.",
    "LoggingManager": "of michaelnny/rl4llm: the section `tracking` configures it, and every run logs to `output.dir`.",
    "DistributedManager": f"of michaelnny/rl4llm: {_BUILT}.",
    "DistributedOps": f"of michaelnny/rl4llm: {_BUILT}.",
    "set_seed": "of michaelnny/rl4llm: set `seed`, which every run and trainer applies.",
    "math_problem_grader": "of michaelnny/rl4llm: use the reward `math`, `rl4llm.rewards.MathReward`.",
    "load_multiple_datasets": "of michaelnny/rl4llm: set `data.path`, or `parts` for several datasets.",
    "load_yaml_config_file": "of michaelnny/rl4llm: use `rl4llm.load_config`. `rl4llm import FILE` converts the file.",
    **dict.fromkeys(
        ("build_model_and_tokenizer", "build_policy_model_and_tokenizer"),
        "of michaelnny/rl4llm: use `rl4llm.load_model` and `rl4llm.load_tokenizer`.",
    ),
    "build_value_model_and_tokenizer": "of michaelnny/rl4llm: `PPOTrainer` builds it, from `algorithm.critic_path`.",
    # TRL
    "AsyncGRPOTrainer": f"of TRL: {_AHEAD}.",
    "AsyncGRPOConfig": f"of TRL: {_AHEAD}.",
    "RichProgressCallback": "of TRL: there are no callbacks; `output.console` chooses how progress is shown.",
    # mithrl
    "Environment": f"of mithrl: {_STEPPED}, and so does a factory with `create`.",
    "EnvironmentFactory": "of mithrl: a factory works unchanged: `env.name=stepped env.task=package.module:Factory`.",
    "MithrlConfig": f"of mithrl: {_KEYS}. `rl4llm import FILE` converts a file.",
    # RL-MAX
    "Rewarder": "of RL-MAX: list rewards in `rewards`, each with a `weight`.",
    "ThinkFormatReward": "of RL-MAX: use the reward `format`, which wants think and answer tags.",
    # MRLM
    "LLMEnvironment": "of MRLM: the policy is `model.path`, and the engine is `inference.name`.",
    "EnvironmentMode": "of MRLM: an environment on another machine is `env.remote`, hosted by `rl4llm serve-env`.",
    "MathReasoningEnvironment": f"of MRLM: use `env.name=chat rewards=[math]`, and {_TASKS}.",
    "MathProblemGenerator": f"of MRLM: {_TASKS}.",
    "CodeExecutionEnvironment": "of MRLM: use `env.name=code`, `rl4llm.CodeEnv`, with the reward `code`.",
    "CodeProblemGenerator": "of MRLM: set `data.path` to problems, for example of HumanEval: configs/humaneval_grpo.yaml.",
    "DebateEnvironment": "of MRLM: use `env.name=debate`, `rl4llm.DebateEnv`: configs/debate_grpo.yaml.",
    "RuleBasedJudge": "of MRLM: the reward `winner` compares answers with the ground truth, `llm_judge` asks a model.",
    "ToolUseEnvironment": "of MRLM: use `env.name=tool env.tools=[calculator, python, search, workspace]`.",
    "create_default_tool_registry": "of MRLM: use `env.tools=[calculator, python, search, workspace]`.",
    "SimulatedEnvironment": f"of MRLM: {_STEPPED}.",
    "Message": f"of MRLM: {_PLAIN}.",
    "Observation": f"of MRLM: {_PLAIN}.",
    "Reward": f"of MRLM: {_PLAIN}.",
    "ExperimentConfig": f"of MRLM: {_KEYS}.",
    "TrainingConfig": f"of MRLM: {_KEYS}.",
    # MRL
    "MRLTrainer": "of MRL: `GRPOTrainer` takes the same call, except for GPUs and workers: `rl4llm launch --on modal`.",
    "OrchestratorConfig": f"of MRL: {_KEYS}.",
    # verl
    "RayPPOTrainer": f"of verl: {_BUILT}. `rl4llm import run.sh` converts a command.",
    "DataProto": "of verl: a batch is `rl4llm.core.types.TrainBatch`.",
    "NaiveRewardManager": "of verl: `rewards` lists what scores an answer, and `compute_score` calls a function of verl.",
    "compute_score": "of verl: `rewards: [{name: compute_score, path: FILE.py}]` calls the function in your file.",
}
"""A sentence by the last part of a name. It begins with the project, and ends with the next step."""


def of_name(name: str) -> str:
    """Return what to import or to write instead of a name of another project; "" for other names.

    >>> of_name("MRLTrainer")
    "of MRL: `GRPOTrainer` takes the same call ..."
    """
    return NAMES.get(name.rpartition(".")[2], "")
