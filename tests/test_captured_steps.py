"""What is captured as a CUDA graph stays on its device: seen here on the meta device, whose tensors are no CPU's."""

import importlib
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch
from scripts import of
from test_off_policy_equality import LOW, OBS_DIM, PARTS
from test_on_policy_equality import NUM_ACTIONS, make_side, mode_args, modules_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leanrl.sebulba.actor import ActingAgent
from leanrl.sebulba.rollout import Rollout
from leanrl.support.layers import Float32
from leanrl.support.normalization import RunningMoments
from leanrl.support.optim import Adam, RMSprop
from leanrl.support.replay import LastStep, Replay

META, NUM_ENVS = torch.device("meta"), 3
THREE_ACTIONS = gym.spaces.Discrete(3)


class Watch(TorchDispatchMode):
    """Counts operations, and keeps those that see a CPU's tensor or read a number, which a capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.off_device = 0, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.count += 1
        seen = {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
        if seen - {"meta"} or operation is torch.ops.aten._local_scalar_dense.default:
            self.off_device.append(str(operation))
        return result


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has no autocast, and is refused where foreach operations clip gradients."""
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr("torch.nn.utils.clip_grad._device_has_foreach_support", lambda *_: True)
    with_foreach = lambda params, norm, foreach: clip(params, norm, foreach=True)  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", with_foreach)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(Float32, "forward", lambda layer, x: super(Float32, layer).forward(x))


def off_policy(name: str) -> tuple:
    """The fast variant, its replay and last step, its networks and optimisers by name, and its update."""
    script = importlib.import_module(f"leanrl.{name}_torchcompile")
    parts = of(name, PARTS)(script, Adam, script.Args(), META)
    width = 1 if name == "dqn" else len(LOW)
    replay, last = Replay(100, OBS_DIM, width, META), LastStep.allocate(NUM_ENVS, OBS_DIM, width, META)
    update, _ = script.make_update(**parts, replay=replay, args=script.Args())
    return script, replay, last, parts, update


def steps_of(update, acting: tuple, *more) -> list:
    """Observe, update, update with the actor, act; ``more`` are further arguments of an update."""
    (observe, act, _), timestep = acting, torch.zeros(NUM_ENVS, OBS_DIM + 3, device=META)
    return [lambda: observe(timestep), lambda: update(False, *more), lambda: update(True, *more), act]


def td3():
    script, replay, last, parts, update = off_policy("td3_continuous_action")
    return steps_of(update, script.make_acting(parts["actor"], replay, last, script.Args()))


def sac():
    script, replay, last, parts, update = off_policy("sac_continuous_action")
    return steps_of(update, script.make_acting(parts["actor"], replay, last), True)


def fast_sac():
    script, replay, last, parts, update = off_policy("fast_sac")
    return steps_of(update, script.make_acting(parts["actor"], parts["obs_moments"], replay, last))


def dqn():
    script, replay, _, parts, update = off_policy("dqn")
    staging = script.Staging(4, NUM_ENVS, OBS_DIM, torch.device("cpu"))
    rows, obs = staging.take().to(META), torch.zeros(NUM_ENVS, OBS_DIM, device=META)
    _, learn, update = script.make_executables(parts["q_network"], replay, staging, update, script.Args())
    return [lambda: script.greedy(parts["q_network"], obs), lambda: learn(rows), update]


def on_policy(script: str) -> tuple:
    """The fast variant's network, rollout and the like, its arguments, and its update of eight rows."""
    args, _ = mode_args(script, "eager", num_envs=NUM_ENVS, num_steps=16)
    side = make_side(modules_of(script)[1], Adam, args, META)
    return side, args, lambda: side.update(torch.arange(8, device=META))


def pqn():
    side, _, update = on_policy("pqn")
    return [lambda: side.module.greedy(side.network, side.rollout.obs[0]), update]


def ppo():
    side, _, update = on_policy("ppo_continuous_action")
    moments, bound = RunningMoments(side.rollout.obs.shape[2:]).to(META), np.ones(NUM_ACTIONS, np.float32)
    noise, row = torch.zeros_like(side.rollout.actions), torch.zeros(1, dtype=torch.int64, device=META)
    obs, bounds = side.rollout.obs[0].double(), (-bound, bound)
    *_, policy_step = side.module.make_acting(side.network, moments, side.rollout, noise, row, *bounds, as_sums=False)
    return [lambda: policy_step(obs), update]


