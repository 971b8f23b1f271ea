"""The contract of environments, as a check that plays episodes without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv, Special
from rl4llm.core.errors import EnvError, RL4LLMError
from rl4llm.core.types import ChatMessage, SamplingParams, Trajectory
from rl4llm.core.weights import WeightRef
from rl4llm.data.render import Renderer
from rl4llm.envs.rollout import Rollout, RolloutResult
from rl4llm.envs.tool import ToolMDPEnv
from rl4llm.envs.tools.trial import tool_failures
from rl4llm.runtime.runner import Runner, run
from rl4llm.testing.rehearsal import (
    Recorder,
    Rehearsal,
    breaking,
    group_of,
    index_of,
    name_of_group,
    prompt_of,
)

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
Laws = Iterator[tuple[str, bool, str | None]]
"""Each law, whether the environment keeps it, and what was seen."""
ROOM = 1 << 20  # a context that no episode of a check fills


def check_env(env: BaseMDPEnv, replies: Sequence[str] = (), *, rows: Sequence[int] = (0, 1)) -> None:
    """Check that an environment keeps its contract; raises EnvError with the law it breaks, and where.

        check_env(MyEnv(rows, tokenizer, [MyReward()], batch_size=1, group_size=1), replies=["up", "I give up"])

    Episodes are played to their end without a model: each sample of a group begins with another of `replies` and `REPLIES`,
    which are answers that make no sense to most environments. The laws:

    - each tool, called once with arguments made from its schema, answers or raises ToolError;
    - whatever the policy says, no episode raises or fails;
    - a group shares its prompt, which stays as the dataset has it; with several roles, it stays as `opening` returns it,
      and only what the role reads is appended;
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
    contract = _Contract(env, (*replies, *REPLIES), [row for row in rows if row < len(env.dataset)])
    for law, holds, seen in contract.laws():
        if not holds:
            raise EnvError(f"check_env: {type(env).__name__} breaks this law: {law}. Seen: {seen}.")


