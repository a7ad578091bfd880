"""The fast rungs of the off-policy scripts compute what the references compute, update for update."""

import importlib
import itertools
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripts import OFF_POLICY

from leanrl.support.executables import CUDAGRAPH_WARMUP, WARMUP_CALLS, CompiledStep, untouched
from leanrl.support.optim import FlatAdam
from leanrl.support.replay import Replay

CPU = torch.device("cpu")
OBS_DIM = 5
# Bounds other than ±1, and different from one dimension to the next.
LOW, HIGH = np.float32([-3.0, -0.4]), np.float32([3.0, 0.2])
NUM_UPDATES = 100
# Of SAC's Adam. With the scripts' 1e-8 it steps by a gradient's sign where that is nearly zero, which rounding decides.
EPS = 1e-4

CUDA = torch.device("cuda", 0)
CUDA_MODES = ("eager", "compile", "cudagraphs", "compile+cudagraphs")
in_either_precision = pytest.mark.parametrize("amp", ["none", "bf16"])
in_every_mode = pytest.mark.parametrize(
    ("mode", "device"),
    [("eager", CPU), ("compile", CPU), *(pytest.param(mode, CUDA, marks=pytest.mark.cuda) for mode in CUDA_MODES)],
    ids=str,
)


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


def make_executable(mode: str, update, device: torch.device, touched, **options):
    """``update``, a function of no arguments, compiled or captured and warmed up without a trace."""
    if mode == "eager":
        return update
    if "compile" in mode:
        update = CompiledStep(update, device, **options)
    if "cudagraphs" in mode:
        from tensordict.nn import CudaGraphModule

        update = CudaGraphModule(update, warmup=CUDAGRAPH_WARMUP, device=device)
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


# A fused kernel rounds to bf16 elsewhere. On a CPU that makes 0.14; half the learning rate would make 0.5.
BF16_TOLERANCE = 0.25


def assert_same_losses(losses: torch.Tensor, expected: torch.Tensor, amp: str = "none") -> None:
    tolerance = 1e-3 if amp == "none" else 2e-2
    torch.testing.assert_close(losses, expected, atol=tolerance, rtol=tolerance)


def assert_moved_together(start: dict, expected: dict, got: dict, tolerance: float = 1e-3) -> None:
    """Each vector moved from ``start`` as it was expected to, but for ``tolerance`` of the way, on a GPU 1e-2."""
    if next(iter(got.values())).device.type == "cuda":
        tolerance = max(tolerance, 1e-2)
    for name, moved in ((name, expected[name] - start[name]) for name in start):
        assert moved.abs().max() > 1e-3, f"{name} did not move"
        error = ((got[name] - expected[name]).norm() / moved.norm()).item()
        assert error < tolerance, f"{name}: off by {error:.1e} of its way"


