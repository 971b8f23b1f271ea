"""Episodes with images that a checkpoint keeps: they come back as they were played, or are played again.

Also conversations with images that an environment asks about beside its samples.
"""

import io
import json

import numpy as np
import PIL.Image
import pytest
import torch
from packed import pack
from vision_models import seeing_model, vision_directories, vision_of  # noqa: F401 - fixture

from rl4llm import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.backends.models import load_tokenizer
from rl4llm.backends.torch_backend import TorchBackend
from rl4llm.core.images import Picture
from rl4llm.core.types import SamplingParams, images_of
from rl4llm.core.weights import WeightRef
from rl4llm.data.pack import totals_of
from rl4llm.envs.rollout import Rollout, play_together
from rl4llm.envs.stored import dump, take_over
from rl4llm.inference.local import LocalClient
from rl4llm.runtime.runner import Runner

PARAMS = SamplingParams(max_tokens=4)


def picture(seed, kind="PNG"):
    """Return a picture of a size that the model does not see: it is resized."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(file, format=kind)
    return Picture(file.getvalue())


def rows(*seeds):
    return [
        {"messages": [ChatMessage.showing("user", picture(seed), "?")], "ground_truth": "a"} for seed in seeds
    ]


class Looks(BaseMDPEnv):
    """Show another picture after the first turn, a JPEG."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage.showing("user", "And ", picture(10 + sample.index, "JPEG"), "?")]


class Even(BaseRewardFunction):
    def __call__(self, messages, ground_truth, **columns):
        return float(len(messages[-1].content) % 2)


class Played:
    """A rollout with a separate engine, as in another process, whose images are in `directory`."""

    def __init__(self, model, directory, runner, dataset, kind=Looks):
        tokenizer = load_tokenizer(model)
        self.vision = vision_of(model, directory)
        env = kind(dataset, tokenizer, [Even("even")], 2, 3, max_steps=2)
        env.vision = self.vision
        self.model = seeing_model(model, self.vision)
        client = LocalClient(self.model, tokenizer, path="auto")
        runner.run(client.load(WeightRef(0)))
        self.rollout = Rollout(env, client, runner=runner, seed=1)
        self.units = self.rollout.begin((0, 1), step=0, sampling_params=PARAMS)

    def take(self, texts):
        """Return whether each unit came back."""
        return [
            take_over(unit, json.loads(text), oldest=0) for unit, text in zip(self.units, texts, strict=True)
        ]

    def logprobs(self, trajectories):
        (batch,) = pack(
            trajectories, [1.0] * len(trajectories), max_tokens_per_batch=10_000, layout="shared", aggregation="token",
            totals=totals_of(trajectories), pad_token_id=0, positions=self.vision.positions,
        )  # fmt: skip
        return TorchBackend(self.model, lr=1e-3).forward(batch)


@pytest.fixture(scope="module")
def model(vision_directories):  # noqa: F811
    return vision_directories["qwen3_vl"]


@pytest.fixture
def runner():
    with Runner() as runner:
        yield runner


@pytest.fixture
def stored(model, runner, tmp_path):
    """Return a rollout of two groups that were played, and what a checkpoint has of them."""
    played = Played(model, tmp_path / "images", runner, rows(1, 2))
    runner.run(play_together(played.units))
    return played, [dump(unit) for unit in played.units]


def test_groups_with_images_come_back_equal(stored, model, runner, tmp_path):
    played, texts = stored
    other = Played(model, tmp_path / "images", runner, rows(1, 2))
    assert other.take(texts) == [True, True]
    before, after = (one.rollout.finish(one.units).trajectories for one in (played, other))
    assert list(map(repr, before)) == list(map(repr, after)) and len(after) == 6
    assert [len(images_of(one.spans)) for one in after] == [2] * 6
    assert torch.equal(played.logprobs(before), other.logprobs(after))
    for old, new in zip(before, after, strict=True):
        (asked, shown), (same, restored) = (
            [one for one in item.messages if one.parts] for item in (old, new)
        )
        assert asked == same  # the prompt's picture is the row's
        seen = [other.vision.see(*one.pictures) for one in (shown, restored)]
        assert seen[0] == seen[1] and shown.content == restored.content == "And ?"
    assert not any("data" in text for text in texts)  # digests alone


def test_a_group_of_another_image_is_played_again(stored, model, runner, tmp_path):
    _, texts = stored
    other = Played(model, tmp_path / "images", runner, rows(1, 3))
    assert other.take(texts) == [True, False]


def test_a_group_whose_image_is_gone_is_played_again(stored, model, runner, tmp_path):
    played, texts = stored
    _, place = images_of(played.units[0].samples[0].spans)
    (tmp_path / "images" / f"{place.image.digest}.png").unlink()
    other = Played(model, tmp_path / "images", runner, rows(1, 2))
    assert other.take(texts) == [False, False]  # both groups have seen it


class Asks(Looks):
    """Ask about two pictures in conversations that are nobody's, before the samples' own turns."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        asked = [[ChatMessage.showing("user", picture(seed), "?")] for seed in (1, 2)]
        params = sampling_params.replace(temperature=0.0, ignore_eos=True)
        self.told = [reply.logprobs for reply in llm.generate(asked, params)]
        for sample, reply in zip(env_state.episodes, llm.chat(env_state.episodes, params), strict=True):
            sample.messages.append(reply)


def test_a_conversation_of_nobody_is_seen_with_its_images(model, runner, tmp_path):
    asking, asked = (
        Played(model, tmp_path / "images", runner, rows(*seeds), Asks) for seeds in ((3, 4), (1, 2))
    )
    for played in (asking, asked):
        runner.run(play_together(played.units))
    samples = [sample for unit in asked.units for sample in unit.samples]
    first, second = (samples[number].policy_spans[0].logprobs for number in (0, 3))
    assert asking.rollout.env.told == [pytest.approx(first, abs=1e-5), pytest.approx(second, abs=1e-5)]
    assert first != pytest.approx(second, abs=1e-3)
