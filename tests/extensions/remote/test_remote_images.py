"""Pictures in prompts and replies of environments on hosts: what a trainer gets is what it would get without hosts."""

import io
import json
import struct
import zlib

import hosted_envs
import PIL.Image
import pytest
import yaml
from hosting import HostThread
from vision_models import seeing_model, vision_directories, vision_of  # noqa: F401 - fixture

from rl4llm.backends.models import load_tokenizer
from rl4llm.cli import main
from rl4llm.core.errors import DataError
from rl4llm.core.images import Image, ImagePlace, Picture
from rl4llm.core.types import ChatMessage, SamplingParams, TokenSpan
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.remote import wire
from rl4llm.extensions.remote.env import HostedEnvironment
from rl4llm.inference.local import LocalClient
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.runner import Runner

SHOWS = "hosted_envs:Shows"
PARAMS = SamplingParams(max_tokens=5, temperature=1.0)


def png(red, size=(28, 28)):
    file = io.BytesIO()
    PIL.Image.new("RGB", size, (red, 40, 40)).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture
def play(vision_directories):  # noqa: F811
    """Play an environment against the embedded engine."""
    runner, directory = Runner(), vision_directories["qwen3_vl"]
    tokenizer, vision = load_tokenizer(directory), vision_of(directory)
    client = LocalClient(seeing_model(directory, vision), tokenizer, deterministic=True)
    runner.run(client.load(WeightRef(0)))

    def run(env, **options):
        env.vision = vision
        rollout = Rollout(env, client, Renderer(tokenizer, vision=vision), runner, seed=1, **options)
        return rollout.play(range(len(env.dataset)), step=0, sampling_params=PARAMS, group_size=2)

    run.tokenizer = tokenizer
    yield run
    runner.run(client.close())
    runner.close()


def on_host(host, play, dataset, **options):
    hosted = HostedEnvironment({"name": SHOWS, "remote": host.address, **options})
    rewards = hosted.rewards(["hosted_envs:Looked"], play.tokenizer, dataset[0], 42)
    return hosted(dataset, play.tokenizer, rewards, 1, 2)


def test_pictures_on_a_host_equal_the_local_ones(play):
    dataset = hosted_envs.Shows.prompts("test")
    local = play(
        hosted_envs.Shows(dataset, play.tokenizer, [as_reward_function("hosted_envs:Looked")], max_steps=2)
    )
    with HostThread([SHOWS]) as host:
        env = on_host(host, play, dataset, max_steps=2)
        remote = play(env)
        env.close()
    expected, actual = (
        [(item.spans, item.messages, item.reward, item.stop_reason) for item in result.trajectories]
        for result in (local, remote)
    )
    assert actual == expected and len(actual) == 4
    for spans, messages, *_ in actual:
        assert sum(len(span.images) for span in spans) == 2
        assert len(messages[0].pictures) == len(messages[2].pictures) == 1
        assert messages[0].pictures != messages[2].pictures


@pytest.mark.parametrize("how", ["broken", "many"])
def test_pictures_beyond_the_limits_fail_their_episode(play, how):
    dataset = [{**hosted_envs.Shows.prompts("test", 1)[0], "how": how}]
    with HostThread([SHOWS]) as host:
        env = on_host(host, play, dataset, max_steps=2)
        result = play(env, max_failed_share=1.0)
        env.close()
    assert [sample.failure_class for sample in result.failed] == ["env/raised"] * 2


def test_training_with_pictures_on_a_host_changes_no_weight(vision_directories, tmp_path):  # noqa: F811
    config = {
        "model": {"path": str(vision_directories["qwen3_vl"]), "vision": "frozen", "autocast": "none"},
        "env": {"name": SHOWS, "max_steps": 2}, "eval": {"every": 0}, "max_steps": 2, "deterministic": True,
        "rollout": {"prompts": 2, "group_size": 4, "max_tokens": 4}, "training": {"lr": 1e-3},
        "tracking": {"tensorboard": False},
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))

    def train(name, *changes):
        assert main(["train", str(tmp_path / "train.yaml"), f"output.dir={tmp_path / name}", *changes]) == 0
        return (tmp_path / name / "model" / "model.safetensors").read_bytes()

    here = train("here")
    with HostThread([SHOWS]) as host:
        assert train("there", f"env.remote={host.address}") == here
        assert any("Shows: opened by a trainer" in line for line in host.said)
    rows = [json.loads(line) for line in (tmp_path / "there" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["mismatch/max"] < 1e-4 and row["reward/std"] > 0 and row["grad_norm"] > 0 for row in rows)


def test_messages_and_places_come_back_equal():
    pictures = Picture(png(1)), Picture(png(2))
    message = ChatMessage.showing("tool", "a ", pictures[0], "", pictures[1], tool_call_id="c", failed=True)
    row = {"messages": [message.to_dict(), {"role": "user", "content": "b"}], "level": 3}
    assert wire.row_of(wire.row_json(row, "a row")) == row
    timed = ChatMessage("tool", "4", seconds=0.25)
    for item in (message, timed, ChatMessage("tool", "no"), ChatMessage("assistant", "4", reasoning="2 + 2")):
        (received,) = wire._chat_messages([wire._message(item)])
        assert (received, received.seconds) == (item, item.seconds)
    span = TokenSpan.context([1, 2, 3, 4], [ImagePlace(Image("a" * 64, 28, 56), 1, 2)])
    assert wire._token_span(wire._span(span)) == span


def test_received_pictures_are_not_decoded():
    """A small file with a huge header is refused by that header, and a cut one passes, since only its header is read."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    huge = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", huge) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    cut = ChatMessage.showing("user", Picture(png(3, (280, 280))[:60]))
    assert wire._chat_messages([wire._message(cut)]) == [cut]
    with pytest.raises(DataError):
        wire._chat_messages([wire._message(ChatMessage.showing("user", Picture(bomb)))])
    half = [wire._message(ChatMessage.showing("user", *[Picture(png(4))] * 33)) for _ in range(2)]
    with pytest.raises(DataError):
        wire._chat_messages(half)
