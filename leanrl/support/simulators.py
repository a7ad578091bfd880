"""What decides the next steps of Gymnasium's environments, in types that a ``weights_only`` checkpoint can hold.

Exact, bit for bit in observations, rewards and ends, for every environment of ``gymnasium.envs.mujoco`` (-v4 and -v5)
and ``gymnasium.envs.classic_control``; other environments are not saved at all. What is only drawn (the shapes of
MuJoCo, Pendulum's arrow) comes back with the next step.
"""

import gymnasium as gym
import numpy as np
import torch

# Positions of bodies [nbody, 3] that environments read before they step the simulator: Ant's torso and all of v4's
# Reacher in xpos, Humanoid's centre of mass in xipos. A step leaves them one substep behind qpos, where mj_forward on
# loading would not. Every other derived quantity is computed anew before it is read.
MUJOCO_LAGGING = ("xpos", "xipos")


def _mujoco_state(env: gym.Env) -> dict:
    import mujoco

    # More than qpos and qvel: the solver starts from the accelerations of the last substep.
    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(env.model, signature))
    mujoco.mj_getState(env.model, env.data, integration, signature)
    lagging = {name: torch.tensor(getattr(env.data, name)) for name in MUJOCO_LAGGING}
    return {"integration": torch.from_numpy(integration), **lagging}


def _set_mujoco_state(env: gym.Env, state: dict) -> None:
    import mujoco

    mujoco.mj_setState(env.model, env.data, state["integration"].numpy(), mujoco.mjtState.mjSTATE_INTEGRATION)
    for name in MUJOCO_LAGGING:
        getattr(env.data, name)[:] = state[name].numpy()


# The other attributes of classic control are set by the reset after a done (CartPole's steps_beyond_terminated) or only
# drawn (Pendulum's last_u). The dtype of ``state`` varies within an episode and decides how the next step rounds.
def _classic_control_state(env: gym.Env) -> dict:
    return {"state": torch.tensor(np.asarray(env.state))}


def _set_classic_control_state(env: gym.Env, state: dict) -> None:
    env.state = state["state"].numpy().copy()


# By the package of the environment's class: a subclass from elsewhere may remember more.
FAMILIES = {
    "gymnasium.envs.mujoco": (_mujoco_state, _set_mujoco_state),
    "gymnasium.envs.classic_control": (_classic_control_state, _set_classic_control_state),
}
# Of TimeLimit. The other wrappers of gymnasium.make remember nothing that a reset does not satisfy.
ELAPSED_STEPS = "_elapsed_steps"


def _family(env: gym.Env):
    return FAMILIES.get(type(env.unwrapped).__module__.rpartition(".")[0])


def env_state(env: gym.Env) -> dict | None:
    """A copy of what decides the next steps and episodes of ``env``; None where that is not known.

    Args:
        env: reset at least once; after a done it is reset before the next step, as NEXT_STEP autoreset does.
    """
    family = _family(env)
    if family is None or env.spec is None or env.spec.additional_wrappers:  # to those of gymnasium.make
        return None
    has_limit = env.has_wrapper_attr(ELAPSED_STEPS)
    return {
        "simulator": family[0](env.unwrapped),
        "elapsed_steps": [env.get_wrapper_attr(ELAPSED_STEPS)] if has_limit else [],
        "np_random": env.unwrapped.np_random.bit_generator.state,
    }


def set_env_state(env: gym.Env, state: dict) -> None:
    """Restores what ``env_state`` returned into an environment made alike, which was reset before."""
    _family(env)[1](env.unwrapped, state["simulator"])
    for elapsed_steps in state["elapsed_steps"]:
        env.set_wrapper_attr(ELAPSED_STEPS, elapsed_steps)
    env.unwrapped.np_random.bit_generator.state = state["np_random"]
