"""PPO on Atari and PQN from the environments to the loss: games that are written down, and Catch."""

import importlib
import itertools

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Discrete
from scripts import ATARI, run, run_tiny, summary
from test_on_policy_targets import slow_gae, slow_returns
from torch.distributions import Categorical

from leanrl.support.envs import EnvPoolVectorEnv, env_seeds
from leanrl.support.run import Run
from leanrl.support.tracking import read_metrics

PPO, FAST_PPO, PQN, FAST_PQN = ATARI

# ----------------------------------------------------------------------------------------- GAMES THAT ARE WRITTEN DOWN

NUM_ENVS, NUM_STEPS, NUM_ROLLOUTS = 4, 16, 3
TOTAL = NUM_STEPS * NUM_ROLLOUTS
LIFE_LOST, GAME_OVER, OUT_OF_TIME = 1, 2, 3


class Games:
    """What NEXT_STEP environments return, [TOTAL, NUM_ENVS]; the last step of each rollout ends episodes of all kinds.

    ``values`` [TOTAL + 1, NUM_ENVS], all different, are what the observations are and what the network says of them.
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

    def episodes(self, rewards: np.ndarray, ends: np.ndarray) -> list[tuple[float, int]]:
        """Return and length of each episode, in the order of their ends."""
        found, returns, lengths = [], np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int)
        for t in range(TOTAL):
            returns += rewards[t]
            lengths += ~self.resets[t]
            for n in np.flatnonzero(ends[t]):
                found.append((returns[n], lengths[n]))
                returns[n] = lengths[n] = 0
        return found


class Pool:
    """The environments ``part`` of ``games``."""

    single_observation_space, single_action_space = Box(-np.inf, np.inf, (1,)), Discrete(5)

    def __init__(self, games: Games, part: slice) -> None:
        self.games, self.part, self.t, self.num_envs = games, part, -1, part.stop - part.start

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


class PolicyOfGames(nn.Module):
    """[B, 1] -> five actions of equal chances; the observation as the value [B]."""

    def __init__(self, num_actions: int, *_) -> None:
        nn.Module.__init__(self)
        self.logits = nn.Parameter(torch.zeros(num_actions))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.logits.expand(len(obs), -1), validate_args=False), self.scale * obs[:, 0]


class QNetworkOfGames(nn.Module):
    """[..., 1] -> five actions; the best one, whose value is the observation, is its hundredths modulo 5."""

    def __init__(self, *sizes: int) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(sizes[-1]))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        best = (100 * obs).round() % 5
        return self.scale * obs - (torch.arange(5) - best).abs()


EPSILONS = [[f"--start-e={e}", f"--end-e={e}"] for e in (0.0, 0.8)]


@pytest.mark.parametrize(
    "script, flags",
    [
        *[(PPO, []), (FAST_PPO, []), (FAST_PPO, ["--num-env-groups=2"])],
        *itertools.product([PQN, FAST_PQN, "pqn", "pqn_torchcompile"], EPSILONS),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_the_loss_gets_what_the_games_gave(script, flags, monkeypatch, tmp_path) -> None:
    games, batches, episodes = Games(), [], []
    module, is_ppo, on_atari = importlib.import_module(f"leanrl.{script}"), script in (PPO, FAST_PPO), script in ATARI
    loss, record_episodes = module.ppo_loss if is_ppo else module.pqn_loss, Run.record_episodes

    def make_envs(env_id, num_envs, seed, *protocol_or_backend, start=0, first_index=0) -> Pool:
        return Pool(games, slice(first_index, first_index + num_envs))

    def spy_on_loss(network, minibatch, *args):
        batches.append(type(minibatch)(*(column.clone() for column in minibatch)))
        return loss(network, minibatch, *args)

    def spy_on_episodes(self, returns, lengths) -> None:
        episodes.extend(zip(map(float, returns), map(int, lengths), strict=True))
        record_episodes(self, returns, lengths)

    if is_ppo:
        monkeypatch.setattr(module, "Agent", type("Agent", (PolicyOfGames, module.Agent), {}))
    else:
        monkeypatch.setattr(module, "QNetwork", QNetworkOfGames)
    monkeypatch.setattr(module, "make_atari_envs" if on_atari else "make_envs", make_envs)
    monkeypatch.setattr(module, loss.__name__, spy_on_loss)
    monkeypatch.setattr(Run, "record_episodes", spy_on_episodes)
    flags = [*flags, "--device=cpu", "--num-threads=1", f"--num-envs={NUM_ENVS}", f"--num-steps={NUM_STEPS}"]
    flags += ["--num-minibatches=1", "--update-epochs=1", f"--total-timesteps={TOTAL * NUM_ENVS}", "--gamma=0.97"]
    flags += ["--gae-lambda=0.8" if is_ppo else "--q-lambda=0.8", f"--runs-dir={tmp_path}", "--run-name=run"]
    # So small a step changes no float32: the network says what is written down in every rollout.
    assert run(script, *flags, "--learning-rate=1e-30") == 0

    dones = games.terminations | games.truncations
    columns = games.rewards, games.values, games.terminations, dones
    rewards, values, terminations, dones = (torch.as_tensor(x, dtype=torch.float64) for x in columns)
    for i, batch in enumerate(batches[-NUM_ROLLOUTS:]):
        now, with_next = slice(i * NUM_STEPS, (i + 1) * NUM_STEPS), slice(i * NUM_STEPS, (i + 1) * NUM_STEPS + 1)
        outcome = rewards[now], values[with_next], terminations[now], dones[now], 0.97, 0.8
        expected = {"actions": torch.as_tensor(games.actions[now])} | ({"values": values[now]} if on_atari else {})
        if is_ppo:
            advantages = slow_gae(*outcome)
            logprobs = torch.full_like(advantages, -np.log(5))
            expected |= {"advantages": advantages, "returns": advantages + values[now], "logprobs": logprobs}
        else:
            expected["returns"] = slow_returns(*outcome)
        # By the observations, of which no two are the same.
        ours, theirs = batch.obs.flatten().argsort(), values[now].flatten().argsort()
        assert torch.equal(batch.obs.flatten()[ours].double(), values[now].flatten()[theirs])
        live = torch.as_tensor(~games.resets[now]).flatten()[theirs]
        assert (~live).sum() >= 3 and torch.equal(batch.mask[ours], live.float())
        for name, column in expected.items():
            actual, column = getattr(batch, name)[ours].double(), column.flatten()[theirs].double()
            rows = live if name in ("advantages", "returns") else slice(None)
            torch.testing.assert_close(actual[rows], column[rows], rtol=1e-5, atol=1e-5)

    if not is_ppo:
        explored = (games.actions != np.round(100 * games.values[:-1]) % 5).mean()
        # A fifth of what explores does what is best.
        assert 0.5 < explored < 0.78 if "--start-e=0.8" in flags else explored == 0
    assert len(episodes) > NUM_ROLLOUTS * 2 and games.terminations.sum() > games.game_over.sum() / 2
    # On Atari those of whole games.
    counted = (games.scores, games.game_over) if on_atari else (games.rewards, games.terminations | games.truncations)
    assert episodes == games.episodes(*counted)


# --------------------------------------------------------------------------------------------------------------- CATCH


class SmallPolicy(nn.Module):
    """For Catch: float [B, 10, 5] -> distribution of 3 actions, value [B]."""

    def __init__(self, num_actions: int, *_) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(50, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, num_actions), nn.Linear(64, 1)

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        hidden = self.body(obs)
        return Categorical(logits=self.actor(hidden), validate_args=False), self.critic(hidden).squeeze(-1)


class SmallQNetwork(nn.Sequential):
    """For Catch: float [B, 10, 5] -> [B, 3]"""

    def __init__(self, num_actions: int) -> None:
        layers = nn.Linear(50, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, num_actions)
        super().__init__(nn.Flatten(), *layers)


def catch(env_id, num_envs, seed, protocol=None, *, start=0, first_index=0) -> EnvPoolVectorEnv:
    """Every tenth step only resets."""
    assert env_id == "Catch-v0"
    return EnvPoolVectorEnv(env_id, env_seeds(seed, num_envs, first_index, start), num_threads=1)


def play_catch(monkeypatch, script) -> type:
    """``script`` plays Catch with a small network, whose class this returns; all else is its own."""
    module = importlib.import_module(f"leanrl.{script}")
    name = "Agent" if script in (PPO, FAST_PPO) else "QNetwork"
    small = type("SmallAgent", (SmallPolicy, module.Agent), {}) if name == "Agent" else SmallQNetwork
    monkeypatch.setattr(module, name, small)
    monkeypatch.setattr(module, "make_atari_envs", catch)
    return small


@pytest.mark.parametrize(
    "script, flags", [(FAST_PPO, ["--num-env-groups=2"]), pytest.param(PPO, [], marks=pytest.mark.long), (FAST_PQN, [])]
)
def test_the_policy_learned_on_catch_is_optimal(script, flags, monkeypatch, tmp_path) -> None:
    network = play_catch(monkeypatch, script)(3)
    flags = [*flags, "--env-id=Catch-v0", "--num-threads=1", "--learning-rate=0.003", "--num-steps=64"]
    flags += ["--total-timesteps=40960", "--save-model", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert run(script, *flags) == 0
    result = summary(tmp_path / "run")
    assert result["episodes"] == pytest.approx(4096, abs=8)  # every tenth step
    assert result["episodic_return"] > 0.9 or script == FAST_PQN  # which explores
    (state,) = torch.load(tmp_path / "run" / "model.pt", weights_only=True)["model"].values()
    network.load_state_dict(state)
    envs = catch("Catch-v0", 50, seed=100)
    obs, _ = envs.reset()
    for step in range(90):
        scores = network(torch.from_numpy(obs)) if script == FAST_PQN else network(torch.from_numpy(obs))[0].logits
        obs, rewards, *_ = envs.step(scores.argmax(1).numpy())
        assert (rewards == (1.0 if step % 10 == 8 else 0.0)).all()


def test_groups_of_environments_make_the_same_run(monkeypatch, tmp_path) -> None:
    play_catch(monkeypatch, FAST_PPO)
    points = []
    for groups in (1, 2, 4):
        flags = ["--env-id=Catch-v0", "--num-threads=1", "--num-steps=32", "--total-timesteps=1024"]
        flags += [f"--num-env-groups={groups}", f"--runs-dir={tmp_path}", f"--run-name={groups}"]
        assert run(FAST_PPO, *flags) == 0
        rows = read_metrics(tmp_path / f"{groups}")
        points.append([[v for k, v in row.items() if k.startswith(("losses/", "charts/episodic"))] for row in rows])
    assert len(points[0]) == 4
    # Not to the last bit: a product rounds differently with another number of rows.
    np.testing.assert_allclose(points[1], points[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(points[2], points[0], rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- BREAKOUT


@pytest.mark.parametrize(
    "script, flags", [(PPO, []), (FAST_PPO, ["--num-env-groups=2"]), (FAST_PPO, ["--num-env-groups=4", "--amp=bf16"])]
)
def test_the_first_update_finds_the_policy_that_played(script, flags, monkeypatch, tmp_path) -> None:
    """Its ratios are 1: what the rollout holds of a step is of that step, in its place."""
    module = importlib.import_module(f"leanrl.{script}")
    # As it starts, the policy is nearly the same in all steps, and no mistake would be seen.
    monkeypatch.setattr(module, "layer_init", lambda layer, std=2.0, init=module.layer_init: init(layer, max(std, 2.0)))
    rows = read_metrics(run_tiny(script, tmp_path, *flags, "--num-minibatches=1", "--total-timesteps=192"))
    assert len(rows) == 3
    for row in rows:
        assert row["losses/clipfrac"] == 0.0
        assert abs(row["losses/approx_kl"]) < (1e-4 if "--amp=bf16" in flags else 1e-7)
