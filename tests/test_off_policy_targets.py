"""Targets, losses and updates of SAC, FastSAC, TD3 and DQN against slow transcriptions of their papers.

The fast variants have them in the same words.
"""

import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import leanrl.dqn as dqn
import leanrl.fast_sac as fast_sac
import leanrl.sac_continuous_action as sac
import leanrl.td3_continuous_action as td3
import leanrl.td3_continuous_action_torchcompile as fast_td3
from leanrl.support.replay import Batch, LastStep

# Bounds other than ±1, and different from one dimension to the next.
LOW, HIGH = np.float32([-3.0, -0.4]), np.float32([3.0, 0.2])
SCALE, BIAS = torch.tensor([3.0, 0.3]).double(), torch.tensor([0.0, -0.1]).double()
OBS_DIM, BATCH_SIZE, NUM_UPDATES = 5, 32, 4
in_either_precision = pytest.mark.parametrize("amp", ["none", "bf16"])


def random_batch(seed=0, discrete=0, dtype=torch.float64):
    """Transitions, a third of them terminations."""
    g = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, BATCH_SIZE, OBS_DIM, generator=g, dtype=torch.float64)
    actions = BIAS + SCALE * (2 * torch.rand(BATCH_SIZE, 2, generator=g, dtype=torch.float64) - 1)
    if discrete:
        actions = torch.randint(discrete, (BATCH_SIZE, 1), generator=g).double()
    rewards = torch.randn(BATCH_SIZE, generator=g, dtype=torch.float64)
    terminations = (torch.rand(BATCH_SIZE, generator=g) < 1 / 3).double()
    assert 0 < terminations.sum() < BATCH_SIZE
    if dtype == torch.float32:  # values near 100 stay there
        rewards, terminations = rewards + 1, 0 * terminations
    return Batch(*(x.to(dtype) for x in (obs, next_obs, actions, rewards, terminations)))


def replay_of(batches):
    """What an update knows of a replay; it samples these batches in turn."""
    batches = iter(batches)
    return SimpleNamespace(rows=torch.zeros(1), sample=lambda batch_size: next(batches))


def in_precision(args, *critics):
    """``(tolerance, dtype)``, and the critics in float32 for --amp bf16, otherwise in float64.

    Values in bf16 are near 100, where it has steps of 0.5: losses and targets that are rounded to it would be seen.
    """
    if args.amp == "none":
        for critic in critics:
            critic.double()
        return 1e-5, torch.float64
    args.tau = 0.5  # so that float32 tells how targets move
    for critic in critics:
        [*critic.parameters()][-1].data += 100
    # Sums in another order may round to the other side, which FastSAC's mean over 51 atoms makes larger.
    return 0.05 if isinstance(args, fast_sac.Args) else 0.02, torch.float32


def assert_same_way(ours, theirs, start, tolerance):
    """``ours`` has moved from ``start`` to where ``theirs`` has, but for ``tolerance`` of the way."""
    ours, theirs, start = (torch.cat([p.detach().flatten() for p in x.parameters()]) for x in (ours, theirs, start))
    way = (theirs - start).norm()
    assert way > (1e-4 if ours.dtype == torch.float64 else 1e-6) and (ours - theirs).norm() < tolerance * way


def optimizer_of(module, lr):
    """Adam; for --amp bf16 SGD, as Adam's first steps are only signs, and rounding decides those of small gradients."""
    if next(module.parameters()).dtype == torch.float32:
        return torch.optim.SGD(module.parameters(), lr / 10)
    return torch.optim.Adam(module.parameters(), lr, betas=(0.9, 0.999), eps=1e-8)


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def move(target, trained, tau):
    for old, new in zip(target.parameters(), trained.parameters(), strict=True):
        old.copy_(tau * new + (1 - tau) * old)


# ----------------------------------------------------------------------------------------------------------- NETWORKS


def qf_parameters(critics, number):
    """The parameters of one of two critics: weights [in, out] and biases [1, out] in turn."""
    return [p[number] for p in critics.parameters()]


def rounded(x):
    """To bf16's precision under autocast."""
    return x.bfloat16().to(x.dtype) if torch.is_autocast_enabled("cpu") else x