@in_either_precision
@in_every_mode
def test_td3_equals_the_reference(mode, device, amp):
    reference, fast = td3_reference(device, amp=amp), td3_fast(mode, device, amp=amp)
    start, ours = td3_parameters(reference, fast)
    assert all(torch.equal(start[name], ours[name]) for name in start)
    for side in (reference, fast):
        torch.manual_seed(2)
        for n in range(1, NUM_UPDATES + 1):
            side.update(n % 2 == 0)
    assert [int(optimizer.num_steps) for optimizer in fast.optimizers] == [NUM_UPDATES // 2, NUM_UPDATES]
    parameters = td3_parameters(reference, fast)
    assert_moved_together(start, *parameters, tolerance=1e-3 if amp == "none" else BF16_TOLERANCE)
    assert_same_losses(fast.losses, reference.losses, amp)


# --------------------------------------------------------------------------------------------------------------- SAC


def sac_reference(device: torch.device, **changes):
    sac = importlib.import_module("leanrl.sac_continuous_action")
    args = sac.Args(**changes)
    torch.manual_seed(1)
    actor, critics = sac.Actor(OBS_DIM, LOW, HIGH).to(device), sac.Critics(OBS_DIM, len(LOW)).to(device)
    critics_target = deepcopy(critics)
    log_alpha = torch.tensor([1.0 if args.autotune else args.alpha], device=device).log().requires_grad_()
    optimizers = [
        torch.optim.Adam(parameters, lr=lr, eps=EPS)
        for parameters, lr in ((actor.parameters(), args.policy_lr), (critics.parameters(), args.q_lr))
    ]
    optimizers.append(torch.optim.Adam([log_alpha], lr=args.q_lr, eps=EPS))
    update, losses = sac.make_update(
        actor, critics, critics_target, log_alpha, *optimizers, filled_replay(device), args
    )
    numbers = itertools.count(1)

    def numbered_update(with_actor: bool) -> None:
        update(with_actor, with_targets=next(numbers) % args.target_network_frequency == 0)

    networks = SimpleNamespace(actor=actor, critics=critics, critics_target=critics_target, log_alpha=log_alpha)
    return SimpleNamespace(update=numbered_update, losses=losses, networks=networks)


@torch.no_grad()
def sac_fast(mode: str, device: torch.device, **changes):
    sac = importlib.import_module("leanrl.sac_continuous_action_torchcompile")
    args = sac.Args(**changes)
    torch.manual_seed(1)
    actor, critics = sac.Actor(OBS_DIM, LOW, HIGH).to(device), sac.Critics(OBS_DIM, len(LOW)).to(device)
    temperature = sac.Temperature(1.0 if args.autotune else args.alpha).to(device)
    rates = {actor: args.policy_lr, critics: args.q_lr, temperature: args.q_lr}
    optimizers = [FlatAdam(network, lr=lr, eps=EPS) for network, lr in rates.items()]
    critics_target = optimizers[1].params.clone()
    update, losses = sac.make_update(*optimizers, critics_target, filled_replay(device), args)
    touched = [tensor for optimizer in optimizers for tensor in optimizer.tensors()] + [critics_target, losses]
    updates = {
        flag: make_executable(mode, partial(update, flag), device, touched, **sac.EXACT_TANH) for flag in (False, True)
    }
    return SimpleNamespace(
        update=lambda with_actor: updates[with_actor](),
        losses=losses,
        optimizers=optimizers,
        critics_target=critics_target,
    )


def sac_parameters(reference, fast) -> tuple[dict, dict]:
    """As td3_parameters."""
    networks = reference.networks
    expected = {
        "actor": networks.actor.parameters(),
        "critics": twins(networks.critics),
        "log_alpha": [networks.log_alpha],
        "critics target": twins(networks.critics_target),
    }
    expected = {name: torch.cat([p.detach().reshape(-1) for p in ps]) for name, ps in expected.items()}
    actor, critics, temperature = fast.optimizers
    # The reference has two heads, weight and bias each; the fast rung one.
    pieces = actor.unflatten(actor.params)
    *body, weight, bias = [pieces[name] for name in pieces]
    heads = [x for pair in zip(weight.chunk(2), bias.chunk(2), strict=True) for x in pair]
    ours = [
        torch.cat([x.reshape(-1) for x in [*body, *heads]]),
        critics.params,
        temperature.params,
        fast.critics_target,
    ]
    return expected, {name: x.clone() for name, x in zip(expected, ours, strict=True)}


@pytest.mark.parametrize(
    "changes",
    [{}, {"autotune": False, "target_network_frequency": 3}, {"amp": "bf16"}],
    ids=["autotune", "fixed", "bf16"],
)
@in_every_mode
def test_sac_equals_the_reference(mode, changes, device):
    """With every sequence of batches to 5e-2 of the way, and with one of six at least far closer, on any processor.

    Where both critics say nearly the same of an action, rounding decides which is the lower one, and that the actor
    learns from: in two of five sequences that leads 1e-2 of the way apart, else 1e-6. A rung that computed something
    else would do so in all of them.
    """
    rounded = "amp" in changes
    for seed in range(2, 8):
        reference, fast = sac_reference(device, **changes), sac_fast(mode, device, **changes)
        start, ours = sac_parameters(reference, fast)
        assert all(torch.equal(start[name], ours[name]) for name in start)
        for side in (reference, fast):
            torch.manual_seed(seed)
            for n in range(1, NUM_UPDATES + 1):
                side.update(n % 2 == 0)
        actor_steps = NUM_UPDATES // 2 * 2  # two at a time, every second update
        alpha_steps = actor_steps if changes.get("autotune", True) else 0
        assert [int(optimizer.num_steps) for optimizer in fast.optimizers] == [actor_steps, NUM_UPDATES, alpha_steps]
        expected, got = sac_parameters(reference, fast)
        if not alpha_steps:
            assert torch.equal(got.pop("log_alpha"), start.pop("log_alpha"))
        assert_moved_together(start, expected, got, tolerance=BF16_TOLERANCE if rounded else 5e-2)
        try:
            assert_moved_together(start, expected, got, tolerance=BF16_TOLERANCE if rounded else 1e-3)
            assert_same_losses(fast.losses, reference.losses, changes.get("amp", "none"))
        except AssertionError:
            if rounded or seed == 7:
                raise
        else:
            break


# --------------------------------------------------------------------------------------------------------------- DQN


@in_either_precision
@in_every_mode
def test_dqn_equals_the_reference(mode, device, amp):
    plain, quick = (importlib.import_module(f"leanrl.{name}") for name in ("dqn", "dqn_torchcompile"))
    args = plain.Args(learning_rate=1e-3, tau=0.7, amp=amp)
    torch.manual_seed(1)
    q_network = plain.QNetwork(OBS_DIM, 3).to(device)
    target_network = deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    replay = filled_replay(device, action_dim=1, discrete=3)
    update, losses = plain.make_update(q_network, target_network, optimizer, replay, args)

    flat = FlatAdam(deepcopy(q_network), lr=args.learning_rate, eps=1e-8)
    flat_target = flat.params.clone()
    replay = filled_replay(device, action_dim=1, discrete=3)
    with torch.no_grad():
        fast_update, fast_losses = quick.make_update(flat, flat_target, replay, args)
        fast_update = make_executable(mode, fast_update, device, [*flat.tensors(), fast_losses])

    def parameters(network) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in network.parameters()])

    start = {"network": parameters(q_network), "target": parameters(target_network)}
    torch.manual_seed(2)
    for n in range(1, NUM_UPDATES + 1):
        update()
        if n % 25 == 0:
            plain.update_target(q_network, target_network, args.tau)
    torch.manual_seed(2)
    with torch.no_grad():
        for n in range(1, NUM_UPDATES + 1):
            fast_update()
            if n % 25 == 0:
                flat_target.lerp_(flat.params, args.tau)
    assert int(flat.num_steps) == NUM_UPDATES
    expected = {"network": parameters(q_network), "target": parameters(target_network)}
    got = {"network": flat.params, "target": flat_target}
    assert_moved_together(start, expected, got, tolerance=1e-3 if amp == "none" else BF16_TOLERANCE)
    assert_same_losses(fast_losses, losses, amp)


