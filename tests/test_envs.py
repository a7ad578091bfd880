"""Vector environments: NEXT_STEP autoreset as Gymnasium defines it, from both backends; seeds; refusals."""

import envpool
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from leanrl.support.envs import TERMINATED, SerialVectorEnv, env_seeds, make_env, make_envs, require_continuous_actions
from leanrl.support.errors import UsageError

BACKENDS = ["gymnasium", "envpool"]


def random_actions(envs, num_steps, seed=0):
    rng = np.random.default_rng(seed)
    space = envs.single_action_space
    return rng.uniform(space.low, space.high, (num_steps, envs.num_envs, *space.shape)).astype(space.dtype)


def play(envs, actions):
    """Observations [T + 1, N, ...], rewards, terminations and truncations [T, N] of playing ``actions`` from reset."""
    first, _ = envs.reset()
    steps = [envs.step(action)[:4] for action in actions]
    obs, rewards, terminations, truncations = (np.stack(column) for column in zip(*steps, strict=True))
    return np.concatenate([first[None], obs]), rewards, terminations, truncations


# Hopper terminates after about 20 random steps, unless it is truncated after 15.
@pytest.mark.parametrize("max_episode_steps", [None, 15])
def test_serial_envs_equal_gymnasiums(max_episode_steps):
    def make():
        return make_env("Hopper-v5", max_episode_steps=max_episode_steps)

    seeds = env_seeds(1, 3)
    ours = SerialVectorEnv([make() for _ in seeds], seeds)
    theirs = SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    assert ours.single_observation_space == theirs.single_observation_space
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    actions = random_actions(ours, 300)
    obs, _ = ours.reset()
    expected_obs, _ = theirs.reset(seed=seeds)
    np.testing.assert_array_equal(obs, expected_obs)
    ends = np.zeros(2, int)
    for action in actions:
        result, expected = ours.step(action)[:4], theirs.step(action)[:4]
        for value, expected_value in zip(result, expected, strict=True):
            assert value.dtype == expected_value.dtype
            np.testing.assert_array_equal(value, expected_value)
        ends += result[2].sum(), result[3].sum()
    # Both kinds of end were seen where they can be.
    assert ends[0] > 5 and (ends[1] > 5) == (max_episode_steps is not None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Reacher-v5"])  # terminates early; truncated after 50 steps
def test_next_step_autoreset(backend, env_id):
    envs = make_envs(env_id, 4, seed=1, backend=backend)
    actions = random_actions(envs, 160)
    obs, rewards, terminations, truncations = play(envs, actions)
    dones = terminations | truncations
    assert dones.sum(0).min() >= 3
    assert (terminations if env_id == "Hopper-v5" else truncations)[dones].all()
    assert not (terminations & truncations).any()

    resets = np.concatenate([np.zeros_like(dones[:1]), dones[:-1]])
    assert not dones[resets].any()
    assert (rewards[resets] == 0).all() and (rewards[~resets] != 0).all()
    # What came with the done is the last observation of the old episode, not the first of the next.
    last, first = obs[:-1][resets], obs[1:][resets]
    if env_id == "Hopper-v5":
        # Starts within 0.005 of upright and at rest; ends fallen.
        upright = np.array([1.25] + [0.0] * 10)
        assert (np.abs(first - upright) <= 0.005 + 1e-9).all()
        assert (np.abs(last - upright).max(1) > 0.1).all()
    else:
        # The target (4, 5) moves with the reset, not with the end.
        np.testing.assert_array_equal(last[:, 4:6], obs[:-2][resets[1:]][:, 4:6])
        assert (last[:, 4:6] != first[:, 4:6]).all()


def ruled(backend) -> list[tuple[str, str]]:
    """The environments whose terminations can be told from the observation."""
    known = envpool.list_all_envs()
    if backend == "gymnasium":  # which lists MuJoCo's v2 and v3, but has them no more
        known = [env_id for env_id in gym.registry if not env_id.endswith(("-v2", "-v3"))]
    return [(backend, env_id) for env_id in sorted(known) if env_id.rpartition("-v")[0] in TERMINATED]


# What random actions do not end: by the velocity that a push has to follow.
PUSHED = {"MountainCar-v0": 1, "MountainCarContinuous-v0": 1, "Acrobot-v1": 5}


@pytest.mark.parametrize("backend, env_id", ruled("gymnasium") + ruled("envpool"))
def test_falls_at_the_time_limit_are_terminations(backend, env_id):
    """Told from the observations, and what Gymnasium says, or EnvPool where the same episodes have more time."""

    def play(num_steps):
        envs = make_envs(env_id, 16, 1, backend, num_threads=1, max_episode_steps=num_steps)
        (obs, _), rng, space, ends = envs.reset(), np.random.default_rng(0), envs.single_action_space, []
        low, high = (0, space.n - 1) if isinstance(space, gym.spaces.Discrete) else (space.low, space.high)
        for _ in range(num_steps):
            actions = rng.choice([low, high], 16) if np.ndim(low) == 0 else rng.uniform(low, high, (16, *space.shape))
            if env_id in PUSHED:
                pushed = np.where(obs[:, PUSHED[env_id]] < 0, low, high).reshape(actions.shape)
                actions = np.where(rng.random(actions.shape) < 0.1, actions, pushed)
            obs, _, terminations, truncations, _ = envs.step(actions)
            np.testing.assert_array_equal(TERMINATED[env_id.rpartition("-v")[0]](obs), terminations)
            ends.append((terminations, truncations))
        return np.stack(ends, 1)

    terminations, truncations = play(300 if env_id in PUSHED else 60)
    first = terminations & ((terminations | truncations).cumsum(0) == 1)
    first[-1] = False
    at = int(first.sum(1).argmax())  # where most first episodes end
    assert first[at].any()
    limited, truncations = play(at + 1)
    np.testing.assert_array_equal(limited, terminations[: at + 1])
    assert truncations[at, first[at]].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_step_returned_is_not_overwritten(backend):
    envs = make_envs("Hopper-v5", 2, seed=1, backend=backend)
    kept = [envs.reset()[:1]]
    kept += [envs.step(action)[:4] for action in random_actions(envs, 30)]
    copies = [[array.copy() for array in arrays] for arrays in kept]
    for action in random_actions(envs, 60, seed=1):
        envs.step(action)
    for arrays, copied in zip(kept, copies, strict=True):
        for array, copy in zip(arrays, copied, strict=True):
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_environment_has_its_own_seed(backend):
    def first_obs(seed, start=0):
        return make_envs("Hopper-v5", 3, seed, backend, start=start).reset()[0]

    np.testing.assert_array_equal(first_obs(1), first_obs(1))
    starts = np.concatenate([first_obs(1), first_obs(2), first_obs(1, start=1), first_obs(1, start=2)])
    assert len(np.unique(starts, axis=0)) == 12


def test_seeds_are_unique_over_runs_environments_and_starts():
    seeds = [s for start in range(3) for seed in range(1, 51) for s in env_seeds(seed, 64, start=start)]
    assert len(set(seeds)) == 3 * 50 * 64
    assert min(seeds) >= 0 and max(seeds) < 2**31
    assert env_seeds(7, 10)[4:] == env_seeds(7, 6, first_index=4)


UNKNOWN = dict.fromkeys(["HalfCheeta-v5", "HalfCheetah-v99", "halfcheetah-v5"], "; did you mean HalfCheetah-v5")
UNKNOWN |= dict.fromkeys(["", ":x", "no such thing", "no.such.module:Env-v0", "/", "a/b/c-v0"], "")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("env_id, hint", UNKNOWN.items())
def test_unknown_environments_are_refused(backend, env_id, hint):
    with pytest.raises(UsageError, match=rf"--env-id .*: is not an? \w+ environment{hint}"):
        make_envs(env_id, 1, seed=1, backend=backend)


def test_environments_that_cannot_be_made_say_why():
    with pytest.raises(UsageError, match=r"--env-id HalfCheetah-v3: cannot be made here .*gymnasium-robotics"):
        make_env("HalfCheetah-v3")


class Custom(gym.Env):
    """One step an episode; its spaces are given."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, True, False, {}


BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
LARGEST = np.finfo(np.float64).max
HUGE = gym.spaces.Box(-LARGEST, LARGEST, (2,), np.float64)
UNBOUNDED = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


@pytest.fixture
def register():
    """Registers ``Custom`` with the given spaces, for one test."""

    def register(observation_space, action_space):
        kwargs = {"observation_space": observation_space, "action_space": action_space}
        gym.register("LeanRLCustom-v0", Custom, kwargs=kwargs)
        return "LeanRLCustom-v0"

    yield register
    gym.registry.pop("LeanRLCustom-v0", None)


def test_dict_observations_become_one_vector_in_the_order_of_their_keys(register):
    inner = gym.spaces.Dict({"d": gym.spaces.Box(-9, -8, (1,), np.float64), "c": gym.spaces.Discrete(3, start=5)})
    outer = {"z": gym.spaces.Box(4, 5, (), np.float32), "m": inner, "a": gym.spaces.Box(2, 3, (2, 2), np.int32)}
    env_id = register(gym.spaces.Dict(outer), BOX)
    envs = make_envs(env_id, 2, seed=1)
    require_continuous_actions(envs, env_id)
    for obs in (envs.reset()[0], envs.step(np.zeros((2, 2), np.float32))[0]):
        assert obs.shape == (2, 9) and obs.dtype == np.float64
        numbers, one_hot, d, z = np.split(obs, [4, 7, 8], axis=1)
        assert np.isin(numbers, [2, 3]).all()
        assert np.isin(one_hot, [0, 1]).all() and (one_hot.sum(1) == 1).all()
        assert ((d >= -9) & (d <= -8)).all() and ((z >= 4) & (z <= 5)).all()


NO_VECTORS = [gym.spaces.Graph(BOX, None), gym.spaces.Sequence(BOX)]


@pytest.mark.parametrize("space", NO_VECTORS, ids=lambda space: type(space).__name__)
def test_dict_observations_of_varying_size_are_refused(register, space):
    env_id = register(gym.spaces.Dict({"a": BOX, "b": gym.spaces.Tuple([BOX, space])}), BOX)
    with pytest.raises(UsageError, match=rf"^--env-id {env_id}: has observations of .*{type(space).__name__}.* flat"):
        make_envs(env_id, 1, seed=1)


# dm_control with a scalar; Gymnasium-Robotics, sorted otherwise than EnvPool and nested; integers and one-hot numbers.
DICTS = ["CheetahRun-v1", "FingerSpin-v1", "FetchReach-v4", "FrankaKitchen-v1", "MiniGrid-Empty-5x5-v0"]


@pytest.mark.parametrize("env_id", DICTS)
def test_envpools_dicts_are_flattened_as_gymnasium_does(env_id):
    envs = make_envs(env_id, 3, seed=1, backend="envpool", num_threads=1)
    pool = envpool.make(env_id, env_type="gymnasium", num_envs=3, seed=env_seeds(1, 3), num_threads=1)

    def resorted(space):
        if not isinstance(space, gym.spaces.Dict):
            return space
        return gym.spaces.Dict({key: resorted(part) for key, part in space.items()})

    def row(obs, i):
        return {key: row(part, i) if isinstance(part, dict) else part[i] for key, part in obs.items()}

    space = resorted(pool.observation_space)
    actions = np.stack([envs.single_action_space.sample() for _ in range(3)])
    pairs = [(envs.reset()[0], pool.reset()[0])]
    pairs += [(envs.step(actions)[0], pool.step(actions)[0]) for _ in range(5)]
    for obs, theirs in pairs:
        expected = np.stack([gym.spaces.flatten(space, row(theirs, i)) for i in range(3)])
        np.testing.assert_array_equal(obs, expected)
        assert obs.shape[1:] == envs.single_observation_space.shape
        assert obs.dtype == expected.dtype == envs.single_observation_space.dtype


def test_dm_controls_episodes_are_truncated_and_their_resets_give_no_reward():
    envs = make_envs("CheetahRun-v1", 2, seed=1, backend="envpool")
    require_continuous_actions(envs, "CheetahRun-v1")
    space = envs.single_observation_space
    assert space.shape == (17,) and (space.low == -np.inf).all() and (space.high == np.inf).all()
    obs, rewards, terminations, truncations = play(envs, random_actions(envs, 1005))
    assert not terminations.any() and truncations[999].all() and truncations.sum() == 2
    assert rewards[999].any() and (rewards[1000] == 0).all()  # EnvPool says the last one again
    assert (np.abs(obs[1000] - obs[1001]).max(1) > 0.1).all()


UNSUITABLE = [((BOX, UNBOUNDED), "bounded vectors"), ((BOX, HUGE), "bounded vectors"), ((IMAGE, BOX), "vectors")]


@pytest.mark.parametrize("spaces, reason", UNSUITABLE)
def test_unsuitable_spaces_are_refused(register, spaces, reason):
    env_id = register(*spaces)
    with pytest.raises(UsageError, match=f"--env-id {env_id}: .*{reason}"):
        require_continuous_actions(make_envs(env_id, 1, seed=1), env_id)
