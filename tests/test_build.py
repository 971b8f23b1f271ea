"""What a configuration is put together from, and which combinations are refused before anything is opened."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from vowels import Vowels

from rl4llm.api import GRPOTrainer
from rl4llm.backends.lora import FrozenModel
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.build import build_trainer
from rl4llm.build.environments import make_env, make_prompts
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv, ChatMessage, RewardExample, SampleState
from rl4llm.core.base_publisher import BasePublisher
from rl4llm.core.errors import ConfigError, DataError, EngineError, RewardError
from rl4llm.core.types import WeightRef
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.evaluate import evaluate
from rl4llm.rewards import BatchCallable, Clip, Gate, as_reward_function, score
from rl4llm.sync.claim import ClaimingPublisher

ROWS = [{"messages": [{"role": "user", "content": f"Say {i}."}], "ground_truth": ""} for i in range(4)]
WAYS = {
    "local": ("memory",),
    "sglang": ("filesystem", "tensor", "distributed", "lora"),
    "vllm": ("filesystem", "lora"),
}
ALL_WAYS = ("memory", "filesystem", "tensor", "distributed", "lora")
SMALL = {"prompts": 2, "group_size": 2, "max_tokens": 4}


def trainer(model_dir, directory, **keys):
    return GRPOTrainer(str(model_dir), ROWS, [Vowels()], output={"dir": str(directory)}, rollout=SMALL, **keys)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("engine", WAYS)
def test_an_engine_takes_weights_in_the_ways_that_are_tested_and_refuses_the_others_by_name(
    model_dir, tmp_path, engine, way
):
    keys = {"inference.name": engine, "sync.name": way, "model.lora.rank": 4}
    if way in WAYS[engine]:
        trainer(model_dir, tmp_path / "run", **keys).trainer.close()
        return
    accepted = rf"sync\.name='{way}' is not accepted with inference\.name='{engine}'. Accepted: {', '.join(WAYS[engine])}\."
    with pytest.raises(ConfigError, match=accepted):
        trainer(model_dir, tmp_path / "run", **keys)
    assert not (tmp_path / "run").exists()


def test_a_run_without_prompts_is_told_to_set_data_path(model_dir, tmp_path):
    keys = {"model.path": str(model_dir), "output.dir": str(tmp_path / "run"), "rewards": ["math"]}
    with pytest.raises(ConfigError, match=r"data.path is not set.*data.path=\.\.\."):
        build_trainer(load_config(overrides=keys))


@pytest.mark.parametrize("written", ["{run}", "{run}/", "{run}/weights/.."])
def test_the_directory_of_the_run_is_no_weight_store(model_dir, tmp_path, written):
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"sync\.dir=.* is output\.dir"):
        trainer(model_dir, run, **{"inference.name": "sglang", "sync.dir": written.format(run=run)})
    assert not run.exists()


def test_the_reference_of_an_adapter_is_the_model_under_it_and_no_second_one(model_dir, tmp_path):
    keys = {"algorithm": {"kl_coef": 0.1}, "max_steps": 1}
    with trainer(model_dir, tmp_path / "adapter", **keys, **{"model.lora.rank": 4}).trainer as adapted:
        assert isinstance(adapted.preparation.reference, FrozenModel)
        adapted.train()
    with trainer(model_dir, tmp_path / "whole", **keys).trainer as whole:
        assert isinstance(whole.preparation.reference, TorchBackend)
        assert whole.preparation.reference.model is not whole.backend.model


def test_a_server_that_a_run_trains_through_is_not_given_a_checkpoint_to_measure(model_dir, tmp_path):
    url = "http://127.0.0.1:9"  # nobody is there, and nobody is asked
    keys = {
        "model.path": str(model_dir), "data.path": "arithmetic", "output.dir": str(tmp_path / "run"), "eval.limit": 2,
        "inference": {"name": "sglang", "url": url},
    }  # fmt: skip
    running = ClaimingPublisher(_Nothing(), [url])
    asyncio.run(running.publish(None, 0))
    try:
        with pytest.raises(EngineError, match=r"Another run gives .*inference\.url.*inference\.name=local"):
            evaluate(load_config(overrides=keys))
    finally:
        asyncio.run(running.close())
    assert list(Path(tmp_path).iterdir()) == []


class _Nothing(BasePublisher):
    async def publish(self, backend, version):
        return WeightRef(version, "full")


class _Stubborn(BaseHTTPRequestHandler):
    """A server that says yes to everything, and goes on with the weights it has."""

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


def test_a_server_reads_what_is_measured_beside_the_run_where_it_can_see_it(model_dir, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stubborn) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        keys = {
            "model.path": str(model_dir), "data.path": "arithmetic", "output.dir": str(tmp_path / "run"), "eval.limit": 2,
            "inference": {"name": "sglang", "url": f"http://127.0.0.1:{server.server_port}"},
        }  # fmt: skip
        with pytest.raises(EngineError, match=rf"told to load version 0 from {tmp_path}/\.scratch-.*/v000000"):
            evaluate(load_config(overrides=keys))
        server.shutdown()
    assert list(Path(tmp_path).iterdir()) == []


def test_training_refuses_to_start_when_a_users_reward_does_not_hold_on_its_examples(model_dir, tmp_path):
    def shouts(completions):
        return [float(text.isupper()) for text in completions]

    said = [ChatMessage("user", "?"), ChatMessage("assistant", "quiet")]
    blind = BatchCallable(shouts, "shouts", examples=[RewardExample(said, "", 1.0)])
    for reward in (blind, Clip(blind, 0, 1), Gate("format", blind)):
        with pytest.raises(RewardError, match="'quiet' for ground truth '': expected 1, but reward 'shouts' gave 0"):
            GRPOTrainer(str(model_dir), ROWS, [reward], output={"dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def shout(text: str) -> str:
    """Says it louder.

    Args:
        text: What is said.
    """
    return text.upper()


def test_an_environment_is_a_class_a_name_or_a_section_and_nothing_else(model_dir, tmp_path):
    def environment(env, **keys):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        run = GRPOTrainer(str(model_dir), ROWS, ["format"], env=env, output={"dir": str(directory)}, **keys)
        run.trainer.close()
        return type(run.trainer.rollout.env), run.config.env

    assert environment("tool", **{"env.max_steps": 3}) == (ToolMDPEnv, {"name": "tool", "max_steps": 3})
    assert environment({"name": "tool", "tools": [shout]}) == (ToolMDPEnv, {"name": "tool", "tools": [f"{__name__}:shout"]})
    assert environment(ToolMDPEnv)[0] is ToolMDPEnv
    for wrong in (object(), Vowels, 3, shout):
        with pytest.raises(ConfigError, match=r"env=.* is not accepted: a subclass of BaseMDPEnv, not an instance"):
            environment(wrong)
    with pytest.raises(ConfigError, match=r"^env.tools: <function .* is not accepted: .* at the top level of a module"):
        environment({"name": "tool", "tools": [lambda text: text]})
    with pytest.raises(ConfigError, match=r"^env.tools\[0\]: Value 'object' is not a supported primitive type"):
        environment({"name": "tool", "tools": [object()]})


def test_the_weight_of_a_reward_of_turns_is_that_of_its_turns(model_dir, tmp_path):
    rewards = ["format", {"name": "tool_use", "per_turn": True, "weight": 0.25}]
    run = GRPOTrainer(str(model_dir), ROWS, rewards=rewards, output={"dir": str(tmp_path)})
    calls = [ChatMessage("user", "?"), ChatMessage("assistant", "call"), ChatMessage("tool", "85")]
    sample = SampleState("p", 0, calls, "", init_msg_size=1)
    env = run.trainer.rollout.env
    assert score([sample], env.reward_functions, env.reward_transform_fn).reward.tolist() == [0.0]
    assert sample.turn_rewards == {0: 0.25}
    run.trainer.close()


def test_a_function_of_the_configuration_makes_one_reward_of_several(model_dir, tmp_path):
    keys = {"output.dir": str(tmp_path / "run"), "env.reward_transform_fn": "rl4llm.rewards:multiply"}
    short = {"name": "length", "unit": "chars", "max_length": 9, "margin": 2}
    run = GRPOTrainer(str(model_dir), ROWS, rewards=["math", short], **keys)
    env = run.trainer.rollout.env
    said = [ChatMessage("assistant", text) for text in ("\\boxed{4}", "\\boxed{5}", "\\boxed{4} ")]
    samples = [SampleState("p", i, [ChatMessage("user", "?"), said[i]], "4", init_msg_size=1) for i in range(3)]
    assert score(samples, env.reward_functions, env.reward_transform_fn).reward.tolist() == [1.0, 0.0, 0.5]
    run.trainer.close()
    for rewards, way, message in [
        (["math", short | {"weight": 2}], "rl4llm.rewards:multiply", "'length' has a weight. Give one or the other"),
        (["math", short], "multiply", "env.reward_transform_fn='multiply' cannot be imported: there is no ':' in it"),
        (["math", short], "math:pi", "env.reward_transform_fn='math:pi' is not accepted: a function of the rewards"),
    ]:
        keys |= {"output.dir": str(tmp_path / "none"), "env.reward_transform_fn": way}
        with pytest.raises(ConfigError, match=message):
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


def test_options_reach_the_prompts_and_the_environment_that_have_them(tokenizer):
    options = {"name": "behind", "url": "there", "seeds": 3}
    (row,) = make_prompts(Behind, options, "train", None)
    fixed = {"tokenizer": tokenizer, "reward_functions": [as_reward_function("format")], "batch_size": 1, "group_size": 1}
    env = make_env(Behind, options, {}, dataset=[row], **fixed)
    assert (row["prompt_id"], env.url) == ("there/train/3", "there")


@pytest.mark.parametrize("rows", [None, (row for row in ROWS)])
def test_an_environment_that_brings_no_list_of_prompts_is_told_so(rows):
    class Brings(BaseMDPEnv):
        prompts = staticmethod(lambda split, limit: rows)

    with pytest.raises(DataError, match=r"Brings\.prompts must return a list of rows, not (None|<generator)"):
        make_prompts(Brings, {"name": "brings"}, "train", None)
