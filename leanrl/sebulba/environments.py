"""Environments for actor threads: Atari in either protocol, and others from EnvPool or Gymnasium."""

from leanrl.support.atari import PROTOCOLS, atari_games, make_atari_envs
from leanrl.support.envs import EnvBackend, make_envs, require_learnable


def make_pool(env_id: str, envs: range, seed: int, protocol: str, backend: EnvBackend = "envpool", **options):
    """One vector environment for the environments with global indices ``envs``; each plays the same in any pool.

    Args:
        seed: the run's; each environment derives its own.
        protocol: a key of PROTOCOLS, for Atari games.
        backend: ``envpool``, or ``gymnasium``, which steps them one after the other.
        options: ``num_threads`` and ``start``, passed on to ``make_envs``.

    Raises:
        UsageError: there is no such environment, these scripts cannot learn it, or a package is missing.
    """
    if backend == "envpool" and env_id in atari_games():
        return make_atari_envs(env_id, len(envs), seed, PROTOCOLS[protocol], first_index=envs.start, **options)
    pool = make_envs(env_id, len(envs), seed, backend, first_index=envs.start, **options)
    require_learnable(pool, env_id)
    return pool
