"""Talk to a model in the environment of its run: a line is the question of an episode, which later lines continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from rl4llm.commands.output import meanwhile, say
from rl4llm.compose import build_algorithm
from rl4llm.compose.data import training_rows
from rl4llm.compose.setup import Given, Setup
from rl4llm.config import Config, load_config
from rl4llm.config.keys import DataConfig, EvalConfig, LoraConfig, OutputConfig, RolloutConfig, TrainingConfig
from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.player import Player
from rl4llm.core.sample import EnvState, Special, messages_of
from rl4llm.core.types import ChatMessage
from rl4llm.envs.rollout import Rollout
from rl4llm.extensions.evaluate.play import PLAIN, at_work, load
from rl4llm.inference.local import LocalClient
from rl4llm.runs.checkpoint import Checkpoint, latest_checkpoint
from rl4llm.runs.run_dir import RunDir
from rl4llm.tracking.tracker import read_jsonl
from rl4llm.trainers.rl import RLTrainer

MODEL = ("rollout.max_tokens=1024", "model.autocast=none")
"""Keys of a model without a run."""

LOOK_S = 0.03  # between two looks at the tokens of an answer
Show = Callable[[str, str], None]
"""Gets an answer in pieces: the role of a message, "" if it continues, and text."""


class ChatError(EnvError):
    """A line was not answered; the conversation begins again with the next one."""


class Conversation:
    """Lines that the policy answers in its environment, one after the other; tokens are appended as in training."""

    def __init__(self, trainer: RLTrainer, template: str | None):
        assert isinstance(trainer.rollout, Rollout)
        assert isinstance(trainer.inference.client, LocalClient)
        self._rollout, self._client = trainer.rollout, trainer.inference.client
        self._env = self._rollout.env
        self._params = trainer.eval_params
        self._row, self._template = _shared(list(self._env.dataset)), template
        self._continues = (
            type(self._env)._run_episode is Player._run_episode and not self._rollout.plays_whole
        )
        # a line does not end the episode, whose tools stay open until the next one begins
        self._end_episode, self._env.end_episode = self._env.end_episode, lambda sample: None  # type: ignore[method-assign]
        self._state: EnvState | None = None
        self._count = 0

    def ask(self, line: str, show: Show = lambda role, text: None) -> list[ChatMessage]:
        """Return the messages that follow a line: answers, results of tools, and what the environment says.

        Raises ChatError if the episode fails or its context is full.
        """
        question = ChatMessage("user", self._template.format(prompt=line) if self._template else line)
        if self._state is not None and self._continues:
            sample = self._state.sample_states[0]
            sample.messages.append(question)
            sample.done, sample.stop_reason, sample.current_step = False, None, 0
        else:
            self.reset()
            self._state = self._begun(question)
            sample = self._state.sample_states[0]
        begin = len(sample.messages)
        with ExitStack() as failed:  # no line follows one that has no answer
            failed.callback(self.reset)
            self._rollout.run(self._play(self._state, show))
            if sample.failure is not None or len(sample.messages) == begin:
                raise ChatError(sample.failure or f"{self._client.context_length} tokens fill the context.")
            failed.pop_all()
        return sample.messages[begin:]

    def reset(self) -> None:
        """End the conversation; the next line begins another."""
        state, self._state = self._state, None
        for sample in state.sample_states if state else ():
            for closing in self._end_episode(sample) or ():
                closing.result()

    def _begun(self, question: ChatMessage) -> EnvState:
        self._env.dataset = [{**self._row, "messages": [*self._row["messages"], question]}]
        samples = self._env.begin_episode(0, self._count, Special(), self._env.seed, step=0)
        self._count += 1  # so that the same line again may be answered in another way
        state = EnvState(samples)
        self._llm = self._rollout.policy(state)
        return state

    async def _play(self, state: EnvState, show: Show) -> None:
        watching = asyncio.create_task(self._watch(state.sample_states[0], show))
        try:
            if self._rollout.plays_whole:
                loop = partial(self._env._run_interaction_loop, state, self._llm, self._params)
                await self._rollout.in_loop_thread(loop)
            else:
                await self._env._run_episodes(state, self._llm, self._env.turn_params(self._params))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, sample: Any, show: Show) -> None:
        """Show the messages that are appended to a sample, and of the one that is being sampled what there is."""
        seen, shown = len(sample.messages), ""

        def show_rest(role: str, text: str) -> None:
            nonlocal shown
            if text.startswith(shown) and len(text) > len(shown):
                show("" if shown else role, text[len(shown) :])
                shown = text

        def show_new() -> None:
            nonlocal seen, shown
            for message in sample.messages[seen:]:
                show_rest(message.role, message.content)
                seen, shown = seen + 1, ""

        try:
            while True:
                await asyncio.sleep(LOOK_S)
                show_new()
                tokens = self._client.sampled(sample.session)
                text = self._env.tokenizer.decode(tokens, skip_special_tokens=True)
                show_rest("assistant", text.rstrip("\ufffd"))  # the rest of a character is missing
        finally:
            show_new()


@contextmanager
def conversation(
    name: str, overrides: Sequence[str] = (), *, part: str | None = None, model: str | None = None
) -> Iterator[Conversation]:
    """Yield a conversation with a run (its directory or a configuration), or with a model (a directory or hub name).

    A run answers with its newest weights, or those of `model`, in its environment, with its prompt and the sampling of its
    evaluations. They are loaded into this process, whatever engine the run has. Raise ConfigError for a run whose model
    gives no answers, and for an unknown `part`.
    """
    file = Path(name) / "config.yaml" if Path(name, "run.json").is_file() else Path(name)
    checkpoint, template, given = None, None, Given(dataset=[_row(())])
    if file.suffix in (".yaml", ".yml"):
        config = load(str(file), overrides, of_run=True)
        run = RunDir(config.output.dir)
        if model is None:
            config, checkpoint = _newest(config, run)
        else:
            config = replace(config, model=replace(config.model, path=model))
        config, given = _playable(config, run, part)
        template = config.data.prompt_template
    else:
        files = [*file.glob("*/run.json"), *file.glob("*/*/run.json"), *file.glob("../run.json")]
        runs = sorted(str(each.parent.resolve()) for each in files)
        if runs and not any(file.glob("*config.json")):
            raise ConfigError(f"{name} is neither a run nor a model. Runs: {', '.join(runs)[:500]}.")
        config = _alone(load_config(None, [f"model.path={name}", *MODEL, *overrides]))
    with ExitStack() as stack:
        with meanwhile():
            given = replace(given, reward_functions=["tool_use"])
            trainer = stack.enter_context(at_work(config, checkpoint, given))
        talk = Conversation(trainer, template)
        try:
            yield talk
        finally:
            talk.reset()


def _newest(config: Config, run: RunDir) -> tuple[Config, Checkpoint | None]:
    """Return what holds the newest weights of a run: its model if it has finished, else the last checkpoint, else none."""
    checkpoint = latest_checkpoint(run.checkpoints_dir)
    if run.model_dir.is_dir() and (checkpoint is None or checkpoint.step >= config.max_steps):
        merged = replace(config.model, path=str(run.model_dir), lora=LoraConfig(), quantize="none")
        return replace(config, model=merged), None
    if checkpoint is None:
        say(f"{run.path} has no checkpoint, so model.path={config.model.path} answers.")
    return config, checkpoint


def _playable(config: Config, run: RunDir, part: str | None) -> tuple[Config, Given]:
    """Return the configuration of a run that plays its own prompts, or else rows with the prompt that they share."""
    if part is not None and part not in config.environments:
        raise ConfigError(f"--part {part} is not a part. This run has: {', '.join(config.parts) or 'none'}.")
    config = config.environments[part or next(iter(config.environments))]
    needs = build_algorithm(config).needs()
    if needs.value_head:
        raise ConfigError(f"{run.path} trains a reward/value model, which cannot answer.")
    objects = json.loads(run.run_file.read_text())["fingerprint"] if run.run_file.exists() else {}
    if env := objects.get("given.env"):
        say(f"config.yaml does not name the Python class {env}, so env.name={config.env['name']} plays.")
    if "given.dataset" in objects:
        return _alone(config), Given(dataset=_stored(run))
    data = replace(config.data, limit=min(2, config.data.limit or 2))
    if needs.learns_from == "episodes":
        return replace(_alone(config), data=data), Given()
    first = training_rows(Setup.of(replace(config, data=data)))[0].get("messages", ())
    systems = takewhile(lambda message: message.role == "system", messages_of(first))
    return _alone(config), Given(dataset=[_row([message.to_dict() for message in systems])])


def _stored(run: RunDir) -> list[dict[str, Any]]:
    """Return the prompts of a few stored episodes, which stand for rows that were objects of Python."""
    stored = (row for file in sorted(run.episodes_dir.glob("*.jsonl"))[:1] for row in read_jsonl(file))
    rows: dict[str, dict[str, Any]] = {}
    for episode in (row for row in stored if row.get("turns")):
        messages = episode["messages"]
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        prompt = {"messages": messages[: turns[-episode["turns"]]], "ground_truth": episode["ground_truth"]}
        rows.setdefault(episode["prompt_id"], prompt)
    return [*rows.values()][:2] or [_row(())]


def _alone(config: Config) -> Config:
    """Return the configuration of this process alone, which only plays."""
    return Config(
        algorithm=PLAIN,
        output=OutputConfig(console="quiet"),
        seed=config.seed,
        threads=config.threads,
        model=config.model,
        data=DataConfig(special_tokens=config.data.special_tokens),
        env={key: value for key, value in config.env.items() if key != "remote"},
        sandbox=config.sandbox,
        rollout=RolloutConfig(max_tokens=config.rollout.max_tokens, stop=config.rollout.stop),
        eval=EvalConfig(every=0, temperature=config.eval.temperature),
        training=TrainingConfig(lr=0.0, optimizer=config.training.optimizer),  # whose state a checkpoint has
    )


def _row(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"messages": [*messages, {"role": "user", "content": "?"}], "ground_truth": None}


def _shared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first row with the messages that all rows begin with, without its last one."""
    prompts = [messages_of(row["messages"]) for row in rows]
    same = takewhile(
        lambda messages: all(each == messages[0] for each in messages), zip(*prompts, strict=False)
    )
    return {**rows[0], "messages": [messages[0] for messages in same][: max(0, len(prompts[0]) - 1)]}
