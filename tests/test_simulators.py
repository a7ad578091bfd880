"""The state of environments: what is restored from a file goes on bit for bit as if it had not been interrupted."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

from leanrl.support.envs import SerialVectorEnv, env_seeds, make_env
from leanrl.support.simulators import CLASSIC_CONTROL, MUJOCO

NUM_STEPS = 400
ENV_IDS = [
    env_id
    for env_id, spec in gym.registry.items()
    if str(spec.entry_point).rpartition(".")[0] in (MUJOCO, CLASSIC_CONTROL)
    and env_id != "Pusher-v4"  # which refuses MuJoCo 3
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


def test_the_usual_environments_are_covered():
    mujoco_names = "HalfCheetah Hopper Walker2d Ant Humanoid HumanoidStandup Swimmer Reacher Pusher"
    mujoco_names += " InvertedPendulum InvertedDoublePendulum"
    classic = {"CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0"}
    assert {f"{name}-v5" for name in mujoco_names.split()} | classic <= set(ENV_IDS)


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("env_id", ENV_IDS)
def test_restored_environments_continue_bit_for_bit(env_id, pending, tmp_path):
    envs, (actions, expected) = make(env_id), uninterrupted(env_id)
    dones = np.stack([terminations | truncations for _, _, terminations, truncations in expected])
    # After so many steps only some of the environments wait for their reset, or none does.
    num_steps = 51 + int(np.argmax(np.isin(dones[50:].sum(1), (1, 2) if pending else (0,))))
    envs.reset()
    for action in actions[:num_steps]:
        envs.step(action)
    state = envs.state_dict()
    for action in actions[num_steps : num_steps + 5]:
        envs.step(action)  # must not reach into the state
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert any(state["done"]) == pending and not all(state["done"])
    envs = make(env_id)
    np.testing.assert_array_equal(envs.load_state_dict(state), expected[num_steps - 1][0])
    for t in range(num_steps, NUM_STEPS):
        for value, expected_value in zip(envs.step(actions[t])[:4], expected[t], strict=True):
            assert value.dtype == expected_value.dtype
            np.testing.assert_array_equal(value, expected_value)
    # Beyond several episodes that began after the restore.
    assert dones[num_steps:].sum(0).min() >= 5


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