def product(x, weight):
    """[B, in] and [in, out] -> [B, out]"""
    return (x[:, :, None] * weight).sum(1)


def slow_mlp(parameters, x, bias_inside=False):
    """Two hidden layers with relu, the product between them in bf16 under autocast.

    ``bias_inside``: its bias is added before the sum is rounded, as nn.Linear does.
    """
    w1, b1, w2, b2, w3, b3 = parameters
    x = product(rounded(torch.relu(product(x, w1) + b1)), rounded(w2))
    x = torch.relu(rounded(x + rounded(b2)) if bias_inside else rounded(x) + b2)
    return product(x, w3) + b3


def qf(critics, number):
    """One of two critics as a function of observations and actions."""
    return lambda obs, actions: slow_mlp(qf_parameters(critics, number), torch.cat([obs, actions], 1)).squeeze(1)


@pytest.mark.parametrize("module", [sac, td3, dqn])
def test_networks_in_either_precision(module):
    """Under autocast all but the product between the hidden layers stays float32."""
    torch.manual_seed(0)
    obs, actions = 10 + torch.randn(BATCH_SIZE, OBS_DIM), torch.randn(BATCH_SIZE, 2)
    bias_inside = module is dqn
    if bias_inside:
        network, inputs = module.QNetwork(OBS_DIM, 3), (obs,)
        slow = {"values": [p.t() for p in network.parameters()]}
    else:
        network, inputs = module.Critics(OBS_DIM, 2), (obs, actions)
        slow = {i: qf_parameters(network, i) for i in (0, 1)}
    for amp in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            values = network(*inputs)
            expected = torch.stack([slow_mlp(ps, torch.cat(inputs, 1), bias_inside) for ps in slow.values()])
        assert values.dtype == torch.float32
        # Where sums in another order round to the other side, an element of the hidden layer is off by 2**-8.
        assert (values.view_as(expected) - expected).abs().max() < (1e-3 if amp else 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        inexact = slow_mlp(next(iter(slow.values())), torch.cat(inputs, 1).bfloat16().float(), bias_inside)
    assert (inexact - expected[0]).abs().max() > 5e-3  # so observations in bf16 would be seen


@pytest.mark.parametrize("module", [sac, td3])
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
def test_actors_in_either_precision(module, amp):
    torch.manual_seed(0)
    actor, obs = module.Actor(OBS_DIM, LOW, HIGH), torch.randn(BATCH_SIZE, OBS_DIM)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        outputs = actor(obs)
        x = slow_mlp([p.t() for p in actor.parameters()], obs, bias_inside=True)
    mean, log_std = x.chunk(2, 1) if module is sac else (x, x)
    expected = (mean, -5 + 3.5 * (log_std.tanh() + 1)) if module is sac else (BIAS + SCALE * x.tanh()).float()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=2e-3 if amp else 1e-5)


