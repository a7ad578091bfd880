"""Gymnasium and EnvPool behind one ``gymnasium.vector.VectorEnv`` in NEXT_STEP autoreset mode.

The step after a done ignores its action, resets, and returns reward 0, so the observation that comes with a done is
the true last one of its episode (https://farama.org/Vector-Autoreset-Mode).
"""

import difflib
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces.utils import flatten_space
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import UsageError, bad, pip_command
from leanrl.support.simulators import env_state, set_env_state

EnvBackend = Literal["gymnasium", "envpool"]


def env_seeds(seed: int, num_envs: int, first_index: int = 0, start: int = 0) -> list[int]:
    """One seed per environment, in [0, 2**31).

    Drawn from ``SeedSequence([seed, global index])``: with ``seed + index``, runs with seeds 1 and 2 would share nearly
    all their environments. ``start``, the step at which a run resumes, keeps it from repeating its first episodes.
    """
    entropy = [[seed, index] + ([start] if start else []) for index in range(first_index, first_index + num_envs)]
    return [int(np.random.SeedSequence(words).generate_state(1)[0] >> 1) for words in entropy]


class SerialVectorEnv(SyncVectorEnv):
    """Environments with array observations, stepped one after the other in this process.

    A ``SyncVectorEnv`` without its support for other observation spaces and for per-environment infos (always empty
    here): with one MuJoCo environment, these cost a third of the simulator's own time.
    """

    def __init__(self, envs: list[gym.Env], seeds: list[int]) -> None:
        super().__init__([lambda env=env: env for env in envs], autoreset_mode=AutoresetMode.NEXT_STEP)
        self._seeds = seeds
        self._obs = np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed=None, options=None) -> tuple[np.ndarray, dict]:
        """Resets every environment, with the seeds given at construction."""
        for i, env in enumerate(self.envs):
            self._obs[i], _ = env.reset(seed=self._seeds[i])
        self._done = [False] * self.num_envs
        return self._obs.copy(), {}

    def step(self, actions: np.ndarray):
        """``actions`` [N, ...] -> observations [N, ...], rewards, terminations, truncations [N], and no infos."""
        rewards = np.zeros(self.num_envs)
        terminations = np.zeros(self.num_envs, bool)
        truncations = np.zeros(self.num_envs, bool)
        obs, done = self._obs, self._done
        for i, env in enumerate(self.envs):
            if done[i]:
                obs[i], _ = env.reset()
                done[i] = False
            else:
                obs[i], rewards[i], terminated, truncated, _ = env.step(actions[i])
                if terminated or truncated:
                    terminations[i], truncations[i], done[i] = terminated, truncated, True
        return obs.copy(), rewards, terminations, truncations, {}

    def state_dict(self) -> dict | None:
        """A copy of everything that the following steps depend on, for a checkpoint.

        None if ``leanrl.support.simulators`` cannot save one of the environments; all of them must then start afresh.
        """
        states = [env_state(env) for env in self.envs]
        if any(state is None for state in states):
            return None
        return {"envs": states, "done": self._done.copy(), "obs": torch.tensor(self._obs)}

    def load_state_dict(self, state: dict) -> np.ndarray:
        """Restores a ``state_dict`` of environments made the same way; no ``reset`` is needed before or after.

        Returns the observations [N, ...] to act on next.
        """
        self.reset()  # Gymnasium's wrappers refuse to step an environment that was never reset
        for env, saved in zip(self.envs, state["envs"], strict=True):
            set_env_state(env, saved)
        self._done = list(state["done"])
        self._obs[:] = state["obs"].numpy()
        return self._obs.copy()

    def render(self) -> np.ndarray:
        """An image [H, W, 3] of the first environment, which must have been made with ``render_mode="rgb_array"``."""
        return self.envs[0].render()


