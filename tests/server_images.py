"""What holds for images on every real server; the tests of each call it."""

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_models import TEXTS, picture, plain_logprobs, vision_of, whole_model

from rl4llm.backends.models import load_tokenizer
from rl4llm.backends.tiny_vision import build_vision_model, build_vision_tokenizer, save_vision_model
from rl4llm.compose.tables import Given
from rl4llm.compose.trainer import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.images import ImagePlace, Picture
from rl4llm.core.types import ChatMessage, SamplingParams, WeightRef

FAMILY = "qwen2_5_vl"
CONTEXT = 512
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True)


def write_model(directory):
    """Write a model as servers need it: heads of 32, and a token for videos, which their processors look up."""
    tokenizer = build_vision_tokenizer(TEXTS)
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    model = build_vision_model(tokenizer, 5, FAMILY, hidden_size=128)
    model.config.video_token_id = tokenizer.convert_tokens_to_ids(marks[-1])
    save_vision_model(model, tokenizer, directory)


class Seer:
    """A client of a real server, with a plain forward of the same model to compare it with."""

    def __init__(self, make, url, directory):
        self.directory, self.vision = directory, vision_of(directory)
        self.client = make(
            url, load_tokenizer(directory), vocab_size=309, context_length=CONTEXT, deadline_s=60
        )
        self.client.vision = self.vision
        self.whole = whole_model(directory)
        self.images = [
            self.vision.store.add(picture(FAMILY, *size, seed))
            for seed, size in enumerate([(2, 3), (1, 2), (2, 3)])
        ]

    def prompt(self, *parts):
        """Return token ids and places; a number is an image, between the marks around one."""
        config, ids, places = self.vision.config, [], []
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            image = self.images[part]
            ids.append(config.vision_start_token_id)
            places.append(ImagePlace(image, len(ids), self.vision.tokens(image)))
            ids += [self.vision.placeholder] * places[-1].length + [config.vision_end_token_id]
        return ids, places

    def run(self, *coroutines):
        async def whole():
            try:
                return await asyncio.gather(*coroutines)
            finally:
                await self.client.disconnect()

        return asyncio.run(whole())

    def apart(self, ids, places, logprobs):
        """Return the largest difference of log-probs of the last tokens, or of all that are not images'."""
        with torch.no_grad():
            expected = plain_logprobs(self.whole, self.vision, ids, places)[-len(logprobs) :]
        text = torch.ones(len(ids), dtype=torch.bool)
        for place in places:
            text[place.offset : place.end] = False
        return (torch.tensor(logprobs) - expected)[text[-len(logprobs) :]].abs().max().item()

    def score_apart(self, *parts):
        ids, places = self.prompt(*parts)
        (scores,) = self.run(self.client.score(ids, places))
        return self.apart(ids, places, scores)

    def load(self, path, version):
        self.run(self.client.load(WeightRef(version, path=str(path), kind="full")))
        self.whole = whole_model(path)


def check_samples_and_scores(seer):
    """Turns with images, the same ids with another image, and text alone equal a plain forward."""
    asked = [seer.prompt([5, 9], 0, [40]), seer.prompt([5, 9], 2, [40]), seer.prompt([5, 9, 40])]
    replies = seer.run(*(seer.client.generate(ids, SAMPLED, images=places) for ids, places in asked))
    assert asked[0][0] == asked[1][0]
    for (ids, places), reply in zip(asked, replies, strict=True):
        assert seer.apart([*ids, *reply.token_ids], places, reply.logprobs) < 1e-5
    said = [token for token in replies[0].token_ids if token != seer.vision.placeholder]
    assert seer.score_apart([5, 9], 0, [40, *said], 1, [7, 8]) < 1e-5
    ids, places = seer.prompt([5, 9], 0, [40])
    (blind,) = seer.run(seer.client.score(ids))
    assert seer.apart(ids, places, blind) > 0.01  # the comparison can tell


def check_new_tower(seer, directory):
    """An image that the server saw before is seen by the new tower after an update."""
    asked = [5, 9], 0, [40, 41, 42]
    assert seer.score_apart(*asked) < 1e-5
    weights = load_file(seer.directory / "model.safetensors")
    save_vision_model(seer.whole, load_tokenizer(seer.directory), directory)
    changed = {name: tensor * 1.3 if "visual" in name else tensor for name, tensor in weights.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    before = seer.whole
    seer.load(directory, 7)
    assert seer.score_apart(*asked) < 1e-5
    seer.whole, after = before, seer.whole
    assert seer.score_apart(*asked) > 1e-3  # the old features would show
    seer.whole = after


class Short(BaseRewardFunction):
    """Reward any answer by its length."""

    def __init__(self):
        super().__init__("short")

    def __call__(self, messages, ground_truth, **columns):
        return float(len(messages[-1].content) % 3)


class Looks(BaseMDPEnv):
    """Show a second image after the first turn."""

    continue_truncated = True

    def respond(self, sample):
        return [ChatMessage.showing("user", "And ", Picture(sample.columns["second"]), "?")]


def check_trains(name, url, directory, output, png, *changes):
    """Train over two turns with an image each: the canary passes, and engine and trainer agree on what trains.

    The server has other weights afterwards.
    """
    rows = [{"prompt": "<image>?", "image": png(1), "second": png(2), "ground_truth": "a"}]
    config = load_config(None, [
        f"model.path={directory}", "model.vision=frozen", "model.autocast=none", f"output.dir={output}", "eval.every=0",
        f"inference.name={name}", f"inference.url={url}", f"inference.context_length={CONTEXT}", "rollout.prompts=1",
        "rollout.group_size=4", "rollout.max_tokens=4", "max_steps=1", "env.max_steps=2", "tracking.tensorboard=false",
        *changes,
    ])  # fmt: skip
    given = Given(dataset=rows, reward_functions=[Short()], env_class=Looks)
    with build_trainer(config, given) as run:
        run.train()
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert rows and all(row["mismatch/mean"] < 1e-5 for row in rows)
    episode = json.loads((output / "episodes/step-000001.jsonl").read_text().splitlines()[0])
    assert sum(len(span.get("images", ())) for span in episode["spans"]) == 2


@pytest.fixture(scope="module")
def servers_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vision") / "model"
    directory.mkdir()
    write_model(directory)
    return directory
