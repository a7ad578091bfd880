"""The fast variants of the on-policy scripts train as the references do, in every mode; on Atari they act so, too."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from scripts import ATARI, ON_POLICY_REFERENCES

from leanrl.support.executables import WARMUP_CALLS, untouched
from leanrl.support.optim import Adam

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OBS_DIM, NUM_ACTIONS = 11, 3
# Where gradients are clipped at 1, they are.
ARGS = {
    "ppo_continuous_action": dict(num_envs=2, num_steps=128, ent_coef=0.01),
    "ppo_atari_envpool": dict(num_envs=4, num_steps=16, learning_rate=1e-4),
    "pqn": dict(num_envs=4, num_steps=32, max_grad_norm=1.0),
    "pqn_atari_envpool": dict(num_envs=4, num_steps=16, learning_rate=1e-4, max_grad_norm=1.0),
}
MODES = {
    "eager": {},
    "compile": dict(compile=True),
    "cudagraphs": dict(cudagraphs=True),
    "compile+cudagraphs": dict(compile=True, cudagraphs=True),
}
ONE_GRAPH_MODES = {
    "one-graph": dict(cudagraphs=True, one_graph=True),
    "compile+one-graph": dict(compile=True, cudagraphs=True, one_graph=True),
}
in_every_mode = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.cuda) if "cudagraphs" in mode else mode for mode in MODES]
)


def modules_of(script: str) -> list:
    """The reference and the fast variant."""
    return [importlib.import_module(f"leanrl.{script}{end}") for end in ("", "_torchcompile")]


def mode_args(script: str, mode: str, **changes) -> tuple:
    """The fast variant's arguments, and the device that ``mode`` needs."""
    levers = (MODES | ONE_GRAPH_MODES)[mode]
    args = modules_of(script)[1].Args(**{**ARGS[script], **levers, **changes})
    return args, CUDA if args.cudagraphs else CPU


def parameters_of(module: nn.Module) -> torch.Tensor:
    """A copy of all of them in one vector."""
    return torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])


def random_frames(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*sizes, 4, 84, 84), generator=generator, dtype=torch.uint8)


def fill(rollout) -> None:
    """Plausible numbers, the same every time; about a tenth of the steps only reset."""
    generator = torch.Generator().manual_seed(0)
    for name, column in rollout._asdict().items():
        if column.is_floating_point():
            numbers = torch.randn(column.shape, generator=generator)
        else:
            high = 256 if column.dtype == torch.uint8 else NUM_ACTIONS
            numbers = torch.randint(high, column.shape, generator=generator, dtype=column.dtype)
        if name == "logprobs":  # of actions in three dimensions, or of one of few actions
            numbers = 0.3 * numbers - 4.0 if rollout.actions.dim() == 3 else 0.1 * numbers - 1.1
        column.copy_(numbers > -1.3 if name == "mask" else numbers)


def make_side(module, adam, args, device: torch.device) -> SimpleNamespace:
    """A variant's network, rollout and update, with the same numbers in both variants."""
    torch.manual_seed(3)
    make_network = getattr(module, "Agent", None) or module.QNetwork
    if "atari" in module.__name__:
        network = make_network(NUM_ACTIONS, **({"norm_obs": True} if getattr(args, "norm_obs", False) else {}))
        network.to(device, memory_format=torch.channels_last)
        if getattr(args, "norm_obs", False):
            network.observe(random_frames(20, seed=5).to(device))
        rollout = module.Rollout.allocate(random_frames(args.num_envs).to(device), args)
    else:
        network = make_network(OBS_DIM, NUM_ACTIONS).to(device)
        sizes = (OBS_DIM,) if "pqn" in module.__name__ else (OBS_DIM, NUM_ACTIONS)
        rollout = module.Rollout.allocate(args.num_steps, args.num_envs, *sizes, device)
    fill(rollout)
    optimizer = adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    update = module.make_update(network, optimizer, rollout, args)
    return SimpleNamespace(module=module, network=network, rollout=rollout, optimizer=optimizer, update=update)