# Gymnasium's termination rules, by name without version: which of the observations [N, ...] are terminal. Rules that
# ask whether the agent is healthy are negated (``~``), so that NaN counts as unhealthy.
TERMINATED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    # Gymnasium also ends Hopper at velocities above 100, but the observation clips them at 10.
    "Hopper": lambda obs: ~((obs[:, 0] > 0.7) & (np.abs(obs[:, 1]) < 0.2) & (np.abs(obs[:, 1:]) < 100).all(1)),
    "Walker2d": lambda obs: ~((obs[:, 0] > 0.8) & (obs[:, 0] < 2) & (np.abs(obs[:, 1]) < 1)),
    "Ant": lambda obs: ~((obs[:, 0] >= 0.2) & (obs[:, 0] <= 1) & np.isfinite(obs).all(1)),
    "Humanoid": lambda obs: ~((obs[:, 0] > 1) & (obs[:, 0] < 2)),
    "InvertedPendulum": lambda obs: ~((np.abs(obs[:, 1]) <= 0.2) & np.isfinite(obs).all(1)),
    # The tip's height, from the sines and cosines of two joints, each with 0.6 m of pole beyond it. Gymnasium takes it
    # from the integrator's last stage, which differs by under a millimetre.
    "InvertedDoublePendulum": lambda obs: 0.6 * (obs[:, 3] * (1 + obs[:, 4]) - obs[:, 1] * obs[:, 2]) <= 1,
    "CartPole": lambda obs: (np.abs(obs[:, 0]) > 2.4) | (np.abs(obs[:, 2]) > np.deg2rad(12)),
    "Acrobot": lambda obs: obs[:, 1] * obs[:, 3] - obs[:, 0] * (1 + obs[:, 2]) > 1,
    "MountainCar": lambda obs: (obs[:, 0] >= 0.5) & (obs[:, 1] >= 0),
    "MountainCarContinuous": lambda obs: (obs[:, 0] >= 0.45) & (obs[:, 1] >= 0),
}


def _as_declared_in_gymnasium(space: gym.Space) -> gym.Space:
    """One of EnvPool's spaces with the keys of its Dicts sorted, and with infinite bounds where there are none.

    EnvPool declares the dtype's largest number there; for dm_control, the lower bound is C++'s
    ``numeric_limits<double>::min()``, the smallest positive normal number.
    """
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({key: _as_declared_in_gymnasium(part) for key, part in space.items()})
    if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where((space.low <= limits.min) | (space.low == limits.tiny), -np.inf, space.low)
    high = np.where(space.high >= limits.max, np.inf, space.high)
    return gym.spaces.Box(low, high, dtype=space.dtype)


def _columns(space: gym.Space, obs) -> list[np.ndarray]:
    """A batch of observations as arrays [N, columns], in the order of ``gymnasium.spaces.flatten``."""
    if isinstance(space, gym.spaces.Dict):
        return [columns for key, part in space.items() for columns in _columns(part, obs[key])]
    if isinstance(space, gym.spaces.Discrete):
        return [obs.reshape(-1, 1) == np.arange(space.start, space.start + space.n)]
    return [obs.reshape(len(obs), -1)]


class EnvPoolVectorEnv(VectorEnv):
    """EnvPool's synchronous mode as a VectorEnv. Its own autoreset mode is NEXT_STEP already.

    ``Dict`` observations are flattened in the order of their sorted keys, at every level, as in ``make_env``.

    A step that ends an episode just as time runs out is both terminated and truncated, as in Gymnasium, if TERMINATED
    has a rule for the environment. In other environments EnvPool reports only ``truncated``, and learners bootstrap.

    Args:
        env_id: one of EnvPool's; not checked here.
        seeds: one per environment.
        num_threads: C++ threads that step them; 0 lets EnvPool choose.
        options: passed on to ``envpool.make``.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, env_id: str, seeds: list[int], num_threads: int = 0, **options) -> None:
        import envpool

        self._pool = envpool.make_gymnasium(env_id, num_envs=len(seeds), seed=seeds, num_threads=num_threads, **options)
        self.num_envs = len(seeds)
        self._terminated = TERMINATED.get(env_id.rpartition("-v")[0])
        with warnings.catch_warnings(action="ignore"):  # EnvPool's float32 spaces have float64 bounds
            self._space = self.single_observation_space = _as_declared_in_gymnasium(self._pool.observation_space)
            self.single_action_space = _as_declared_in_gymnasium(self._pool.action_space)
        if isinstance(self._space, gym.spaces.Dict):
            self.single_observation_space = flatten_space(self._space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed=None, options=None) -> tuple[np.ndarray, dict]:
        """Resets every environment. The seeds were given at construction, where EnvPool wants them."""
        obs, infos = self._pool.reset()
        return self._flatten(obs), infos

    def _flatten(self, obs) -> np.ndarray:
        if not isinstance(obs, dict):
            return obs
        return np.concatenate(_columns(self._space, obs), axis=1, dtype=self.single_observation_space.dtype)

    def step(self, actions: np.ndarray):
        """``actions`` [N, ...] -> observations [N, ...], rewards, terminations, truncations [N], EnvPool's infos."""
        self.send(actions)
        return self.recv()

    def send(self, actions: np.ndarray) -> None:
        """The first half of ``step``: starts the environments and returns at once."""
        self._pool.send(np.asarray(actions, self.single_action_space.dtype))

    def recv(self):
        """The second half of ``step``: waits for all environments and returns their results, in order."""
        obs, rewards, terminations, truncations, infos = self._pool.recv()
        obs = self._flatten(obs)
        # On a reset, dm_control repeats the last reward and Meta-World returns the new state's.
        rewards[infos["elapsed_step"] == 0] = 0
        if self._terminated is not None and truncations.any():  # EnvPool reports no termination on such a step
            terminations = terminations | (truncations & self._terminated(obs))
        return obs, rewards, terminations, truncations, infos

    def render(self) -> np.ndarray:
        """An image [H, W, 3] of the first environment, which must have been made with ``render_mode="rgb_array"``."""
        return self._pool.render(env_ids=0)[0]

    def close_extras(self, **kwargs) -> None:
        self._pool.close()