@pytest.mark.parametrize("script", OFF_POLICY)
def test_values_have_more_digits_than_bf16(script):
    """What autocast leaves to the networks' last layers: at a hundred, bf16's next number is 0.5 away."""
    module = importlib.import_module(f"leanrl.{script}")
    obs, actions = torch.randn(64, OBS_DIM), torch.randn(64, 2)
    with torch.autocast("cpu", torch.bfloat16):
        if script.startswith("dqn"):
            values = module.QNetwork(OBS_DIM, 3)(obs)
        else:
            values = module.Critics(OBS_DIM, 2)(obs, actions)
    assert values.dtype == torch.float32
    assert (values != values.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("script", [script for script in OFF_POLICY if script.startswith("td3")])
def test_td3_actions_have_more_digits_than_bf16(script):
    """The actor's last layer too is float32: with it in bf16 HalfCheetah was learned more slowly."""
    actor = importlib.import_module(f"leanrl.{script}").Actor(OBS_DIM, np.full(2, -1.0), np.full(2, 1.0))
    with torch.autocast("cpu", torch.bfloat16):
        actions = actor(torch.randn(64, OBS_DIM))
    before_tanh = torch.atanh(actions.double())
    rounded = before_tanh.bfloat16().double()
    assert actions.dtype == torch.float32
    assert ((before_tanh - rounded).abs() > 1e-5 * before_tanh.abs()).float().mean() > 0.9


def test_dqn_stages_what_the_reference_writes():
    """Transitions written together, reset steps and an unfilled end included, make the same replay."""
    quick = importlib.import_module("leanrl.dqn_torchcompile")
    rng = np.random.default_rng(0)
    plain, staged = Replay(20, OBS_DIM, 1, CPU), Replay(20, OBS_DIM, 1, CPU)
    staging = quick.Staging(4, 2, OBS_DIM, CPU)
    for step in range(30):
        obs, next_obs = rng.normal(size=(2, 2, OBS_DIM))
        told = rng.integers(3, size=2), rng.normal(size=2), rng.random(2) < 0.2, rng.random(2) < 0.2
        staging.add(obs, next_obs, *told)
        actions, *rest = (torch.as_tensor(x, dtype=torch.float32) for x in told)
        plain.add(torch.tensor(obs).float(), torch.tensor(next_obs).float(), actions[:, None], *rest)
        if staging.num_staged == staging.capacity or step == 29:
            staged.add(*staging.split(staging.take()))
    assert staging.num_staged == 0
    assert plain.size.item() == 20 and torch.equal(plain.cursor, staged.cursor)
    assert torch.equal(plain.rows[:20], staged.rows[:20])
