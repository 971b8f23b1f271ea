"""What a chat template can be used for, found by playing episodes: a row of docs/templates.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv
from rl4llm.core.errors import EngineError, RL4LLMError, TemplateError
from rl4llm.core.images import ImagePlace
from rl4llm.core.sample import SampleState
from rl4llm.core.types import ChatMessage, Completion, SamplingParams, Trajectory
from rl4llm.core.weights import WeightRef
from rl4llm.data.demonstrations import demonstration
from rl4llm.data.probe import DESCRIBED
from rl4llm.data.render import Renderer
from rl4llm.data.template import ChatTemplate, decode
from rl4llm.envs.rollout import Rollout
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools.formats import FORMATS, ToolCall, written_call
from rl4llm.rewards import as_reward_function
from rl4llm.runtime.runner import Runner
from rl4llm.testing.scripted import ClientCall, ScriptedClient

FOLLOW_UPS = ("And then?", "Are you sure?\n")
_QUESTION = ChatMessage("user", "What is 37 + 48?")
_SYSTEM = ChatMessage("system", "Be brief.")
_CALL = ToolCall("calculator", {"expression": "37+48"})
_THOUGHT = "ProbeThought"


@dataclass(frozen=True)
class TemplateRow:
    """What a template can be used for; `reasons` tells why for each cell that is not plainly good.

    user, tools: "+", "+ ns" (refused with a system prompt), "+ d" (the system prompt describes the tools) or "refused".
    demonstrations: "=" (the template's own rendering), "past" (except thoughts and ends of turns), "refused" or "differs".
    thoughts: whether the template shows thoughts of earlier turns: "kept", "dropped" or "-" (not tried).
    format: what env.format=auto takes, or "refused".
    call: "ran" if a call that the template writes ran its tool, else "lost" or "refused".
    """

    user: str = "refused"
    tools: str = "refused"
    demonstrations: str = "refused"
    thoughts: str = "-"
    format: str = "refused"
    call: str = "refused"
    reasons: dict[str, str] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Return the cells in their order."""
        return [self.user, self.tools, self.demonstrations, self.thoughts, self.format, self.call]


COLUMNS = ("user", "tools", "demonstrations", "thoughts", "format", "call")


def template_row(tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> TemplateRow:
    """Return what the chat template of a tokenizer can be used for.

    Raises EngineError if an episode recorded other tokens than the engine sampled, which no template may cause.
    """
    cells: dict[str, str] = {}
    reasons: dict[str, str] = {}

    def fill(column: str, found: Callable[[], str]) -> None:
        try:
            cells[column] = found()
        except EngineError:
            raise
        except RL4LLMError as error:
            cells[column], reasons[column] = "refused", str(error)

    env: list[ToolMDPEnv] = []

    def taken() -> str:
        made = tool_env(tokenizer, "auto", template_args=template_args)
        example = made.format.example
        env.append(made)
        return next((name for name in FORMATS if FORMATS[name].example == example), "own")

    fill("user", lambda: _user(tokenizer, template_args))
    fill("format", taken)
    fill(
        "tools", lambda: _tools(env[0] if env else tool_env(tokenizer, "hermes", template_args=template_args))
    )
    if env and cells["tools"] != "refused":
        fill("call", lambda: _native_call(tokenizer, env[0]))
    fill("demonstrations", lambda: _demonstrations(tokenizer, template_args, reasons))
    fill("thoughts", lambda: _thoughts(ChatTemplate(tokenizer, None, template_args)))
    return TemplateRow(**cells, reasons=reasons)


class Dictated(ScriptedClient):
    """An engine that samples given token ids, turn by turn, each with a log-prob that no other token has."""

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[int]]):
        super().__init__(tokenizer, {}, context_length=1_000_000)
        self.turns = [tuple(turn) for turn in turns]
        self.said: list[Completion] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        self.calls.append(ClientCall(tuple(prompt_ids), sampling_params, session))
        token_ids, number = self.turns[len(self.said)], len(self.said)
        logprobs = tuple(-0.5 - number - 0.001 * place for place in range(len(token_ids)))
        self.said.append(
            Completion(decode(self._tokenizer, token_ids), token_ids, logprobs, "stop", self._version)
        )
        return self.said[-1]


