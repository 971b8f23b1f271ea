"""Directories of runs, written by what writes them in training."""

import json

import numpy as np
import torch
from packed import pack

from rl4llm.core.base_env import SampleState
from rl4llm.core.images import ImagePlace, Picture
from rl4llm.core.types import ChatMessage, Completion, Group, TokenSpan, Trajectory
from rl4llm.data.images import ImageStore
from rl4llm.data.pack import totals_of
from rl4llm.tracking.episodes import EpisodeLog, TrainedTokens
from rl4llm.tracking.tracker import JsonlTracker

CONFIG = "algorithm:\n  name: grpo\ntraining:\n  lr: {lr}\nmax_steps: 20\nseed: {seed}\n"
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}


def episode(tokenizer, prompt="p", sample=0, answer="42", reward=1.0, stop="done", **more):
    """One turn with a tool, one with an answer."""
    messages = (
        ChatMessage("user", f"How much is {prompt}?"),
        ChatMessage("assistant", "", tool_calls=(CALL,)),
        ChatMessage("tool", "42"),
        ChatMessage("assistant", answer),
    )
    said = [encoded(tokenizer, text) for text in ("calculator 6*7", answer[:200])]
    spans = (TokenSpan.context(encoded(tokenizer, f"How much is {prompt}?\n")), policy(said[0]))
    spans += (TokenSpan.context(encoded(tokenizer, "\n42\n")), policy(said[1]))
    extras = {"sample": sample, "ground_truth": "42", **more}
    return Trajectory(prompt, spans, messages, {"math": reward}, reward, stop, extras)


def encoded(tokenizer, text):
    return tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False) or [0]


def policy(token_ids):
    logprobs = tuple(-(token % 50) / 100 - 0.01 for token in token_ids)
    return TokenSpan.policy(Completion("", tuple(token_ids), logprobs, "stop", version=3))[0]


def trained(trajectories, difference):
    """As if they had trained, with log-probs that are `difference` above the engine's and a clip at every fifth token."""
    tokens = TrainedTokens()
    for batch in pack(
        trajectories,
        [one.reward - 0.5 for one in trajectories],
        max_tokens_per_batch=10_000,
        layout="shared",
        aggregation="token",
        totals=totals_of(trajectories),
        pad_token_id=0,
    ):
        batch.advantages_BT = batch.credits_BT
        clipped_BT = (torch.arange(batch.token_ids_BT.shape[1]) % 5 == 0).expand_as(batch.mask_BT)
        tokens.add(
            [one.spans for one in trajectories], batch, batch.sampled_logprobs_BT + difference, clipped_BT
        )
    return tokens


def write_step(log, tokenizer, step, groups=2, size=4, **details):
    def attempt(prompt, sample):
        return episode(
            tokenizer, prompt, sample, answer=f"It is {40 + sample}.", reward=float(sample == 2), **details
        )

    prompts = [f"{step}-{i}" for i in range(groups)]
    made = [Group(prompt, tuple(attempt(prompt, sample) for sample in range(size))) for prompt in prompts]
    credits = [[one.reward - 0.5 for one in group.trajectories] for group in made]
    numbers = trained([one for group in made for one in group.trajectories], difference=step / 1000)
    why = {"failure": "no answer", "failure_class": "env/timeout"}
    failed = [SampleState(f"{step}-9", 0, [ChatMessage("user", "?")], "42", **why)]
    log.log(step, made, failed if step % 2 == 0 else (), credits=credits, trained=numbers)


def write_run(directory, tokenizer, steps=3, lr="1.0e-4", offset=0.0, seed=0):
    """A run of some steps, with a tokenizer where a run has one."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(CONFIG.format(lr=lr, seed=seed))
    (directory / "run.json").write_text(
        json.dumps({"run_id": directory.name, "created": "now", "rl4llm": "0.1.0"})
    )
    metrics, log = JsonlTracker(directory / "metrics.jsonl"), EpisodeLog(directory / "episodes")
    for step in range(1, steps + 1):
        metrics.log(step, {"reward/mean": step / 10 + offset, "loss": 1 / step, "time/rollout": 0.5})
        write_step(log, tokenizer, step)
    metrics.close()
    tokenizer.save_pretrained(directory / "model")
    return directory


def write_seen(run):
    """Write an episode with an image of 40 tokens into a run, as its last; return the image's file."""
    images = ImageStore(run / "images")
    image = images.add(np.full((320, 640, 3), 200, np.uint8))
    said = (
        ChatMessage.showing("user", "What is ", Picture(images.png(image)), "?"),
        ChatMessage("assistant", "It is grey."),
    )
    spans = (TokenSpan.context([5, *[7] * 40, 6], [ImagePlace(image, 1, 40)]), policy([8, 9]))
    group = Group("seen", (Trajectory("seen", spans, said, {"math": 1.0}, 1.0, "done", {"sample": 0}),))
    EpisodeLog(run / "episodes").log(99, [group], credits=[[0.0]])
    return run / "images" / f"{image.digest}.png"
