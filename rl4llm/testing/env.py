"""The contract of environments, as a check that plays episodes without a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rl4llm.core.base_env import BaseMDPEnv, Special
from rl4llm.core.errors import EnvError, RL4LLMError
from rl4llm.core.types import ChatMessage, SamplingParams, Trajectory, WeightRef
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
    check = _EnvCheck(env, (*replies, *REPLIES), [row for row in rows if row < len(env.dataset)])
    check.run()


class _EnvCheck:
    """Plays rollouts of an environment and holds each law against them."""

    def __init__(self, env: BaseMDPEnv, replies: Sequence[str], rows: list[int]):
        self.env, self.replies, self.rows = env, replies, rows
        self.renderer = Renderer.of(env, env.tokenizer)

    def run(self) -> None:
        """Hold all laws, the ones that explain others first."""
        self.check_tools()
        first = self.play()
        self.check_prompts(first)
        self.demand(first.client.over is None, "an episode has at most max_steps turns", first.client.over)
        self.demand(
            first.broken is None, "whatever the policy says, no episode raises or fails", first.broken
        )
        for name, episode in first.episodes.items():
            self.check_roles(name, episode)
            self.check_authors(name, episode, first.client)
            turns = f"{episode.num_turns} turns"
            self.demand(
                episode.num_turns <= self.env.max_steps, "an episode has at most max_steps turns", turns
            )
        self.check_context(first.client)
        self.check_repeats(first, self.play(rows=self.rows[::-1]))
        self.check_contained()

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

    def check_tools(self) -> None:
        """Call each tool once. It runs first, since its message on a broken tool is the shortest."""
        if not isinstance(self.env, ToolMDPEnv) or not self.rows:
            return
        (sample,) = self.env.begin_episode(self.rows[0], 0, Special(), seed=self.env.seed, step=0)
        failures = run(tool_failures(self.env, sample))
        law = "each tool, called with arguments made from its schema, answers or raises ToolError"
        self.demand(not failures, law, "; ".join(failures))

    def check_prompts(self, played: Rehearsal) -> None:
        """Before all others: groups of different prompts cannot even be built."""
        firsts: dict[str, set[tuple[int, ...]]] = {}
        for session, prompt_ids in played.client.firsts.items():
            firsts.setdefault(prompt_of(session), set()).add(prompt_ids)
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
        begin = next(len(found[name[0]]) for found in map(self._openings, self.rows) if name[0] in found)
        pairs = pairwise(message.role for message in episode.messages[begin - 1 :])
        alternate = not any(before == after == "assistant" for before, after in pairs)
        self.demand(alternate, "roles alternate: somebody else speaks between two turns of the policy", where)
        others = {message.role for message in episode.messages[begin:]} - {"assistant", *self.env.reply_roles}
        law = f"the environment speaks in its reply_roles, {self.env.reply_roles}, which the chat template was checked for"
        self.demand(not others, law, where)

    def check_authors(self, name: tuple[str, int], episode: Trajectory, client: Recorder) -> None:
        law = "only what the policy said at that very point is marked as its own, tokens and log-probs"
        for record in episode.records:
            before: tuple[int, ...] = ()
            for span in record:
                said = client.said.get((name[0], before), ())
                sampled = span.author == "context" or (span.token_ids, span.logprobs) in said
                text = self.env.tokenizer.decode(list(span.token_ids))
                self.demand(sampled, law, f"prompt {name[0]!r}, sample {name[1]}: {text!r:.200}")
                before += span.token_ids

    def check_context(self, client: Recorder) -> None:
        """Check episodes in a context with room for few turns."""
        room = max(map(len, client.firsts.values())) + 8
        played = self.play(room=room)
        self.demand(
            played.broken is None, "an episode that fills the context ends there and counts", played.broken
        )
        longest = max((episode.num_tokens for episode in played.episodes.values()), default=0)
        self.demand(longest <= room, "an episode has no more tokens than the context", f"{longest} of {room}")

    def check_repeats(self, first: Rehearsal, again: Rehearsal) -> None:
        law = "the same seed gives the same episode, again and in another order of the prompts; derive what is random "
        law += (
            "from env.seed, sample.prompt_id and sample.index, and keep the state of an episode in the sample"
        )
        self.demand(again.broken is None, law, again.broken)
        for (prompt_id, index), episode in first.episodes.items():
            other = again.episodes[prompt_id, index]
            pairs = zip(_told(episode), _told(other), strict=False)
            seen = next(
                (f"{one!r:.200} and then {two!r:.200}" for one, two in pairs if one != two),
                "one ended earlier",
            )
            self.demand(_told(episode) == _told(other), law, f"prompt {prompt_id!r}, sample {index}: {seen}")

    def check_contained(self) -> None:
        """One episode breaks in the environment, then one in the engine."""
        prompt_id, seats = (
            self._prompt_id(self.rows[0]),
            [(group, 1) for group in self._openings(self.rows[0])],
        )
        raised: list[str] = []
        broken = self.play(env=breaking(self.env, (prompt_id, 1), raised))
        law = "a step that raises fails its own episode, which is left out, and no other; in a custom loop, catch what "
        law += "respond raises and call sample.fail(...)"
        self._check_alone(broken, seats, law, expected=bool(raised))
        session = next(name for name in broken.client.firsts if (prompt_of(name), index_of(name)) in seats)
        law = "a reply that never comes fails its own episode, which is left out, and no other; leave samples that are done"
        self._check_alone(self.play(silent=session), seats, law, expected=True)

    def demand(self, holds: bool, law: str, seen: str | None) -> None:
        if not holds:
            raise EnvError(f"check_env: {type(self.env).__name__} breaks this law: {law}. Seen: {seen}.")

    def _check_alone(
        self, played: Rehearsal, seats: Sequence[tuple[str, int]], law: str, expected: bool
    ) -> None:
        self.demand(played.error is None, law, str(played.error))
        failed = {(group_of(sample), sample.index) for sample in played.result.failed}
        self.demand(
            failed == (set(seats) if expected else set()),
            law,
            f"{seats[0]} broke, and {sorted(failed)} failed",
        )

    def _prompt_id(self, row: int) -> str:
        return str(self.env.dataset[row].get("prompt_id", row))

    def _openings(self, row: int) -> dict[str, tuple[ChatMessage, ...]]:
        """Return the prompt of each group of a row: one for each role that the policy plays."""
        openings, prompt_id = self.env.openings(self.env.dataset[row]), self._prompt_id(row)
        return {name_of_group(prompt_id, role): tuple(openings[role]) for role in self.env.policy_roles}

    def _kept(self, stored: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> bool:
        if messages[: len(stored)] == stored:
            return True
        *before, last = stored
        begun = messages[len(stored) - 1 : len(stored)]
        heard = any(self.env.roles) and all(
            item.role == "user" and item.content.startswith(last.content) for item in begun
        )
        return messages[: len(before)] == tuple(before) and heard


def _told(episode: Trajectory) -> list[Any]:
    """Return what two plays of one episode must agree in."""
    return [*episode.messages, *episode.records, episode.stop_reason, *episode.turn_rewards]