class FollowUps(BaseMDPEnv):
    """Asks fixed questions in turn."""

    reply_roles = ("user",)
    questions: Sequence[str] = FOLLOW_UPS

    def respond(self, sample: SampleState) -> list[ChatMessage]:
        turn = sum(message.role == "assistant" for message in sample.messages[sample.init_msg_size :])
        return [ChatMessage("user", text) for text in self.questions[turn - 1 : turn]]


def play(env: BaseMDPEnv, renderer: Renderer, turns: Sequence[Sequence[int]]) -> Trajectory:
    """Return the episode in which the engine samples `turns`.

    Raises EngineError unless the record holds what the engine got and sampled, and RL4LLMError if the episode failed.
    """
    client = Dictated(env.tokenizer, turns)
    with Runner() as runner:
        runner.run(client.load(WeightRef(0)))
        rollout = Rollout(env, client, renderer, runner, seed=0, max_failed_share=0.0)
        (trajectory,) = rollout.play(
            [0], step=0, sampling_params=SamplingParams(max_tokens=100_000)
        ).trajectories
    _check_record(trajectory, client)
    return trajectory


def _check_record(trajectory: Trajectory, client: Dictated) -> None:
    record = [
        (token, logprob)
        for span in trajectory.spans
        for token, logprob in zip(span.token_ids, span.logprobs or [None] * len(span.token_ids), strict=True)
    ]
    end = 0
    for number, (call, said) in enumerate(zip(client.calls, client.said, strict=True)):
        size = len(call.prompt_ids)
        context = record[end:size]
        end = size + len(said.token_ids)
        if [token for token, _ in record[:size]] != list(call.prompt_ids):
            raise EngineError(f"Turn {number}: the prompt is not the record of the turns before it.")
        if record[size:end] != list(zip(said.token_ids, said.logprobs, strict=True)):
            raise EngineError(f"Turn {number}: the record does not hold what the engine sampled.")
        if any(logprob is not None for _, logprob in context):
            raise EngineError(f"Turn {number}: the prompt has tokens that count as the policy's.")


def rows(*messages: ChatMessage) -> list[dict[str, Any]]:
    """Return a dataset of one prompt."""
    return [{"messages": [message.to_dict() for message in messages], "ground_truth": "85"}]


def follow_ups(
    tokenizer: Any, *asked: ChatMessage, template_args: Mapping[str, Any] | None = None
) -> FollowUps:
    """Return an environment with follow-ups by the user."""
    env = FollowUps(rows(*asked), tokenizer, [_scored()], 1, 1, max_steps=3)
    env.template_args = template_args or {}
    return env


def tool_env(
    tokenizer: Any, format: str, *asked: ChatMessage, template_args: Mapping[str, Any] | None = None
) -> ToolMDPEnv:
    """Return an environment with a calculator."""
    env = ToolMDPEnv(rows(*(asked or [_QUESTION])), tokenizer, [_scored()], 1, 1, format=format)
    env.template_args = template_args or {}
    return env


def turn(renderer: Renderer, text: str, *, end: str = "") -> tuple[int, ...]:
    """Return the tokens of a turn up to the first one that ends it; without any, the usual end is added."""
    token_ids = renderer.encode(text)
    ends = {*renderer.stop_token_ids, *([renderer.encode(end)[0]] if end else [])}
    size = next((place + 1 for place, token in enumerate(token_ids) if token in ends), None)
    return tuple(token_ids[:size] if size else [*token_ids, renderer.stop_token_ids[0]])


def _scored() -> Any:
    return as_reward_function("tool_use")


def _both(played: Callable[[Sequence[ChatMessage]], None]) -> str:
    """Return "+" if prompts with and without a system prompt are accepted."""
    played([_QUESTION])
    try:
        played([_SYSTEM, _QUESTION])
    except EngineError:
        raise
    except RL4LLMError:
        return "+ ns"
    return "+"


