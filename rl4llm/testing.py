"""What users run on their own parts: contract checks, and fakes that stand in for the expensive ones."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from rl4llm.core.base_client import BaseClient
from rl4llm.core.base_env import BaseMDPEnv, EpisodeState, SampleState
from rl4llm.core.errors import EngineError, EnvError, RL4LLMError, UnreachableError
from rl4llm.core.types import ChatMessage, Completion, FinishReason, SamplingParams, Trajectory, WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.roles import RolesEnv
from rl4llm.envs.rollout import Rollout, RolloutResult

Script = Mapping[str, Sequence[str]] | Callable[[str, Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One request that a `ScriptedClient` got."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str


class ScriptedClient(BaseClient):
    """An engine that says what it is told to, without a model.

        client = ScriptedClient(tokenizer, {"": ["Answer: 4"], "0/gsm8k-17/1": ["Let me see.", "Answer: 5"]})

    The script names the replies of each session in order; "" serves all other sessions, and a last reply is repeated. It
    may also be a function of the session and the prompt's tokens. Every reply ends with the tokenizer's end token unless
    `max_tokens` cuts it short. Each log-prob is -0.5. `calls`, `expected` and `released` tell what was asked.
    """

    LOGPROB = -0.5

    def __init__(self, tokenizer: Any, script: Script, *, context_length: int = 4096, delay_s: float = 0.0):
        self._tokenizer, self._script, self._delay_s = tokenizer, script, delay_s
        self.context_length, self.vocab_size = context_length, len(tokenizer)
        self.calls: list[ClientCall] = []
        self.expected: list[str] = []
        self.released: list[str] = []
        self._version = -1
        self._turns: dict[str, int] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        self._check(prompt_ids)
        self.calls.append(ClientCall(tuple(prompt_ids), sampling_params, session))
        reply = self._reply(session, prompt_ids)
        await asyncio.sleep(self._delay_s)
        tokens = [*self._tokenizer.encode(reply, add_special_tokens=False, verbose=False), self._tokenizer.eos_token_id]
        kept = tuple(tokens[: min(sampling_params.max_tokens, self.context_length - len(prompt_ids))])
        text = self._tokenizer.decode(list(kept), skip_special_tokens=True)
        reason: FinishReason = "stop" if len(kept) == len(tokens) else "length"
        return Completion(text, kept, (self.LOGPROB,) * len(kept), reason, self._version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [self.LOGPROB] * (len(token_ids) - 1)

    async def load(self, weight_ref: WeightRef) -> None:
        self._version = weight_ref.version

    async def version(self) -> int:
        return self._version

    async def expect(self, session: str) -> None:
        self.expected.append(session)

    async def release(self, session: str) -> None:
        self.released.append(session)

    def _reply(self, session: str, prompt_ids: Sequence[int]) -> str:
        if callable(self._script):
            return self._script(session, prompt_ids)
        name = session if session in self._script else ""
        if not self._script.get(name):
            raise EngineError(f"ScriptedClient has no reply for session {session!r}; it knows {sorted(self._script)}.")
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self._script[name][min(turn, len(self._script[name]) - 1)]

    def _check(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise EngineError("generate: the prompt is empty; give at least one token.")
        wrong = [token for token in prompt_ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise EngineError(f"generate: token id {wrong[0]} is outside the vocabulary: 0 to {self.vocab_size - 1}.")
        if len(prompt_ids) >= self.context_length:
            raise EngineError(
                f"generate: a prompt of {len(prompt_ids)} tokens leaves no room in the context of {self.context_length}."
            )


def check_client(
    client: BaseClient, prompts: Sequence[Sequence[int]], *, tolerance: float = 1e-4, seeded: bool = True
) -> None:
    """Check that an inference client keeps the contract of `BaseClient`; raises EngineError with the law it breaks.

    Args:
        client: the engine, with weights loaded.
        prompts: at least two different prompts, token ids, with room for 16 more tokens each.
        tolerance: how far log-probs may be from those of `score`.
        seeded: whether equal seeds must give equal tokens; some servers do not promise it.
    """
    if len({tuple(prompt) for prompt in prompts}) < 2:
        raise EngineError("check_client needs at least two different prompts.")
    asyncio.run(_check_all(client, [list(prompt) for prompt in prompts], tolerance, seeded))


async def _check_all(client: BaseClient, prompts: list[list[int]], tolerance: float, seeded: bool) -> None:
    await _check_shape(client, prompts[0])
    await _check_greedy(client, prompts)
    await _check_logprobs(client, prompts[0], tolerance)
    await _check_stops(client, prompts[0])
    await _check_sessions(client, prompts[0])
    await _check_errors(client)
    if seeded:
        await _check_seeds(client, prompts)
    await client.disconnect()


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)


def _demand(holds: bool, law: str) -> None:
    if not holds:
        raise EngineError(f"check_client: the client breaks this law: {law}.")


async def _check_shape(client: BaseClient, prompt: list[int]) -> None:
    completion = await client.generate(prompt, SAMPLED)
    _demand(len(completion.token_ids) == 12, "with ignore_eos a completion has max_tokens tokens")
    _demand(completion.finish_reason == "length", "a completion that ran into max_tokens finished with 'length'")
    _demand(completion.version == await client.version(), "a completion carries the version of the weights")
    _demand(all(0 <= token < client.vocab_size for token in completion.token_ids), "tokens lie in the vocabulary")
    _demand(all(logprob <= 0 for logprob in completion.logprobs), "log-probs are not above 0")


async def _check_greedy(client: BaseClient, prompts: list[list[int]]) -> None:
    alone = [await client.generate(prompt, GREEDY) for prompt in prompts]
    together = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in prompts))
    same = [one.token_ids == other.token_ids for one, other in zip(alone, together, strict=True)]
    _demand(all(same), "at temperature 0 equal prompts give equal tokens, alone or in company")


async def _check_seeds(client: BaseClient, prompts: list[list[int]]) -> None:
    params = [SAMPLED.replace(seed=seed) for seed in range(4)]
    group = await asyncio.gather(*(client.generate(prompts[0], item) for item in params))
    company = [client.generate(prompt, SAMPLED.replace(seed=9)) for prompt in prompts[1:]]
    again = await asyncio.gather(*company, *(client.generate(prompts[0], item) for item in reversed(params)))
    again = again[len(company) :][::-1]
    same = [one.token_ids == other.token_ids for one, other in zip(group, again, strict=True)]
    _demand(all(same), "equal seeds give equal tokens, whatever else the engine does, in any order")
    _demand(len({item.token_ids for item in group}) > 1, "different seeds give different tokens")


async def _check_logprobs(client: BaseClient, prompt: list[int], tolerance: float) -> None:
    for params in (GREEDY, SAMPLED):
        completion = await client.generate(prompt, params)
        scored = await client.score([*prompt, *completion.token_ids])
        _demand(len(scored) == len(prompt) + 11, "score gives one log-prob to each token after the first")
        pairs = zip(completion.logprobs, scored[-12:], strict=True)
        worst = max(abs(one - other) for one, other in pairs)
        _demand(worst <= tolerance, f"a completion's log-probs equal score() to {tolerance:g} (they differ by {worst:.1e})")


async def _check_stops(client: BaseClient, prompt: list[int]) -> None:
    free = await client.generate(prompt, GREEDY)
    stop = free.token_ids[5]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    completion = await client.generate(prompt, GREEDY.replace(stop_token_ids=(stop,)))
    _demand(completion.token_ids == expected, "a stop token ends the completion and is kept")
    _demand(completion.finish_reason == "stop", "a completion that met a stop token finished with 'stop'")
    if len(free.text) >= 4 and "\ufffd" not in free.text:
        string = free.text[2:4]
        completion = await client.generate(prompt, GREEDY.replace(stop=(string,)))
        _demand(completion.text == free.text[: free.text.index(string)], "text is cut before a stop string")
        kept = len(completion.token_ids)
        _demand(completion.token_ids == free.token_ids[:kept], "a stop string does not change the tokens before it")
        _demand(completion.finish_reason == "stop", "a completion that met a stop string finished with 'stop'")


async def _check_sessions(client: BaseClient, prompt: list[int]) -> None:
    await client.expect("check_client")
    first = await client.generate(prompt, GREEDY.replace(max_tokens=4), session="check_client")
    longer = [*prompt, *first.token_ids, *prompt[:2]]
    second = await client.generate(longer, GREEDY.replace(max_tokens=4), session="check_client")
    await client.release("check_client")
    fresh = await client.generate(longer, GREEDY.replace(max_tokens=4))
    _demand(second.token_ids == fresh.token_ids, "a later turn of a session gives what a fresh request gives")


async def _check_errors(client: BaseClient) -> None:
    cases = {
        "an empty prompt": [],
        "a token id outside the vocabulary": [client.vocab_size],
        "a negative token id": [-1],
        "a prompt that leaves no room in the context": [0] * client.context_length,
    }
    for case, prompt in cases.items():
        try:
            await client.generate(prompt, GREEDY)
        except EngineError:
            continue
        _demand(False, f"{case} raises EngineError")


REPLIES = (
    "I do not know.",
    "",
    " \n",
    "{",
    '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 7, "arguments": null}</tool_call><tool_call>{"na',
    "```python\nraise SystemExit(1)\n```",
    "<answer>\u00e9\u4e16\U0001f600</answer> " + "9" * 500,
)
"""What a policy says to every environment sooner or later."""
ROOM = 1 << 20  # a context that no episode of a check fills
IDLE = 1000  # so often a loop may ask for a turn that the context has no room for


def check_env(env: BaseMDPEnv, replies: Sequence[str] = (), *, rows: Sequence[int] = (0, 1)) -> None:
    """Check that an environment keeps its contract; raises EnvError with the law it breaks, and where.

        check_env(MyEnv(rows, tokenizer, [MyReward()], batch_size=1, group_size=1), replies=["up", "I give up"])

    Episodes are played to their end without a model: each sample of a group begins with another of `replies` and `REPLIES`,
    which are answers that make no sense to most environments. The laws:

    - whatever the policy says, no episode raises or fails;
    - a group shares its prompt, and the prompt stays as the dataset has it, or in an episode of several roles as `opening`
      makes it, to the end of which only what the role hears is added;
    - roles alternate: the policy speaks after somebody else did, and others only in `reply_roles`;
    - budgets hold: at most `max_steps` turns, and no more tokens than the context has room for;
    - nothing is marked as the policy's that it did not say at that very point;
    - the same seed gives the same episode, again and in another order;
    - a step that raises, or a reply that never comes, fails its own episode, for all of its roles, and no other.

    Args:
        env: the environment, with its dataset, tokenizer and rewards. It is not closed.
        replies: what a policy may say that gets further in it, such as right answers and right calls.
        rows: which prompts of its dataset are played.
    """
    check = _EnvCheck(env, (*replies, *REPLIES), [row for row in rows if row < len(env.dataset)])
    check.run()


@dataclass(frozen=True, slots=True)
class _Played:
    """One rollout: what the engine was asked and said, and what became of it."""

    client: _Recorder
    result: RolloutResult
    error: RL4LLMError | None

    @property
    def episodes(self) -> dict[tuple[str, int], Trajectory]:
        return {(_group_of(item), item.extras["sample"]): item for item in self.result.trajectories}

    @property
    def broken(self) -> str | None:
        """What went wrong first, with what the policy had said last."""
        if self.error is not None:
            return str(self.error)
        if not self.result.failed:
            return None
        sample = self.result.failed[0]
        last = next((item.content for item in reversed(sample.messages) if item.role == "assistant"), None)
        return f"prompt {sample.prompt_id!r}, sample {sample.index}, policy {last!r:.200}: {sample.failure}"


class _EnvCheck:
    """Plays rollouts of an environment and holds each law against them."""

    def __init__(self, env: BaseMDPEnv, replies: Sequence[str], rows: list[int]):
        self.env, self.replies, self.rows = env, replies, rows
        self.renderer = Renderer(env.tokenizer, env.tool_schemas, roles=env.reply_roles if env.max_steps > 1 else ())

    def run(self) -> None:
        """Hold all laws, the ones that explain others first."""
        first = self.play()
        self.check_prompts(first)
        self.demand(first.client.over is None, "an episode has at most max_steps turns", first.client.over)
        self.demand(first.broken is None, "whatever the policy says, no episode raises or fails", first.broken)
        for name, episode in first.episodes.items():
            self.check_roles(name, episode)
            self.check_authors(name, episode, first.client)
            turns = f"{episode.num_turns} turns"
            self.demand(episode.num_turns <= self.env.max_steps, "an episode has at most max_steps turns", turns)
        self.check_context(first.client)
        self.check_repeats(first, self.play(rows=self.rows[::-1]))
        self.check_contained()

    def play(
        self, env: BaseMDPEnv | None = None, rows: Sequence[int] | None = None, room: int = ROOM, silent: str = ""
    ) -> _Played:
        """One rollout in which each reply begins an episode of each prompt."""
        client = _Recorder(self.env.tokenizer, self.replies, room, self.env.max_steps, silent)
        with asyncio.Runner() as runner:
            runner.run(client.load(WeightRef(0)))
            env = env or self.env
            rollout = Rollout(env, client, self.renderer, runner, seed=env.seed, max_failed_share=1.0)
            params = SamplingParams(max_tokens=ROOM)
            try:
                rows = self.rows if rows is None else rows
                result = rollout.play(rows, step=0, sampling_params=params, group_size=len(self.replies))
            except RL4LLMError as error:
                return _Played(client, RolloutResult((), ()), error)
        return _Played(client, result, None)

    def check_prompts(self, played: _Played) -> None:
        """Before all others: groups of different prompts cannot even be built."""
        firsts: dict[str, set[tuple[int, ...]]] = {}
        for session, prompt_ids in played.client.firsts.items():
            firsts.setdefault(_prompt_of(session), set()).add(prompt_ids)
        mixed = [prompt for prompt, found in firsts.items() if len(found) > 1 and not any(self.env.roles)]
        law = "a group shares its prompt: its samples begin with the same tokens, which only the dataset decides"
        self.demand(not mixed, law, f"prompts {mixed} had several beginnings")
        for row in self.rows:
            for group, stored in self._openings(row).items():
                for (owner, index), episode in played.episodes.items():
                    kept = owner != group or self._kept(stored, episode.messages)
                    law = "an episode leaves the messages of its prompt as they are"
                    self.demand(kept, law, f"{owner!r}, sample {index}")

    def check_roles(self, name: tuple[str, int], episode: Trajectory) -> None:
        where = f"prompt {name[0]!r}, sample {name[1]}: {[message.role for message in episode.messages]}"
        begin = self._prompt_size(name[0])
        pairs = pairwise(message.role for message in episode.messages[begin - 1 :])
        alternate = not any(before == after == "assistant" for before, after in pairs)
        self.demand(alternate, "roles alternate: somebody else speaks between two turns of the policy", where)
        others = {message.role for message in episode.messages[begin:]} - {"assistant", *self.env.reply_roles}
        law = f"the environment speaks in its reply_roles, {self.env.reply_roles}, which the chat template was checked for"
        self.demand(not others, law, where)

    def check_authors(self, name: tuple[str, int], episode: Trajectory, client: _Recorder) -> None:
        law = "only what the policy said at that very point is marked as its own, tokens and log-probs"
        for record in episode.records:
            before: tuple[int, ...] = ()
            for span in record:
                said = client.said.get((name[0], before), ())
                sampled = span.author == "context" or (span.token_ids, span.logprobs) in said
                text = self.env.tokenizer.decode(list(span.token_ids))
                self.demand(sampled, law, f"prompt {name[0]!r}, sample {name[1]}: {text!r:.200}")
                before += span.token_ids

    def check_context(self, client: _Recorder) -> None:
        """A context in which few turns have room."""
        room = max(map(len, client.firsts.values())) + 8
        played = self.play(room=room)
        self.demand(played.broken is None, "an episode that fills the context ends there and counts", played.broken)
        longest = max((episode.num_tokens for episode in played.episodes.values()), default=0)
        self.demand(longest <= room, "an episode has no more tokens than the context", f"{longest} of {room}")

    def check_repeats(self, first: _Played, again: _Played) -> None:
        law = "the same seed gives the same episode, again and in another order of the prompts; derive what is random "
        law += "from env.seed, sample.prompt_id and sample.index, and keep the state of an episode in the sample"
        self.demand(again.broken is None, law, again.broken)
        for (prompt_id, index), episode in first.episodes.items():
            other = again.episodes[prompt_id, index]
            pairs = zip(_told(episode), _told(other), strict=False)
            seen = next((f"{one!r:.200} and then {two!r:.200}" for one, two in pairs if one != two), "one ended earlier")
            self.demand(_told(episode) == _told(other), law, f"prompt {prompt_id!r}, sample {index}: {seen}")

    def check_contained(self) -> None:
        """One episode breaks in the environment, then one in the engine."""
        prompt_id, seats = self._prompt_id(self.rows[0]), [(group, 1) for group in self._openings(self.rows[0])]
        raised: list[str] = []
        broken = self.play(env=_raising(self.env, (prompt_id, 1), raised))
        law = "a step that raises fails its own episode, which is left out, and no other; in a loop of your own, catch what "
        law += "respond raises and call sample.fail(...)"
        self._check_alone(broken, seats, law, expected=bool(raised))
        session = next(name for name in broken.client.firsts if (_prompt_of(name), _index_of(name)) in seats)
        law = "a reply that never comes fails its own episode, which is left out, and no other; leave samples that are done"
        self._check_alone(self.play(silent=session), seats, law, expected=True)

    def demand(self, holds: bool, law: str, seen: str | None) -> None:
        if not holds:
            raise EnvError(f"check_env: {type(self.env).__name__} breaks this law: {law}. Seen: {seen}.")

    def _check_alone(self, played: _Played, seats: Sequence[tuple[str, int]], law: str, expected: bool) -> None:
        self.demand(played.error is None, law, str(played.error))
        failed = {(_group_of(sample), sample.index) for sample in played.result.failed}
        self.demand(failed == (set(seats) if expected else set()), law, f"{seats[0]} broke, and {sorted(failed)} failed")

    def _prompt_id(self, row: int) -> str:
        return str(self.env.dataset[row].get("prompt_id", row))

    def _openings(self, row: int) -> dict[str, tuple[ChatMessage, ...]]:
        """The prompt of each group of a row: one for each role that the policy plays."""
        openings, prompt_id = self.env.openings(self.env.dataset[row]), self._prompt_id(row)
        return {_group(prompt_id, role): tuple(openings[role]) for role in self.env.policy_roles}

    def _kept(self, stored: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> bool:
        if messages[: len(stored)] == stored:
            return True
        *before, last = stored
        begun = messages[len(stored) - 1 : len(stored)]
        heard = any(self.env.roles) and all(item.role == "user" and item.content.startswith(last.content) for item in begun)
        return messages[: len(before)] == tuple(before) and heard

    def _prompt_size(self, group: str) -> int:
        return next(len(found[group]) for found in map(self._openings, self.rows) if group in found)


class _Recorder(ScriptedClient):
    """Says each of some replies as the first of an episode, and others after it; remembers what it said to what.

    It never answers the session `silent`, and stops a loop that asks for more turns than an episode may have.
    """

    def __init__(self, tokenizer: Any, replies: Sequence[str], room: int, max_turns: int, silent: str):
        super().__init__(tokenizer, self._next, context_length=room)
        self.replies, self.max_turns, self.silent = replies, max_turns, silent
        self.firsts: dict[str, tuple[int, ...]] = {}
        self.said: dict[tuple[str, tuple[int, ...]], list[tuple[tuple[int, ...], tuple[float, ...]]]] = {}
        self._asked: dict[str, list[tuple[int, ...]]] = {}  # the prompts of a session's turns, from its last beginning
        self._idle = 0
        self.over: str | None = None  # how a loop asked for too much

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, *, session: str = ""
    ) -> Completion:
        prompt = tuple(prompt_ids)
        if session:
            self._note_turn(session, prompt)
        if session and session == self.silent:
            raise UnreachableError("check_env keeps the engine silent for this episode.")
        completion = await super().generate(prompt_ids, sampling_params, session=session)
        if session:
            said = (completion.token_ids, completion.logprobs)
            self.said.setdefault((_prompt_of(session), prompt), []).append(said)
        return completion

    async def version(self) -> int:
        self._idle += 1
        if self._idle > IDLE * len(self.replies):
            self._stop("turns without end are asked for samples that are done, because the context is full")
        return await super().version()

    def _note_turn(self, session: str, prompt: tuple[int, ...]) -> None:
        self.firsts.setdefault(session, prompt)
        asked = self._asked.setdefault(session, [])
        if asked and prompt[: len(asked[-1])] != asked[-1]:  # the episode is played again
            asked.clear()
        if prompt not in asked:
            asked.append(prompt)
        if len(asked) > self.max_turns:
            self._stop(f"session {session} asks for turn {len(asked)}, and max_steps is {self.max_turns}")

    def _stop(self, over: str) -> NoReturn:
        self.over = over
        raise EnvError(f"check_env: {over}.")

    def _next(self, session: str, prompt_ids: Sequence[int]) -> str:
        index, turn = (_index_of(session), len(self._asked[session]) - 1) if session else (0, 0)
        return self.replies[(index + turn) % len(self.replies)]


def _raising(env: BaseMDPEnv, victim: tuple[str, int], raised: list[str]) -> BaseMDPEnv:
    """An environment that shares everything with `env`, but whose step raises for one episode."""
    if isinstance(env, RolesEnv):
        return _sharing(env, "next_role", _raising_turn(type(env).next_role, victim, raised))
    respond = type(env).respond

    def stumble(sample: SampleState) -> None:
        if (sample.prompt_id, sample.index) == victim:
            raised.append(sample.session)
            raise RuntimeError("check_env makes this step raise")

    async def awaited(self: BaseMDPEnv, sample: SampleState) -> Sequence[ChatMessage]:
        stumble(sample)
        replies = respond(self, sample)
        return await replies if isinstance(replies, Coroutine) else replies

    def plain(self: BaseMDPEnv, sample: SampleState) -> Any:
        stumble(sample)
        return respond(self, sample)

    method = awaited if inspect.iscoroutinefunction(respond) else plain
    return _sharing(env, "respond", method)


def _raising_turn(next_role: Callable[..., Any], victim: tuple[str, int], raised: list[str]) -> Callable[..., Any]:
    def stumble(self: RolesEnv, episode: EpisodeState) -> str | None:
        seat = next(iter(episode.seats.values()))
        if episode.said and (seat.prompt_id, seat.index) == victim:
            raised.append(seat.session)
            raise RuntimeError("check_env makes this step raise")
        return next_role(self, episode)

    return stumble


def _sharing(env: BaseMDPEnv, name: str, method: Callable[..., Any]) -> BaseMDPEnv:
    kind = type(type(env).__name__, (type(env),), {name: method})
    stumbling: BaseMDPEnv = object.__new__(kind)
    vars(stumbling).update(vars(env))
    return stumbling


def _told(episode: Trajectory) -> list[Any]:
    """What two plays of one episode must agree in."""
    return [*episode.messages, *episode.records, episode.stop_reason, *episode.turn_rewards]


def _prompt_of(session: str) -> str:
    return session.partition("/")[2].rpartition("/")[0]


def _index_of(session: str) -> int:
    return int(session.rpartition("/")[2])


def _group_of(item: Trajectory | SampleState) -> str:
    return _group(item.prompt_id, item.role)


def _group(prompt_id: str, role: str) -> str:
    """As sessions name it."""
    return f"{prompt_id}/{role}" if role else prompt_id