def ppo_atari():
    side, args, update = on_policy("ppo_atari_envpool")
    noise = torch.zeros(args.num_steps + 1, NUM_ENVS, NUM_ACTIONS, device=META)
    policy_step, _ = side.module.make_policy_step(side.network, side.rollout, noise, args)
    return [lambda: policy_step(side.rollout.obs[0]), update]


def pqn_atari():
    side, args, update = on_policy("pqn_atari_envpool")
    policy_step, _ = side.module.make_policy_step(side.network, side.rollout, args)
    return [lambda: policy_step(side.rollout.obs[0]), update]


def cleanba_ppo(action_space=THREE_ACTIONS, torso="auto"):
    script = importlib.import_module("leanrl.cleanba_ppo")
    args = script.Args(num_envs=NUM_ENVS, num_steps=4, norm_adv=False, torso=torso)
    agent, rollout, act = actor_learner(script, args, action_space)
    batch = script.Batch.of(rollout)
    (gradient,), step = script.make_update(agent, Adam(agent.parameters(), lr=1e-3), [batch], args)
    script.fill_targets(batch, rollout, args)
    inds = torch.arange(8, device=META)
    return [lambda: step(gradient(inds)), act]


def continuous_cleanba_ppo():
    return cleanba_ppo(gym.spaces.Box(-1, 1, (3,)), torso="mlp")


def cleanba_impala():
    script = importlib.import_module("leanrl.cleanba_impala")
    args = script.Args(num_envs=NUM_ENVS, num_steps=4)
    agent, rollout, act = actor_learner(script, args, THREE_ACTIONS)
    (gradient,), step = script.make_update(agent, RMSprop(agent.parameters(), lr=1e-3), [rollout], args)
    envs = torch.arange(2, device=META)
    return [lambda: step(gradient(envs)), act]


def actor_learner(script, args, action_space):
    space = gym.spaces.Box(0, 255, (4, 20, 20), np.uint8)
    agent = script.make_agent(space, action_space, args).to(META, memory_format=torch.channels_last)
    rollout = Rollout.allocate(space, action_space, args.num_steps, NUM_ENVS, META)
    act, noise = script.make_act(ActingAgent(agent, args.amp), args), torch.zeros(NUM_ENVS, 3, device=META)
    return agent, rollout, lambda: act(rollout.obs[0], noise)


DISTRIBUTED = [cleanba_ppo, continuous_cleanba_ppo, cleanba_impala]


@pytest.mark.parametrize(
    "make", [td3, sac, fast_sac, dqn, pqn, ppo, ppo_atari, pqn_atari, *DISTRIBUTED], ids=lambda make: make.__name__
)
def test_nothing_leaves_the_device(make, monkeypatch):
    as_on_a_gpu(monkeypatch)
    for captured in make():
        with Watch() as watch:
            captured()
        assert watch.count > 5 and not watch.off_device
    with Watch() as watch:  # and what does leave it is seen
        torch.zeros(3).to(META)
    assert watch.off_device


# Operations of commit 6b6cff2, whose updates were written out over flat vectors: observe, update, update with the actor
# and act; DQN's are greedy, learn and update; PPO's act and update. PQN's, act and update, are of its first versions.
FORMER_OPERATIONS = {
    td3: [26, 151, 271, 24],
    sac: [26, 176, 644, 39],
    dqn: [9, 128, 104],
    pqn: [11, 132],
    ppo: [45, 287],
    ppo_atari: [52, 288],
    pqn_atari: [31, 191],
}


@pytest.mark.parametrize("make", FORMER_OPERATIONS, ids=lambda make: make.__name__)
def test_few_operations_are_launched(make, monkeypatch):
    """Each is a launch on a GPU, where nothing is compiled: loops over parameters would multiply them."""
    as_on_a_gpu(monkeypatch)
    for captured, former in zip(make(), FORMER_OPERATIONS[make], strict=True):
        captured()
        with Watch() as watch:
            captured()
        assert watch.count <= 1.2 * former
