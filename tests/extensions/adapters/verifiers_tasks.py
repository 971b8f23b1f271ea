"""Tasks of verifiers for tests, in a separate module that its Python loads: say how many letters a word has."""

import os
from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers_letters import LetterToolset

__all__ = ["WordTaskset"]


class WordData(vf.TaskData):
    word: str


class WordConfig(vf.TaskConfig):
    broken: str = ""  # how the reward breaks
    tools: vf.ToolsetConfig | None = None


class WordTask(vf.Task[WordData, vf.State, WordConfig]):
    @classmethod
    def toolsets(cls, config: WordConfig) -> list[vf.Toolset]:
        return [LetterToolset(config.tools)] if config.tools else []

    @vf.reward(weight=0.5)
    async def right(self, task: WordData, trace: vf.Trace) -> float:
        if self.config.broken == "raises":
            raise RuntimeError("the judge is away")
        if self.config.broken == "dies":
            os._exit(7)
        if self.config.broken == "nan":
            return float("nan")
        os.write(1, b"a library may print what it likes\n")
        return float(str(len(task.word)) in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / max(len(trace.last_reply), 4)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class WordTasksetConfig(vf.TasksetConfig):
    words: int = 40
    task: WordConfig = WordConfig()


class WordTaskset(vf.Taskset[WordTask, WordTasksetConfig]):
    def load(self) -> Iterable[WordTask]:
        for number in range(self.config.words):
            word = "ab" * (number + 1)
            data = WordData(prompt=f"How many letters has {word}?", system_prompt="Count.", word=word)
            yield WordTask(data, self.config.task)
