"""Black-box agents: any program that uses the API of OpenAI or Anthropic, in front of the policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from rl4llm.core.base_env import LLM, BaseMDPEnv, SampleState
from rl4llm.core.errors import ConfigError, DataError
from rl4llm.core.registry import PARTS, from_extension, load, provided
from rl4llm.core.schema import Count, Positive, checked
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.dialects import Dialects
from rl4llm.extensions.agents.endpoint import AgentEndpoint
from rl4llm.extensions.agents.inside import WorkspaceAgent
from rl4llm.extensions.agents.runs import AgentOutcome, CommandAgent, FunctionAgent
from rl4llm.extensions.agents.session import AgentSession
from rl4llm.runtime.seeds import derive_seed

MOST_WARNINGS = 20  # of fields, whose names an agent chooses
END_S = 60.0  # for an agent to end after it was asked to stop


class AgentEnv(BaseMDPEnv):
    """Runs an agent for each episode, and answers its requests with the policy.

        env.name=agent env.command="python examples/agent.py"
        env.name=agent env.agent=my_package.my_agent:solve

    The agent receives the row as its task (all columns except `ground_truth`, plus a `seed`), and the base URL and key of
    an endpoint with the APIs of OpenAI and Anthropic. Rewards see the conversation with the policy's last answer. If the
    agent's output differs from that answer, it is appended as a last assistant message.

    The policy's answers are recorded token for token, see `rl4llm.extensions.agents.history`. Whenever the agent
    rewrites its history, a fork of the token record starts. All forks train with the reward of the episode, and no
    token trains twice. An episode counts as one in its group, however many records it has.

    An agent that crashes, hangs or sends no request fails the sample (`agent/crashed`, `agent/timeout`,
    `agent/silent`), since that is not the policy's fault. Agents should therefore expect any text and any arguments of
    a call. If an agent crashes after a request was refused because of a limit (`max_steps`, the context), or after an
    answer was cut at its token limit, the episode ends normally. If a request was refused for another reason, and the
    agent did not repeat it successfully, the sample fails (`agent/refused`): its record would end too early.

    So do samples whose row or hidden tests are faulty (`env/task`), and those without a workspace (`env/workspace`).

    The metrics are `env/requests`, `env/refused`, `env/ignored_fields`, `env/forks`, `env/generated_tokens` and
    `env/trained_tokens`. Generated tokens that do not train never reached the agent, or belong to a failed attempt that
    was retried.

    Args:
        command: starts a process for each episode, see `CommandAgent`.
        env: further variables for the command, which gets none of the trainer's keys.
        files: texts of files by their paths below HOME, such as an agent's settings.
        workspace: options of the workspaces in which the command runs, see `WorkspaceAgent`; an empty mapping for the
            usual ones. Without it, the command runs on this machine.
        agent: a function or "package.module:function", see `FunctionAgent`.
        max_steps: requests of an episode that are answered.
        timeout_s: seconds that an agent may take, including the policy's answers.
        processes: how many agents of `command` run at once.
        unenforced: what requests may ask for without getting it, of "tool_choice" (a call that is forced) and
            "response_format" (a format of the answer). Otherwise sampling is constrained, or where the engine or the model's
            format of calls does not allow that, such requests are refused.
    """

    default_rewards = ("math",)

    @checked("env")
    def __init__(
        self,
        *args: Any,
        command: str | Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        workspace: Mapping[str, Any] | None = None,
        agent: str | Callable[..., Any] | None = None,
        max_steps: int = 32,
        timeout_s: Positive = 300.0,
        processes: Count = 16,
        unenforced: Sequence[Literal["tool_choice", "response_format"]] = (),
        **kwargs: Any,
    ):
        self.agent = _agent_of(command, agent, workspace, {"env": env, "files": files})
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        of_turns = [reward.name for reward in self.reward_functions if reward.per_turn]
        if of_turns:
            raise ConfigError(
                f"The reward {of_turns[0]!r} scores each turn, but the records of an agent do not number turns."
            )
        self.timeout_s = timeout_s
        inside = workspace is not None
        self._workspace_error = from_extension("workspace_error", "env.workspace") if inside else ()
        self._unenforced = unenforced
        self._processes = processes if command is not None else None
        self._endpoint: AgentEndpoint | None = None
        self._lost: dict[str, int] = {}  # tokens of failed attempts, by session
        self._warn: Callable[[str], None] = lambda text: None
        self._told: set[str] = set()

    @cached_property
    def _dialects(self) -> Dialects:
        return Dialects(self.tokenizer, self.special_tokens, self.template_args, self.vision)

    @classmethod
    def rewards_for(cls, row: Mapping[str, Any]) -> Sequence[Any]:
        names_task = provided(PARTS).get("names_task")
        return ("task",) if names_task and load(names_task)(row) else cls.default_rewards

    def report_to(self, warn: Callable[[str], None]) -> None:
        self._warn = warn

    def close(self) -> None:
        super().close()
        if isinstance(self.agent, WorkspaceAgent):
            self.agent.workspaces.close()

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        async with self._ending(sample, llm):
            if self._endpoint is None or not self._endpoint.users:
                self._endpoint = AgentEndpoint(self._processes, self._unenforced)  # of this event loop
            endpoint = self._endpoint
            async with endpoint.used(), _slot(endpoint.slots, sample, llm):
                session = AgentSession(
                    sample, llm, sampling_params, self._dialects, max_requests=self.max_steps
                )
                try:
                    await self._play(endpoint, session)
                except DataError as error:
                    sample.fail(str(error), "env/task")
                except self._workspace_error as error:
                    sample.fail(str(error), "env/workspace")

    async def _play(self, endpoint: AgentEndpoint, session: AgentSession) -> None:
        """Play the episode; raises DataError for a faulty row, and the error of a workspace that does not work."""
        try:
            base_url, task = endpoint.open(session), self._task(session.sample)
            if isinstance(self.agent, WorkspaceAgent):
                agent = self.agent
                async with (
                    endpoint.socket(session) as socket,
                    agent.opened(session.sample, socket) as workspace,
                ):
                    await self._run(endpoint, session, agent.run_in(workspace, task, session.key))
                    if session.sample.failure is None:
                        await agent.grade(session.sample, workspace)
            else:
                await self._run(endpoint, session, self.agent.run(task, base_url, session.key))
        finally:
            await endpoint.close(session)

    async def _outcome(
        self, session: AgentSession, run: Coroutine[Any, Any, AgentOutcome]
    ) -> AgentOutcome | None:
        """Run the agent and return its outcome; None if it had to be stopped."""
        running = asyncio.ensure_future(run)
        try:
            ends: set[asyncio.Future[Any]] = {running, session.over}
            await asyncio.wait(ends, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=END_S)
        if session.over.done():
            session.over.result()  # raises what stops the run
        return None if running.cancelled() or not running.done() else running.result()

    def _task(self, sample: SampleState) -> dict[str, Any]:
        return {
            **sample.columns,
            "prompt_id": sample.prompt_id,
            "sample": sample.index,
            "seed": derive_seed(self.seed, sample.session) % 2**31,
            "messages": [_told(message) for message in sample.messages],
        }

    async def _run(
        self, endpoint: AgentEndpoint, session: AgentSession, run: Coroutine[Any, Any, AgentOutcome]
    ) -> None:
        """Run the agent, and end its episode."""
        outcome = await self._outcome(session, run)
        await endpoint.close(session)
        self._conclude(session.sample, session, outcome)

    def _conclude(self, sample: SampleState, session: AgentSession, outcome: AgentOutcome | None) -> None:
        """Hand over the records, and set how the episode ended."""
        records = session.history.records
        if records:
            sample.spans[:] = records[0].spans
            forks = [list(record.spans) for record in records[1:]]
            origins = session.history.origins
            sample.special = replace(sample.special, forks=forks, origins=origins, own_prompt=True)
            messages, first = session.conversation
            sample.init_msg_size = first
            sample.messages[:] = messages
            if outcome is not None and outcome.output not in ("", messages[-1].content):
                sample.messages.append(ChatMessage("assistant", outcome.output))
        if sample.failure is None:  # otherwise the engine failed, whatever the agent did then
            self._judge(sample, session, outcome)
        sample.finish(session.stop_reason)
        self._note(sample, session)

    def _judge(self, sample: SampleState, session: AgentSession, outcome: AgentOutcome | None) -> None:
        silent = not session.history.records
        if outcome is None:
            sample.fail(f"the agent took more than {self.timeout_s:g} s", "agent/timeout")
        elif session.refusals:
            sample.fail(f"a request of the agent was refused: {session.refusals[0].reason}", "agent/refused")
        elif outcome.crash and (session.stop_reason == "done" or silent):
            sample.fail(f"the agent crashed: {outcome.crash}", "agent/crashed")
        elif silent:
            limit = f"; its requests hit the limit {session.ran_into!r}" if session.ran_into else ""
            sample.fail(f"the agent ended without an answer from the policy{limit}", "agent/silent")
        elif outcome.crash and session.ran_into is None:
            self._warn_once(
                "crash", f"The agent crashed after an answer was cut at its token limit: {outcome.crash}"
            )

    def _note(self, sample: SampleState, session: AgentSession) -> None:
        sampled = session.sampled_tokens + self._lost.pop(sample.session, 0)
        if sample.failure is not None and "played_again_after" not in sample.extras:
            self._lost[sample.session] = sampled
        sample.extras["metrics"] = {
            "requests": session.requests,
            "refused": session.refused,
            "ignored_fields": session.ignored.total(),
            "forks": max(0, len(session.history.records) - 1),
            "generated_tokens": sampled,
            "trained_tokens": session.history.sampled_tokens,
        }
        for name in sorted(session.ignored)[:MOST_WARNINGS]:
            self._warn_once(
                name[:60],
                f"The agent's requests set {name[:60]!r}, which is ignored: it is not read, or the run decides it.",
            )

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._told and len(self._told) <= MOST_WARNINGS:
            self._told.add(name)
            self._warn(text)


def _told(message: ChatMessage) -> dict[str, Any]:
    """Return a message of the task as agents send it, with pictures as parts in the form of OpenAI's chat."""
    row = message.to_dict()
    if parts := row.pop("parts", None):
        row["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else part.to_part() for part in parts
        ]
    return row


def _agent_of(
    command: str | Sequence[str] | None,
    agent: str | Callable[..., Any] | None,
    workspace: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> CommandAgent | FunctionAgent:
    if command is not None and agent is None:
        return (
            CommandAgent(command, **options)
            if workspace is None
            else WorkspaceAgent(workspace, command, **options)
        )
    if names := [name for name, value in {**options, "workspace": workspace}.items() if value is not None]:
        raise ConfigError(f"env.{names[0]} is only for a command. A function runs in the trainer.")
    if agent is not None and command is None:
        return FunctionAgent(agent)
    raise ConfigError('env.name=agent needs either env.command="..." or env.agent=package.module:function.')


@asynccontextmanager
async def _slot(free: asyncio.Semaphore | None, sample: SampleState, llm: LLM) -> AsyncIterator[None]:
    """Wait for a free process; meanwhile the sample holds no engine."""
    if free is None:
        yield
        return
    waits = free.locked()
    if waits:
        await llm.close(sample)
    async with free:
        if waits:
            await llm.open(sample)
        yield
