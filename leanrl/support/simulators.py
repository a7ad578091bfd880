"""What decides the next steps of Gymnasium's environments, in types that a ``weights_only`` checkpoint can hold.

Exact, bit for bit in observations, rewards and ends, for every environment of ``gymnasium.envs.mujoco`` (-v4 and -v5)
and ``gymnasium.envs.classic_control``; other environments are not saved at all. What is only drawn (the shapes of
MuJoCo, Pendulum's arrow) comes back with the next step.
"""

import gymnasium as gym
import numpy as np
import torch

# Of the environment's class: a subclass from elsewhere may remember more.
MUJOCO, CLASSIC_CONTROL = "gymnasium.envs.mujoco", "gymnasium.envs.classic_control"
# Positions of bodies [nbody, 3] that environments read before they step the simulator: Ant's torso and all of v4's
# Reacher in xpos, Humanoid's centre of mass in xipos. A step leaves them one substep behind qpos, where mj_forward on
# loading would not. Every other derived quantity is computed anew before it is read.
MUJOCO_LAGGING = ("xpos", "xipos")
# Of TimeLimit. The other wrappers of gymnasium.make remember nothing that a reset does not satisfy.
ELAPSED_STEPS = "_elapsed_steps"


def env_state(env: gym.Env) -> dict | None:
    """A copy of what decides the next steps and episodes of ``env``; None where that is not known.

    Args:
        env: reset at least once; after a done it is reset before the next step, as NEXT_STEP autoreset does.
    """
    simulator = env.unwrapped
    package = type(simulator).__module__.rpartition(".")[0]
    # What is wrapped around those of gymnasium.make may have a memory of its own.
    is_plain = env.spec is not None and not env.spec.additional_wrappers and env.has_wrapper_attr(ELAPSED_STEPS)
    if package not in (MUJOCO, CLASSIC_CONTROL) or not is_plain:
        return None
    state = {"np_random": simulator.np_random.bit_generator.state, "elapsed_steps": env.get_wrapper_attr(ELAPSED_STEPS)}
    if package == CLASSIC_CONTROL:
        # The other attributes are set by the reset after a done (CartPole's steps_beyond_terminated) or only drawn
        # (Pendulum's last_u). The dtype varies within an episode and decides how the next step rounds.
        return state | {"state": torch.tensor(np.asarray(simulator.state))}
    import mujoco

    # More than qpos and qvel: the solver starts from the accelerations of the last substep.
    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(simulator.model, signature))
    mujoco.mj_getState(simulator.model, simulator.data, integration, signature)
    lagging = {name: torch.tensor(getattr(simulator.data, name)) for name in MUJOCO_LAGGING}
    return state | {"integration": torch.from_numpy(integration), **lagging}


def set_env_state(env: gym.Env, state: dict) -> None:
    """Restores what ``env_state`` returned into an environment made alike, which was reset before."""
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
