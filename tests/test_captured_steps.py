"""What is captured as a CUDA graph stays on its device: seen here on the meta device, whose tensors are no CPU's."""

import importlib
from contextlib import nullcontext
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leanrl.sebulba.actor import ActingAgent
from leanrl.sebulba.rollout import Rollout
from leanrl.support.layers import Float32
from leanrl.support.optim import Adam, RMSprop
from leanrl.support.replay import LastStep, Replay

META, CPU = torch.device("meta"), torch.device("cpu")
OBS_DIM, NUM_ENVS = 5, 3
LOW, HIGH = np.float32([-3.0, -0.4]), np.float32([3.0, 0.2])


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
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda params, norm, foreach: clip(params, norm, foreach=True)
    )
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(Float32, "forward", lambda layer, x: super(Float32, layer).forward(x))


TIMESTEP = torch.zeros(NUM_ENVS, OBS_DIM + 3, device=META)


def off_policy_storage() -> tuple[Replay, LastStep]:
    return Replay(100, OBS_DIM, len(LOW), META), LastStep.allocate(NUM_ENVS, OBS_DIM, len(LOW), META)


def td3():
    script = importlib.import_module("leanrl.td3_continuous_action_torchcompile")
    actor, critics = script.Actor(OBS_DIM, LOW, HIGH).to(META), script.Critics(OBS_DIM, len(LOW)).to(META)
    replay, last = off_policy_storage()
    optimizers = [Adam(network.parameters(), lr=1e-3) for network in (actor, critics)]
    update, _ = script.make_update(
        actor, critics, deepcopy(actor), deepcopy(critics), *optimizers, replay, script.Args()
    )
    observe, act, _ = script.make_acting(actor, replay, last, script.Args())
    return [lambda: observe(TIMESTEP), lambda: update(False), lambda: update(True), act]


def sac():
    script = importlib.import_module("leanrl.sac_continuous_action_torchcompile")
    actor, critics = script.Actor(OBS_DIM, LOW, HIGH).to(META), script.Critics(OBS_DIM, len(LOW)).to(META)
    replay, last = off_policy_storage()
    log_alpha = torch.zeros(1, device=META, requires_grad=True)
    optimizers = [Adam(params, lr=1e-3) for params in (actor.parameters(), critics.parameters(), [log_alpha])]
    update, _ = script.make_update(actor, critics, deepcopy(critics), log_alpha, *optimizers, replay, script.Args())
    observe, act, _ = script.make_acting(actor, replay, last)
    return [lambda: observe(TIMESTEP), lambda: update(False, True), lambda: update(True, True), act]


def dqn():
    script = importlib.import_module("leanrl.dqn_torchcompile")
    network = script.QNetwork(OBS_DIM, 3).to(META)
    replay = Replay(100, OBS_DIM, 1, META)
    staging = script.Staging(4, NUM_ENVS, OBS_DIM, CPU)
    rows, obs = staging.take().to(META), torch.zeros(NUM_ENVS, OBS_DIM, device=META)
    optimizer = Adam(network.parameters(), lr=1e-3)
    update, _ = script.make_update(network, deepcopy(network), optimizer, replay, script.Args())
    _, learn, update = script.make_executables(network, replay, staging, update, script.Args())
    return [lambda: script.greedy(network, obs), lambda: learn(rows), update]


def pqn():
    script = importlib.import_module("leanrl.pqn_torchcompile")
    network = script.QNetwork(OBS_DIM, 3).to(META)
    rollout = script.Rollout.allocate(16, NUM_ENVS, OBS_DIM, META)
    update = script.make_update(network, Adam(network.parameters(), lr=1e-3, eps=1e-5), rollout, script.Args())
    obs, inds = torch.zeros(NUM_ENVS, OBS_DIM, device=META), torch.arange(8, device=META)
    return [lambda: script.greedy(network, obs), lambda: update(inds)]


