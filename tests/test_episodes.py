"""Counting episodes: a step at a time, a rollout at a time, and as Gymnasium's wrapper counts them."""

import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from leanrl.support.envs import SerialVectorEnv, make_env
from leanrl.support.episodes import EpisodeStatistics


@pytest.fixture(scope="module")
def steps():
    """400 steps of 3 CartPoles with random actions: rewards, dones, resets [T, N], and what the wrapper counted."""
    envs = [RecordEpisodeStatistics(make_env("CartPole-v1")) for _ in range(3)]
    vector = SerialVectorEnv(envs, [1, 2, 3])
    vector.reset()
    actions = np.random.default_rng(0).integers(2, size=(400, 3))
    rewards, dones, resets, counted = [], [], [np.zeros(3, bool)], []
    for row in actions:
        _, reward, terminations, truncations, _ = vector.step(row)
        rewards.append(reward)
        dones.append(terminations | truncations)
        resets.append(dones[-1])
        counted += [(envs[n].return_queue[-1], envs[n].length_queue[-1]) for n in np.flatnonzero(dones[-1])]
    return np.array(rewards), np.array(dones), np.array(resets[:-1]), counted


def test_step_by_step(steps):
    *columns, counted = steps
    episodes, ended = EpisodeStatistics(3), []
    for row in zip(*columns, strict=True):
        ended += zip(*episodes.add_step(*row), strict=True)
    assert len(ended) > 30
    assert ended == counted


@pytest.mark.parametrize("num_steps", [1, 7, 400])
def test_rollout_by_rollout(steps, num_steps):
    """Episodes go on from one rollout to the next, and through a checkpoint between them."""
    *columns, counted = steps
    episodes, ended = EpisodeStatistics(3), []
    for start in range(0, 400, num_steps):
        ended += zip(*episodes.add(*(column[start : start + num_steps] for column in columns)), strict=True)
        state, episodes = episodes.state_dict(), EpisodeStatistics(3)
        episodes.load_state_dict(state)
    assert ended == counted
