"""Episodes in which several roles speak: self-play games, debates, simulated users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl4llm.core.base_env import LLM, BaseMDPEnv, EnvState, EpisodeState, Line, SampleState
from rl4llm.core.base_opponent import BaseOpponent
from rl4llm.core.errors import ConfigError, EnvError, unknown
from rl4llm.core.message import after_thinking, shortened
from rl4llm.core.player import contained
from rl4llm.core.schema import Count, checked
from rl4llm.core.tables import OPPONENTS
from rl4llm.core.types import ChatMessage, SamplingParams
from rl4llm.runtime.seeds import derive_seed
from rl4llm.runtime.threads import call_off_loop

Reply = Callable[[Sequence[ChatMessage]], Any]
"""A function that plays a role: it returns the next line of a conversation, in which its lines are the assistant's."""

SILENCE = "(silence)"
MAX_LINE_CHARS = 20_000  # of an opponent's line, which has no token limit


class RolesEnv(BaseMDPEnv):
    """Let roles speak in turn, each in a separate conversation; the policy plays all roles without an opponent.

        class TwentyQuestions(RolesEnv):
            roles = ("guesser", "answerer")
            instructions = {"guesser": "Find the word. Ask.", "answerer": "The word is {ground_truth}. Say yes or no."}

            def next_role(self, episode):
                over = episode.said and episode.said[-1].text == "You found it."
                return None if over else super().next_role(episode)

    A conversation begins with the role's instruction and the task. The role's own lines are assistant messages, and what
    others said since its last line is the next user message. Thoughts are private. Rewards score each role's
    conversation and get its `role` and the `transcript`; a `BaseJudge` scores all roles at once.

    Subclasses may override all public methods; ``episode.seed`` must be the seed of any randomness in them.

    Args:
        roles: names of the roles, in the order in which they speak.
        instructions: system prompts by role, in which ``{column}`` is a column of the row and ``{role}`` the role's name.
        frozen: roles that the current policy plays without learning from them.
        opponents: what plays a role in place of the policy: objects of `BaseOpponent`, or functions of the messages.
        max_steps: turns of each role.
    """

    roles: tuple[str, ...] = ("agent", "user")
    continue_truncated = True
    instructions: Mapping[str, str] = {}
    instruction: str | None = None  # of roles that `instructions` leaves out

    @checked("env")
    def __init__(
        self,
        *args: Any,
        roles: Sequence[str] | None = None,
        instructions: Mapping[str, str] | None = None,
        frozen: Sequence[str] | None = None,
        opponents: Mapping[str, BaseOpponent | Reply] | None = None,
        max_steps: Count = 2,
        **kwargs: Any,
    ):
        opponents = self.opponents if opponents is None else opponents
        self.roles = tuple(self.roles if roles is None else roles)
        self.frozen = tuple(self.frozen if frozen is None else frozen)
        self.instructions = {**self.instructions, **(instructions or {})}
        self.opponents = {role: _as_opponent(role, item) for role, item in opponents.items()}
        self._rollouts = 0  # that play now, and share the connections of opponents
        super().__init__(*args, **kwargs | {"max_steps": max_steps})
        for role in self.instructions:
            if role not in self.roles:
                raise ConfigError(unknown("env.instructions", role, self.roles))

    def next_role(self, episode: EpisodeState) -> str | None:
        """Return the role whose turn it is, None to end the episode; by default roles take turns, `max_steps` times each."""
        rounds, turn = divmod(len(episode.said), len(self.roles))
        return self.roles[turn] if rounds < self.max_steps else None

    def hears(self, role: str, episode: EpisodeState) -> str:
        """Return what a role reads before its turn: by default what others said since its last turn."""
        lines = lines_since(role, episode)
        if len(self.roles) == 2:
            return "\n\n".join(line.text for line in lines)
        return "\n\n".join(f"{line.role}: {line.text}" for line in lines)

    def opening(
        self, role: str, task: Sequence[ChatMessage], columns: Mapping[str, Any]
    ) -> list[ChatMessage]:
        """Return the first messages of the role's conversation: its instruction, before any system message, and the task."""
        instruction = self.instructions.get(role, self.instruction)
        if instruction is None:
            return list(task)
        # nobody means the text "None"
        truth = {"ground_truth"} if columns.get("ground_truth") is None else set()
        columns = {name: columns[name] for name in columns.keys() - truth} | {"role": role}
        try:
            told = instruction.format_map(columns)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ConfigError(f"env.instructions.{role}: {error!r}. Write a literal brace twice.") from error
        system = [told, *(line.content for line in task if line.role == "system")]
        rest = [message for message in task if message.role != "system"]
        return [ChatMessage("system", "\n\n".join(system)), *rest]

    def close(self) -> None:
        """Release the opponents and the rewards."""
        for opponent in self.opponents.values():
            opponent.close()
        super().close()

    async def _run_episodes(self, env_state: EnvState, llm: LLM, sampling_params: SamplingParams) -> None:
        self._rollouts += 1
        try:
            await super()._run_episodes(env_state, llm, sampling_params)
        finally:
            self._rollouts -= 1
            for opponent in () if self._rollouts else self.opponents.values():
                await opponent.disconnect()

    async def _run_episode(self, sample: SampleState, llm: LLM, sampling_params: SamplingParams) -> None:
        """Play an episode; `sample` is its first and is open in the engine."""
        async with self._ending(sample, llm):
            episode, opened = _episode_of(sample), sample
            while (speaker := await self._next(sample)) is not None:
                if speaker.role in self.opponents:
                    text = await self._opponents_line(speaker, sampling_params)
                else:
                    if speaker is not opened:  # a deterministic engine waits for one sample of each episode
                        await llm.open(speaker)
                        await llm.park(opened)
                        opened = speaker
                    text = await self._policys_line(speaker, llm, sampling_params)
                if text is None:
                    break
                speaker.current_step += 1
                episode.said.append(Line(speaker.role, text))
            for each in episode.seats.values():
                each.finish("done")
            await llm.close(opened)

    async def _next(self, sample: SampleState) -> SampleState | None:
        """Return the sample of the role whose turn it is, with what it reads appended; None if the episode is over."""
        episode = _episode_of(sample)
        if any(each.done for each in episode.seats.values()):
            return None
        turn = await self._turn_safely(sample)
        if turn is None:
            return None
        role, heard = turn
        speaker = episode.seats[role]
        if speaker.current_step >= self.max_steps:
            speaker.finish("max_steps")
            return None
        message = speaker.last_message
        if heard and message.role == "user":  # it waits for the role's first answer
            speaker.messages[-1] = ChatMessage.showing(
                "user", *(message.parts or (message.content,)), f"\n\n{heard}"
            )
        elif heard:
            speaker.messages.append(ChatMessage("user", heard))
        return speaker

    async def _turn_safely(self, sample: SampleState) -> tuple[str, str] | None:
        """Return what `_turn` returns; an error in it fails the episode alone."""
        what = f"{type(self).__name__}.next_role"
        return await contained(sample, what, self._turn(sample), self.respond_timeout_s)

    async def _turn(self, sample: SampleState) -> tuple[str, str] | None:
        """Return whose turn it is and what the role reads before it; None ends the episode."""
        return await self.off_loop(lambda: self._chosen(_episode_of(sample)))

    def _chosen(self, episode: EpisodeState) -> tuple[str, str] | None:
        role = self.next_role(episode)
        if role is None:
            return None
        if role not in self.roles:
            raise EnvError(
                f"next_role returned {role!r}. Accepted: one of {', '.join(self.roles)}, or None to end the episode"
            )
        heard = self.hears(role, episode)
        if not isinstance(heard, str):
            raise EnvError(f"{self.hears.__qualname__}({role!r}) must return a string, not {heard!r:.200}")
        if not heard and episode.seats[role].last_message.role == "assistant":
            raise EnvError(f"role {role!r} would speak twice in a row with no message in between")
        return role, heard

    async def _policys_line(
        self, sample: SampleState, llm: LLM, sampling_params: SamplingParams
    ) -> str | None:
        completion = await llm.reply(sample, sampling_params)
        if sample.done:
            return None
        if completion.finish_reason == "length" and not self.continue_truncated:
            sample.finish("length")
        return after_thinking(sample.last_message.content).strip() or SILENCE

    async def _opponents_line(self, sample: SampleState, sampling_params: SamplingParams) -> str | None:
        opponent = self.opponents[sample.role]
        seed = derive_seed(_episode_of(sample).seed, sample.role, sample.current_step)
        work = _text(opponent, sample.messages, sampling_params.replace(seed=seed))
        what = f"the opponent that plays {sample.role!r}"
        text = await contained(sample, what, work, opponent.reply_timeout_s, kind="opponent")
        if text is None:
            return None
        sample.messages.append(ChatMessage("assistant", text))
        return after_thinking(text).strip() or SILENCE


