"""Saving Gymnasium's environments, in types that a ``weights_only`` checkpoint can hold.

Observations, rewards and episode ends continue bit for bit, for every environment of ``gymnasium.envs.mujoco`` (-v4 and
-v5) and ``gymnasium.envs.classic_control``; others are not saved at all. What is only rendered (MuJoCo's geometry,
Pendulum's arrow) is right again after the next step.
"""

import gymnasium as gym
import numpy as np
import torch

# Packages of environments that can be saved: a subclass from elsewhere may have more state.
MUJOCO, CLASSIC_CONTROL = "gymnasium.envs.mujoco", "gymnasium.envs.classic_control"
# Positions of bodies [nbody, 3] that environments read before they step the simulator: Ant's torso and all of
# Reacher-v4's bodies in xpos, Humanoid's centre of mass in xipos. A step leaves them one substep behind qpos, and
# mj_forward on loading would not. All other derived quantities are recomputed before they are read.
MUJOCO_LAGGING = ("xpos", "xipos")
# TimeLimit's. The other wrappers of gymnasium.make have no state that a reset does not restore.
ELAPSED_STEPS = "_elapsed_steps"


def env_state(env: gym.Env) -> dict | None:
    """A copy of all that the next steps and episodes of ``env`` depend on; None if that is not known.

    Args:
        env: reset at least once. After a done it must be reset before the next step, as in NEXT_STEP autoreset.
    """
    simulator = env.unwrapped
    package = type(simulator).__module__.rpartition(".")[0]
    # Wrappers beyond those of gymnasium.make may have state of their own.
    is_plain = env.spec is not None and not env.spec.additional_wrappers and env.has_wrapper_attr(ELAPSED_STEPS)
    if package not in (MUJOCO, CLASSIC_CONTROL) or not is_plain:
        return None
    state = {"np_random": simulator.np_random.bit_generator.state, "elapsed_steps": env.get_wrapper_attr(ELAPSED_STEPS)}
    if package == CLASSIC_CONTROL:
        # The other attributes are set by the reset after a done (CartPole's steps_beyond_terminated) or only rendered
        # (Pendulum's last_u). The dtype varies within an episode and decides how the next step rounds.
        return state | {"state": torch.tensor(np.asarray(simulator.state))}
    import mujoco

    # Not only qpos and qvel: the solver starts from the accelerations of the last substep.
    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(simulator.model, signature))
    mujoco.mj_getState(simulator.model, simulator.data, integration, signature)
    lagging = {name: torch.tensor(getattr(simulator.data, name)) for name in MUJOCO_LAGGING}
    return state | {"integration": torch.from_numpy(integration), **lagging}


def set_env_state(env: gym.Env, state: dict) -> None:
    """Restores what ``env_state`` returned, in an environment made the same way that has been reset."""
    simulator = env.unwrapped
    simulator.np_random.bit_generator.state = state["np_random"]
    env.set_wrapper_attr(ELAPSED_STEPS, state["elapsed_steps"])
    if "state" in state:
        simulator.state = state["state"].numpy().copy()
        return
    import mujoco

    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(simulator.model, simulator.data, state["integration"].numpy(), signature)
    for name in MUJOCO_LAGGING:
        getattr(simulator.data, name)[:] = state[name].numpy()
