"""Episodes in which several roles speak: games of self-play, debates, a user who is simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl4llm.core.base_env import LLM, BaseMDPEnv, EnvState, EpisodeState, Line, SampleState
from rl4llm.core.base_opponent import OPPONENTS, BaseOpponent
from rl4llm.core.errors import ConfigError, EnvError, unknown
from rl4llm.core.seeds import derive_seed
from rl4llm.core.threads import call_off_loop
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.envs.registry import register_env
from rl4llm.rewards.extract import after_thinking

Reply = Callable[[Sequence[ChatMessage]], Any]
"""A function that plays a role: it returns the next line of a conversation in which its own lines are the assistant's."""

SILENCE = "(says nothing)"
MAX_LINE_CHARS = 20_000  # of an opponent, whose tokens nobody counts


@register_env("roles")
class RolesEnv(BaseMDPEnv):
    """Roles speak in turn, each in a conversation of its own; the policy plays all that no opponent plays.

        class TwentyQuestions(RolesEnv):
            roles = ("guesser", "answerer")
            instructions = {"guesser": "Find the word. Ask.", "answerer": "The word is {ground_truth}. Say yes or no."}

            def next_role(self, episode):
                over = episode.said and episode.said[-1].text == "You found it."
                return None if over else super().next_role(episode)

    A conversation begins with the role's instruction and the task. The role's own lines are the assistant's in it, and what
    others said since its last line is the user's next message. What stands before ``</think>`` nobody else hears. Rewards
    are asked about each role's conversation, and told its `role` and the `transcript`; a `BaseJudge` scores all at once.

    What may be overridden: `next_role`, `hears` and `opening`. What is random there derives from ``episode.seed``.

    Args:
        roles: who speaks, in this order.
        instructions: system prompts by role, in which ``{column}`` is that of the row and ``{role}`` the role's name.
        frozen: roles that the policy plays, as it is by then, without learning from what it says there.
        opponents: who plays a role in place of the policy: objects of `BaseOpponent`, or functions of the messages.
        max_steps: turns of each role.
    """

    roles: tuple[str, ...] = ("agent", "user")
    continue_truncated = True
    instructions: Mapping[str, str] = {}
    instruction: str | None = None  # of roles that have none of their own

    def __init__(
        self,
        *args: Any,
        roles: Sequence[str] | None = None,
        instructions: Mapping[str, str] | None = None,
        frozen: Sequence[str] | None = None,
        opponents: Mapping[str, BaseOpponent | Reply] | None = None,
        max_steps: int = 2,
        **kwargs: Any,
    ):
        self.roles = tuple(self.roles if roles is None else _listed("roles", roles))
        self.frozen = tuple(self.frozen if frozen is None else _listed("frozen", frozen))
        self.instructions = {**self.instructions, **_mapped("instructions", instructions or {})}
        given = _mapped("opponents", self.opponents if opponents is None else opponents)
        self.opponents = {role: _as_opponent(role, item) for role, item in given.items()}
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        if len(self.roles) < 2:
            raise ConfigError(f"env.roles={list(self.roles)} is not accepted: two or more.")
        for role in self.instructions:
            if role not in self.roles:
                raise ConfigError(unknown("env.instructions", role, self.roles))

    def next_role(self, episode: EpisodeState) -> str | None:
        """Whose turn it is; None when the episode is over. By default one after the other, `max_steps` times."""
        rounds, turn = divmod(len(episode.said), len(self.roles))
        return self.roles[turn] if rounds < self.max_steps else None

    def hears(self, role: str, episode: EpisodeState) -> str:
        """What a role is told before its turn: by default what others said since its last one."""
        lines = lines_since(role, episode)
        if len(self.roles) == 2:
            return "\n\n".join(line.text for line in lines)
        return "\n\n".join(f"{line.role}: {line.text}" for line in lines)

    def opening(self, role: str, task: Sequence[ChatMessage], columns: Mapping[str, Any]) -> list[ChatMessage]:
        """The role's instruction, in front of what the task itself may have as a system message, and the task."""
        instruction = self.instructions.get(role, self.instruction)
        if instruction is None:
            return list(task)
        system = [_filled(role, instruction, columns), *(message.content for message in task if message.role == "system")]
        rest = [message for message in task if message.role != "system"]
        return [ChatMessage("system", "\n\n".join(system)), *rest]

    def close(self) -> None:
        """Release the opponents and the rewards."""
        for opponent in self.opponents.values():
            opponent.close()
        super().close()

    async def _run_episodes(self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams) -> None:
        try:
            await super()._run_episodes(env_state, llm, sampling_params)
        finally:
            for opponent in self.opponents.values():
                await opponent.disconnect()

    async def _run_turns(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        """`sample` is the first of the episode's, and was opened."""
        episode = _episode_of(sample)
        seats, opened = episode.seats, sample
        while (seat := await self._next(sample)) is not None:
            if seat.role in self.opponents:
                text = await self._opponents_line(seat, sampling_params)
            else:
                opened = await _pass_on(llm, opened, seat)
                text = await self._policys_line(seat, llm, sampling_params)
            if text is None:
                break
            seat.current_step += 1
            episode.said.append(Line(seat.role, text))
        for seat in seats.values():
            seat.finish("done")
        await llm.close(opened)

    async def _next(self, sample: SampleState) -> SampleState | None:
        """Whose turn it is, with what it hears in its conversation; nobody's when the episode is over."""
        episode, where = _episode_of(sample), type(self).__name__
        if any(seat.done for seat in episode.seats.values()):
            return None
        work = self.off_loop(lambda: self._turn(episode))
        turn = await self.contained(sample, f"{where}.next_role", work, kind="env", timeout_s=self.respond_timeout_s)
        if turn is None:
            return None
        role, heard = turn
        seat = episode.seats[role]
        if seat.current_step >= self.max_steps:
            seat.finish("max_steps")
            return None
        _hear(seat, heard)
        return seat

    def _turn(self, episode: EpisodeState) -> tuple[str, str] | None:
        role = self.next_role(episode)
        if role is None:
            return None
        if role not in self.roles:
            raise EnvError(f"{role!r} is none of the roles: {', '.join(self.roles)}. None ends the episode")
        heard = self.hears(role, episode)
        if not isinstance(heard, str):
            raise EnvError(f"{type(self).__name__}.hears({role!r}) must return a text, not {heard!r:.200}")
        if not heard and episode.seats[role].last_message.role == "assistant":
            raise EnvError(f"it is the turn of {role!r} again, and there is nothing that it hears in between")
        return role, heard

    async def _policys_line(self, seat: SampleState, llm: LLM, sampling_params: SamplingParams) -> str | None:
        completion = await llm.reply(seat, sampling_params)
        if seat.done:
            return None
        if completion.finish_reason == "length" and not self.continue_truncated:
            seat.finish("length")
        return after_thinking(seat.last_message.content).strip() or SILENCE

    async def _opponents_line(self, seat: SampleState, sampling_params: SamplingParams) -> str | None:
        opponent = self.opponents[seat.role]
        seed = derive_seed(_episode_of(seat).seed, seat.role, seat.current_step)
        work = _text(opponent, seat.messages, sampling_params.replace(seed=seed))
        what = f"the opponent that plays {seat.role!r}"
        text = await self.contained(seat, what, work, kind="opponent", timeout_s=opponent.reply_timeout_s)
        if text is not None:
            seat.messages.append(ChatMessage("assistant", text))
            return after_thinking(text).strip() or SILENCE
        return None


class FunctionOpponent(BaseOpponent):
    """A function of the messages that returns the next line; for users and opponents that follow rules."""

    def __init__(self, function: Reply):
        self.function = function

    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        return await call_off_loop("rl4llm-opponent", self.function, list(messages))


def _listed(key: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"env.{key}={given!r:.200} is not accepted: a list of roles.")
    return tuple(given)


def _mapped(key: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"env.{key}={given!r:.200} is not accepted: a mapping by role.")
    return dict(given)


def _as_opponent(role: str, given: Any) -> BaseOpponent:
    if isinstance(given, BaseOpponent):
        return given
    if callable(given) and not isinstance(given, type):
        return FunctionOpponent(given)
    raise ConfigError(
        f"env.opponents.{role}={given!r:.200} is not accepted. Accepted: a BaseOpponent, a function of the messages that "
        f"returns the next line, or in a configuration a mapping with name ({', '.join(OPPONENTS)}) and options."
    )


def _filled(role: str, instruction: str, columns: Mapping[str, Any]) -> str:
    given = {**columns, "role": role}
    try:
        return instruction.format_map(given)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"env.instructions.{role}: {type(error).__name__}: {error}. In braces stand columns of the rows "
            f"({', '.join(sorted(given))}); a brace itself is written twice."
        ) from error


