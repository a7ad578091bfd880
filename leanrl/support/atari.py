"""Atari games over EnvPool, behind one ``gymnasium.vector.VectorEnv`` in NEXT_STEP autoreset mode.

What EnvPool 1.2 reports, where it differs from Gymnasium's own Atari wrappers:

- ``terminated`` is true when a game is over and, under ``episodic_life``, when a life is lost, except on a step where
  time runs out as well: then only ``truncated`` is true. ``info["terminated"]`` is 1 whenever the game is over.
- The step after a done only resets and returns reward 0. It starts the next game, or resumes play after a lost life,
  with up to ``noop_max`` no-op frames and, in games that have it, a press of fire. Points scored in these frames are
  lost, and a game that ends during them restarts without a flag. ``info["elapsed_step"]`` counts the steps of a game
  except those that only reset, so it cannot tell a lost life from any other step.
- ``info["reward"]`` is the game's raw reward, even if the agent's is clipped.
- Running out of time ends the game, however many lives are left.
"""

from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from leanrl.support.envs import EnvPoolVectorEnv, envpool_envs, make_envs, near_names
from leanrl.support.errors import bad


class AtariProtocol(NamedTuple):
    """How a game is played. The defaults are those of CleanRL and LeanRL."""

    episodic_life: bool = True
    """a lost life ends the training episode, but not the game"""
    reward_clip: bool = True
    """rewards become -1, 0 or 1"""
    repeat_action_probability: float = 0.0
    """probability that the emulator repeats the last action instead ("sticky actions")"""
    noop_max: int = 30
    """at most this many no-op frames at the start of a game and after a lost life"""
    full_action_space: bool = False
    """all 18 actions of the console instead of the game's own"""
    max_episode_steps: int = 27_000
    """time limit in agent steps of 4 frames each"""


CLEANRL = AtariProtocol()
CLEANBA = AtariProtocol(episodic_life=False, repeat_action_probability=0.25, noop_max=1, full_action_space=True)
PROTOCOLS = {"cleanba": CLEANBA, "cleanrl": CLEANRL}
"""the protocols by the names that --protocol takes"""


class AtariVectorEnv(EnvPoolVectorEnv):
    """EnvPool's Atari games: observations uint8 [N, 4, 84, 84], the newest frame last."""

    # The console runs at 60 frames per second, and the agent sees every fourth.
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 15}

    def reset(self, *, seed=None, options=None) -> tuple[np.ndarray, dict]:
        obs, infos = super().reset()
        self._episodic_life = self._pool.config["episodic_life"]
        self._lives = infos["lives"].copy()
        self._plays_on = np.zeros(self.num_envs, bool)  # the next step resets after a lost life
        return obs, infos

    def recv(self):
        """As ``EnvPoolVectorEnv.recv``, but terminations stay true if time ran out as the game or life was lost.

        ``infos["game_over"]`` [N] is true where a game ended or ran out of time. On a step that only resets after a
        lost life, it is true if the game ended before play resumed.
        """
        obs, rewards, terminations, truncations, infos = super().recv()
        over, lives = infos["terminated"].astype(bool), infos["lives"]
        terminations = terminations | over
        if self._episodic_life:
            terminations |= truncations & (lives < self._lives)
        infos["game_over"] = over | truncations | (self._plays_on & (lives > self._lives))
        self._lives, self._plays_on = lives.copy(), terminations & ~infos["game_over"]
        return obs, rewards, terminations, truncations, infos


def whole_games(rewards: np.ndarray, dones: np.ndarray, infos: dict) -> tuple[np.ndarray, np.ndarray]:
    """What ``EpisodeStatistics`` counts: the games' raw rewards, and where a whole game ended, [N] each.

    For environments other than Atari games these are ``rewards`` and ``dones``.
    """
    return infos.get("reward", rewards), infos.get("game_over", dones)


def atari_games() -> list[str]:
    """The names of all games, such as ``Breakout-v5``; UsageError if EnvPool is missing."""
    return sorted(name for name, module in envpool_envs().items() if module == "envpool.atari")


def make_atari_envs(env_id: str, num_envs: int, seed: int, protocol: AtariProtocol, **options) -> AtariVectorEnv:
    """A synchronous pool of one Atari game; the same seed gives the same games.

    Args:
        env_id: the game, such as ``Breakout-v5``.
        num_envs: environments in this pool.
        seed: the run's; each environment derives its own (``env_seeds``).
        protocol: how the game is played.
        options: passed on to ``make_envs``: ``start``, ``first_index``, ``num_threads``, ``render_mode`` ...

    Raises:
        UsageError: unknown game, or EnvPool is missing.
    """
    known = atari_games()
    if env_id not in known:
        hint = near_names(env_id.replace("NoFrameskip-v4", "-v5"), known) or "; names look like Breakout-v5"
        raise bad("env_id", env_id, f"is not an Atari game of EnvPool{hint}")
    return make_envs(env_id, num_envs, seed, "envpool", pool_type=AtariVectorEnv, **protocol._asdict(), **options)
