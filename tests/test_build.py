"""What a configuration is put together from, and which combinations are refused before anything is opened."""

import asyncio
import copy
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from sweeps import sampled
from tiny_models import SIZES
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config
from vowels import Vowels

from conftest import TEXTS
from rl4llm.algorithms import ALGORITHMS
from rl4llm.api import GRPOTrainer
from rl4llm.backends.lora import FrozenModel
from rl4llm.backends.models import check_tokenizer, load_tokenizer
from rl4llm.backends.tiny import build_model, build_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.compose import Given, build_trainer
from rl4llm.compose.choices import check_choices, check_config, rate_warnings, warnings_of
from rl4llm.compose.engines import build_client, check_engine, server_urls
from rl4llm.compose.environments import make_env, make_prompts
from rl4llm.compose.models import build_model as build_trained
from rl4llm.compose.setup import Machine, Setup, build_algorithm, set_up_torch
from rl4llm.compose.supervised import dataset_renderer
from rl4llm.compose.trainer import precision_of
from rl4llm.config import load_config
from rl4llm.core.base_client import BasePublisher
from rl4llm.core.base_env import BaseMDPEnv, ChatMessage, RewardExample, SampleState
from rl4llm.core.errors import ConfigError, DataError, EngineError, ModelError, RewardError, RunDirError
from rl4llm.core.tables import ENGINES
from rl4llm.core.weights import WeightRef
from rl4llm.envs.chat import ChatEnv
from rl4llm.envs.compaction import REQUEST
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.extensions.evaluate.play import evaluate
from rl4llm.extensions.servers.sync.wrappers import ClaimingPublisher
from rl4llm.inference.local import LocalClient
from rl4llm.rewards import BatchCallable, Clip, Gate, as_reward_function, score
from rl4llm.runtime import devices
from rl4llm.runtime.quantized import nf4, quantized_layers
from rl4llm.runtime.ranks import Ranks

ROWS = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": "4"} for i in range(4)]
SHORT = {"name": "length", "unit": "chars", "max_length": 9, "margin": 2}
WAYS = {
    "local": ("memory",),
    "sglang": ("filesystem", "distributed", "lora"),
    "vllm": ("filesystem", "lora"),
}
ALL_WAYS = ("memory", "filesystem", "distributed", "lora")
SMALL = {"prompts": 2, "group_size": 2, "max_tokens": 4}


def trainer(model_dir, directory, **keys):
    return GRPOTrainer(
        str(model_dir), ROWS, [Vowels()], output={"dir": str(directory)}, rollout=SMALL, **keys
    )


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("engine", WAYS)
def test_an_engine_accepts_only_its_own_publishers(model_dir, tmp_path, engine, way):
    keys = {"inference.name": engine, "sync.name": way, "model.lora.rank": 4}
    if way in WAYS[engine]:
        trainer(model_dir, tmp_path / "run", **keys).trainer.close()
        return
    with pytest.raises(ConfigError):
        trainer(model_dir, tmp_path / "run", **keys)
    assert not (tmp_path / "run").exists()


def test_temperature_0_is_refused_where_answers_are_compared():
    keys = {"model.path": "m", "training.lr": 1e-5}
    refused = set()
    for name in ALGORITHMS:
        needs = ALGORITHMS[name]().needs()
        check_choices(load_config(overrides=keys | {"algorithm": {"name": name}}), Given(), needs)
        config = load_config(overrides=keys | {"algorithm": {"name": name}, "rollout.temperature": 0})
        try:
            check_choices(config, Given(), needs)
        except ConfigError:
            refused.add(name)
    assert {"grpo", "dapo", "rloo", "remax", "online_dpo"} <= refused
    assert not refused & {"ppo", "reinforce_pp", "explore_grpo", "sft", "dpo"}


class Hints(BaseMDPEnv):
    def respond(self, sample):
        return [ChatMessage("user", "Higher.")]


def test_a_run_warns_of_replies_that_no_turn_reads(model_dir, tmp_path, capsys):
    cases = [(Hints, {}, 1), (f"{__name__}:Hints", {}, 1), (None, {}, 0)]
    cases += [(Hints, {"env.max_steps": turns}, 0) for turns in (1, 2)]
    for number, (env, keys, expected) in enumerate(cases):
        trainer(model_dir, tmp_path / f"{number}", env=env, **keys).trainer.close()
        assert capsys.readouterr().out.count("reads no message that Hints.respond returns") == expected


