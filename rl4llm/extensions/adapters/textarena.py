"""Games of TextArena for one player or several, which the policy plays alone, against itself or against an opponent.

rl4llm train configs/textarena_grpo.yaml env.task=TicTacToe-v0
"""

from __future__ import annotations

import numbers
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from rl4llm.core.base_env import EpisodeState, SampleState
from rl4llm.core.base_reward import BaseBatchReward
from rl4llm.core.errors import ConfigError, EnvError
from rl4llm.core.registry import needed
from rl4llm.core.types import ChatMessage
from rl4llm.envs.roles import RolesEnv
from rl4llm.extensions.adapters.prompts import prompt_row, seeds_of, user

COLUMN = "textarena"
DEFAULT_LIMIT = 256
_import = partial(needed, "textarena", "env.name='textarena'")
GLOBAL_RANDOM = threading.Lock()  # games draw from the random numbers of the process


def textarena_prompts(
    split: str,
    limit: int | None = None,
    *,
    task: str,
    task_options: Mapping[str, Any] | None = None,
    players: int | None = None,
    task_seed: int = 0,
) -> list[dict[str, Any]]:
    """Return what the game tells each player at its beginning. Each prompt has a different seed, also across the splits.

    Returns 256 prompts unless `limit` is given. Raises ConfigError for a game that needs `players`.
    """
    seeds = seeds_of(split, limit or DEFAULT_LIMIT, "textarena", task, task_seed)
    options = dict(task_options or {})
    players = players or _number_of_players(task, options)
    rows = []
    for number, seed in enumerate(seeds):
        match = _Match(task, options, players, seed)
        opening = {_role(player): match.heard(player) for player in range(players)}
        column = {"task": task, "options": options, "players": players, "seed": seed, "opening": opening}
        rows.append(prompt_row(f"{task}-{split}-{number}", None, [user(opening[_role(0)])], textarena=column))
    return rows


class TextArenaEnv(RolesEnv):
    """Plays a game of TextArena: the roles are `player_0`, `player_1` and so on, and the game decides whose turn it is.

    A player's conversation begins with the game's own prompt. Then it reads what the game and the other players said
    since its last turn. The reward `textarena` is the game's, 0 if the game did not end within `max_steps`. The metrics
    are `env/finished` and `env/invalid_moves`, the share of games that a player lost by one.

    Args:
        task: the id of the game; its wrappers for observations are not used, those for actions are.
        task_options: arguments of the game.
        players: number of players; needed only for games that take several numbers.
        task_seed: seed of the games of both splits.
        max_steps: turns of each player.
    """

    default_rewards = ("textarena",)
    prompts = staticmethod(textarena_prompts)

    def __init__(self, dataset: Sequence[Mapping[str, Any]], *args: Any, max_steps: int = 32, **kwargs: Any):
        self._games: dict[int, tuple[EpisodeState, _Match]] = {}  # by id of the episode
        roles = [_role(player) for player in range(dataset[0][COLUMN]["players"])]
        super().__init__(dataset, *args, **kwargs | {"max_steps": max_steps, "roles": roles})

    def opening(
        self, role: str, task: Sequence[ChatMessage], columns: Mapping[str, Any]
    ) -> list[ChatMessage]:
        return [ChatMessage("user", columns[COLUMN]["opening"][role])]

    def next_role(self, episode: EpisodeState) -> str | None:
        game = self._game(episode)
        for line in episode.said[game.moves :]:
            game.move(line.text)
        return None if game.rewards is not None else _role(game.player)

    def hears(self, role: str, episode: EpisodeState) -> str:
        game = self._game(episode)
        heard = game.heard(game.player)
        return heard or ("It is your turn." if episode.seats[role].current_step else "")

    def end_episode(self, sample: SampleState) -> None:
        """Note what the game gave each player."""
        assert sample.episode is not None  # of a subclass of RolesEnv
        _, game = self._games.pop(id(sample.episode), (None, None))
        for player, seat in enumerate(sample.seats):
            rewards = game.rewards if game else None
            seat.extras[COLUMN] = 0.0 if rewards is None else float(rewards.get(player, 0.0))
            invalid = game is not None and game.lost_by_invalid_move(player)
            seat.extras["metrics"] = {"finished": float(rewards is not None), "invalid_moves": float(invalid)}

    def _game(self, episode: EpisodeState) -> _Match:
        """Return the game of an episode. Raises EnvError if it does not begin as in the prompt."""
        if id(episode) not in self._games:
            column = dict(next(iter(episode.seats.values())).columns[COLUMN])
            opening = column.pop("opening")
            game = _Match(**column)
            if any(game.heard(player) != opening[_role(player)] for player in range(column["players"])):
                raise EnvError(f"{column['task']} does not begin as in its prompt, with the same seed")
            self._games[id(episode)] = (episode, game)
        return self._games[id(episode)][1]


