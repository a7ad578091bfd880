"""Pools of environments for actor threads: Atari in either protocol, and EnvPool's others with discrete actions."""

import gymnasium as gym

from leanrl.support.atari import PROTOCOLS, atari_games, make_atari_envs
from leanrl.support.envs import EnvPoolVectorEnv, env_seeds, require_envpool_env, require_numbered_actions
from leanrl.support.errors import bad


def make_pool(
    env_id: str, envs: range, seed: int, protocol: str, num_threads: int = 1, start: int = 0
) -> EnvPoolVectorEnv:
    """A synchronous pool of the environments with the global numbers ``envs``.

    Args:
        seed: of the run; each environment gets its own from it.
        protocol: a key of PROTOCOLS, for Atari games.
        num_threads: C++ threads.
        start: environment steps at which the run is taken up.

    Raises:
        UsageError: EnvPool is missing or has no such environment, or not one that these scripts can learn.
    """
    require_envpool_env(env_id, "the distributed scripts")
    if env_id in atari_games():
        options = {"num_threads": num_threads, "start": start, "first_index": envs.start}
        return make_atari_envs(env_id, len(envs), seed, PROTOCOLS[protocol], **options)
    pool = EnvPoolVectorEnv(env_id, env_seeds(seed, len(envs), envs.start, start), num_threads)
    require_numbered_actions(pool, env_id)
    if not isinstance(obs := pool.single_observation_space, gym.spaces.Box):
        raise bad("env_id", env_id, f"has observations of {obs}; this script needs an array of numbers")
    return pool