def test_a_run_warns_of_a_compaction_that_the_context_ends(model_dir, tokenizer, tmp_path, capsys):
    room = 320 - SMALL["max_tokens"] - len(tokenizer.encode(REQUEST, add_special_tokens=False))
    for at, expected in ((None, 0), (room, 0), (room + 1, 1), (5000, 1)):
        keys = {"env.max_steps": 9, "env.compact_at": at, "inference.context_length": 320}
        trainer(model_dir, tmp_path / str(at), env=Hints, **keys).trainer.close()
        assert capsys.readouterr().out.count("env.compact_at=") == expected


def test_a_tokenizer_of_another_model_is_refused(model_dir, tokenizer, tmp_path):
    large = build_tokenizer(
        TEXTS * 4 + ["many other words of another language, zwei drei vier"] * 9, vocab_size=400
    )
    other = build_tokenizer(["some other words, so other tokens"] * 9, vocab_size=300)
    for name, foreign in (("large", large), ("other", other)):
        foreign.save_pretrained(tmp_path / name)
        with pytest.raises(ModelError):
            trainer(model_dir, tmp_path / "run", tokenizer=load_tokenizer(tmp_path / name))
    shutil.copytree(model_dir, tmp_path / "mixed")
    large.save_pretrained(tmp_path / "mixed")
    with pytest.raises(ModelError):
        trainer(tmp_path / "mixed", tmp_path / "run")
    padded = build_model(tokenizer, seed=0, hidden_size=16, num_layers=1)
    padded.resize_token_embeddings(len(tokenizer) + 44)
    check_tokenizer(tokenizer, padded, given=True)  # embeddings without a token are fine


@pytest.mark.parametrize(
    "urls", [[], ["http://a:1", "http://b:1", "http://a:1/"], ["http://localhost:1", "http://127.0.0.1:1"]]
)
def test_no_server_or_the_same_twice_is_refused(urls):
    config = load_config(overrides={"model.path": "m", "inference": {"name": "sglang", "url": urls}})
    with pytest.raises(ConfigError, match=r"inference\.url"):
        check_engine(config)


def test_a_module_of_another_machine_is_refused_only_here():
    far = {"model.path": "m", "data.path": "arithmetic", "rewards": ["no_such_package.rewards:mine"]}
    check_config(load_config(overrides=far), here=False)
    for keys, here in ((far, True), (far | {"rewards": ["no_such_reward"]}, False)):
        with pytest.raises(ConfigError):
            check_config(load_config(overrides=keys), here=here)


def test_a_special_token_that_no_text_uses_needs_no_embedding(model_dir):
    extended = load_tokenizer(model_dir)
    extended.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})  # as in Gemma 3 1B
    check_tokenizer(extended, model_dir, given=True)
    extended.add_tokens(["ordinary"])
    with_pad = load_tokenizer(model_dir)
    with_pad.add_special_tokens({"pad_token": "<my_pad>"})
    for unlike in (extended, with_pad):
        with pytest.raises(ModelError):
            check_tokenizer(unlike, model_dir, given=True)


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_long_rows_are_refused_or_dropped_and_a_run_keeps_to_it(model_dir, tmp_path, method):
    texts = ["a", "b" * 3000, "c", "d" * 4000]
    said = [{"role": "assistant", "content": "e"}] if method == "sft" else []
    rows = [{"messages": [{"role": "user", "content": text}, *said], "ground_truth": ""} for text in texts]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    keys = {
        "model.path": str(model_dir), "data.path": str(file), "output.dir": str(tmp_path / "run"), "eval.every": 0,
        "algorithm": {"name": method}, "rollout": SMALL, "max_steps": 1, "rewards": None if said else ["format"],
        "tracking.tensorboard": False,
    }  # fmt: skip
    with pytest.raises(DataError):
        build_trainer(load_config(overrides=keys))
    with build_trainer(load_config(overrides=keys | {"data.bad_rows": "skip"})) as loop:
        loop.train()
        assert loop.prompts.num_rows == 2 and sorted(loop.prompts.next_batch()) == [0, 1]
    with pytest.raises(RunDirError):
        build_trainer(load_config(overrides=keys))