@pytest.mark.parametrize("module", [sac, td3, fast_sac])
def test_an_actor_sees_unrounded_observations(module):
    """Hopper's height moves within 0.1 of 1.25, where bf16 has steps of 0.008."""
    layer, obs = module.Actor(OBS_DIM, np.full(2, -1.0), np.full(2, 1.0)).fc1, 1.25 + 0.1 * torch.randn(64, OBS_DIM)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layer(obs)
    torch.testing.assert_close(hidden, layer(obs), rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------------------- SAC


def density(mean, log_std, noise, margin=1e-6):
    """An action and its log-probability by a change of variables; ``margin`` is added to the slope of the squashing."""
    x = mean + log_std.exp() * noise
    slope = ((2 * (math.log(2) - x - F.softplus(-2 * x))).exp() * SCALE + margin).log()
    log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - slope
    return BIAS + SCALE * x.tanh(), log_prob.sum(1)


def test_density_of_squashed_actions():
    """Within the bounds, and with their scale in it."""
    torch.manual_seed(0)
    actor = sac.Actor(OBS_DIM, LOW, HIGH).double()
    obs, noise = torch.randn(1_000, OBS_DIM, dtype=torch.float64), torch.randn(1_000, 2, dtype=torch.float64)
    mean, log_std = actor(30 * obs)
    assert log_std.min() >= -5 and log_std.max() <= 2 and log_std.max() - log_std.min() > 3
    actor.forward = lambda obs: (mean, log_std.clamp(max=0))
    actions, log_prob = actor.get_action(obs, noise)
    expected = density(mean, log_std.clamp(max=0), noise, margin=0.0)
    torch.testing.assert_close(actions, expected[0])
    # 1e-6 is added to the derivative, which matters where an action is nearly at its bound.
    inside = ((actions - BIAS).abs() < 0.99 * SCALE).all(1)
    assert inside.sum() > 200
    torch.testing.assert_close(log_prob[inside], expected[1][inside], rtol=0, atol=1e-3)


def slow_sac(actor, critics, log_alpha, batches, args):
    """https://arxiv.org/abs/1812.05905, algorithm 1, with CleanRL's delayed policy updates."""
    critics_target = deepcopy(critics)
    qf1, qf2, qf1_target, qf2_target = (qf(twins, i) for twins in (critics, critics_target) for i in (0, 1))
    optimizers = [optimizer_of(actor, args.policy_lr), optimizer_of(critics, args.q_lr)]
    a_optimizer = torch.optim.Adam([log_alpha], lr=args.q_lr)
    for n, (obs, next_obs, actions, rewards, terminations) in enumerate(batches, start=1):
        # All of an update at once, as the script draws it: for the targets, twice the actor, twice the coefficient.
        noise = torch.randn(1 if n % 2 else 5, *actions.shape, dtype=actions.dtype)
        with torch.no_grad():
            next_actions, log_pi = density(*actor(next_obs), noise[0])
            q_next = torch.min(qf1_target(next_obs, next_actions), qf2_target(next_obs, next_actions))
            y = rewards + torch.where(terminations > 0, 0.0, 0.99 * (q_next - log_alpha.exp() * log_pi))
        step(optimizers[1], F.mse_loss(qf1(obs, actions), y) + F.mse_loss(qf2(obs, actions), y))
        if n % 2 == 0:
            for i in (1, 2):
                pi, log_pi = density(*actor(obs), noise[i])
                min_qf = torch.min(qf1(obs, pi), qf2(obs, pi))
                step(optimizers[0], (log_alpha.exp().detach() * log_pi - min_qf).mean())
                if args.autotune:
                    with torch.no_grad():
                        _, log_pi = density(*actor(obs), noise[i + 2])
                    step(a_optimizer, -(log_alpha.exp() * (log_pi - 2.0)).mean())  # two dimensions of actions
        move(critics_target, critics, args.tau)
    return critics_target


def assert_learns_as(slow_update, script, args, actor, critics, *more, alpha, **turn):
    """The script's updates, whose further arguments are ``more``, move all parts as the transcription does."""
    tolerance, dtype = in_precision(args, critics)
    actor.to(dtype)
    log_alpha = torch.tensor([alpha], dtype=dtype).log().requires_grad_()
    start = deepcopy((actor, critics, log_alpha))
    slow = deepcopy(start)
    batches = [random_batch(seed, dtype=dtype) for seed in range(NUM_UPDATES)]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.amp == "bf16"):
        slow_target = slow_update(*slow, *more, batches, args)
    critics_target = deepcopy(critics)
    optimizers = optimizer_of(actor, args.policy_lr), optimizer_of(critics, args.q_lr)
    parts = actor, critics, critics_target, log_alpha, *optimizers, torch.optim.Adam([log_alpha], lr=args.q_lr)
    update, losses = script.make_update(*parts, *more, replay_of(batches), args)
    torch.manual_seed(1)
    for n in range(1, NUM_UPDATES + 1):
        update(with_actor=n % 2 == 0, **turn)
    assert_same_way(actor, slow[0], start[0], tolerance)
    for ours, theirs in ((critics, slow[1]), (critics_target, slow_target)):
        assert_same_way(ours, theirs, start[1], tolerance)
    torch.testing.assert_close(log_alpha, slow[2], rtol=tolerance, atol=1e-8)
    assert torch.equal(log_alpha, start[2]) != args.autotune
    assert losses.alpha.item() == pytest.approx(log_alpha.exp().item(), rel=1e-6)


