"""Atari over EnvPool: what its flags and infos mean, both protocols, whole games in the statistics, refusals."""

import numpy as np
import pytest

from leanrl.support.atari import CLEANBA, CLEANRL, make_atari_envs, whole_games
from leanrl.support.envs import EnvPoolVectorEnv
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import UsageError

# Five lives last for 120 steps of random play at least.
NUM_ENVS, NUM_STEPS = 4, 300


def play(envs, num_steps):
    """Arrays [T, N, ...] of random play: obs, rewards, terminations, truncations, resets, and each info."""
    rng = np.random.default_rng(0)
    envs.reset()
    resets, steps = np.zeros(envs.num_envs, bool), []
    for _ in range(num_steps):
        actions = rng.integers(0, envs.single_action_space.n, envs.num_envs)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        returned = {key: value.copy() for key, value in infos.items() if isinstance(value, np.ndarray)}
        # "reward" is what the game gave, "rewards" what is learned from.
        steps.append({"obs": obs[:, -1], "rewards": rewards, "resets": resets, **returned})
        steps[-1] |= {"terminations": terminations, "truncations": truncations}
        resets = terminations | truncations
    envs.close()
    return {key: np.stack([step[key] for step in steps]) for key in steps[0]}


def breakout(seed=1, num_envs=NUM_ENVS, protocol=CLEANRL, **kwargs):
    return make_atari_envs("Breakout-v5", num_envs, seed, protocol, num_threads=1, **kwargs)


def test_a_lost_life_ends_the_episode_but_not_the_game():
    steps = play(breakout(), NUM_STEPS)
    lives = np.concatenate([np.full((1, NUM_ENVS), 5), steps["lives"]])
    lost = lives[1:] < lives[:-1]
    assert lost.sum() > 30
    np.testing.assert_array_equal(steps["terminations"], lost)
    np.testing.assert_array_equal(steps["game_over"], lost & (steps["lives"] == 0))
    assert steps["game_over"].sum() >= 4 and not steps["truncations"].any()
    # The step after that begins the next life, or the next game.
    resets, before = steps["resets"], np.roll(steps["lives"], 1, 0)
    np.testing.assert_array_equal(steps["lives"][resets], np.where(before[resets] == 0, 5, before[resets]))
    assert (steps["rewards"][resets] == 0).all() and (steps["reward"][resets] == 0).all()
    assert not steps["terminations"][resets].any()
    # A game's steps are counted on through its lives, those that only reset left out.
    new_game = resets & (before == 0)
    expected = np.zeros(NUM_ENVS, int)
    for t in range(NUM_STEPS):
        expected = np.where(new_game[t], 0, expected + ~resets[t])
        np.testing.assert_array_equal(steps["elapsed_step"][t], expected)


def test_without_episodic_life_only_the_game_ends():
    steps = play(breakout(protocol=CLEANRL._replace(episodic_life=False)), NUM_STEPS)
    assert steps["terminations"].sum() >= 4
    np.testing.assert_array_equal(steps["terminations"], steps["game_over"])
    np.testing.assert_array_equal(steps["terminations"], steps["lives"] == 0)


@pytest.mark.parametrize("protocol", [CLEANRL, CLEANBA])
def test_time_that_runs_out_ends_the_game_whatever_lives_are_left(protocol):
    steps = play(breakout(protocol=protocol._replace(max_episode_steps=40)), 100)
    out = steps["elapsed_step"] == 40
    assert out.sum() >= 8 and (steps["lives"][out] > 0).any()
    np.testing.assert_array_equal(steps["truncations"], out)
    assert steps["game_over"][out].all()
    # A life that is lost with that very step is lost.
    lives_lost = (steps["lives"] < np.roll(steps["lives"], 1, 0)) & protocol.episodic_life
    np.testing.assert_array_equal(steps["terminations"][out], lives_lost[out])
    after = np.roll(out, 1, 0)
    after[0] = False
    assert (steps["lives"][after] == 5).all() and (steps["elapsed_step"][after] == 0).all()


@pytest.mark.parametrize("episodic_life, lives", [(True, 4), (False, 0)])
def test_what_is_lost_as_time_runs_out_has_terminated(episodic_life, lives):
    protocol = CLEANRL._replace(episodic_life=episodic_life)
    steps = play(breakout(num_envs=1, protocol=protocol), 400)
    length = int(steps["elapsed_step"][steps["terminations"]][0])
    steps = play(breakout(num_envs=1, protocol=protocol._replace(max_episode_steps=length)), length)
    assert not steps["terminations"][:-1].any() and not steps["truncations"][:-1].any()
    last = {key: steps[key][-1, 0] for key in ("terminations", "truncations", "game_over", "lives")}
    assert last == {"terminations": True, "truncations": True, "game_over": True, "lives": lives}