def near_names(name: str, known) -> str:
    """``; did you mean HalfCheetah-v5, ...?``, or an empty string if no known name is close."""
    lower = {k.lower(): k for k in known}
    matches = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)
    return f"; did you mean {', '.join(lower[m] for m in matches)}?" if matches else ""


def make_env(env_id: str, **kwargs) -> gym.Env:
    """``gymnasium.make`` with ``Dict`` and ``Tuple`` observations flattened to vectors of numbers.

    The order is Gymnasium's: sorted keys at every level, unless an environment declares an OrderedDict. ``Discrete``
    becomes one-hot, ``Text`` the indices of its characters.

    Raises:
        UsageError: unknown environment, a missing package, or observations whose size varies.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # "out of date", once per environment
            env = gym.make(env_id, **kwargs)
    except (gym.error.Error, ImportError, ValueError) as error:
        if env_id not in gym.registry:
            hint = near_names(env_id, gym.registry)
            raise bad("env_id", env_id, f"is not a Gymnasium environment{hint}") from None
        remedy = f"; {pip_command('mujoco')}" if "MuJoCo is not" in str(error) else ""
        raise bad("env_id", env_id, f"cannot be made here ({error}){remedy}") from None
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        if not space.is_np_flattenable:
            raise bad("env_id", env_id, f"has observations of {space}, which do not flatten to vectors of one size")
        env = gym.wrappers.FlattenObservation(env)
    return env


@cache
def envpool_envs() -> dict[str, str]:
    """EnvPool's environments and the module of each, such as ``envpool.atari``; UsageError if EnvPool is missing.

    JAX, which only EnvPool's XLA interface needs, and Jumanji, which draws with matplotlib, take two thirds of its
    import time, or 1 s. Stand-in modules keep JAX out, and Jumanji until one of its environments is made.
    """
    if "envpool" not in sys.modules and (spec := find_spec("envpool")):
        lax = SimpleNamespace(XlaMixin=type("XlaMixin", (), {}))
        jumanji = SimpleNamespace(__spec__=None, __path__=[f"{spec.submodule_search_locations[0]}/jumanji"])
        sys.modules |= {"envpool.python.lax": lax, "envpool.jumanji": jumanji}
    try:
        import envpool
    except ImportError as error:
        raise UsageError(f"EnvPool: the package is missing ({error}); {pip_command('envpool')}") from None
    sys.modules.pop("envpool.jumanji", None)
    return {env_id: module for env_id, (module, *_) in envpool.registration.registry.specs.items()}


def require_envpool_env(env_id: str) -> str:
    """EnvPool's module for ``env_id``; UsageError if it has no such environment."""
    known = envpool_envs()
    if env_id not in known:
        raise bad("env_id", env_id, f"is not an EnvPool environment{near_names(env_id, known)}")
    return known[env_id]