class TextArenaReward(BaseBatchReward):
    """The reward that a game of TextArena gave the player, mostly from -1 to 1; 0 if the game did not end."""

    needs_ground_truth = False

    def __init__(self, name: str = "textarena"):
        super().__init__(name)

    def score_batch(self, samples: Sequence[SampleState]) -> list[float]:
        return [sample.extras.get(COLUMN, 0.0) for sample in samples]


class _Match:
    """A game in progress, with separate random numbers, whichever games run beside it."""

    def __init__(self, task: str, options: Mapping[str, Any], players: int, seed: int):
        self.moves = 0
        self.rewards: Mapping[int, float] | None = None  # by player, once the game is over
        self._random = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        with self._drawing():
            self._env = _import().make(task, **options)
            self._env.reset(num_players=players, seed=seed)
        self.state = self._env.state
        self.state.set_invalid_move = partial(_in_order, self.state.set_invalid_move)
        self._inner = self._env
        while isinstance(self._inner, _import().Wrapper):  # those for observations repeat the whole history
            self._inner = self._inner.env

    @property
    def player(self) -> int:
        return int(self.state.current_player_id)

    def heard(self, player: int) -> str:
        """Return the messages to a player since the last call, without its own moves."""
        if player == self.player:
            _, messages = self._inner.get_observation()  # which may add how the game stands
        else:
            messages, self.state.observations[player] = self.state.observations[player], []
        names = {**self.state.role_mapping, _import().GAME_ID: "GAME"}
        echo = (player, _import().ObservationType.PLAYER_ACTION)
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if (sender, kind) != echo
        )

    def move(self, action: str) -> None:
        """Let the current player move. Raises EnvError if the game ends without rewards that are numbers."""
        self.moves += 1
        with self._drawing():
            done, _ = self._env.step(action=action)
        if done:
            self.rewards = self.state.rewards
            rewards = self.rewards.values() if isinstance(self.rewards, Mapping) else [self.rewards]
            if not all(isinstance(reward, numbers.Real) for reward in rewards):
                raise EnvError(f"the game ended with the rewards {self.rewards!r}")

    def lost_by_invalid_move(self, player: int) -> bool:
        return bool(self.state.game_info[player].get("invalid_move", False))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with GLOBAL_RANDOM:
            states = random.getstate(), np.random.get_state()
            _restore(self._random)
            try:
                yield
            finally:
                self._random = random.getstate(), np.random.get_state()
                _restore(states)


def _restore(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def _in_order(set_invalid_move: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Pass the reason on before the reward: some games of TextArena 0.7 do the reverse, and are rewarded with a text."""
    return set_invalid_move(*sorted(arguments, key=lambda one: not isinstance(one, str)), **named)


def _role(player: int) -> str:
    return f"player_{player}"


def _number_of_players(task: str, options: Mapping[str, Any]) -> int:
    """Return how many play. Raises ConfigError for a game that takes several numbers."""
    textarena = _import()
    for players, state in ((1, textarena.SinglePlayerState), (2, textarena.TwoPlayerState)):
        with suppress(AssertionError):  # a game's own, about the number
            if isinstance(_Match(task, options, players, 0).state, state):
                return players
    raise ConfigError(f"env.task={task!r} is a game for several numbers of players. Set env.players.")
