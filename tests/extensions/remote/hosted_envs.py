"""Environments and rewards that hosts run in tests; what they did is kept here, in the host's process."""

import io
import itertools
import os
import random
import signal
import time
from pathlib import Path
from types import MappingProxyType

import numpy as np
import PIL.Image
import PIL.ImageOps

from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage
from rl4llm.core.errors import EnvError
from rl4llm.core.images import Picture
from rl4llm.core.types import images_of
from rl4llm.data.images import read_picture
from rl4llm.envs import RolesEnv, ToolMDPEnv
from rl4llm.extensions.judges.judges import BaseJudge
from rl4llm.extensions.remote.wire import MAX_MESSAGE_BYTES

CLOSED, ENDED = [], []
ON_TURN = []
"""Called with the sample at each turn."""


class Hints(BaseMDPEnv):
    """A hint after each turn, which depends on the seed, the prompt, the sample, the turn and what was sampled alone.

    It keeps count in the sample, gives each turn what it is worth, and brings its own prompts.
    """

    default_rewards = ("hosted_envs:Tokens",)
    success_at = 1e6
    continue_truncated = True

    @staticmethod
    def prompts(split, limit=None, *, above=0):
        texts = [f"Guess {above + i}." for i in range(limit or 4)]
        return [
            {"prompt_id": f"{split}-{i}", "messages": [{"role": "user", "content": text}], "ground_truth": i}
            for i, text in enumerate(texts)
        ]

    def respond(self, sample):
        for watch in ON_TURN:
            watch(sample)
        sampled = sum(len(span.token_ids) for span in sample.policy_spans)
        draw = random.Random(f"{self.seed} {sample.prompt_id} {sample.index} {sample.current_step} {sampled}")
        sample.extras["object"] = self  # which no other process can have
        sample.extras["metrics"] = {"hints": sample.current_step}
        sample.reward_turn(draw.random())
        if sample.current_step == self.max_steps:
            return []
        return [ChatMessage("user", f"No, try {draw.randint(0, 99)}", seconds=time.perf_counter())]

    def end_episode(self, sample):
        ENDED.append((sample.prompt_id, sample.index))

    def _next(self):
        """Share its name with a method of RolesEnv."""

    def close(self):
        CLOSED.append(self)
        super().close()


class Stumbles(Hints):
    """Breaks in the ways that environments break, as the prompt says."""

    respond_timeout_s = 1.0

    def respond(self, sample):
        how = sample.messages[0].content
        if sample.index and "raise" in how:
            raise RuntimeError("the dice fell off the table")
        if sample.index and "hang" in how:
            time.sleep(5)
        if sample.index and "surrogate" in how:
            return [ChatMessage("user", "half a character: \ud800")]
        if sample.index and "huge" in how:
            return [ChatMessage("user", "x" * (MAX_MESSAGE_BYTES + 1))]
        return super().respond(sample)

    def end_episode(self, sample):
        super().end_episode(sample)
        if sample.index and "stick" in sample.messages[0].content:
            raise OSError("it cannot be closed")


class Mortal(ToolMDPEnv):
    """Tools on a host that is killed -9 in the middle of the `dies_at`th turn, unless the file `died` says that it was."""

    continue_truncated = True

    def __init__(self, *args, dies_at=10, died="", **kwargs):
        super().__init__(*args, **kwargs)
        self.dies_at, self.died, self.turns = dies_at, Path(died), itertools.count(1)

    async def respond(self, sample):
        if next(self.turns) == self.dies_at and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await super().respond(sample)
        return [ChatMessage("tool", f"go on {sample.index}")]


class Duel(RolesEnv):
    """Two roles; the seed of the episode decides who begins, and the last line whether it ends."""

    roles = ("pro", "con")
    instructions = MappingProxyType({"pro": "Defend level {level}.", "con": "Attack it."})

    def next_role(self, episode):
        for watch in ON_TURN:
            watch(episode)
        if not episode.said:
            return self.roles[episode.seed % 2]
        last = episode.seats[episode.said[-1].role]
        last.extras["object"] = self
        last.extras["metrics"] = {"lines": len(episode.said)}
        last.reward_turn(random.Random(f"{episode.seed} {episode.said}").random())
        if "raise" in episode.task[-1].content and last.index:
            raise RuntimeError("the ring is closed")
        both = all(seat.current_step for seat in episode.seats.values())
        if both and (len(episode.said[-1].text) % 3 == 0 or len(episode.said) == 2 * self.max_steps):
            return None
        return next(role for role in self.roles if role != episode.said[-1].role)