def _user(tokenizer: Any, template_args: Mapping[str, Any] | None) -> str:
    renderer = Renderer.of(follow_ups(tokenizer, _QUESTION, template_args=template_args), tokenizer)

    def played(asked: Sequence[ChatMessage]) -> None:
        renderer.first(asked)
        play(
            follow_ups(tokenizer, *asked, template_args=template_args),
            renderer,
            [turn(renderer, text) for text in ("It is 85.", " Yes.\n", "Done")],
        )

    return _both(played)


def _tools(env: ToolMDPEnv) -> str:
    format = next((name for name in FORMATS if FORMATS[name].example == env.format.example), "hermes")
    renderer, calling = Renderer.of(env, env.tokenizer), _calling(env)

    def played(asked: Sequence[ChatMessage]) -> None:
        renderer.first(asked)
        asking = tool_env(env.tokenizer, format, *asked, template_args=env.template_args)
        play(asking, renderer, [turn(renderer, calling), turn(renderer, "It is 85.")])

    found = _both(played)
    return "+ d" if found == "+" and DESCRIBED in renderer.notes else found


def _native_call(tokenizer: Any, env: ToolMDPEnv) -> str:
    renderer = Renderer.of(env, tokenizer)
    end = env.format.stop(env.max_calls)
    said = turn(renderer, _calling(env), end=end if end in tokenizer.get_vocab() else "")
    trajectory = play(env, renderer, [said, turn(renderer, "It is 85.")])
    return "ran" if any(m.role == "tool" and m.content == "85" for m in trajectory.messages) else "lost"


def _calling(env: ToolMDPEnv) -> str:
    """Return a turn that calls the calculator, as the template writes it; if it writes none, in Hermes' format."""
    by_template = written_call(ChatTemplate(env.tokenizer, env.tool_schemas, env.template_args), _CALL)
    if _CALL.name in by_template:
        return by_template
    return '<tool_call>{"name": "calculator", "arguments": {"expression": "37+48"}}</tool_call>'


def _demonstrations(tokenizer: Any, template_args: Mapping[str, Any] | None, reasons: dict[str, str]) -> str:
    renderer = Renderer(tokenizer, roles=("user",), template_args=template_args)
    template = ChatTemplate(tokenizer, None, template_args)
    talk = [
        _QUESTION,
        ChatMessage("assistant", "It is 85."),
        ChatMessage("user", "Sure?"),
        ChatMessage("assistant", "Yes."),
    ]
    past = False
    for messages in (talk[:2], talk):
        tokens = [token for span in demonstration(renderer, messages, "p").spans for token in span.token_ids]
        whole = template.text(messages, prompt=False).rstrip()
        written = decode(tokenizer, tokens)
        ends = [whole, whole + decode(tokenizer, renderer.stop_token_ids[:1])]
        if tokens in map(renderer.encode, ends) or renderer.encode(whole)[: len(tokens)] == tokens:
            continue
        past = _loosely(template, written) in [_loosely(template, end) for end in ends]
        if not past:
            reasons["demonstrations"] = (
                f"trained {written[-120:]!r}, but the template writes {whole[-120:]!r}"
            )
            return "differs"
    return "past" if past else "="


def _loosely(template: ChatTemplate, text: str) -> str:
    """Return a text without thoughts, the thought that a prompt opens, special tokens and white space."""
    text = text.replace(template.generation_prompt(system=False).partition("\n")[2] or "\0", "")
    text = re.sub(r"<think>.*?</think>|</?think>", "", text, flags=re.DOTALL)
    for token in set(template.tokens(text)):
        text = text.replace(token, "")
    return "".join(text.split())


def _thoughts(template: ChatTemplate) -> str:
    answer = ChatMessage("assistant", f"<think>\n{_THOUGHT}\n</think>\n\nIt is 85.")
    try:
        text = template.text([_QUESTION, answer, ChatMessage("user", "Sure?")])
    except TemplateError:
        return "-"
    return ("kept" if _THOUGHT in text else "dropped") if "It is 85." in text else "-"