@in_either_precision
@pytest.mark.parametrize("autotune", [True, False])
def test_sac_update_is_the_papers(autotune, amp):
    args = sac.Args(autotune=autotune, batch_size=BATCH_SIZE, amp=amp)
    torch.manual_seed(0)
    actor, critics = sac.Actor(OBS_DIM, LOW, HIGH), sac.Critics(OBS_DIM, 2)
    assert_learns_as(slow_sac, sac, args, actor, critics, alpha=1.0 if autotune else 0.2, with_targets=True)


# ----------------------------------------------------------------------------------------------------------- FASTSAC


def slow_projection(probs, returns, atoms):
    """https://arxiv.org/abs/1707.06887, algorithm 1, and what it leaves out: a return that is one of the atoms."""
    projected = torch.zeros_like(probs)
    for i, j in np.ndindex(*probs.shape):
        place = (min(max(returns[i, j], atoms[0]), atoms[-1]) - atoms[0]) / (atoms[1] - atoms[0])
        lower, upper = math.floor(place), math.ceil(place)
        projected[i, lower] += probs[i, j] * (upper - place if upper > lower else 1)
        projected[i, upper] += probs[i, j] * (place - lower)
    return projected


def test_projection_is_the_papers():
    """Also of returns beyond the atoms, and of those that are atoms: the first and the last among them."""
    torch.manual_seed(0)
    atoms = torch.linspace(-2, 3, 11, dtype=torch.float64)
    probs = torch.randn(BATCH_SIZE, 11, dtype=torch.float64).softmax(1)
    returns = 3 * torch.randn(BATCH_SIZE, 11, dtype=torch.float64)
    returns[0] = atoms
    assert (returns < atoms[0]).any() and (returns > atoms[-1]).any()
    projected = fast_sac.project(probs, returns, atoms)
    torch.testing.assert_close(projected, slow_projection(probs, returns, atoms))
    torch.testing.assert_close(projected[0], probs[0])
    torch.testing.assert_close((projected * atoms).sum(1), (probs * returns.clamp(-2, 3)).sum(1))


def slow_layer_norm(x, weight, bias):
    x = x - x.mean(1, keepdim=True)
    return weight * x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() + bias


def slow_logits(critics, number, obs, actions):
    w1, b1, weight1, bias1, w2, b2, weight2, bias2, w3, b3 = qf_parameters(critics, number)
    x = torch.relu(slow_layer_norm(product(torch.cat([obs, actions], 1), w1) + b1, weight1, bias1))
    x = rounded(product(rounded(x), rounded(w2))) + b2
    return product(torch.relu(slow_layer_norm(x, weight2, bias2)), w3) + b3