class FunctionOpponent(BaseOpponent):
    """Play a role by a function of the messages that returns the next line, for rule-based users and opponents."""

    def __init__(self, function: Reply):
        self.function = function

    async def reply(self, messages: Sequence[ChatMessage], sampling_params: SamplingParams) -> str:
        return await call_off_loop("rl4llm-opponent", self.function, list(messages))


def _as_opponent(role: str, player: Any) -> BaseOpponent:
    if isinstance(player, BaseOpponent):
        return player
    if callable(player) and not isinstance(player, type):
        return FunctionOpponent(player)
    raise ConfigError(
        f"env.opponents.{role}={player!r:.200} is not accepted. Accepted: a BaseOpponent, a function of the messages, or in "
        f"a configuration 'policy', 'package.module:function', or a mapping with name ({', '.join(OPPONENTS)}) and options."
    )


def lines_since(role: str, episode: EpisodeState) -> list[Line]:
    """Return the lines after the last line of a role."""
    spoke = [number for number, line in enumerate(episode.said) if line.role == role]
    return episode.said[spoke[-1] + 1 if spoke else 0 :]


def _episode_of(sample: SampleState) -> EpisodeState:
    assert sample.episode is not None  # each sample of several roles has one
    return sample.episode


async def _text(
    opponent: BaseOpponent, messages: Sequence[ChatMessage], sampling_params: SamplingParams
) -> str:
    """Return the opponent's line as valid Unicode; raises EnvError if it is not a string."""
    text = await opponent.reply(tuple(messages), sampling_params)
    if not isinstance(text, str):
        raise EnvError(f"a line must be a string, not {text!r:.200}")
    return shortened(text, MAX_LINE_CHARS)