def make_envs(
    env_id: str,
    num_envs: int,
    seed: int,
    backend: EnvBackend = "gymnasium",
    num_threads: int = 0,
    start: int = 0,
    first_index: int = 0,
    pool_type: type[EnvPoolVectorEnv] = EnvPoolVectorEnv,
    **options,
) -> VectorEnv:
    """Vectorised environments in NEXT_STEP autoreset mode.

    Args:
        env_id: the backend's name for the environment.
        seed: the run's; each environment derives its own (``env_seeds``).
        backend: ``gymnasium`` steps them one after the other in this process; ``envpool`` on ``num_threads`` C++
            threads (0 lets it choose), which pays off with many environments.
        start: environment step at which the run is resumed, 0 on a fresh start.
        first_index: index of the first environment among all of the run's.
        pool_type: class for EnvPool's environments.
        options: passed on to ``gymnasium.make`` or ``envpool.make``.

    Raises:
        UsageError: unknown environment, or a missing package.
    """
    seeds = env_seeds(seed, num_envs, first_index, start)
    if backend == "gymnasium":
        return SerialVectorEnv([make_env(env_id, **options) for _ in range(num_envs)], seeds)
    require_envpool_env(env_id)
    return pool_type(env_id, seeds, num_threads, **options)


def save_envs(envs: VectorEnv, episodes: EpisodeStatistics) -> dict | None:
    """The simulators and their unfinished episodes, for a checkpoint; None if they cannot be saved."""
    simulators = envs.state_dict() if isinstance(envs, SerialVectorEnv) else None
    return None if simulators is None else {"simulators": simulators, "episodes": episodes.state_dict()}


def start_envs(envs: VectorEnv, episodes: EpisodeStatistics, saved: dict | None) -> tuple[np.ndarray, np.ndarray]:
    """The first observations [N, ...], and resets [N]: whether an environment's next step only resets it.

    With ``saved`` (from ``save_envs``) episodes continue where the run was interrupted; without it they start afresh.
    """
    if saved is None:
        return envs.reset()[0], np.zeros(envs.num_envs, bool)
    episodes.load_state_dict(saved["episodes"])
    return envs.load_state_dict(saved["simulators"]), np.array(saved["simulators"]["done"])


def require_discrete_actions(envs: VectorEnv, env_id: str) -> None:
    """UsageError unless actions are numbered from 0 and observations are vectors of numbers."""
    _require_spaces(envs, env_id, gym.spaces.Discrete)


def require_continuous_actions(envs: VectorEnv, env_id: str) -> None:
    """UsageError unless actions and observations are vectors of real numbers, the actions bounded."""
    _require_spaces(envs, env_id, gym.spaces.Box)


def require_learnable(envs: VectorEnv, env_id: str) -> None:
    """UsageError unless observations are arrays of numbers, and actions are numbered from 0 or bounded vectors."""
    _require_spaces(envs, env_id, gym.spaces.Discrete, gym.spaces.Box, obs_kind="arrays")


def _require_spaces(envs: VectorEnv, env_id: str, *action_types: type[gym.Space], obs_kind: str = "vectors") -> None:
    action, obs = envs.single_action_space, envs.single_observation_space
    if not isinstance(action, action_types):
        needed = " or ".join(kind.__name__ for kind in action_types)
        raise bad("env_id", env_id, f"has {type(action).__name__} actions; this script needs {needed} ones")
    is_usable = isinstance(action, gym.spaces.Discrete) and action.start == 0
    if isinstance(action, gym.spaces.Box):
        # The largest float32 stands for no bound.
        is_usable = len(action.shape) == 1 and (np.abs([action.low, action.high]) < np.finfo(np.float32).max).all()
    if not is_usable:
        raise bad("env_id", env_id, f"has actions {action}; this script needs bounded vectors, or numbers from 0")
    if not isinstance(obs, gym.spaces.Box) or (obs_kind == "vectors" and len(obs.shape) != 1):
        raise bad("env_id", env_id, f"has observations of {obs}; this script needs {obs_kind} of numbers")
    if obs.dtype == np.uint8 and len(obs.shape) == 3 and obs.shape[2] < obs.shape[0]:
        raise bad("env_id", env_id, f"has images of shape {obs.shape}; this script needs the channels first")
