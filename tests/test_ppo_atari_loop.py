"""PPO on Atari from the environments to the loss: what the scripts' loops make of games that are written down."""

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Discrete
from scripts import run
from test_ppo_targets import slow_gae
from torch.distributions import Categorical

import leanrl.ppo_atari_envpool as reference
import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.support.run import Run

NUM_ENVS, NUM_STEPS, NUM_ROLLOUTS = 4, 16, 3
TOTAL = NUM_STEPS * NUM_ROLLOUTS
LIFE_LOST, GAME_OVER, OUT_OF_TIME = 1, 2, 3


class Games:
    """What NEXT_STEP environments return, [TOTAL, NUM_ENVS]; the last step of each rollout ends episodes of all kinds.

    ``values`` [TOTAL + 1, NUM_ENVS], all different, are what the observations are and what the critic says of them.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        ends = rng.choice(4, (TOTAL, NUM_ENVS), p=[0.7, 0.1, 0.1, 0.1])
        ends[NUM_STEPS - 2 :: NUM_STEPS] = 0
        ends[NUM_STEPS - 1 :: NUM_STEPS] = [LIFE_LOST, GAME_OVER, OUT_OF_TIME, 0]
        for t in range(1, TOTAL):
            ends[t, ends[t - 1] > 0] = 0  # a step that only resets ends nothing
        self.resets = np.concatenate([np.zeros((1, NUM_ENVS), bool), ends[:-1] > 0])
        self.scores = np.where(self.resets, 0.0, rng.integers(-3, 10, (TOTAL, NUM_ENVS)))
        self.rewards = np.sign(self.scores).astype(np.float32)
        self.terminations = (ends == LIFE_LOST) | (ends == GAME_OVER)
        self.truncations = ends == OUT_OF_TIME
        self.game_over = (ends == GAME_OVER) | self.truncations
        self.values = rng.permutation((TOTAL + 1) * NUM_ENVS).reshape(-1, NUM_ENVS).astype(np.float32) / 100
        self.actions = np.full((TOTAL, NUM_ENVS), -1)  # what was played

    def episodes(self) -> list[tuple[float, int]]:
        """Score and length of each whole game, in the order of their ends."""
        found, scores, lengths = [], np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int)
        for t in range(TOTAL):
            scores += self.scores[t]
            lengths += ~self.resets[t]
            for n in np.flatnonzero(self.game_over[t]):
                found.append((scores[n], lengths[n]))
                scores[n] = lengths[n] = 0
        return found


class Pool:
    """The environments ``part`` of ``games``."""

    single_action_space = Discrete(5)

    def __init__(self, games: Games, part: slice) -> None:
        self.games, self.part, self.t = games, part, -1

    def _obs(self) -> np.ndarray:
        return self.games.values[self.t + 1, self.part, None].copy()

    def reset(self) -> tuple[np.ndarray, dict]:
        return self._obs(), {}

    def send(self, actions: np.ndarray) -> None:
        self.t += 1
        self.games.actions[self.t, self.part] = actions

    def recv(self):
        games = self.games
        columns = games.rewards, games.terminations, games.truncations, games.scores, games.game_over
        rewards, terminations, truncations, scores, game_over = (x[self.t, self.part].copy() for x in columns)
        return self._obs(), rewards, terminations, truncations, {"reward": scores, "game_over": game_over}

    def step(self, actions: np.ndarray):
        self.send(actions)
        return self.recv()

    def close(self) -> None: ...


class Network(nn.Module):
    """[B, 1] -> five actions of equal chances; the observation as the value [B]."""

    def __init__(self, num_actions: int) -> None:
        nn.Module.__init__(self)
        self.logits = nn.Parameter(torch.zeros(num_actions))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.logits.expand(len(obs), -1), validate_args=False), self.scale * obs[:, 0]


@pytest.mark.parametrize(
    "script, module, flags",
    [
        ("ppo_atari_envpool", reference, []),
        ("ppo_atari_envpool_torchcompile", fast, []),
        ("ppo_atari_envpool_torchcompile", fast, ["--num-env-groups=2"]),
    ],
    ids=["reference", "fast", "fast in groups"],
)
def test_the_loss_gets_what_the_games_gave(script, module, flags, monkeypatch, tmp_path) -> None:
    games, batches, episodes = Games(), [], []
    loss, record_episodes = module.ppo_loss, Run.record_episodes

    def make_envs(env_id, num_envs, seed, protocol, *, start=0, first_index=0) -> Pool:
        return Pool(games, slice(first_index, first_index + num_envs))

    def spy_on_loss(agent, minibatch, args):
        batches.append([column.clone() for column in minibatch[1:]])
        return loss(agent, minibatch, args)

    def spy_on_episodes(self, returns, lengths) -> None:
        episodes.extend(zip(map(float, returns), map(int, lengths), strict=True))
        record_episodes(self, returns, lengths)

    monkeypatch.setattr(module, "Agent", type("Agent", (Network, module.Agent), {}))
    monkeypatch.setattr(module, "make_atari_envs", make_envs)
    monkeypatch.setattr(module, "ppo_loss", spy_on_loss)
    monkeypatch.setattr(Run, "record_episodes", spy_on_episodes)
    flags = [*flags, "--device=cpu", "--num-threads=1", f"--num-envs={NUM_ENVS}", f"--num-steps={NUM_STEPS}"]
    flags += ["--num-minibatches=1", "--update-epochs=1", f"--total-timesteps={TOTAL * NUM_ENVS}"]
    # So small a step changes no float32: the critic says what is written down in every rollout.
    assert run(script, *flags, "--learning-rate=1e-30", f"--runs-dir={tmp_path}", "--run-name=run") == 0

    dones = games.terminations | games.truncations
    columns = games.rewards, games.values, games.terminations, dones
    rewards, values, terminations, dones = (torch.as_tensor(x, dtype=torch.float64) for x in columns)
    for i, batch in enumerate(batches[-NUM_ROLLOUTS:]):
        now, with_next = slice(i * NUM_STEPS, (i + 1) * NUM_STEPS), slice(i * NUM_STEPS, (i + 1) * NUM_STEPS + 1)
        advantages = slow_gae(rewards[now], values[with_next], terminations[now], dones[now], 0.99, 0.95).flatten()
        order = batch[4].argsort()  # of the values, by which steps are known
        expected_order = values[now].flatten().argsort()
        weights = torch.as_tensor(~games.resets[now], dtype=torch.float64).flatten()
        live = weights[expected_order] == 1.0
        assert (~live).sum() >= 3
        actions, logprobs, *rest = (column[order].double() for column in batch)
        expected = advantages, advantages + values[now].flatten(), values[now].flatten(), weights
        for actual, column in zip(rest[:3], expected, strict=False):
            torch.testing.assert_close(actual[live], column[expected_order][live], rtol=1e-5, atol=1e-5)
        assert torch.equal(rest[3], weights[expected_order])
        assert actions.tolist() == games.actions[now].flatten()[expected_order].tolist()
        torch.testing.assert_close(logprobs, torch.full_like(logprobs, -np.log(5)))

    expected_episodes = games.episodes()
    assert len(expected_episodes) > NUM_ROLLOUTS * 2 and games.terminations.sum() > games.game_over.sum() / 2
    assert episodes == expected_episodes
