"""The state of environments: what is restored from a file goes on bit for bit as if it had not been interrupted."""

import functools

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

from leanrl.support.envs import SerialVectorEnv, env_seeds, make_env
from leanrl.support.simulators import FAMILIES

NUM_STEPS = 400
ENV_IDS = [
    env_id
    for env_id, spec in gym.registry.items()
    if str(spec.entry_point).rpartition(".")[0] in FAMILIES and env_id != "Pusher-v4"  # which refuses MuJoCo 3
]


def make(env_id):
    """Three environments, truncated after different numbers of steps if they do not terminate before."""
    return SerialVectorEnv([make_env(env_id, max_episode_steps=n) for n in (30, 37, 44)], env_seeds(1, 3))


@functools.cache
def uninterrupted(env_id):
    """Random actions [T, N, ...] and what each of these steps returned."""
    envs = make(env_id)
    envs.action_space.seed(1)
    actions = [envs.action_space.sample() for _ in range(NUM_STEPS)]
    envs.reset()
    return actions, [envs.step(action)[:4] for action in actions]


def dones(env_id):
    """After which steps an episode ended, [T, N]."""
    return np.stack([terminations | truncations for _, _, terminations, truncations in uninterrupted(env_id)[1]])


def save_step(env_id, pending):
    """A number of steps after which only some of the environments wait for their reset, or none does."""
    waiting = dones(env_id).sum(1)
    return 51 + int(np.argmax(np.isin(waiting[50:], (1, 2) if pending else (0,))))


def save(env_id, num_steps, path):
    """The state after ``num_steps`` of the uninterrupted run, as a file gives it back."""
    actions, _ = uninterrupted(env_id)
    envs = make(env_id)
    envs.reset()
    for action in actions[:num_steps]:
        envs.step(action)
    state = envs.state_dict()
    for action in actions[num_steps : num_steps + 5]:
        envs.step(action)  # must not reach into the state
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def first_difference(env_id, envs, num_steps):
    """The first step after ``num_steps`` whose results differ from the uninterrupted run, None if they never do."""
    actions, expected = uninterrupted(env_id)
    for t in range(num_steps, NUM_STEPS):
        for value, expected_value in zip(envs.step(actions[t])[:4], expected[t], strict=True):
            if value.dtype != expected_value.dtype or not np.array_equal(value, expected_value):
                return t
    return None


def test_the_usual_environments_are_covered():
    mujoco_names = "HalfCheetah Hopper Walker2d Ant Humanoid HumanoidStandup Swimmer Reacher Pusher"
    mujoco_names += " InvertedPendulum InvertedDoublePendulum"
    classic = {"CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"}
    assert {f"{name}-v5" for name in mujoco_names.split()} | classic <= set(ENV_IDS)


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("env_id", ENV_IDS)
def test_restored_environments_continue_bit_for_bit(env_id, pending, tmp_path):
    num_steps = save_step(env_id, pending)
    state = save(env_id, num_steps, tmp_path / "state.pt")
    assert any(state["done"]) == pending and not all(state["done"])
    envs = make(env_id)
    np.testing.assert_array_equal(envs.load_state_dict(state), uninterrupted(env_id)[1][num_steps - 1][0])
    assert first_difference(env_id, envs, num_steps) is None
    # Beyond several episodes that began after the restore.
    assert dones(env_id)[num_steps:].sum(0).min() >= 5


# ------------------------------------------------------------------------------------------------ WHAT IT CANNOT LACK


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Pendulum-v1"])
def test_the_generator_decides_the_next_episode(env_id, tmp_path):
    num_steps = save_step(env_id, pending=False)
    state = save(env_id, num_steps, tmp_path / "state.pt")
    envs = make(env_id)
    envs.reset()
    for saved, fresh in zip(state["envs"], envs.state_dict()["envs"], strict=True):
        saved["np_random"] = fresh["np_random"]
    envs.load_state_dict(state)
    next_end = num_steps + int(np.argmax(dones(env_id)[num_steps:].any(1)))
    assert first_difference(env_id, envs, num_steps) == next_end + 1


def test_the_time_limit_counts_on(tmp_path):
    num_steps = save_step("HalfCheetah-v5", pending=False)
    state = save("HalfCheetah-v5", num_steps, tmp_path / "state.pt")
    for saved in state["envs"]:
        saved["elapsed_steps"] = [0]
    envs = make("HalfCheetah-v5")
    envs.load_state_dict(state)
    next_end = num_steps + int(np.argmax(dones("HalfCheetah-v5")[num_steps:].any(1)))
    assert first_difference("HalfCheetah-v5", envs, num_steps) == next_end


def test_qpos_and_qvel_are_not_enough(tmp_path):
    num_steps = save_step("HalfCheetah-v5", pending=False)
    envs = make("HalfCheetah-v5")
    envs.load_state_dict(save("HalfCheetah-v5", num_steps, tmp_path / "state.pt"))
    for env in envs.envs:
        simulator = env.unwrapped
        qpos, qvel = simulator.data.qpos.copy(), simulator.data.qvel.copy()
        mujoco.mj_resetData(simulator.model, simulator.data)
        simulator.set_state(qpos, qvel)
    assert first_difference("HalfCheetah-v5", envs, num_steps) is not None


@pytest.mark.parametrize("env_id, name", [("Ant-v5", "xpos"), ("Humanoid-v5", "xipos"), ("Reacher-v4", "xpos")])
def test_positions_lag_behind_what_mj_forward_computes(env_id, name, tmp_path):
    num_steps = save_step(env_id, pending=False)
    state = save(env_id, num_steps, tmp_path / "state.pt")
    envs = make(env_id)
    for env, saved in zip(envs.envs, state["envs"], strict=True):
        model = env.unwrapped.model
        data = mujoco.MjData(model)
        integration = saved["simulator"]["integration"].numpy()
        mujoco.mj_setState(model, data, integration, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(model, data)
        saved["simulator"][name] = torch.tensor(getattr(data, name))
    envs.load_state_dict(state)
    assert first_difference(env_id, envs, num_steps) == num_steps


# ---------------------------------------------------------------------------------------------- WHAT CANNOT BE SAVED


class OurHopper(HopperEnv):
    """Might remember more than Gymnasium's."""


@pytest.mark.parametrize(
    "env",
    [
        lambda: gym.wrappers.TimeLimit(OurHopper(), 100),
        lambda: gym.wrappers.NormalizeReward(make_env("Hopper-v5")),  # has statistics of its own
        lambda: make_env("Taxi-v4"),
    ],
)
def test_unknown_environments_have_no_state(env):
    envs = SerialVectorEnv([env()], env_seeds(1, 1))
    envs.reset()
    assert envs.state_dict() is None
