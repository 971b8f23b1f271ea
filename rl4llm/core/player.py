"""The default interaction loop: each episode is a coroutine, and an error in one fails only that one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from rl4llm.core.errors import EnvError
from rl4llm.core.images import ImagePlace
from rl4llm.core.sample import EnvState, SampleState
from rl4llm.core.types import ChatMessage, Completion, SamplingParams
from rl4llm.runtime.raised import raised
from rl4llm.runtime.threads import LateError, call_off_loop, in_own_thread, result_of, within

T = TypeVar("T")


class LLM(Protocol):
    """The policy as an environment sees it: messages in, messages out, the exact tokens recorded on the side."""

    @property
    def context_length(self) -> int:
        """Prompt plus completion, in tokens."""
        ...

    @property
    def constrains(self) -> bool:
        """Whether completions match the grammar of their sampling parameters."""
        ...

    async def open(self, sample: SampleState) -> None:
        """Begin the sample's episode, which requests replies until `close`."""
        ...

    async def close(self, sample: SampleState) -> None:
        """End the sample's episode."""
        ...

    async def park(self, sample: SampleState) -> None:
        """Pause the sample while another role of the episode speaks; another `open` continues it."""
        ...

    async def reply(self, sample: SampleState, sampling_params: SamplingParams) -> Completion:
        """Sample the next assistant message, append it to `sample.messages` and its tokens to `sample.spans`."""
        ...

    async def complete(
        self,
        sample: SampleState,
        token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *draw: int | str,
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        """Sample after any tokens, for an environment that writes `sample.spans` itself; see `PolicyLLM`."""
        ...

    def generate(self, prompts: Sequence[Any], sampling_params: SamplingParams) -> list[Completion]:
        """Return completions for level-3 loops; a prompt is a SampleState, a list of messages or token ids, or a string."""
        ...

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's event loop and wait for its result."""
        ...


class Player:
    """How `BaseMDPEnv` plays its episodes, unless a subclass has another loop."""

    roles: tuple[str, ...]
    max_steps: int
    continue_truncated: bool
    respond_timeout_s: float
    respond: Callable[[SampleState], Any]
    end_episode: Callable[[SampleState], Any]

    async def _run_episodes(self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams) -> None:
        """Play all episodes at once; an error that stops one stops the others too."""
        if len(self.roles) > 1 and type(self)._run_episode is Player._run_episode:
            raise EnvError(
                f"{type(self).__name__} has several roles, but does not define who speaks when. Subclass RolesEnv."
            )
        for sample in env_state.episodes:  # all are announced before the first begins
            await llm.open(sample)
        try:
            async with asyncio.TaskGroup() as episodes:
                for sample in env_state.episodes:
                    episodes.create_task(self._run_episode(sample, llm, sampling_params))
        except BaseExceptionGroup as failures:  # the group cancelled the others; the first cause explains all
            raise failures.exceptions[0] from None

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        """Play one episode to its end: a turn of the policy, then the environment's answer, and so on."""
        async with self._ending(sample, llm):
            while not sample.done:
                completion = await llm.reply(sample, sampling_params)
                sample.current_step += 1
                if sample.done:
                    return  # type: ignore[unreachable] # mypy does not know that `reply` changes the sample
                if completion.finish_reason == "length" and not self.continue_truncated:
                    sample.finish("length")
                    return
                replies = await self._respond_safely(sample)
                if sample.current_step >= self.max_steps:
                    sample.finish("max_steps" if replies else "done")
                elif not replies:
                    sample.finish("done")
                else:
                    sample.messages.extend(replies)

    async def _respond_safely(self, sample: SampleState) -> Sequence[ChatMessage]:
        """Return what `respond` returns, checked; an error in it fails the sample alone."""
        where = f"{type(self).__name__}.respond"

        async def respond() -> Sequence[ChatMessage]:
            before = list(sample.messages)
            replies = await call_off_loop("rl4llm-env", self.respond, sample)
            if sample.messages != before:
                raise EnvError(f"{where} changed sample.messages; return the new messages instead")
            if not are_messages(replies):
                raise EnvError(
                    f"{where} must return a list of ChatMessage ([] ends the episode), not {replies!r:.200}"
                )
            if any(reply.role == "assistant" for reply in replies):
                raise EnvError(f"{where} returned an assistant message; only the policy writes those")
            return list(replies)

        return await contained(sample, self.respond, respond(), self.respond_timeout_s) or []

    async def _end_safely(self, sample: SampleState) -> None:
        """End the episode; an error in `end_episode` fails the sample alone."""

        async def end() -> None:
            for closing in self.end_episode(sample) or ():
                await result_of(closing)

        failure = sample.failure, sample.failure_class
        await contained(sample, f"{type(self).__name__}.end_episode", end(), self.respond_timeout_s)
        if failure[0] is not None:  # what broke first says more
            sample.failure, sample.failure_class = failure

    @asynccontextmanager
    async def _ending(self, sample: SampleState, llm: LLM) -> AsyncIterator[None]:
        """End the episode after the block, even after an error."""
        try:
            yield
        finally:
            await self._end_safely(sample)
            await llm.close(sample)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run blocking work in a separate thread: it starts at once, and if it hangs, the process still ends."""
        return await in_own_thread("rl4llm-env", work)


async def contained(
    sample: SampleState, what: Any, work: Coroutine[Any, Any, T], timeout_s: float | None, kind: str = "env"
) -> T | None:
    """Return the result of `work`, named or done by `what`. An error fails this episode under `kind`, and returns None."""
    name = what if isinstance(what, str) else f"{type(what.__self__).__name__}.{what.__name__}"
    try:
        return await within(timeout_s, work)
    except LateError:
        sample.fail(f"{name} took more than {timeout_s:g} s", f"{kind}/timeout")
    except Exception as error:  # noqa: BLE001 - one of the two places: an environment's own code
        sample.fail(raised(name, error, what), f"{kind}/raised")
    return None


def are_messages(given: Any) -> bool:
    """Return whether a value is a list of messages, as `respond` must return."""
    return isinstance(given, list | tuple) and all(isinstance(item, ChatMessage) for item in given)