@torch.no_grad()
def test_fast_sacs_networks_in_bf16():
    torch.manual_seed(0)
    actor, critics = fast_sac.Actor(OBS_DIM, LOW, HIGH), fast_sac.Critics(OBS_DIM, 2, fast_sac.Args())
    for p in (*actor.parameters(), *critics.parameters()):
        p += 0.1 * torch.randn_like(p)
    obs, actions = torch.randn(BATCH_SIZE, OBS_DIM), torch.randn(BATCH_SIZE, 2)

    def slow_outputs():
        w1, b1, weight1, bias1, w2, b2, weight2, bias2, w3, b3 = actor.parameters()
        x = torch.relu(slow_layer_norm(product(obs, w1.t()) + b1, weight1, bias1))
        x = rounded(product(rounded(x), rounded(w2.t())) + rounded(b2))
        mean, log_std = (product(torch.relu(slow_layer_norm(x, weight2, bias2)), w3.t()) + b3).chunk(2, 1)
        return *(slow_logits(critics, i, obs, actions) for i in (0, 1)), mean, -5 + 3.5 * (log_std.tanh() + 1)

    with torch.autocast("cpu", torch.bfloat16):
        outputs, expected = (*critics(obs, actions), *actor(obs)), slow_outputs()
    for ours, theirs, wrong in zip(outputs, expected, slow_outputs(), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().mean() < 0.1 * (ours - wrong).abs().mean()


def slow_fast_sac(actor, critics, log_alpha, normalize, batches, args):
    """https://arxiv.org/abs/2512.01996, with one target for both critics."""
    critics_target = deepcopy(critics)
    atoms = torch.linspace(-100, 1_000, 51, dtype=torch.float64)
    optimizers = [optimizer_of(actor, args.policy_lr), optimizer_of(critics, args.q_lr)]
    a_optimizer = torch.optim.Adam([log_alpha], lr=args.q_lr)
    value = lambda number, obs, actions: slow_logits(critics, number, obs, actions).softmax(1) @ atoms  # noqa: E731
    for n, (obs, next_obs, actions, rewards, terminations) in enumerate(batches, start=1):
        obs, next_obs = normalize(obs), normalize(next_obs)
        noise = torch.randn(1 if n % 2 else 2, *actions.shape, dtype=actions.dtype)
        with torch.no_grad():
            next_actions, log_pi = density(*actor(next_obs), noise[0])
            first, second = (slow_logits(critics_target, i, next_obs, next_actions).softmax(1) for i in (0, 1))
            y = atoms - log_alpha.exp() * log_pi[:, None]
            y = rewards[:, None] + torch.where(terminations > 0, 0.0, 0.99)[:, None] * y
            target = slow_projection((first + second) / 2, y, atoms)
        step(optimizers[1], sum(F.cross_entropy(slow_logits(critics, i, obs, actions), target) for i in (0, 1)))
        if args.autotune:
            step(a_optimizer, -(log_alpha.exp() * (log_pi - 2.0)).mean())  # two dimensions of actions
        if n % 2 == 0:
            pi, log_pi = density(*actor(obs), noise[1])
            values = (value(0, obs, pi) + value(1, obs, pi)) / 2
            step(optimizers[0], (log_alpha.exp().detach() * log_pi - values).mean())
        move(critics_target, critics, args.tau)
    return critics_target


@in_either_precision
@pytest.mark.parametrize("autotune", [True, False])
def test_fast_sac_update_is_the_papers(autotune, amp):
    args = fast_sac.Args(autotune=autotune, batch_size=BATCH_SIZE, amp=amp)
    torch.manual_seed(0)
    actor, critics = fast_sac.Actor(OBS_DIM, LOW, HIGH), fast_sac.Critics(OBS_DIM, 2, args)
    for p in (*actor.parameters(), *critics.parameters()):  # norms' weights are 1 at first, and all returns alike
        p.data += 0.05 * torch.randn_like(p)
    parts = actor, critics, lambda x: (x - 0.3) / 1.7  # how observations are normalised
    assert_learns_as(slow_fast_sac, fast_sac, args, *parts, alpha=args.alpha)


# --------------------------------------------------------------------------------------------------------------- TD3


def slow_td3(actor, critics, batches, args):
    """https://arxiv.org/abs/1802.09477, algorithm 1."""
    actor_target, critics_target = deepcopy(actor), deepcopy(critics)
    qf1, qf2, qf1_target, qf2_target = (qf(twins, i) for twins in (critics, critics_target) for i in (0, 1))
    optimizers = [optimizer_of(actor, args.learning_rate), optimizer_of(critics, args.learning_rate)]
    low, high = torch.from_numpy(LOW).double(), torch.from_numpy(HIGH).double()
    for n, (obs, next_obs, actions, rewards, terminations) in enumerate(batches, start=1):
        with torch.no_grad():
            noise = torch.clamp(0.2 * torch.randn_like(actions), -0.5, 0.5) * SCALE
            next_actions = torch.max(torch.min(actor_target(next_obs) + noise, high), low)
            q_next = torch.min(qf1_target(next_obs, next_actions), qf2_target(next_obs, next_actions))
            y = rewards + torch.where(terminations > 0, 0.0, 0.99 * q_next)
        step(optimizers[1], F.mse_loss(qf1(obs, actions), y) + F.mse_loss(qf2(obs, actions), y))
        if n % 2 == 0:
            step(optimizers[0], -qf1(obs, actor(obs)).mean())
            for target, trained in ((actor_target, actor), (critics_target, critics)):
                move(target, trained, args.tau)
    return actor_target, critics_target


@in_either_precision
def test_td3_update_is_the_papers(amp):
    args = td3.Args(batch_size=BATCH_SIZE, amp=amp)
    torch.manual_seed(0)
    actor, critics = td3.Actor(OBS_DIM, LOW, HIGH), td3.Critics(OBS_DIM, 2)
    tolerance, dtype = in_precision(args, critics)
    actor.to(dtype)
    with torch.no_grad():
        actor.fc_mu.bias.copy_(torch.tensor([1.5, -2.0]))  # near the bounds, where the smoothed action is clipped
    start = deepcopy((actor, critics))
    slow = deepcopy(start)
    batches = [random_batch(seed, dtype=dtype) for seed in range(NUM_UPDATES)]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp == "bf16"):
        slow_targets = slow_td3(*slow, batches, args)
    targets = deepcopy(actor), deepcopy(critics)
    optimizers = optimizer_of(actor, args.learning_rate), optimizer_of(critics, args.learning_rate)
    update, _ = td3.make_update(actor, critics, *targets, *optimizers, replay_of(batches), args)
    torch.manual_seed(1)
    for n in range(1, NUM_UPDATES + 1):
        update(with_actor=n % 2 == 0)
    for ours, theirs, old in zip((actor, critics, *targets), (*slow, *slow_targets), start * 2, strict=True):
        assert_same_way(ours, theirs, old, tolerance)