class _Contract:
    """Plays rollouts of an environment and holds each law against them."""

    def __init__(self, env: BaseMDPEnv, replies: Sequence[str], rows: list[int]):
        self.env, self.replies, self.rows = env, replies, rows
        self.renderer = Renderer.of(env, env.tokenizer)

    def laws(self) -> Laws:
        """Yield all laws, the ones that explain others first."""
        yield from self.tools()
        played = self.play()
        yield from self.prompts(played)
        yield "an episode has at most max_steps turns", played.client.over is None, played.client.over
        yield "whatever the policy says, no episode raises or fails", played.broken is None, played.broken
        for name, episode in played.episodes.items():
            yield from self.roles(name, episode)
            yield from self.authors(name, episode, played.client)
            turns = episode.num_turns - len(episode.origins) * (self.env.compact_at is not None)  # summaries
            yield "an episode has at most max_steps turns", turns <= self.env.max_steps, f"{turns} turns"
        yield from self.context(played.client)
        yield from self.repeats(played, self.play(rows=self.rows[::-1]))
        yield from self.contained()

    def play(
        self,
        env: BaseMDPEnv | None = None,
        rows: Sequence[int] | None = None,
        room: int = ROOM,
        silent: str = "",
    ) -> Rehearsal:
        """One rollout in which each reply begins an episode of each prompt."""
        client = Recorder(self.env.tokenizer, self.replies, room, self.env.max_steps, silent)
        with Runner() as runner:
            runner.run(client.load(WeightRef(0)))
            env = env or self.env
            rollout = Rollout(env, client, self.renderer, runner, seed=env.seed, max_failed_share=1.0)
            params = SamplingParams(max_tokens=ROOM)
            try:
                rows = self.rows if rows is None else rows
                result = rollout.play(rows, step=0, sampling_params=params, group_size=len(self.replies))
            except RL4LLMError as error:
                return Rehearsal(client, RolloutResult((), ()), error)
        return Rehearsal(client, result, None)

    def tools(self) -> Laws:
        """Call each tool once. It runs first, since its message on a broken tool is the shortest."""
        if isinstance(self.env, ToolMDPEnv) and self.rows:
            (sample,) = self.env.begin_episode(self.rows[0], 0, Special(), seed=self.env.seed, step=0)
            failures = run(tool_failures(self.env, sample))
            law = "each tool, called with arguments made from its schema, answers or raises ToolError"
            yield law, not failures, "; ".join(failures)

    def prompts(self, played: Rehearsal) -> Laws:
        """Before all others: groups of different prompts cannot even be built."""
        beginnings: dict[str, set[tuple[int, ...]]] = {}
        for session, prompt_ids in played.client.firsts.items():
            beginnings.setdefault(prompt_of(session), set()).add(prompt_ids)
        mixed = [prompt for prompt, ids in beginnings.items() if len(ids) > 1 and not any(self.env.roles)]
        law = "a group shares its prompt: its samples begin with the same tokens, which only the dataset decides"
        yield law, not mixed, f"prompts {mixed} had several beginnings"
        law = "an episode leaves the messages of its prompt as they are"
        for row in self.rows:
            for group, stored in self._openings(row).items():
                for (owner, index), episode in played.episodes.items():
                    same = owner != group or self._begins_with(stored, episode.messages)
                    yield law, same, f"{owner!r}, sample {index}"

    def roles(self, name: tuple[str, int], episode: Trajectory) -> Laws:
        where = f"prompt {name[0]!r}, sample {name[1]}: {[message.role for message in episode.messages]}"
        openings = map(self._openings, self.rows)
        begin = next(len(opening[name[0]]) for opening in openings if name[0] in opening)
        pairs = pairwise(message.role for message in episode.messages[begin - 1 :])
        twice = any(before == after == "assistant" for before, after in pairs)
        yield "roles alternate: somebody else speaks between two turns of the policy", not twice, where
        speakers = {"assistant", *self.env.reply_roles, *["user"] * (self.env.compact_at is not None)}
        roles = {message.role for message in episode.messages[begin:]} - speakers
        law = f"the environment speaks in its reply_roles, {self.env.reply_roles}, which the chat template was checked for"
        yield law, not roles, where

    def authors(self, name: tuple[str, int], episode: Trajectory, client: Recorder) -> Laws:
        law = "only what the policy said at that very point is marked as its own, tokens and log-probs"
        for record in episode.records:
            before: tuple[int, ...] = ()
            for span in record:
                replies = client.said.get((name[0], before), ())
                sampled = span.author == "context" or (span.token_ids, span.logprobs) in replies
                text = self.env.tokenizer.decode(list(span.token_ids))
                yield law, sampled, f"prompt {name[0]!r}, sample {name[1]}: {text!r:.200}"
                before += span.token_ids

    def context(self, client: Recorder) -> Laws:
        """Play episodes in a context with room for few turns."""
        room = max(map(len, client.firsts.values())) + 8
        played = self.play(room=room)
        law = "an episode that fills the context ends there and counts"
        yield law, played.broken is None, played.broken
        records = (record for episode in played.episodes.values() for record in episode.records)
        longest = max((sum(len(span.token_ids) for span in record) for record in records), default=0)
        yield "an episode has no more tokens than the context", longest <= room, f"{longest} of {room}"

    def repeats(self, played: Rehearsal, repeated: Rehearsal) -> Laws:
        law = (
            "the same seed gives the same episode, again and in another order of the prompts; derive what is random from "
            "env.seed, sample.prompt_id and sample.index, and keep the state of an episode in the sample"
        )
        yield law, repeated.broken is None, repeated.broken
        for (prompt_id, index), episode in played.episodes.items():
            earlier, later = _facts(episode), _facts(repeated.episodes[prompt_id, index])
            pairs = [(a, b) for a, b in zip(earlier, later, strict=False) if a != b]
            seen = " and then ".join(f"{item!r:.200}" for item in pairs[0]) if pairs else "one ended earlier"
            yield law, earlier == later, f"prompt {prompt_id!r}, sample {index}: {seen}"

    def contained(self) -> Laws:
        """Break one episode in the environment, then one in the engine."""
        prompt_id = self._prompt_id(self.rows[0])
        seats = [(group, 1) for group in self._openings(self.rows[0])]
        raised: list[str] = []
        broken = self.play(env=breaking(self.env, (prompt_id, 1), raised))
        session = next(name for name in broken.client.firsts if (prompt_of(name), index_of(name)) in seats)
        cases = (
            (
                broken,
                seats if raised else [],
                "a step that raises",
                "in a custom loop, call sample.fail(...)",
            ),
            (self.play(silent=session), seats, "a reply that never comes", "leave samples that are done"),
        )
        for played, expected, what, advice in cases:
            failed = {(group_of(sample), sample.index) for sample in played.result.failed}
            seen = str(played.error or f"{seats[0]} broke, and {sorted(failed)} failed")
            law = f"{what} fails its own episode, which is left out, and no other; {advice}"
            yield law, played.error is None and failed == set(expected), seen

    def _prompt_id(self, row: int) -> str:
        return str(self.env.dataset[row].get("prompt_id", row))

    def _openings(self, row: int) -> dict[str, tuple[ChatMessage, ...]]:
        """Return the prompt of each group of a row: one for each role that the policy plays."""
        openings, prompt_id = self.env.openings(self.env.dataset[row]), self._prompt_id(row)
        return {name_of_group(prompt_id, role): tuple(openings[role]) for role in self.env.policy_roles}

    def _begins_with(self, stored: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> bool:
        """Return whether a prompt stayed as stored; a role may read more in the last message, appended to it."""
        if messages[: len(stored)] == tuple(stored):
            return True
        *before, question = stored
        begun = messages[len(before) : len(stored)]
        appended = any(item.role == "user" and item.content.startswith(question.content) for item in begun)
        return any(self.env.roles) and appended and messages[: len(before)] == tuple(before)


def _facts(episode: Trajectory) -> list[Any]:
    """Return what two plays of one episode must agree in."""
    return [*episode.messages, *episode.records, episode.stop_reason, *episode.turn_rewards]