def test_a_trainer_writes_nothing_before_it_trains(model_dir, tmp_path):
    directory = tmp_path / "run"
    first, second = (trainer(model_dir, directory, max_steps=1) for _ in range(2))
    with pytest.raises(DataError):
        GRPOTrainer(str(model_dir), [], [Vowels()], output={"dir": str(directory)})
    assert list(tmp_path.iterdir()) == []
    first.trainer.resume()  # the run is open now, and config.yaml says which one it is
    assert load_config(directory / "config.yaml") == first.config
    with pytest.raises(RunDirError):
        second.train()
    first.train()
    with pytest.raises(RunDirError):
        trainer(model_dir, directory, training={"lr": 0.1})
    third = trainer(model_dir, directory, max_steps=2)
    assert "max_steps: 1" in (directory / "config.yaml").read_text()
    assert third.train().trainer.step == 2
    assert "max_steps: 2" in (directory / "config.yaml").read_text()


def test_an_untried_device_is_named_at_the_start():
    lines = [
        precision_of("auto", Machine(device, "float32", "none", Ranks())) for device in ("cuda:0", "mps")
    ]
    assert ["never tried" in line for line in lines] == [False, True]


def test_a_run_keeps_the_precision_that_auto_chose(model_dir, tmp_path, monkeypatch):
    def run(autocast, **keys):
        return trainer(
            model_dir, tmp_path / "run", **{"model.autocast": autocast, "model.device": "cpu"}, **keys
        )

    monkeypatch.setattr("rl4llm.compose.setup.multiplies_bfloat16", lambda: True)
    first = run("auto", max_steps=1)
    machine = Machine.of(first.config)
    assert machine.autocast == machine.computed == "bfloat16"
    assert first.trainer.backend._autocast == "bfloat16"
    first.train()
    monkeypatch.setattr("rl4llm.compose.setup.multiplies_bfloat16", lambda: False)
    with pytest.raises(RunDirError):
        run("auto")
    assert run("bfloat16", max_steps=2).train().trainer.step == 2
    assert Machine.of(load_config(overrides={"model.path": "M"})).autocast == "none"


@pytest.mark.parametrize(("keys", "native", "autocast"), [
    ({"device": "cpu"}, True, "bfloat16"), ({"device": "cpu"}, False, "none"), ({"device": "cuda"}, True, "bfloat16"),
    ({"device": "cuda"}, None, "bfloat16"),  # a GPU that only a plan knows
    ({"device": "cuda"}, False, "none"), ({"device": "cuda", "autocast": "none"}, True, "none"),
    ({"device": "cuda", "dtype": "bfloat16"}, True, "none"),
])  # fmt: skip
def test_bfloat16_is_the_default_where_it_is_faster(keys, native, autocast, monkeypatch):
    monkeypatch.setattr("rl4llm.compose.setup.multiplies_bfloat16", lambda: native)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: native is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    config = load_config(None, {"model.path": "M", **{f"model.{key}": value for key, value in keys.items()}})
    assert Machine.of(config).autocast == autocast
    on_gpu = keys["device"] == "cuda"
    assert bool(precision_of(config.model.autocast, Machine.of(config))) == (on_gpu or "autocast" not in keys)


