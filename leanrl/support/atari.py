"""Atari games over EnvPool, behind one ``gymnasium.vector.VectorEnv`` in NEXT_STEP autoreset mode.

What EnvPool 1.2 says, which differs from what Gymnasium's own Atari wrappers say:

- ``terminated`` is true where a game is over, and under ``episodic_life`` where a life was lost, unless time has run
  out with the same step: then only ``truncated`` is. ``info["terminated"]`` is 1 where the game is over, always.
- The step after a done only resets, and returns reward 0: the game after its end, or play after a lost life, too by up
  to ``noop_max`` frames without action and, where the game has it, by pressing fire. What the game scores meanwhile is
  lost, and one that ends meanwhile begins anew unmarked. ``info["elapsed_step"]`` counts the steps of a game, those
  that only reset left out, so it does not distinguish a lost life from any other step.
- ``info["reward"]`` is what the game gave, whatever the reward that is learned from.
- Time that runs out ends the game, whatever lives are left.
"""

from dataclasses import dataclass, replace

import numpy as np
from gymnasium.vector import AutoresetMode

from leanrl.support.envs import EnvPoolVectorEnv, envpool_envs, make_envs, near_names
from leanrl.support.errors import bad


@dataclass(frozen=True)
class AtariProtocol:
    """How a game is played. The defaults are those of CleanRL and LeanRL."""

    episodic_life: bool = True
    """a lost life ends the training episode, but not the game"""
    reward_clip: bool = True
    """rewards are -1, 0 or 1"""
    repeat_action_probability: float = 0.0
    """with which the emulator repeats the last action instead ("sticky actions")"""
    noop_max: int = 30
    """a game starts, and goes on after a lost life, with at most so many frames without action"""
    full_action_space: bool = False
    """all 18 actions of the console, not those alone that the game knows"""
    max_episode_steps: int = 27_000
    """agent steps, of 4 frames each, at which time runs out"""

    def for_evaluation(self, sticky: bool) -> "AtariProtocol":
        """The games' own rewards, for an agent that was trained under this protocol.

        Lives stay what they were: under ``episodic_life`` EnvPool serves the next ball, where a game has one, and an
        agent that never had to would let time run out. ``infos["game_over"]`` says where a whole game ends.

        Args:
            sticky: whether actions stick, with the usual probability of 0.25.
        """
        return replace(self, reward_clip=False, repeat_action_probability=0.25 if sticky else 0.0)


CLEANRL = AtariProtocol()
CLEANBA = AtariProtocol(episodic_life=False, repeat_action_probability=0.25, noop_max=1, full_action_space=True)
PROTOCOLS = {"cleanba": CLEANBA, "cleanrl": CLEANRL}
"""by the names that --protocol takes"""


class AtariVectorEnv(EnvPoolVectorEnv):
    """EnvPool's Atari games: observations uint8 [N, 4, 84, 84], the last frame last."""

    # The console shows 60 frames a second, of which an agent sees every fourth.
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 15}

    def reset(self, *, seed=None, options=None) -> tuple[np.ndarray, dict]:
        obs, infos = super().reset()
        self._episodic_life = self._pool.config["episodic_life"]
        self._lives = infos["lives"].copy()
        self._plays_on = np.zeros(self.num_envs, bool)  # the next step resets after a lost life
        return obs, infos

    def recv(self):
        """As ``EnvPoolVectorEnv.recv``, but terminations are true wherever a life or a game was lost.

        ``infos["game_over"]`` [N] is true where a game ended or time ran out; in a step that only resets, where the
        game ended without having been played on.
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
    """What ``EpisodeStatistics`` is to count of a step: the games' own rewards, and where one ended, [N] each.

    Of environments that are no Atari games, ``rewards`` and ``dones`` themselves.
    """
    return infos.get("reward", rewards), infos.get("game_over", dones)


def atari_games() -> list[str]:
    """The names of all games, as in ``Breakout-v5``; UsageError where EnvPool is missing."""
    return sorted(name for name, module in envpool_envs().items() if module == "envpool.atari")


def make_atari_envs(env_id: str, num_envs: int, seed: int, protocol: AtariProtocol, **options) -> AtariVectorEnv:
    """One synchronous pool of an Atari game: the same seed gives the same games.

    Args:
        env_id: the game, as in ``Breakout-v5``.
        num_envs: environments of this pool.
        seed: of the run; each environment gets its own from it (``env_seeds``).
        protocol: how the game is played.
        options: as ``make_envs`` takes them: ``start``, ``first_index``, ``num_threads``, ``render_mode`` ...

    Raises:
        UsageError: unknown game, or EnvPool is missing.
    """
    known = atari_games()
    if env_id not in known:
        hint = near_names(env_id.replace("NoFrameskip-v4", "-v5"), known) or "; they are named as in Breakout-v5"
        raise bad("env_id", env_id, f"is not an Atari game of EnvPool{hint}")
    return make_envs(env_id, num_envs, seed, "envpool", pool_type=AtariVectorEnv, **vars(protocol), **options)
