"""Environments of OpenEnv, by a real server of the package. It needs other versions of packages than the trainer's
extras, so install it into a separate Python environment. Elsewhere these tests are skipped."""

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from played import played

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.adapters.openenv import OpenEnv
from rl4llm.extensions.adapters.step_rewards import StepRewards
from rl4llm.runtime.ports import free_port
from rl4llm.testing import ScriptedClient, check_env

pytest.importorskip("openenv", reason="openenv is not installed; it needs a separate environment")


@pytest.fixture(scope="module")
def url():
    port = free_port("127.0.0.1")
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("guess_server.py")), str(port)])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/schema", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    yield url
    server.kill()
    server.wait()


def made(tokenizer, url, split="train", **options):
    rows = OpenEnv.prompts(
        split, 2, url=url, **{key: options.pop(key) for key in ("reset_options",) if key in options}
    )
    return OpenEnv(rows, tokenizer, [StepRewards()], batch_size=1, group_size=2, url=url, **options)


def play(env, tokenizer, script, group_size=2):
    return played(env, ScriptedClient(tokenizer, script), group_size=group_size)


def secret(env):
    return str(int(re.search(r"more: (\d+)", env.dataset[0]["messages"][-1]["content"]).group(1)) - 1)


def test_an_environment_of_openenv_keeps_the_contract(tokenizer, url):
    check_env(made(tokenizer, url, max_steps=3), [str(number) for number in range(3)])


def test_openenv_episode_follows_the_server_and_its_rewards(tokenizer, url):
    env = made(tokenizer, url)
    right = secret(env)
    (episode,) = play(env, tokenizer, {"": ["nothing", f" {right}\n"]}, group_size=1).trajectories
    assert (episode.turn_rewards, episode.stop_reason) == ((-0.1, 1.0), "done")
    assert episode.reward == pytest.approx(0.9)
    assert episode.messages[2].content == "Wrong."
    assert episode.extras["metrics"] == {"return": 0.9, "invalid_actions": 0}


@pytest.mark.parametrize("reply", ["left", "[1]", "{1}", '{"guess": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_reply_without_an_action_is_not_one(reply):
    env = OpenEnv.__new__(OpenEnv)
    env.action = None
    assert env._action(reply) is None


def test_the_splits_have_other_seeds(url):
    seeds = {
        split: {row["openenv"]["seed"] for row in OpenEnv.prompts(split, 3, url=url)}
        for split in ("train", "test")
    }
    assert len(seeds["train"] | seeds["test"]) == 6


def test_what_breaks_on_the_server_fails_the_episode_alone(tokenizer, url):
    env = made(tokenizer, url, max_steps=2)
    prompt = env.dataset[0]["prompt_id"]
    result = play(env, tokenizer, {f"0/{prompt}/1": ["crash"], "": ["0"]})
    assert [sample.index for sample in result.failed] == [1]
    assert "the dice fell off the table" in result.failed[0].failure
    assert len(result.trajectories) == 1


def test_an_environment_that_forgets_its_seed_fails_the_episode(tokenizer, url):
    result = play(made(tokenizer, url, reset_options={"forgets": True}), tokenizer, {"": ["0"]})
    assert not result.trajectories and {sample.failure_class for sample in result.failed} == {"env/raised"}


def test_an_unknown_field_of_actions_is_refused(tokenizer, url):
    with pytest.raises(ConfigError):
        made(tokenizer, url, action="nubmer")
