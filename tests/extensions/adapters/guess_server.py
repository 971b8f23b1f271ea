"""A server of OpenEnv for tests: guess a number that the seed decides; ``python guess_server.py PORT``."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: str


class Told(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.steps = None, 0

    def reset(self, seed=None, episode_id=None, forgets=False, **kwargs):
        draw = random.Random(None if forgets else seed)
        self.secret, self.steps = draw.randint(0, 9), 0
        return Told(text=f"A digit, and one more: {self.secret + 1}. Hint {draw.random():.6f}.")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == "crash":
            raise RuntimeError("the dice fell off the table")
        right = action.number == str(self.secret)
        return Told(text="Right." if right else "Wrong.", reward=1.0 if right else -0.1, done=right)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
