"""Games of TextArena, for one player and two, played by the policy."""

import json
import random

import pytest
from played import played
from small_run import SmallRun

from rl4llm.cli import main
from rl4llm.core.errors import ConfigError
from rl4llm.extensions.adapters.textarena import TextArenaEnv, TextArenaReward, textarena_prompts
from rl4llm.testing import ScriptedClient

textarena = pytest.importorskip("textarena")
GUESS = {"task": "GuessTheNumber-v0", "task_options": {"max_number": 4}}


class Letters(textarena.Env):
    """Each player says something once; what it earns depends on every letter, less what the other earns."""

    def __init__(self, players):
        self.players = players

    def reset(self, num_players, seed=None):
        kind = {1: textarena.SinglePlayerState, 2: textarena.TwoPlayerState}[self.players]
        self.state = kind(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Say something.")

    def step(self, action):
        said, player = self.state.game_state, self.state.current_player_id
        said[player] = sum(map(ord, action)) % 11 / 10
        self.state.add_observation(action, textarena.ObservationType.PLAYER_ACTION, from_id=player)
        if len(said) == self.players:
            self.state.rewards = {one: said[one] - said.get(1 - one, 0.0) for one in said}
            self.state.done = True
        return self.state.step()


@pytest.fixture(autouse=True, scope="module")
def _registered():
    for players in (1, 2):
        textarena.register(f"Letters-v{players}", entry_point=Letters, players=players)


@pytest.fixture
def play(tokenizer):
    """Plays episodes of the first game; `said` are the lines of each player."""

    def run(said, *, size=1, max_steps=8, opponents=None, **options):
        rows = textarena_prompts("train", 1, **options)
        given = {"batch_size": 1, "group_size": size, "max_steps": max_steps, "opponents": opponents}
        env = TextArenaEnv(rows, tokenizer, [TextArenaReward()], **given)
        result = played(env, ScriptedClient(tokenizer, said))
        assert not env._games  # each is released
        return rows[0], result

    return run


def by_role(result):
    return {trajectory.role: trajectory for group in result.groups for trajectory in group.trajectories}


def test_one_player_plays_to_the_games_own_reward(play):
    row, result = play({"": ["[1]", "2", "[3]", "[4]"]}, size=2, **GUESS)
    first, second = result.trajectories
    assert "guess the number between 1 and 4 within 10 turns" in first.messages[0].content
    assert first.messages[0].content == row["messages"][0]["content"]
    assert first.reward == 1.0 and first.stop_reason == "done" and first.extras["metrics"]["finished"] == 1.0
    assert first.messages == second.messages  # samples of a prompt play one game
    heard = [message.content for message in first.messages if message.role == "user"][1:]
    assert heard and set(heard) == {"[GAME] The target number is higher."}  # nothing that it said itself


def test_two_players_hear_each_other_and_earn_apart(play):
    won, lost = ["[0]", "[1]", "[2]"], ["[3]", "[4]"]
    row, result = play({"": [won[0], lost[0], won[1], lost[1], won[2]]}, task="TicTacToe-v0")
    first, second = by_role(result)["player_0"], by_role(result)["player_1"]
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert first.messages[0].content.startswith("[GAME] You are Player 0 in Tic Tac Toe.")
    assert second.messages[0].content.startswith(row["textarena"]["opening"]["player_1"])
    assert "[Player 0] [0]" in second.messages[0].content and "[Player 1] [3]" in first.messages[2].content
    assert "[Player 0]" not in first.messages[2].content


def test_an_opponent_plays_the_other_side(play):
    moves = iter(["[3]", "[9]", "[9]"])  # twice a square that does not exist
    _, result = play(
        {"": ["[0]", "[1]"]}, task="TicTacToe-v0", opponents={"player_1": lambda heard: next(moves)}
    )
    assert list(by_role(result)) == ["player_0"] and by_role(result)["player_0"].reward == 1.0
    assert by_role(result)["player_0"].extras["metrics"] == {"finished": 1.0, "invalid_moves": 0.0}


def test_a_game_that_does_not_end_rewards_nothing(play):
    _, result = play({"": ["[0]", "[1]"]}, task="TicTacToe-v0", max_steps=1)
    assert [one.reward for one in result.trajectories] == [0.0, 0.0]
    assert result.trajectories[0].extras["metrics"]["finished"] == 0.0


def test_an_invalid_move_is_rewarded_with_a_number(play):
    """Some games pass the reason where the reward belongs."""
    _, result = play({"": ["no move"] * 4}, task="ThreeCardMonte-v0")
    (one,) = result.trajectories
    assert one.reward == 0.0 and one.extras["metrics"] == {"finished": 1.0, "invalid_moves": 1.0}
    assert "Reason: Bad action. Use `[k]`." in one.messages[2].content


def test_an_episode_without_numbers_as_rewards_fails(play, monkeypatch):
    def end(self, action):
        self.state.rewards, self.state.done = {0: "won"}, True
        return self.state.step()

    monkeypatch.setattr(Letters, "step", end)
    _, result = play({"": ["a"]}, task="Letters-v1")
    assert not result.trajectories and result.failed[0].failure_class == "env/raised"


def test_games_keep_their_random_numbers_apart(play):
    """Games draw from the random numbers of the process, which others draw from too."""
    said = {"": ["[red]"] * 6}
    alone = play(said, task="Bandit-v0", max_steps=6)[1].trajectories
    random.seed(5)
    state = random.getstate()
    together = play(said, task="Bandit-v0", max_steps=6, size=4)[1].trajectories
    assert random.getstate() == state
    assert all(one.messages == alone[0].messages for one in together)


def test_splits_of_games_share_no_seed():
    seeds = [
        row["textarena"]["seed"]
        for split in ("train", "test")
        for row in textarena_prompts(split, 20, **GUESS)
    ]
    assert len(set(seeds)) == 40


def test_games_for_several_numbers_of_players_need_one():
    with pytest.raises(ConfigError):
        textarena_prompts("train", 1, task="SecretMafia-v0")


@pytest.mark.parametrize("players", [1, 2])
def test_a_configuration_trains_on_games(model_dir, tmp_path, players):
    small = SmallRun.at(tmp_path, model_dir)
    env = ["env.name=textarena", f"env.task=Letters-v{players}", "data.path=null", "rewards=null"]
    assert main(["train", *small.into("run", *env, "max_steps=2")]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 and step["env/finished"] == 1 for step in steps)
    for player in range(players):
        assert steps[0][f"role/player_{player}/reward/std"] > 0
