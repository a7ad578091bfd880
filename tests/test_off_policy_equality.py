"""The fast variants of the off-policy scripts compute what the references compute, update for update."""

import importlib
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripts import of
from torch.utils._pytree import tree_leaves

from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.normalization import RunningMoments
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


def in_every_mode(long: tuple[str, ...] = ()):
    """Parametrises a test: all modes in either precision; compiled on a CPU in those of ``long`` with --all alone.

    There compilation takes a minute. Each algorithm's default run compiles it in one precision at least.
    """
    cases = []
    for amp in ("none", "bf16"):
        cases.append(("eager", CPU, amp))
        cases.append(pytest.param("compile", CPU, amp, marks=[pytest.mark.long] if amp in long else []))
        cases += [pytest.param(mode, CUDA, amp, marks=pytest.mark.cuda) for mode in CUDA_MODES]
    return pytest.mark.parametrize(("mode", "device", "amp"), cases, ids=str)


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


# ----------------------------------------------------------------------------------------------------------- LEARNERS


def learner(script: str, mode: str, device: torch.device, **changes) -> SimpleNamespace:
    """A script's networks, which train by ``update(*turn)`` in ``mode``; every script makes the same ones."""
    module = importlib.import_module(f"leanrl.{script}")
    args, adam = module.Args(**changes), getattr(module, "Adam", torch.optim.Adam)
    torch.manual_seed(1)
    parts = of(script, PARTS)(module, adam, args, device)
    replay = filled_replay(device, *((1, 3) if script.startswith("dqn") else ()))
    update, losses = module.make_update(**parts, replay=replay, args=args)
    touched = [x for part in parts.values() for x in tensors(part)] + [*losses]

    @cache
    def executable(*turn):
        """Compiled or captured, and warmed up without a trace."""
        made = make_executable(partial(update, *turn), device, "compile" in mode, "cudagraphs" in mode)
        with untouched(touched, device):
            for _ in range(WARMUP_CALLS if mode != "eager" else 0):
                made()
        return made

    return SimpleNamespace(update=lambda *turn: executable(*turn)(), losses=losses, parts=parts, args=args)


def td3_parts(td3, adam, args, device: torch.device) -> dict:
    actor, critics = td3.Actor(OBS_DIM, LOW, HIGH).to(device), td3.Critics(OBS_DIM, len(LOW)).to(device)
    return {
        **{"actor": actor, "critics": critics, "actor_target": deepcopy(actor), "critics_target": deepcopy(critics)},
        "actor_optimizer": adam(actor.parameters(), lr=args.learning_rate),
        "q_optimizer": adam(critics.parameters(), lr=args.learning_rate),
    }


def sac_parts(sac, adam, args, device: torch.device, *more) -> dict:
    actor, critics = sac.Actor(OBS_DIM, LOW, HIGH).to(device), sac.Critics(OBS_DIM, len(LOW), *more).to(device)
    log_alpha = torch.tensor([1.0 if args.autotune else args.alpha], device=device).log().requires_grad_()
    return {
        **{"actor": actor, "critics": critics, "critics_target": deepcopy(critics), "log_alpha": log_alpha},
        "actor_optimizer": adam(actor.parameters(), lr=args.policy_lr, eps=EPS),
        "q_optimizer": adam(critics.parameters(), lr=args.q_lr, eps=EPS),
        "a_optimizer": adam([log_alpha], lr=args.q_lr, eps=EPS),
    }


def dqn_parts(dqn, adam, args, device: torch.device) -> dict:
    q_network = dqn.QNetwork(OBS_DIM, 3).to(device)
    optimizer = adam(q_network.parameters(), lr=args.learning_rate)
    return {"q_network": q_network, "target_network": deepcopy(q_network), "optimizer": optimizer}


def fast_sac_parts(fast_sac, adam, args, device: torch.device) -> dict:
    parts = sac_parts(fast_sac, adam, args, device, args)
    parts["obs_moments"] = obs_moments = RunningMoments((OBS_DIM,)).to(device)
    obs_moments.update(2 + 3 * torch.randn(50, OBS_DIM, device=device))
    return parts


PARTS = {"dqn": dqn_parts, "sac": sac_parts, "td3": td3_parts, "fast_sac": fast_sac_parts}


def tensors(part) -> list[torch.Tensor]:
    """Of a tensor, a module or an optimiser, at their addresses."""
    state = part if isinstance(part, torch.Tensor) else part.state_dict()
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def parameters(side: SimpleNamespace) -> dict[str, torch.Tensor]:
    """A copy of what is trained, one flat vector each."""
    trained = {name: tensors(part) for name, part in side.parts.items() if "optimizer" not in name}
    return {name: torch.cat([x.detach().reshape(-1) for x in xs]) for name, xs in trained.items()}


def steps_of(side: SimpleNamespace) -> dict[str, int]:
    """How often each optimiser has stepped."""
    states = {name: part.state.values() for name, part in side.parts.items() if "optimizer" in name}
    return {name: max((int(x["step"]) for x in state), default=0) for name, state in states.items()}