def rival(messages):
    """Play a role without a model."""
    return f"No, for the {len(messages)}. time."


class OwnOpening(RolesEnv):
    """Begins in a custom way."""

    def opening(self, role, task, columns):
        return list(task)


class OwnOpponent(RolesEnv):
    """Brings an opponent."""

    opponents = MappingProxyType({"user": lambda messages: "Go on."})


class OwnLoop(BaseMDPEnv):
    """Has a custom loop."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs):
        return env_state


class Tokens(BaseRewardFunction):
    """The number of tokens that the policy sampled; not for samples that it does not like."""

    def __init__(self, name="tokens", dislikes=""):
        super().__init__(name)
        self.dislikes = dislikes

    def __call__(self, messages, ground_truth, **kwargs):
        return 0.0

    def score_batch(self, samples):
        if any(self.dislikes and self.dislikes in sample.messages[0].content for sample in samples):
            raise RuntimeError("I do not like this")
        return [float(sum(len(span.token_ids) for span in sample.policy_spans)) for sample in samples]


class TurnLetters(BaseRewardFunction):
    """The letters of each turn."""

    per_turn = True

    def __init__(self, name="letters"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs):
        return []

    def score_batch(self, samples):
        return [
            [
                float(len(item.content))
                for item in sample.messages[sample.init_msg_size :]
                if item.role == "assistant"
            ]
            for sample in samples
        ]


class MoreLetters(BaseJudge):
    """The share of the letters that each role wrote; not for episodes about something that it does not like."""

    def __init__(self, name="more_letters", dislikes=""):
        super().__init__(name)
        self.dislikes = dislikes

    def judge(self, transcript, ground_truth, level=0, **columns):
        if self.dislikes and str(level) == self.dislikes:
            raise RuntimeError("I do not like this level")
        letters = {
            role: 1 + sum(len(line.text) for line in transcript if line.role == role) for role in Duel.roles
        }
        return {role: count / sum(letters.values()) for role, count in letters.items()}


class Seen(Tokens):
    """What a role read and wrote, and how it began, as a number."""

    def score_batch(self, samples):
        return [
            sum(len(message.content) for message in sample.messages) + 10_000.0 * sample.init_msg_size
            for sample in samples
        ]


class Breaks(Tokens):
    """Breaks its contract for the whole batch."""

    def score_batch(self, samples):
        return None


class Refuses(Tokens):
    """Cannot be made."""

    def __init__(self, name="refuses"):
        super().__init__(name)
        raise EnvError("this reward refuses to exist")


class Shows(BaseMDPEnv):
    """Shows the picture of the prompt upside down after the first turn; it brings its own prompts."""

    default_rewards = ("hosted_envs:Looked",)
    continue_truncated = True

    @staticmethod
    def prompts(split, limit=None, *, side=56):
        noise = np.random.default_rng(len(split)).integers(
            0, 256, (limit or 2, side, 2 * side, 3), dtype=np.uint8
        )
        pictures = [read_picture(PIL.Image.fromarray(pixels)) for pixels in noise]
        return [
            {
                "prompt_id": f"{split}-{i}",
                "messages": [ChatMessage.showing("user", "What is ", picture, "?").to_dict()],
                "ground_truth": i,
            }
            for i, picture in enumerate(pictures)
        ]

    def respond(self, sample):
        (picture,) = sample.messages[0].pictures
        how = sample.columns.get("how")
        if how == "broken":
            return [ChatMessage.showing("user", Picture(b"no picture"))]
        if how == "many":
            return [ChatMessage.showing("user", *[picture] * 65)]
        image = PIL.Image.open(io.BytesIO(picture.data))
        return [ChatMessage.showing("user", "And ", read_picture(PIL.ImageOps.flip(image)), "?")]


class Looked(Tokens):
    """The bytes of all pictures, where they are among the tokens, and what the policy sampled, as a number."""

    def score_batch(self, samples):
        return [
            sum(sum(picture.data) for message in sample.messages for picture in message.pictures) / 1e6
            + sum(place.end + int(place.image.digest[:4], 16) for place in images_of(sample.spans)) / 1e3
            + sum(sum(span.token_ids) for span in sample.policy_spans) / 1e2
            for sample in samples
        ]