def test_a_gpu_has_exact_float32_and_no_plans_for_attention(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    config = load_config(None, {"model.path": "M", "model.device": "cuda"})
    set_up_torch(config, Machine.of(config))
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        config = load_config(None, {"model.path": "M", "model.device": "cuda", "deterministic": True})
        set_up_torch(config, Machine.of(config))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_template_args_reach_every_rendering(model_dir, tmp_path, tokenizer):
    silent = copy.deepcopy(tokenizer)
    silent.chat_template += "{% if add_generation_prompt and enable_thinking is false %}none{% endif %}"
    args = {"enable_thinking": False}
    made = trainer(model_dir, tmp_path / "run", tokenizer=silent, **{"env.template_args": args}).trainer
    row = ROWS[0]["messages"]
    question = [ChatMessage.from_dict(message) for message in row]
    answered = {"messages": [*row, {"role": "assistant", "content": "3"}, *row]}
    config = load_config(
        overrides={"model.path": "m", "data.path": "d", "env.template_args.enable_thinking": False}
    )
    env = ChatEnv(ROWS, silent, [Vowels()])
    env.template_args = args
    renderers = [
        made.rollout._renderer,
        dataset_renderer(Setup.of(config, tokenizer=silent), [answered], ()),
        Rollout(env, None)._renderer,
    ]
    for renderer in renderers:
        after = renderer.following(question, ended=True)
        assert all(
            silent.decode(ids).endswith("assistant\nnone") for ids in (renderer.first(question), after)
        )
    made.close()


SHOWN = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("shown", "described"), sampled(SHOWN, SHOWN[1:3]))
def test_demonstrations_show_the_tools_that_episodes_show(tokenizer, shown, described):
    template = copy.deepcopy(tokenizer)
    template.chat_template = (
        tokenizer.chat_template if shown else tokenizer.chat_template.replace("tools", "x")
    )
    row = ROWS[0]["messages"]
    question = [ChatMessage.from_dict(message) for message in row]
    answered = {"messages": [*row, {"role": "assistant", "content": "3"}]}
    keys = {"model.path": "m", "data.path": "d", "env.name": "tool", "env.describe_tools": described}
    config = load_config(overrides={**keys, "env.tools": ["calculator", "python"]})
    env = ToolMDPEnv(ROWS, template, [Vowels()], tools=["calculator", "python"], describe_tools=described)
    prompt = dataset_renderer(Setup.of(config, tokenizer=template), [answered], ()).first(question)
    assert prompt == Rollout(env, None)._renderer.first(question)
    assert ("calculator" in template.decode(prompt)) == described
    env.close()


def test_the_reference_of_an_adapter_is_the_model_under_it(model_dir, tmp_path):
    keys = {"algorithm": {"kl_coef": 0.1}, "max_steps": 1}
    with trainer(model_dir, tmp_path / "adapter", **keys, **{"model.lora.rank": 4}).trainer as adapted:
        assert isinstance(adapted.preparation.reference, FrozenModel)
        adapted.train()
    with trainer(model_dir, tmp_path / "whole", **keys).trainer as whole:
        assert isinstance(whole.preparation.reference, TorchBackend)
        assert whole.preparation.reference.model is not whole.backend.model


def test_an_evaluation_does_not_use_the_server_of_a_run(model_dir, tmp_path):
    url = "http://127.0.0.1:9"  # nobody is there, and nobody is asked
    keys = {
        "model.path": str(model_dir), "data.path": "arithmetic", "output.dir": str(tmp_path / "run"), "eval.limit": 2,
        "inference": {"name": "sglang", "url": url}, "rewards": [SHORT],
    }  # fmt: skip
    running = ClaimingPublisher(_Nothing(), [url])
    asyncio.run(running.publish(None, 0))
    try:
        with pytest.raises(EngineError):
            evaluate(load_config(overrides=keys))
    finally:
        asyncio.run(running.close())
    assert list(Path(tmp_path).iterdir()) == []


class _Nothing(BasePublisher):
    async def publish(self, backend, version):
        return WeightRef(version, "full")