def averages_of(side: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Of the gradients, one flat vector for each optimiser that has stepped."""
    states = {name: side.parts[name].state.values() for name, steps in steps_of(side).items() if steps}
    return {name: torch.cat([x["exp_avg"].flatten() for x in state]) for name, state in states.items()}


def take_over(side: SimpleNamespace, other: SimpleNamespace) -> None:
    """Gives one side the other's state, in place."""
    for name, part in side.parts.items():
        if isinstance(part, torch.Tensor):
            part.data.copy_(other.parts[name])
        else:
            part.load_state_dict(other.parts[name].state_dict())


def assert_same_losses(losses: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], amp: str = "none") -> None:
    tolerance = 1e-3 if amp == "none" else 2e-2
    torch.testing.assert_close(tuple(losses), tuple(expected), atol=tolerance, rtol=tolerance)


def assert_moved_together(start: dict, expected: dict, got: dict, tolerance: float = 1e-3) -> None:
    """Each vector moved from ``start`` as it was expected to, but for ``tolerance`` of the way, on a GPU 1e-2."""
    if next(iter(got.values())).device.type == "cuda":
        tolerance = max(tolerance, 1e-2)
    for name, moved in ((name, expected[name] - start[name]) for name in start):
        assert moved.abs().max() > 1e-3, f"{name} did not move"
        error = ((got[name] - expected[name]).norm() / moved.norm()).item()
        assert error < tolerance, f"{name}: off by {error:.1e} of its way"


# ----------------------------------------------------------------------------------------------------------- EQUALITY


def assert_equal_training(
    script: str, mode: str, device: torch.device, turn, steps: dict, fixed=(), after=None, **changes
) -> None:
    """Each of many updates moves everything as the reference's does, from where that is.

    From its own place a variant would part from the reference now and then: where both critics say nearly the same,
    rounding decides which is the lower one, and that is learned from.

    Args:
        turn: the arguments of update n, from 1.
        steps: what each optimiser of the variant is to have counted.
        fixed: names of what is not to move.
        after: what to call with the script, a side and n after its update n.
        changes: of the scripts' arguments.
    """
    amp = changes.get("amp", "none")
    reference = learner(script, "eager", device, **changes)
    fast = learner(f"{script}_torchcompile", mode, device, **changes)
    start, ours = parameters(reference), parameters(fast)
    assert all(torch.equal(start[name], ours[name]) for name in start)
    errors = dict.fromkeys(start, 0.0)
    for n in range(1, NUM_UPDATES + 1):
        take_over(fast, reference)
        for name, side in ((script, reference), (f"{script}_torchcompile", fast)):
            torch.manual_seed(n)
            side.update(*turn(n))
            after and after(name, side, n)
        expected, got = parameters(reference), parameters(fast)
        errors = {name: errors[name] + (got[name] - expected[name]).abs() for name in start}  # none cancels another
    assert steps_of(fast) == steps
    assert not any((expected.pop(name) - start.pop(name)).any() or errors[name].any() for name in fixed)
    tolerance = 1e-3 if amp == "none" else 1e-2
    assert_moved_together(start, expected, {name: expected[name] + errors[name] for name in start}, tolerance)
    averages = [{name: 0 * x for name, x in averages_of(reference).items()}, *map(averages_of, (reference, fast))]
    assert_moved_together(*averages, tolerance)
    assert_same_losses(fast.losses, reference.losses, amp)


@in_every_mode(long=("none",))
def test_td3_equals_the_reference(mode, device, amp):
    steps = {"actor_optimizer": NUM_UPDATES // 2, "q_optimizer": NUM_UPDATES}
    assert_equal_training("td3_continuous_action", mode, device, lambda n: (n % 2 == 0,), steps, amp=amp)


@in_every_mode(long=("bf16",))
def test_sac_equals_the_reference(mode, device, amp):
    steps = dict.fromkeys(("actor_optimizer", "q_optimizer", "a_optimizer"), NUM_UPDATES)  # two every second update
    turn = lambda n: (n % 2 == 0, True)  # noqa: E731
    assert_equal_training("sac_continuous_action", mode, device, turn, steps, amp=amp)


@in_every_mode(long=("none", "bf16"))
def test_sac_with_a_fixed_coefficient_equals_the_reference(mode, device, amp):
    changes = {"autotune": False, "target_network_frequency": 3, "policy_updates": 1, "amp": amp}
    steps = {"actor_optimizer": NUM_UPDATES // 2, "q_optimizer": NUM_UPDATES, "a_optimizer": 0}
    turn = lambda n: (n % 2 == 0, n % 3 == 0)  # noqa: E731
    assert_equal_training("sac_continuous_action", mode, device, turn, steps, fixed=("log_alpha",), **changes)


@in_every_mode(long=("bf16",))
def test_fast_sac_equals_the_reference(mode, device, amp):
    steps = {"actor_optimizer": NUM_UPDATES // 2, "q_optimizer": NUM_UPDATES, "a_optimizer": NUM_UPDATES}
    turn = lambda n: (n % 2 == 0,)  # noqa: E731
    assert_equal_training("fast_sac", mode, device, turn, steps, fixed=("obs_moments",), amp=amp)


@in_every_mode(long=("bf16",))
def test_dqn_equals_the_reference(mode, device, amp):
    def move_target(script: str, side: SimpleNamespace, n: int) -> None:
        if n % 25 == 0:
            move = importlib.import_module(f"leanrl.{script}").update_target
            move(side.parts["q_network"], side.parts["target_network"], side.args.tau)

    changes = {"learning_rate": 1e-3, "tau": 0.7, "amp": amp}
    assert_equal_training("dqn", mode, device, lambda n: (), {"optimizer": NUM_UPDATES}, after=move_target, **changes)


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
