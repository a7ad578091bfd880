"""The fast rungs of the off-policy scripts compute what the references compute, update for update."""

import importlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leanrl.support.executables import CUDAGRAPH_WARMUP, WARMUP_CALLS, CompiledStep, untouched
from leanrl.support.optim import FlatAdam
from leanrl.support.replay import Replay

CPU = torch.device("cpu")
OBS_DIM = 5
# Bounds other than ±1, and different from one dimension to the next.
LOW, HIGH = np.float32([-3.0, -0.4]), np.float32([3.0, 0.2])
NUM_UPDATES = 100

COMPILED = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]


def filled_replay(device: torch.device, action_dim: int = len(LOW), discrete: int = 0) -> Replay:
    """300 transitions, some of them terminations."""
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator)
    replay = Replay(500, OBS_DIM, action_dim, device)
    for _ in range(100):
        actions = randn(3, action_dim).clamp(-1, 1) * torch.from_numpy(HIGH)[:action_dim]
        if discrete:
            actions = torch.randint(discrete, (3, 1), generator=generator).float()
        terminations = (torch.rand(3, generator=generator) < 0.1).float()
        step = (randn(3, OBS_DIM), randn(3, OBS_DIM), actions, randn(3), terminations, torch.zeros(3))
        replay.add(*(x.to(device) for x in step))
    return replay


def make_executable(mode: str, update, device: torch.device, touched):
    """``update``, a function of no arguments, compiled or captured and warmed up without a trace."""
    if mode == "eager":
        return update
    if "compile" in mode:
        update = CompiledStep(update, device)
    if "cudagraphs" in mode:
        from tensordict.nn import CudaGraphModule

        update = CudaGraphModule(update, warmup=CUDAGRAPH_WARMUP)
    with untouched(touched, device):
        for _ in range(WARMUP_CALLS):
            update()
    return update


# --------------------------------------------------------------------------------------------------------------- TD3


def td3_reference(device: torch.device, **changes):
    td3 = importlib.import_module("leanrl.td3_continuous_action")
    args = td3.Args(**changes)
    torch.manual_seed(1)
    actor, critics = td3.Actor(OBS_DIM, LOW, HIGH).to(device), td3.Critics(OBS_DIM, len(LOW)).to(device)
    networks = [actor, critics, td3.Actor(OBS_DIM, LOW, HIGH).to(device), td3.Critics(OBS_DIM, len(LOW)).to(device)]
    networks[2].load_state_dict(actor.state_dict())
    networks[3].load_state_dict(critics.state_dict())
    optimizers = [torch.optim.Adam(network.parameters(), lr=args.learning_rate) for network in (actor, critics)]
    update, losses = td3.make_update(*networks, *optimizers, filled_replay(device), args)
    return SimpleNamespace(update=update, losses=losses, networks=networks)


@torch.no_grad()
def td3_fast(mode: str, device: torch.device, **changes):
    td3 = importlib.import_module("leanrl.td3_continuous_action_torchcompile")
    args = td3.Args(**changes)
    torch.manual_seed(1)
    actor, critics = td3.Actor(OBS_DIM, LOW, HIGH).to(device), td3.Critics(OBS_DIM, len(LOW)).to(device)
    optimizers = [FlatAdam(network, lr=args.learning_rate, eps=1e-8) for network in (actor, critics)]
    targets = [optimizer.params.clone() for optimizer in optimizers]
    update, losses = td3.make_update(*optimizers, *targets, filled_replay(device), args)
    touched = [*optimizers[0].tensors(), *optimizers[1].tensors(), *targets, losses]
    updates = {flag: make_executable(mode, partial(update, flag), device, touched) for flag in (False, True)}
    return SimpleNamespace(
        update=lambda with_actor: updates[with_actor](),
        losses=losses,
        actor=actor,
        optimizers=optimizers,
        targets=targets,
    )


def twins(critics) -> list[torch.Tensor]:
    """A reference's parameters of both Q-networks in the order of the fast rung's: [2, in, out], [2, 1, out], ..."""
    rows = []
    for first, second in zip(critics.qf1.parameters(), critics.qf2.parameters(), strict=True):
        pair = torch.stack([first.detach(), second.detach()])
        rows.append(pair.mT if pair.dim() == 3 else pair.unsqueeze(1))
    return rows


def td3_parameters(reference, fast) -> tuple[dict, dict]:
    """Both sides' parameters, one flat vector a network, in the order of the fast rung's."""
    actor, critics, actor_target, critics_target = reference.networks
    expected = {
        "actor": actor.parameters(),
        "critics": twins(critics),
        "actor target": actor_target.parameters(),
        "critics target": twins(critics_target),
    }
    expected = {name: torch.cat([p.detach().reshape(-1) for p in ps]) for name, ps in expected.items()}
    ours = [optimizer.params for optimizer in fast.optimizers] + fast.targets
    return expected, {name: x.clone() for name, x in zip(expected, ours, strict=True)}


def assert_moved_together(start: dict, expected: dict, got: dict) -> None:
    """Each vector moved from ``start`` as it was expected to, but for a thousandth of the way.

    Single parameters may differ by a step: where a gradient is nearly zero, Adam takes a step by its sign.
    """
    for name, moved in ((name, expected[name] - start[name]) for name in start):
        assert moved.abs().max() > 1e-3, f"{name} did not move"
        error = ((got[name] - expected[name]).norm() / moved.norm()).item()
        assert error < 1e-3, f"{name}: off by {error:.1e} of its way"


@pytest.mark.parametrize("device", COMPILED)
@pytest.mark.parametrize("mode", ["eager", "compile", pytest.param("compile+cudagraphs", marks=pytest.mark.cuda)])
def test_td3_equals_the_reference(mode, device):
    reference, fast = td3_reference(device), td3_fast(mode, device)
    start, ours = td3_parameters(reference, fast)
    assert all(torch.equal(start[name], ours[name]) for name in start)
    for side in (reference, fast):
        torch.manual_seed(2)
        for n in range(1, NUM_UPDATES + 1):
            side.update(n % 2 == 0)
    assert [int(optimizer.num_steps) for optimizer in fast.optimizers] == [NUM_UPDATES // 2, NUM_UPDATES]
    assert_moved_together(start, *td3_parameters(reference, fast))
    torch.testing.assert_close(fast.losses, reference.losses, atol=1e-3, rtol=1e-3)