@pytest.mark.parametrize("module", [td3, fast_td3])
def test_td3_explores_within_the_bounds(module):
    """With noise of a tenth of the action scale, or of five, which the bounds cut off."""
    torch.manual_seed(0)
    actor = module.Actor(OBS_DIM, LOW, HIGH)
    obs = torch.randn(1, OBS_DIM).expand(20_000, -1)

    def act(**changes):
        args = module.Args(**changes)
        if module is td3:
            return module.act(actor, obs, args)
        last = LastStep(obs, torch.zeros(len(obs), 2), torch.zeros(len(obs)))
        return module.make_acting(actor, None, last, args)[1]()

    with torch.no_grad():
        noise = act() - actor(obs)
        assert noise.std(0).tolist() == pytest.approx((0.1 * SCALE).tolist(), rel=0.05)
        actions = act(exploration_noise=5.0)
    assert actions.amin(0).tolist() == pytest.approx(LOW.tolist())
    assert actions.amax(0).tolist() == pytest.approx(HIGH.tolist())


# --------------------------------------------------------------------------------------------------------------- DQN


@in_either_precision
def test_dqn_update_is_the_papers(amp):
    args = dqn.Args(batch_size=BATCH_SIZE, amp=amp)
    torch.manual_seed(0)
    q_network, target_network = dqn.QNetwork(OBS_DIM, 3), dqn.QNetwork(OBS_DIM, 3)
    tolerance, dtype = in_precision(args, q_network, target_network)
    slow, start = deepcopy(q_network), deepcopy(q_network)
    batches = [random_batch(seed, discrete=3, dtype=dtype) for seed in range(NUM_UPDATES)]
    trained, optimizer = (optimizer_of(network, args.learning_rate) for network in (q_network, slow))
    update, losses = dqn.make_update(q_network, target_network, trained, replay_of(batches), args)
    for obs, next_obs, actions, rewards, terminations in batches:
        update()
        total = 0.0
        for i in range(BATCH_SIZE):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp == "bf16"):
                values, next_values = slow(obs[i]), target_network(next_obs[i]).detach()
            y = rewards[i] if terminations[i] else rewards[i] + 0.99 * next_values.max()
            total = total + (y - values[int(actions[i])]) ** 2
        step(optimizer, total / BATCH_SIZE)
    assert_same_way(q_network, slow, start, tolerance)
    assert losses.td_loss.item() == pytest.approx(total.item() / BATCH_SIZE, rel=tolerance)


def test_epsilon_is_the_share_of_random_actions():
    np.random.seed(0)
    q_network = dqn.QNetwork(OBS_DIM, 4)
    torch.nn.init.constant_(q_network[-1].bias, 0.0)
    with torch.no_grad():
        q_network[-1].bias[2] = 100.0
    for epsilon in (0.0, 0.4, 1.0):
        actions = dqn.act(partial(dqn.greedy, q_network), torch.zeros(40_000, OBS_DIM), 4, epsilon)
        expected = np.full(4, epsilon / 4) + (np.arange(4) == 2) * (1 - epsilon)
        assert np.bincount(actions, minlength=4) / 40_000 == pytest.approx(expected, abs=0.01)