def minibatches(args, device: torch.device, count: int) -> list[torch.Tensor]:
    """Indices of a quarter of the batch each."""
    generator, size = torch.Generator().manual_seed(1), args.num_steps * args.num_envs
    return [torch.randperm(size, generator=generator)[: size // 4].to(device) for _ in range(count)]


# Where the other precision is compiled by default.
LONG_CASES = {(script, "compile", "bf16") for script in ("ppo_continuous_action", "pqn", "pqn_atari_envpool")}
LONG_CASES |= {("ppo_atari_envpool", "compile", "none")}


def cases() -> list:
    found = []
    for script in ON_POLICY_REFERENCES:
        for mode in MODES | (ONE_GRAPH_MODES if script == "ppo_atari_envpool" else {}):
            for amp in ("none", "bf16"):
                marks = [] if mode in ("eager", "compile") else [pytest.mark.cuda]
                if (script, mode, amp) in LONG_CASES:
                    marks = [pytest.mark.long]
                found.append(pytest.param((script, mode, amp), marks=marks, id=f"{script}-{mode}-{amp}"))
    return found


@pytest.fixture(scope="module")
def float32_convolutions():
    """Without TF32, which a GPU uses by default: it has three digits, and the reference computes on the CPU.

    And, as in a run, without the convolutions whose sums have another order each time.
    """
    settings, cudnn = torch.backends.cudnn.conv, torch.backends.cudnn
    before = settings.fp32_precision, cudnn.deterministic
    settings.fp32_precision, cudnn.deterministic = "ieee", True
    yield
    settings.fp32_precision, cudnn.deterministic = before


@pytest.fixture(scope="module", params=cases())
def pair(request, float32_convolutions) -> SimpleNamespace:
    """Both variants with the same weights and rollout, the fast one compiled or captured once for all tests."""
    script, mode, amp = request.param
    args, device = mode_args(script, mode, amp=amp)
    if script == "ppo_atari_envpool":
        args.norm_obs = amp == "bf16"
    torch.set_num_threads(1)
    reference, fast = modules_of(script)
    plain, quick = make_side(reference, torch.optim.Adam, args, CPU), make_side(fast, Adam, args, device)
    if script == "ppo_atari_envpool":
        quick.noise = torch.zeros(args.num_steps + 1, args.num_envs, NUM_ACTIONS, device=device)
        policy_step, quick.start = fast.make_policy_step(quick.network, quick.rollout, quick.noise, args)
        # Epochs of one minibatch, so that parameters can be compared after each.
        epoch_args, obs = replace(args, num_steps=args.num_steps // 4, num_minibatches=1), quick.rollout.obs[0].clone()
        quick.act, quick.update = fast.make_executables(policy_step, quick.update, obs, epoch_args)
    elif script == "pqn_atari_envpool":
        policy_step, quick.start = fast.make_policy_step(quick.network, quick.rollout, args)
        quick.act, quick.update = fast.make_executables(policy_step, quick.update, args, device)
    else:
        acting = quick.network if script == "pqn" else lambda: None
        _, quick.update = fast.make_executables(acting, quick.update, args, device)
    return SimpleNamespace(script=script, args=args, device=device, plain=plain, quick=quick, in_bf16=amp == "bf16")


@torch.no_grad()
def check_acting(pair: SimpleNamespace, tolerance: float, logprob_tolerance: float) -> None:
    """A rollout of the fast variant against the reference's outputs; PPO's samples are those of the noise."""
    plain, quick, seen = pair.plain, pair.quick, []
    quick.start()
    for t, obs in enumerate(random_frames(pair.args.num_steps + 1, pair.args.num_envs, seed=1)):
        with torch.autocast("cpu", torch.bfloat16, enabled=pair.in_bf16):
            outputs = plain.network(obs)
        if pair.script == "ppo_atari_envpool":
            probs, values = outputs
            actions = torch.from_numpy(quick.act(obs.numpy()))
            scores = probs.logits + quick.noise[t].cpu()
            logprobs = quick.rollout.logprobs[t].cpu()
            torch.testing.assert_close(logprobs, probs.log_prob(actions), rtol=0, atol=logprob_tolerance)
            assert torch.equal(quick.rollout.actions[t].cpu(), actions)
        else:
            actions, scores = quick.act(obs.to(pair.device)).cpu(), outputs
            plain.module.policy_step(plain.network, plain.rollout, t, obs, pair.args)
            assert torch.equal(plain.rollout.obs[t], obs)
            values = plain.rollout.values[t]
        # Where rounding decides between two actions, it may.
        assert (scores.amax(1) - scores.gather(1, actions[:, None])[:, 0] <= tolerance).all()
        torch.testing.assert_close(quick.rollout.values[t].cpu(), values, rtol=0, atol=tolerance)
        assert torch.equal(quick.rollout.obs[t].cpu(), obs)
        seen.append(actions)
    assert pair.script == "pqn_atari_envpool" or len(torch.stack(seen).unique(dim=0)) > 1, "samples repeat"


def test_updates_and_acting_equal_the_reference(pair) -> None:
    """bf16 rounds differently in a fused kernel; another device sums in another order."""
    script, plain, quick, in_bf16 = pair.script, pair.plain, pair.quick, pair.in_bf16
    on_cpu = pair.device.type == "cpu"
    start = parameters_of(plain.network)
    assert torch.equal(parameters_of(quick.network), start)
    if script == "ppo_atari_envpool":
        check_acting(pair, *((0.02, 1e-3) if in_bf16 else (1e-5, 1e-5)))
    elif script == "pqn_atari_envpool":
        check_acting(pair, 0.03 if in_bf16 else 1e-4, 0.0)

    fill(plain.rollout)
    fill(quick.rollout)
    losses, expected_losses, errors, drifts = [], [], [], []
    for inds in minibatches(pair.args, CPU, 10 if script == "pqn_atari_envpool" else 50):
        expected_losses.append(plain.update(inds))
        losses.append(quick.update(inds.to(pair.device)).cpu().clone())
        expected, got = parameters_of(plain.network), parameters_of(quick.network)
        errors.append(((got - expected).norm() / (expected - start).norm()).item())
        drifts.append((got - expected).abs().max().item())
    moved = (expected - start).abs()
    losses, expected_losses = torch.stack(losses), torch.stack(expected_losses)
    assert quick.optimizer.num_steps.unique().item() == len(losses)

    if script == "ppo_continuous_action":
        assert moved.max() > 1e-2, "the reference took no real steps"
        assert drifts[-1] < (0.15 * moved.max() if in_bf16 else 2e-6 if on_cpu else 2e-5)
    elif script == "pqn":
        assert moved.max() > 5e-3
        assert errors[-1] < (0.1 if in_bf16 else 1e-4 if on_cpu else 1e-3)
    elif script == "pqn_atari_envpool":
        assert moved.mean() > 1e-4
        # Adam's first steps are as long where the gradient is rounding alone.
        assert max(errors) < (0.5 if in_bf16 else 0.02)
    else:
        assert moved.mean() > 1e-4
        # A rounding error may switch a unit off, and grows from step to step: at first there is none but rounding. A
        # GPU rounds otherwise from the first layer on.
        assert drifts[9] < 1e-6 or in_bf16 or not on_cpu
        # On a CPU bf16 makes up to 0.34, half the learning rate would make 0.5.
        limit = (0.45 if in_bf16 else 0.05) * moved.mean()
        for (name, p), q in zip(plain.network.named_parameters(), quick.network.parameters(), strict=True):
            assert (q.detach().cpu() - p.detach()).abs().mean() < limit, name
    if not in_bf16:
        tolerance = dict(rtol=1e-3, atol=1e-3) if script in ATARI else dict(rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(losses, expected_losses, **tolerance)
    elif script == "pqn_atari_envpool":
        torch.testing.assert_close(losses[0], expected_losses[0], rtol=3e-2, atol=3e-2)
    elif script == "ppo_atari_envpool":  # one row of 16 that rounding takes over the clip's edge is much of clipfrac
        torch.testing.assert_close(losses[0], expected_losses[0], rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(losses[:, :-1], expected_losses[:, :-1], rtol=2e-2, atol=2e-2)

    # And what acts now is what was learned: with a stale copy PPO's log-probabilities are 0.017 apart.
    plain.network.load_state_dict(quick.network.state_dict())
    if script == "ppo_atari_envpool":
        check_acting(pair, *((0.05, 5e-3) if in_bf16 else (1e-4, 1e-4)))
    elif script == "pqn_atari_envpool":
        check_acting(pair, 0.03 if in_bf16 else 1e-4, 0.0)


def test_a_new_learning_rate_reaches_the_step(pair) -> None:
    """A loaded one too."""
    network, optimizer = pair.quick.network, pair.quick.optimizer
    fill(pair.quick.rollout)
    inds = minibatches(pair.args, pair.device, 1)[0]

    def moves() -> bool:
        before = parameters_of(network)
        pair.quick.update(inds)
        return not torch.equal(parameters_of(network), before)

    with untouched([network.state_dict(), optimizer.state_dict()], pair.device):
        assert all(moves() for _ in range(WARMUP_CALLS + 1))
        for rate in (0.0, 1e-3):
            optimizer.param_groups[0]["lr"].fill_(rate)
            assert moves() == (rate > 0.0)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": {}, "param_groups": [{"lr": 0.0}]})
        assert not moves()
    optimizer.param_groups[0]["lr"].fill_(pair.args.learning_rate)


def test_the_same_updates_again_give_the_same_bits(pair) -> None:
    results = []
    for _ in range(2):
        with untouched([pair.quick.network.state_dict(), pair.quick.optimizer.state_dict()], pair.device):
            fill(pair.quick.rollout)
            before = parameters_of(pair.quick.network)
            losses = [pair.quick.update(inds).clone() for inds in minibatches(pair.args, pair.device, 5)]
            results.append((parameters_of(pair.quick.network), *losses))
            assert not torch.equal(results[-1][0], before)
    assert all(map(torch.equal, *results))
