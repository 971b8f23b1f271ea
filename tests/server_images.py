"""What holds for images on every real server; the tests of each call it, all on one server."""

import asyncio
import io
import json
from dataclasses import replace

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import build_vision_model, build_vision_tokenizer, save_vision_model
from vision_models import TEXTS, picture, plain_logprobs, vision_of, whole_model

from rl4llm.backends.models import load_tokenizer
from rl4llm.compose.setup import Given
from rl4llm.compose.trainer import build_trainer
from rl4llm.config import load_config
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction
from rl4llm.core.errors import EngineError
from rl4llm.core.images import ImagePlace, Picture
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.core.weights import WeightRef
from rl4llm.extensions.servers.clients.embedded import EmbeddedClient
from rl4llm.extensions.servers.clients.sglang import SGLangClient
from rl4llm.extensions.servers.clients.vllm import VLLMClient
from rl4llm.extensions.servers.fleet.fleet import FleetClient
from rl4llm.extensions.servers.fleet.member import FleetLimits

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
CLIENTS = {"embedded": EmbeddedClient, "sglang": SGLangClient, "vllm": VLLMClient}
CONTEXT = 512
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True)


def families(first):
    """Return the parameters of a fixture: one family in every run of the tests, the others in a sweep."""
    others = (pytest.param(family, marks=pytest.mark.sweep) for family in FAMILIES if family != first)
    return [first, *others]


def write_model(directory, family):
    """Write a model as servers need it, and return its directory.

    Its heads have 32 dimensions. Servers look up a token for videos, and in the config how positions are interleaved.
    """
    directory = directory / family
    directory.mkdir()
    tokenizer = build_vision_tokenizer(TEXTS)
    marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    model = build_vision_model(tokenizer, 5, family, hidden_size=128)
    model.config.video_token_id = tokenizer.convert_tokens_to_ids(marks[-1])
    if family == "qwen3_vl":
        model.config.text_config.rope_parameters["mrope_interleaved"] = True
    save_vision_model(model, tokenizer, directory)
    return directory


class Seer:
    """A real server behind a fleet, as a run has it, with a plain forward of the same model to compare it with."""

    def __init__(self, name, url, directory):
        self.name, self.url, self.directory = name, url, directory
        self.vision = vision_of(directory)
        self.client = FleetClient([self.client_of(url)], limits=FleetLimits(all_down_limit_s=10))
        self.whole = whole_model(directory)
        self.images = [
            self.vision.store.add(picture(directory.name, *size, seed))
            for seed, size in enumerate([(2, 3), (1, 2), (2, 3), (2, 2)])
        ]
        self.version = 0

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        asyncio.run(self.client.close())

    def client_of(self, url):
        tokenizer = load_tokenizer(self.directory)
        client = CLIENTS[self.name](
            url, tokenizer, vocab_size=len(tokenizer), context_length=CONTEXT, deadline_s=60
        )
        client.vision = self.vision
        return client

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

    def load(self, directory):
        """Load a model's weights, and compare with it from now on."""
        self.version += 1
        ref = WeightRef(self.version, path=str(directory), kind="full")
        self.run(self.client.load(ref))
        self.whole = whole_model(directory)
        return ref

    def write_changed(self, directory):
        """Write the model with another tower, and return its directory."""
        save_vision_model(self.whole, load_tokenizer(self.directory), directory)
        weights = load_file(self.directory / "model.safetensors")
        changed = {name: tensor * 1.3 if "visual" in name else tensor for name, tensor in weights.items()}
        save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def check_samples_and_scores(seer):
    """Turns with images, the same ids with another image, and text alone equal a plain forward."""
    seer.load(seer.directory)
    assert seer.score_apart([5, 9], 2, [40], 1, [7, 8], 0, [6]) < 1e-5  # before the server knows any of them
    asked = [seer.prompt([5, 9], 0, [40]), seer.prompt([5, 9], 2, [40]), seer.prompt([5, 9, 40])]
    replies = seer.run(*(seer.client.generate(ids, SAMPLED, images=places) for ids, places in asked))
    assert asked[0][0] == asked[1][0]
    for (ids, places), reply in zip(asked, replies, strict=True):
        assert seer.apart([*ids, *reply.token_ids], places, reply.logprobs) < 1e-5
    said = [token for token in replies[0].token_ids if token not in seer.vision.media]
    assert seer.score_apart([5, 9], 0, [40, *said], 1, [7, 8]) < 1e-5
    ids, places = seer.prompt([5, 9], 0, [40])
    (blind,) = seer.run(seer.client.score(ids))
    assert seer.apart(ids, places, blind) > 0.01  # the comparison can tell


def check_new_tower(seer, directory):
    """An image that the server saw before is seen by the new tower after an update."""
    seer.load(seer.directory)
    asked = [5, 9], 0, [40, 41, 42]
    assert seer.score_apart(*asked) < 1e-5
    before = seer.whole
    seer.load(seer.write_changed(directory))
    assert seer.score_apart(*asked) < 1e-5
    seer.whole, after = before, seer.whole
    assert seer.score_apart(*asked) > 1e-3  # the old features would show
    seer.whole = after