def ppo():
    script = importlib.import_module("leanrl.ppo_continuous_action_torchcompile")
    agent = script.Agent(OBS_DIM, len(LOW)).to(META)
    rollout = script.Rollout.allocate(16, NUM_ENVS, OBS_DIM, len(LOW), META)
    moments = script.RunningMoments.start((OBS_DIM,), META)
    noise, row = torch.zeros_like(rollout.actions), torch.zeros(1, dtype=torch.int64, device=META)
    *_, policy_step = script.make_acting(agent, moments, rollout, noise, row, LOW, HIGH, as_sums=False)
    update = script.make_update(agent, Adam(agent.parameters(), lr=1e-3, eps=1e-5), rollout, script.Args())
    obs = torch.zeros(NUM_ENVS, OBS_DIM, dtype=torch.float64, device=META)
    inds = torch.arange(8, device=META)
    return [lambda: policy_step(obs), lambda: update(inds)]


def ppo_atari():
    script = importlib.import_module("leanrl.ppo_atari_envpool_torchcompile")
    args = script.Args(num_envs=NUM_ENVS, num_steps=4)
    agent = script.Agent(3).to(META, memory_format=torch.channels_last)
    obs = torch.zeros(NUM_ENVS, 4, 84, 84, dtype=torch.uint8, device=META)
    rollout = script.Rollout.allocate(obs, args)
    policy_step, _ = script.make_policy_step(agent, rollout, torch.zeros(5, NUM_ENVS, 3, device=META), args)
    update = script.make_update(agent, Adam(agent.parameters(), lr=1e-3, eps=1e-5), rollout, args)
    inds = torch.arange(8, device=META)
    return [lambda: policy_step(obs), lambda: update(inds)]


def pqn_atari():
    script = importlib.import_module("leanrl.pqn_atari_envpool_torchcompile")
    args = script.Args(num_envs=NUM_ENVS, num_steps=4)
    network = script.QNetwork(3).to(META, memory_format=torch.channels_last)
    obs = torch.zeros(NUM_ENVS, 4, 84, 84, dtype=torch.uint8, device=META)
    rollout = script.Rollout.allocate(obs, args)
    policy_step, _ = script.make_policy_step(network, rollout, args)
    update = script.make_update(network, Adam(network.parameters(), lr=1e-3, eps=1e-5), rollout, args)
    inds = torch.arange(8, device=META)
    return [lambda: policy_step(obs), lambda: update(inds)]


def cleanba_ppo():
    script = importlib.import_module("leanrl.cleanba_ppo")
    args = script.Args(num_envs=NUM_ENVS, num_steps=4, norm_adv=False)
    agent, rollout, act = actor_learner(script, args)
    batch = script.Batch.of(rollout)
    get_value, (gradient,), step = script.make_update(agent, Adam(agent.parameters(), lr=1e-3), [batch], args)
    script.fill_targets(batch, rollout, get_value, args)
    inds = torch.arange(8, device=META)
    return [lambda: get_value(rollout.obs[-1]), lambda: step(gradient(inds)), act]


def cleanba_impala():
    script = importlib.import_module("leanrl.cleanba_impala")
    args = script.Args(num_envs=NUM_ENVS, num_steps=4)
    agent, rollout, act = actor_learner(script, args)
    (gradient,), step = script.make_update(agent, RMSprop(agent.parameters(), lr=1e-3), [rollout], args)
    envs = torch.arange(2, device=META)
    return [lambda: step(gradient(envs)), act]


def actor_learner(script, args):
    space = gym.spaces.Box(0, 255, (4, 20, 20), np.uint8)
    agent = script.make_agent(space, 3, args).to(META, memory_format=torch.channels_last)
    rollout = Rollout.allocate(space, args.num_steps, NUM_ENVS, META)
    act, noise = script.make_act(ActingAgent(agent, args.amp), args), torch.zeros(NUM_ENVS, 3, device=META)
    return agent, rollout, lambda: act(rollout.obs[0], noise)


@pytest.mark.parametrize(
    "make", [td3, sac, dqn, pqn, ppo, ppo_atari, pqn_atari, cleanba_ppo, cleanba_impala], ids=lambda make: make.__name__
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