def _hear(seat: SampleState, heard: str) -> None:
    """Add it to the conversation: as a message, or to the one that waits for the role's first answer."""
    last = seat.last_message
    if heard and last.role == "user":
        seat.messages[-1] = ChatMessage("user", f"{last.content}\n\n{heard}")
    elif heard:
        seat.messages.append(ChatMessage("user", heard))


def lines_since(role: str, episode: EpisodeState) -> list[Line]:
    """What was said after the last line of a role."""
    spoke = [number for number, line in enumerate(episode.said) if line.role == role]
    return episode.said[spoke[-1] + 1 if spoke else 0 :]


def _episode_of(sample: SampleState) -> EpisodeState:
    assert sample.episode is not None  # each sample of several roles has one
    return sample.episode


async def _pass_on(llm: LLM, opened: SampleState, seat: SampleState) -> SampleState:
    """The seat becomes the one that an engine in deterministic mode waits for: always one of an episode."""
    if seat is not opened:
        await llm.open(seat)
        await llm.park(opened)
    return seat


async def _text(opponent: BaseOpponent, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
    """The opponent's line as a text that every tokenizer takes; EnvError when it is none."""
    text = await opponent.reply(tuple(messages), sampling_params)
    if not isinstance(text, str):
        raise EnvError(f"a line must be a text, not {text!r:.200}")
    return text[:MAX_LINE_CHARS].encode(errors="replace").decode()