def check_counts(seer):
    """An image that has fewer tokens in the prompt than the server makes is refused."""
    ids, (place,) = seer.prompt(3, [40])
    fewer = [replace(place, length=place.length - 1)]
    with pytest.raises(EngineError, match=r"tokens (of an image|in a prompt) of"):
        seer.run(seer.client.generate(ids[:1] + ids[2:], SAMPLED, images=fewer))


def check_restart(seer, server, directory):
    """Two servers see images, and one that restarts gets the new tower again; it has no features of the image any more."""
    fleet = FleetClient([seer.client_of(url) for url in (seer.url, server.url)])
    changed = seer.write_changed(directory)
    seer.version += 1
    seer.whole = whole_model(changed)
    asked = seer.prompt([5, 9], 0, [40])

    async def both():
        await fleet.version()
        while len(fleet.engines()) < 2:
            await asyncio.sleep(0.1)
        return [await engine.score(*asked) for engine in fleet.engines()]

    async def sampled():
        ids, places = asked
        sessions = (f"0/p{n}/0" for n in range(8))
        return await asyncio.gather(
            *(fleet.generate(ids, SAMPLED, images=places, session=session) for session in sessions)
        )

    def run(script):
        async def main():
            try:
                return await asyncio.wait_for(script, 60)
            finally:
                await fleet.disconnect()

        return asyncio.run(main())

    with server:
        run(fleet.load(WeightRef(seer.version, path=str(changed), kind="full")))
        assert max(seer.apart(*asked, scores) for scores in run(both())) < 1e-5
        replies = run(sampled())
        assert all(member.replies for member in fleet._servers)
    replies += run(sampled())
    assert len(fleet.engines()) == 1
    with server:
        assert max(seer.apart(*asked, scores) for scores in run(both())) < 1e-5
    ids, places = asked
    assert all(seer.apart([*ids, *one.token_ids], places, one.logprobs) < 1e-5 for one in replies)


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


def png(family, seed, rows=1, columns=2):
    file = io.BytesIO()
    PIL.Image.fromarray(picture(family, rows, columns, seed)).save(file, format="PNG")
    return file.getvalue()


def train(seer, output, *changes):
    """Take two steps over two turns with an image each, and return what trained, and the episodes.

    Canary and mismatch show that engine and trainer agree after the first step too. The server has other weights afterwards.
    """
    family = seer.directory.name
    rows = [{"prompt": "<image>?", "image": png(family, 1), "second": png(family, 2), "ground_truth": "a"}]
    config = load_config(None, [
        f"model.path={seer.directory}", "model.autocast=none", f"output.dir={output}", "eval.every=0",
        f"inference.name={seer.name}", f"inference.url={seer.url}", f"inference.context_length={CONTEXT}",
        "rollout.prompts=1", "max_steps=2", "env.max_steps=2", "training.lr=1e-2", "training.schedule=constant",
        "tracking.tensorboard=false", "inference.wait_s=300", *changes,
    ])  # fmt: skip
    given = Given(dataset=rows, reward_functions=[Short()], env_class=Looks)
    with build_trainer(config, given) as run:
        run.train()
        weights = dict(run.backend.weights())
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    # a step of equal rewards has none
    trained = [step["mismatch/mean"] for step in steps if "mismatch/mean" in step]
    assert len(steps) == 2 and trained and max(trained) < 1e-5 and not any(step["failures"] for step in steps)
    files = sorted((output / "episodes").glob("step-*.jsonl"))
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert any(sum(len(span.get("images", ())) for span in one["spans"]) == 2 for one in episodes)
    return weights, episodes


def check_tower_trains(seer, output, *changes):
    """A tower trains through the server; return the episodes whose first turn has a placeholder, by chance."""
    sizes = "rollout.group_size=6", "rollout.max_tokens=100"
    weights, episodes = train(seer, output, "model.vision=train", *sizes, *changes)
    before = load_file(seer.directory / "model.safetensors")
    assert max((weights[name] - before[name]).abs().max() for name in before if "visual" in name) > 1e-3
    media = set(seer.vision.media)
    firsts = [(one, next(span for span in one["spans"] if span["author"] == "policy")) for one in episodes]
    found = [(one, first) for one, first in firsts if media.intersection(first["token_ids"])]
    assert any(first.get("weight", 0) > 0 for _, first in found)
    return found


def check_adapter_trains(seer, output):
    """An adapter on the text model trains through the server, which holds the model under it."""
    seer.load(seer.directory)
    sizes = "rollout.group_size=4", "rollout.max_tokens=8"
    train(seer, output, "model.vision=frozen", "model.lora.rank=4", "sync.name=lora", *sizes)