def test_a_game_that_ends_in_a_reset_is_over(monkeypatch):
    """The frames without action after a lost life take the last one too: EnvPool begins anew, and marks nothing."""
    envs = breakout(num_envs=2)
    envs.reset()
    # Lives, terminations and rewards of two environments; the second one's game goes on.
    script = [([5, 5], [0, 0], [1, 1]), ([1, 1], [1, 1], [2, 2]), ([5, 1], [0, 0], [0, 0]), ([5, 1], [0, 0], [3, 3])]

    def recv(self):
        lives, terminations, rewards = map(np.array, script.pop(0))
        infos = {"lives": lives, "terminated": np.zeros(2, int), "reward": rewards}
        return None, rewards, terminations.astype(bool), np.zeros(2, bool), infos

    monkeypatch.setattr(EnvPoolVectorEnv, "recv", recv)
    games, resets, ended = EpisodeStatistics(2), np.zeros(2, bool), []
    while script:
        _, rewards, terminations, _, infos = envs.recv()
        returns, lengths = games.add_step(*whole_games(rewards, terminations, infos), resets)
        ended.append(infos["game_over"].tolist())
        if any(ended[-1]):
            assert (list(returns), list(lengths)) == ([3.0], [2])
        resets = terminations
    assert ended == [[False, False], [False, False], [True, False], [False, False]]


@pytest.mark.parametrize("max_episode_steps", [27_000, 250])
def test_statistics_count_whole_games_unclipped(max_episode_steps):
    """Ms. Pacman: 3 lives, rewards of 10 and more."""
    protocol = CLEANRL._replace(max_episode_steps=max_episode_steps)
    steps = play(make_atari_envs("MsPacman-v5", NUM_ENVS, 1, protocol, num_threads=1), 2 * NUM_STEPS)
    np.testing.assert_array_equal(steps["rewards"], np.sign(steps["reward"]))
    assert steps["reward"].max() >= 10

    games, counted = [], []
    statistics, scores = EpisodeStatistics(NUM_ENVS), [0.0] * NUM_ENVS
    for t in range(2 * NUM_STEPS):
        step = {key: steps[key][t] for key in steps}
        dones = step["terminations"] | step["truncations"]
        counted += zip(*statistics.add_step(*whole_games(step["rewards"], dones, step), step["resets"]), strict=True)
        for i in range(NUM_ENVS):
            scores[i] += step["reward"][i]
            if (step["lives"][i] == 0 and not step["resets"][i]) or step["elapsed_step"][i] == max_episode_steps:
                games.append((scores[i], step["elapsed_step"][i]))
                scores[i] = 0.0
    assert len(games) >= NUM_ENVS
    assert len(games) < steps["terminations"].sum() + steps["truncations"].sum()  # lives were lost too
    assert steps["truncations"].any() == (max_episode_steps == 250)
    assert counted == games


def test_pools_share_the_environments_of_one_run():
    whole = play(breakout(num_envs=4), 50)
    assert len({whole["obs"][:, i].tobytes() for i in range(4)}) == 4
    again = play(breakout(num_envs=4, start=1000), 50)
    assert (again["obs"] != whole["obs"]).any()
    actions = np.random.default_rng(0).integers(0, 4, (50, 4))
    pools = [breakout(num_envs=2, first_index=first) for first in (0, 2)]
    for pool in pools:
        pool.reset()
    for t in range(50):
        for pool, part in zip(pools, (slice(0, 2), slice(2, 4)), strict=True):
            pool.send(actions[t, part])
        for pool, part in zip(pools, (slice(0, 2), slice(2, 4)), strict=True):
            obs, *_, infos = pool.recv()
            np.testing.assert_array_equal(obs[:, -1], whole["obs"][t, part])
            np.testing.assert_array_equal(infos["lives"], whole["lives"][t, part])


def test_protocols():
    def actions(protocol):
        return breakout(num_envs=1, protocol=protocol).single_action_space.n

    assert (CLEANRL, CLEANBA) == ((True, True, 0.0, 30, False, 27_000), (False, True, 0.25, 1, True, 27_000))
    assert (actions(CLEANRL), actions(CLEANBA)) == (4, 18)
    # With sticky actions the same actions make another game.
    protocols = [CLEANRL._replace(repeat_action_probability=p, noop_max=1) for p in (0.0, 0.25)]
    plain, sticky = (play(breakout(protocol=protocol), 60)["obs"] for protocol in protocols)
    assert (plain != sticky).any()


NO_GAMES = {"Brekout-v5": "did you mean Breakout-v5", "pong-v5": "did you mean Pong-v5", "Catch-v0": "did you mean "}
NO_GAMES |= {"BreakoutNoFrameskip-v4": "did you mean Breakout-v5"}
NO_GAMES |= dict.fromkeys(["HalfCheetah-v5", ""], "names look like Breakout-v5")


@pytest.mark.parametrize("env_id, hint", NO_GAMES.items())
def test_what_is_no_game_is_refused(env_id, hint):
    with pytest.raises(UsageError, match=f"^--env-id {env_id}: is not an Atari game of EnvPool; {hint}"):
        make_atari_envs(env_id, 1, 1, CLEANRL)