class _Stubborn(BaseHTTPRequestHandler):
    """A server that answers every request with success, and keeps the weights it has."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = json.dumps({"success": True, "weight_version": "default"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *args):
        pass


def test_a_server_reads_evaluated_weights_beside_the_run(model_dir, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stubborn) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        keys = {
            "model.path": str(model_dir), "data.path": "arithmetic", "output.dir": str(tmp_path / "run"), "eval.limit": 2,
            "inference": {"name": "sglang", "url": f"http://127.0.0.1:{server.server_port}"},
            "rewards": [SHORT],
        }  # fmt: skip
        with pytest.raises(EngineError):
            evaluate(load_config(overrides=keys))
        server.shutdown()
    assert list(Path(tmp_path).iterdir()) == []


def test_a_reward_that_fails_its_examples_stops_the_start(model_dir, tmp_path):
    def shouts(completions):
        return [float(text.isupper()) for text in completions]

    said = [ChatMessage("user", "?"), ChatMessage("assistant", "quiet")]
    blind = BatchCallable(shouts, "shouts", examples=[RewardExample(said, "", 1.0)])
    for reward in (blind, Clip(blind, 0, 1), Gate("format", blind)):
        with pytest.raises(RewardError):
            GRPOTrainer(str(model_dir), ROWS, [reward], output={"dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def shout(text: str) -> str:
    """Says it louder.

    Args:
        text: The text.
    """
    return text.upper()


def test_an_environment_is_a_class_a_name_or_a_section(model_dir, tmp_path):
    def environment(env, **keys):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        run = GRPOTrainer(str(model_dir), ROWS, ["format"], env=env, output={"dir": str(directory)}, **keys)
        run.trainer.close()
        return type(run.trainer.rollout.env), run.config.env

    assert environment("tool", **{"env.max_steps": 3}) == (ToolMDPEnv, {"name": "tool", "max_steps": 3})
    assert environment({"name": "tool", "tools": [shout]}) == (
        ToolMDPEnv,
        {"name": "tool", "tools": [f"{__name__}:shout"]},
    )
    assert environment(ToolMDPEnv)[0] is ToolMDPEnv
    unnamed = [{"name": "tool", "tools": [tool]} for tool in (lambda text: text, object())]
    for wrong in (object(), Vowels, 3, shout, *unnamed):
        with pytest.raises(ConfigError):
            environment(wrong)


class Hinting(BaseMDPEnv):
    """Answers once, and rewards that turn."""

    def respond(self, sample):
        sample.reward_turn(1.0)
        return []


def test_an_environment_of_a_user_gets_no_reward_by_default(model_dir, tmp_path):
    keys = {"output": {"dir": str(tmp_path / "run")}, "rollout": SMALL}
    with GRPOTrainer(str(model_dir), ROWS, env=Hinting, **keys).trainer as made:
        assert made.rollout.env.reward_functions == []
    with GRPOTrainer(str(model_dir), [row | {"ground_truth": "1"} for row in ROWS], **keys).trainer as made:
        assert [reward.name for reward in made.rollout.env.reward_functions] == ["math"]


def test_an_environment_that_rewards_no_turns_needs_a_reward(model_dir, tmp_path):
    class Plain(BaseMDPEnv):
        """Plays a single turn."""

    with pytest.raises(ConfigError):
        GRPOTrainer(str(model_dir), ROWS, env=Plain, output={"dir": str(tmp_path / "run")}, rollout=SMALL)


@pytest.mark.parametrize(
    "reward", ["format", {"name": "format"}, lambda completions: [0.0] * len(completions), Vowels()]
)
def test_single_reward_needs_no_list(model_dir, tmp_path, reward):
    keys = {"output": {"dir": str(tmp_path / "run")}, "rollout": SMALL, "eval": {"every": 0}}
    with GRPOTrainer(str(model_dir), ROWS, reward, **keys).trainer as made:
        assert len(made.rollout.env.reward_functions) == 1


def test_a_curriculum_needs_a_reward_that_defines_success(model_dir, tmp_path):
    rows = [row | {"level": number % 2} for number, row in enumerate(ROWS)]
    keys = {"output": {"dir": str(tmp_path / "run")}, "rollout": SMALL, "curriculum": "level"}
    with pytest.raises(ConfigError):
        GRPOTrainer(str(model_dir), rows, [Vowels()], **keys)
    reward = Vowels()
    reward.success_at = 0.5
    GRPOTrainer(str(model_dir), rows, [reward], **keys).trainer.close()


def test_the_weight_of_a_reward_of_turns_is_that_of_its_turns(model_dir, tmp_path):
    rewards = ["format", {"name": "tool_use", "per_turn": True, "weight": 0.25}]
    run = GRPOTrainer(str(model_dir), ROWS, rewards=rewards, output={"dir": str(tmp_path)})
    calls = [ChatMessage("user", "?"), ChatMessage("assistant", "call"), ChatMessage("tool", "85")]
    sample = SampleState("p", 0, calls, "", init_msg_size=1)
    env = run.trainer.rollout.env
    assert score([sample], env.reward_functions, env.reward_transform_fn).reward.tolist() == [0.0]
    assert sample.turn_rewards == {0: 0.25}
    run.trainer.close()


def test_a_configured_function_combines_several_rewards(model_dir, tmp_path):
    keys = {"output.dir": str(tmp_path / "run"), "env.reward_transform_fn": "rl4llm.rewards:multiply"}
    run = GRPOTrainer(str(model_dir), ROWS, rewards=["math", SHORT], **keys)
    env = run.trainer.rollout.env
    said = [ChatMessage("assistant", text) for text in ("\\boxed{4}", "\\boxed{5}", "\\boxed{4} ")]
    samples = [
        SampleState("p", i, [ChatMessage("user", "?"), said[i]], "4", init_msg_size=1) for i in range(3)
    ]
    assert score(samples, env.reward_functions, env.reward_transform_fn).reward.tolist() == [1.0, 0.0, 0.5]
    run.trainer.close()
    for rewards, way in (
        (["math", SHORT | {"weight": 2}], "rl4llm.rewards:multiply"),
        (["math", SHORT], "multiply"),
    ):
        keys |= {"output.dir": str(tmp_path / "none"), "env.reward_transform_fn": way}
        with pytest.raises(ConfigError):
            GRPOTrainer(str(model_dir), ROWS, rewards=rewards, **keys)
    assert not (tmp_path / "none").exists()


class Behind(BaseMDPEnv):
    """An environment that needs its address both for its prompts and to be played."""

    @staticmethod
    def prompts(split, limit=None, *, url, seeds=1):
        return [{**ROWS[0], "prompt_id": f"{url}/{split}/{seeds}"}]

    def __init__(self, *args, url, **kwargs):
        super().__init__(*args, **kwargs)
        self.url = url


def test_options_reach_the_prompts_or_the_environment(tokenizer):
    options = {"name": "behind", "url": "there", "seeds": 3}
    (row,) = make_prompts(Behind, options, "train", None)
    fixed = {
        "tokenizer": tokenizer,
        "reward_functions": [as_reward_function("format")],
        "batch_size": 1,
        "group_size": 1,
    }
    env = make_env(Behind, options, {}, dataset=[row], **fixed)
    assert (row["prompt_id"], env.url) == ("there/train/3", "there")


def test_tools_get_what_is_shared_but_no_opponents(tokenizer):
    class Seen(ChatEnv):
        def __init__(self, *args, provided, **kwargs):
            super().__init__(*args, **kwargs)
            self.provided = provided

    fixed = {"reward_functions": [as_reward_function("format")], "batch_size": 1, "group_size": 1}
    offered = {"sandbox": "the sandbox", "opponents": {}}
    env = make_env(Seen, {"name": "seen"}, offered, dataset=ROWS, tokenizer=tokenizer, **fixed)
    assert dict(env.provided) == {"sandbox": "the sandbox"}


def test_an_engine_that_is_no_server_is_made_from_the_model(model, tokenizer, model_dir, monkeypatch):
    class Elsewhere(LocalClient):
        """Plays somewhere else, without an address."""

        in_process = False

    monkeypatch.setattr(ENGINES, "_items", {**ENGINES._items, "elsewhere": Elsewhere})
    config = load_config(overrides=[f"model.path={model_dir}", "inference.name=elsewhere"])
    check_engine(config)
    assert server_urls(config) == []
    assert isinstance(build_client(Setup.of(config, tokenizer=tokenizer), model), Elsewhere)


def test_defaults_that_are_traps_are_shown_once(model_dir, tmp_path, capsys):
    keys = {"model": {"path": str(model_dir)}, "data.path": "arithmetic", "eval.every": 0, "rewards": [SHORT]}

    def shown(directory, **more):
        build_trainer(load_config(overrides=keys | {"output.dir": str(tmp_path / directory)} | more)).close()
        return capsys.readouterr().out

    unset = shown("unset")
    assert unset.count("training.lr is not set") == unset.count("rollout.max_tokens is not set") == 1
    assert "an adapter hardly learns with it" in shown("adapter", **{"model.lora.rank": 2})
    assert "is not set" not in shown("knowing", **{"training.lr": 1e-6, "rollout.max_tokens": 256})


def test_escapes_that_a_shell_kept_are_reported():
    for override, expected in (
        ("data.prompt_template={prompt}\\nAnswer:", 1),
        ('data.prompt_template="{prompt}\\nAnswer:"', 0),
        ("data.prompt_template=Is $\\nu \\neq 0$? {prompt}", 0),
        ("rollout.stop=[\\n]", 1),
        ('rollout.stop=["\\n"]', 0),
    ):
        config = load_config(overrides=["model.path=m", override, "training.lr=1e-6"])
        assert len(warnings_of(config)) == expected, override


def test_servers_with_another_base_are_reported_unless_corrected():
    keys = ["model.path=m", "model.quantize=nf4", "model.lora.rank=2", "training.lr=1e-5", "sync.name=lora"]
    assert len(warnings_of(load_config(overrides=keys))) == 1
    assert warnings_of(load_config(overrides=[*keys, "algorithm.correction=tis"])) == []
    assert warnings_of(load_config(overrides=[*keys, "sync.name=filesystem"])) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"model.lora.rank": 0},
        {
            "model.quantize": "none",
            "model.lora.rank": 0,
            "training.optimizer": "adamw8bit",
            "backend.name": "deepspeed",
        },
        {"backend.name": "deepspeed"},
    ],
)
def test_4_bits_train_under_an_adapter_of_torch_alone(keys):
    fitting = {"model.path": "m", "model.quantize": "nf4", "model.lora.rank": 2, "inference.name": "local"}
    config = load_config(overrides=fitting)
    check_choices(config, Given(), build_algorithm(config).needs())
    config = load_config(overrides=fitting | keys)
    with pytest.raises(ConfigError):
        check_choices(config, Given(), build_algorithm(config).needs())


def test_a_served_teacher_of_images_is_refused():
    keys = {
        "model.path": "m",
        "model.vision": "frozen",
        "inference.name": "local",
        "algorithm.name": "distill",
        "algorithm.teacher_path": "t",
    }
    served = {"algorithm.teacher_path": None, "algorithm.teacher_url": "http://t"}
    for further in ({}, served | {"model.vision": "none"}):
        config = load_config(overrides=keys | further)
        check_choices(config, Given(), build_algorithm(config).needs())
    config = load_config(overrides=keys | served)
    with pytest.raises(ConfigError):
        check_choices(config, Given(), build_algorithm(config).needs())


def test_a_critic_does_not_start_from_files_in_4_bits(model, tokenizer, tmp_path):
    pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: pip install 'rl4llm[bitsandbytes]'"
    )
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"quantization_config": nf4(model, []), "device_map": {"": "cpu"}}
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options).save_pretrained(tmp_path / "model")
    keys = {
        "model.path": str(tmp_path / "model"),
        "model.device": "cpu",
        "algorithm.name": "ppo",
        "model.lora.rank": 2,
    }
    config = load_config(overrides=keys)
    policy = build_trained(config, build_algorithm(config), "model")
    assert quantized_layers(policy.model)
    with pytest.raises(ModelError):
        build_trained(config, build_algorithm(config), "critic")
    config = load_config(overrides=keys | {"model.lora.rank": 0})
    with pytest.raises(ModelError):
        build_trained(config, build_algorithm(config), "model")


def test_rate_that_a_program_sets_has_no_warning():
    config = load_config(overrides={"model.path": "m"})
    assert rate_warnings(config)
    config.training.lr = 1e-4
    assert rate_warnings(config) == []
    config.training.warmup_steps, config.max_steps = 200, 50
    assert len(rate_warnings(config)) == 1
    config.training.passes_per_rollout = 4
    assert rate_warnings(config) == []
    config.training.lr = 1e-12  # float32 rounds it away
    assert len(rate_warnings(config)) == 1


def test_a_model_of_padded_rows_is_batched_by_length(model_dir, tmp_path):
    """Whether it is the policy or its teacher."""
    tokenizer = load_tokenizer(str(model_dir))
    sizes = SIZES | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    rows = [{"messages": [{"role": "user", "content": "hi"}], "ground_truth": ""}]
    layouts = {}
    for kind, config in (("capped", Gemma2Config(**sizes)), ("plain", Qwen3Config(**sizes))):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        trainer = GRPOTrainer(
            str(tmp_path / kind),
            rows,
            [lambda completions, **columns: [0.0 for _ in completions]],
            output={"dir": str(tmp_path / f"run of {kind}")},
            rollout={"prompts": 1, "group_size": 2, "max_tokens": 4},
        )
        layouts[kind] = trainer.trainer.preparation.batching.layout
    taught = load_config(
        overrides={
            "model.path": str(tmp_path / "plain"),
            "data.path": "arithmetic",
            "eval.every": 0,
            "algorithm": {"name": "distill", "teacher_path": str(tmp_path / "capped")},
            "output.dir": str(tmp_path / "run of taught"),
        }
    )
    layouts["taught"] = build_trainer(taught).preparation.batching.layout
    assert layouts == {"capped": "sorted", "plain": "shared", "taught": "sorted"}
