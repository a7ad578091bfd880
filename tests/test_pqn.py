"""PQN: returns, loss and whole rollouts against slow transcriptions; the fast variant equals the reference."""

import importlib
import math
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from scripts import course, leaves, newest_checkpoint, run, run_until, summary, tiny
from test_ppo_continuous_equality import MODES, in_every_mode
from test_ppo_targets import random_rollout
from torch.nn.utils import parameters_to_vector

import leanrl.pqn as reference
import leanrl.pqn_torchcompile as fast
from leanrl.support.optim import Adam

OBS_DIM, NUM_ACTIONS, NUM_STEPS, NUM_ENVS = 6, 3, 32, 4
UPDATES = 50

both_scripts = pytest.mark.parametrize("script", ["pqn", "pqn_torchcompile"])


# ----------------------------------------------------------------------------------------------------------- TARGETS


def slow_returns(rewards, next_values, terminations, dones, gamma, q_lambda):
    """Peng's Q(lambda) step by step from the last to the first, each environment by itself; ``next_values`` [T, N]."""
    returns = torch.zeros_like(rewards)
    num_steps, num_envs = rewards.shape
    for n in range(num_envs):
        for t in reversed(range(num_steps)):
            if terminations[t, n]:
                returns[t, n] = rewards[t, n]
            elif dones[t, n] or t == num_steps - 1:
                returns[t, n] = rewards[t, n] + gamma * next_values[t, n]
            else:
                mixed = q_lambda * returns[t + 1, n] + (1 - q_lambda) * next_values[t, n]
                returns[t, n] = rewards[t, n] + gamma * mixed
    return returns


@both_scripts
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma, q_lambda", [(0.99, 0.65), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_returns_equal_the_recursion(script, seed, gamma, q_lambda):
    rewards, values, terminations, dones, _ = random_rollout(seed)
    assert terminations.sum() > 5 and (dones - terminations).sum() > 5
    expected = slow_returns(rewards, values[1:], terminations, dones, gamma, q_lambda)
    returns = importlib.import_module(f"leanrl.{script}").lambda_returns
    ours = returns(rewards, values, terminations, dones, gamma, q_lambda)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_returns_by_hand():
    # gamma 0.5, lambda 0.5. No end; the middle step terminates; the middle step is truncated.
    rewards = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).expand(3, 3)
    values = torch.tensor([[4.0], [8.0], [12.0], [16.0]], dtype=torch.float64).expand(4, 3)
    terminations = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64)
    dones = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.float64)
    last = 3 + 16 / 2
    middle = [2 + (last + 12) / 4, 2, 2 + 12 / 2]
    expected = [[1 + (x + 8) / 4 for x in middle], middle, [last] * 3]
    returns = reference.lambda_returns(rewards, values, terminations, dones, 0.5, 0.5)
    torch.testing.assert_close(returns, torch.tensor(expected, dtype=torch.float64))


def test_resets_reach_no_other_step():
    rewards, values, terminations, dones, resets = random_rollout(seed=0)
    before = reference.lambda_returns(rewards, values, terminations, dones, 0.99, 0.65)
    after = reference.lambda_returns(rewards + 100.0 * resets, values, terminations, dones, 0.99, 0.65)
    assert resets.sum() > 10
    torch.testing.assert_close(after[~resets], before[~resets], rtol=0, atol=1e-12)
    assert (after[resets] != before[resets]).all()


# -------------------------------------------------------------------------------------------------------------- LOSS


def slow_linear(layer, x):
    rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
    return [sum(w * y for w, y in zip(row, x, strict=True)) + bias for row, bias in rows]


def slow_q_values(network, obs):
    """Of one observation, number by number: twice a product, its norm and relu; a product."""
    x = obs.tolist()
    for linear, norm in ((network[0], network[1]), (network[3], network[4])):
        x = slow_linear(linear, x)
        mean = sum(x) / len(x)
        deviation = math.sqrt(sum((y - mean) ** 2 for y in x) / len(x) + 1e-5)
        scales = zip(x, norm.weight.tolist(), norm.bias.tolist(), strict=True)
        x = [max(0.0, (y - mean) / deviation * weight + bias) for y, weight, bias in scales]
    return slow_linear(network[6], x)


def random_minibatch(size=12):
    generator = torch.Generator().manual_seed(0)
    obs, returns = (torch.randn(size, *shape, generator=generator, dtype=torch.float64) for shape in ((OBS_DIM,), ()))
    actions = torch.randint(NUM_ACTIONS, (size,), generator=generator)
    return reference.Minibatch(obs, actions, returns, weights=torch.ones(size, dtype=torch.float64))


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = reference.QNetwork(OBS_DIM, NUM_ACTIONS).double()
    for p in network.parameters():
        p.data += 0.1 * torch.randn_like(p)  # biases and the norms' weights too
    return network


def test_loss_equals_the_formula_row_by_row(network):
    minibatch = random_minibatch()
    minibatch.weights[::5] = 0.0
    loss, losses = reference.pqn_loss(network, minibatch)
    squares, values = [], []
    for obs, action, expected, weight in zip(*minibatch, strict=True):
        if weight:
            values.append(slow_q_values(network, obs)[action])
            squares.append((values[-1] - float(expected)) ** 2)
    assert len(values) == 9
    assert loss.item() == losses.td_loss.item() == pytest.approx(sum(squares) / 9, rel=1e-10)
    assert losses.q_values.item() == pytest.approx(sum(values) / 9, rel=1e-10)


def loss_and_gradient(network, minibatch):
    loss, losses = reference.pqn_loss(network, minibatch)
    return loss.detach(), losses, torch.autograd.grad(loss, list(network.parameters()))


def test_rows_of_weight_0_change_nothing(network):
    minibatch = random_minibatch()
    minibatch.weights[::3] = 0.0
    loss, losses, gradient = loss_and_gradient(network, minibatch)
    changed = minibatch._replace(returns=minibatch.returns + 100.0 * (1.0 - minibatch.weights))
    changed_loss, changed_losses, changed_gradient = loss_and_gradient(network, changed)
    assert torch.equal(changed_loss, loss) and all(map(torch.equal, changed_losses, losses))
    assert all(map(torch.equal, changed_gradient, gradient)) and any(x.any() for x in gradient)
    rest = reference.Minibatch(*(column[minibatch.weights > 0] for column in minibatch))
    torch.testing.assert_close(loss_and_gradient(network, rest), (loss, losses, gradient), rtol=1e-10, atol=1e-12)


@both_scripts
def test_values_have_more_digits_than_bf16(script):
    network = importlib.import_module(f"leanrl.{script}").QNetwork(OBS_DIM, NUM_ACTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        values = network(torch.randn(64, OBS_DIM))
    assert values.dtype == torch.float32 and (values != values.bfloat16()).float().mean() > 0.9


def test_epsilon_falls_linearly_and_stays():
    args = reference.Args(total_timesteps=1000, start_e=0.9, end_e=0.1, exploration_fraction=0.4)
    epsilons = [reference.linear_schedule(args, step) for step in (0, 100, 200, 400, 401, 1000)]
    assert epsilons == pytest.approx([0.9, 0.7, 0.5, 0.1, 0.1, 0.1])


# -------------------------------------------------------------------------------------------------------------- RUNS


@pytest.fixture
def short_cartpole():
    """CartPole whose episodes have 20 steps at most: some terminate, some are truncated."""
    gym.register("LeanRLShortCartPole-v0", CartPoleEnv, max_episode_steps=20)
    yield "LeanRLShortCartPole-v0"
    gym.registry.pop("LeanRLShortCartPole-v0")


@both_scripts
@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_a_run_trains_on_what_happened(script, epsilon, short_cartpole, tmp_path, monkeypatch):
    """Each rollout beside a record of the environments' steps: weights, returns, and who explored."""
    module, num_steps, num_envs = importlib.import_module(f"leanrl.{script}"), 16, 3
    make_envs, finish_rollout = module.make_envs, module.finish_rollout
    record, seen = [], {"resets": 0, "truncated": 0, "terminated": 0, "rollouts": 0, "explored": 0}

    def make_recorded_envs(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        step = envs.step

        def recorded_step(actions):
            resets, before = np.array(envs._done), envs._obs.copy()
            result = step(actions)
            record.append((before, actions.copy(), *(x.copy() for x in result[:4]), resets))
            return result

        envs.step = recorded_step
        return envs

    def checked_finish_rollout(q_network, rollout, *outcome):
        finish_rollout(q_network, rollout, *outcome)
        columns = (torch.as_tensor(np.stack(column)) for column in zip(*record, strict=True))
        obs, actions, next_obs, rewards, terminated, truncated, resets = columns
        assert len(record) == num_steps
        record.clear()
        assert torch.equal(rollout.obs[:-1], obs) and torch.equal(rollout.obs[-1], next_obs[-1])
        assert torch.equal(rollout.actions[:-1], actions)
        assert torch.equal(rollout.weights[:-1] == 0, resets)
        exact = deepcopy(q_network).double().requires_grad_(False)
        next_values = exact(next_obs.double()).amax(-1)
        expected = slow_returns(rewards, next_values, terminated, terminated | truncated, 0.97, 0.8)
        torch.testing.assert_close(rollout.returns[:-1][~resets].double(), expected[~resets], rtol=1e-4, atol=1e-4)
        seen["explored"] += (actions != exact(obs.double()).argmax(-1)).sum().item()
        for name, flags in (("resets", resets), ("truncated", truncated), ("terminated", terminated)):
            seen[name] += flags.sum().item()
        seen["rollouts"] += 1

    monkeypatch.setattr(module, "make_envs", make_recorded_envs)
    monkeypatch.setattr(module, "finish_rollout", checked_finish_rollout)
    flags = [*tiny(script), f"--env-id={short_cartpole}", f"--num-envs={num_envs}", f"--num-steps={num_steps}"]
    flags += ["--gamma=0.97", "--q-lambda=0.8", f"--start-e={epsilon}", f"--end-e={epsilon}"]
    flags += ["--total-timesteps=960", "--learning-rate=1e-3", "--runs-dir", tmp_path, "--run-name=run"]
    assert run(script, *flags) == 0
    assert seen["rollouts"] == 20
    assert min(seen[name] for name in ("resets", *(["truncated", "terminated"] if epsilon else []))) > 5
    # Half of what explores does what is best.
    assert 0.35 * 960 < seen["explored"] < 0.45 * 960 if epsilon else seen["explored"] == 0


@pytest.mark.parametrize("mode", [[], ["--compile"]], ids=["eager", "compile"])
def test_both_make_the_same_run(mode, tmp_path):
    """Apart from rounding, which decides no action here: all are random, and the same."""
    flags = [*tiny("pqn"), "--num-envs=2", "--start-e=1", "--end-e=1", "--total-timesteps=1280", "--runs-dir", tmp_path]
    assert run("pqn", *flags, "--run-name=plain") == run("pqn_torchcompile", *flags, *mode, "--run-name=quick") == 0
    ours, theirs = course(tmp_path / "quick"), course(tmp_path / "plain")
    assert len(ours) == 10 and [row.keys() for row in ours] == [row.keys() for row in theirs]
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert our_row == pytest.approx(their_row, rel=1e-3)


@both_scripts
def test_resume_is_exact(script, tmp_path):
    """Interrupted where an episode has just ended, and in the middle of one: bit for bit the uninterrupted run."""
    flags = [*tiny(script), "--num-envs=2", "--num-steps=1", "--num-minibatches=1", "--total-timesteps=400"]
    flags += ["--runs-dir", tmp_path]
    assert run(script, *flags, "--run-name=straight") == 0
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    assert run_until(script, 100, *flags, "--run-name=run", after_an_end=True) == 0
    assert any(newest_checkpoint(run_dir)[1]["script"]["envs"]["simulators"]["done"])
    assert run_until(script, 300, "--resume", run_dir) == 0
    assert 300 <= summary(run_dir)["global_step"] < 400 and summary(run_dir)["interrupted"]
    assert run(script, "--resume", run_dir) == 0
    (_, ours), (_, theirs) = newest_checkpoint(run_dir), newest_checkpoint(straight)
    assert leaves(ours["script"]) == leaves(theirs["script"]) and leaves(ours["rng"]) == leaves(theirs["rng"])
    assert course(run_dir) == course(straight)


# ------------------------------------------------------------------------------------------------------------- MODES


def mode_args(mode: str, **changes) -> tuple[fast.Args, torch.device]:
    args = fast.Args(**{"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, **MODES[mode], **changes})
    return args, torch.device("cuda", 0) if args.cudagraphs else torch.device("cpu")


def filled_rollout(module, device: torch.device):
    """A rollout with plausible numbers and a few steps that only reset."""
    generator = torch.Generator().manual_seed(0)
    rollout = module.Rollout.allocate(NUM_STEPS, NUM_ENVS, OBS_DIM, device)
    for column in (rollout.obs, rollout.returns):
        column.copy_(torch.randn(column.shape, generator=generator))
    rollout.actions.copy_(torch.randint(NUM_ACTIONS, rollout.actions.shape, generator=generator))
    rollout.weights.copy_((torch.rand(rollout.weights.shape, generator=generator) > 0.1).float())
    return rollout


def minibatches(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(NUM_STEPS * NUM_ENVS, generator=generator)[:32].to(device) for _ in range(UPDATES)]


def networks(device: torch.device):
    torch.manual_seed(3)
    plain = reference.QNetwork(OBS_DIM, NUM_ACTIONS)
    quick = fast.QNetwork(OBS_DIM, NUM_ACTIONS).to(device)
    quick.load_state_dict(plain.state_dict())
    return plain, quick


@pytest.mark.parametrize("amp", ["none", "bf16"])
@in_every_mode
def test_fifty_updates_equal_the_reference(mode: str, amp: str) -> None:
    args, device = mode_args(mode, amp=amp, max_grad_norm=1.0)  # which clips
    plain, quick = networks(device)
    start = parameters_to_vector(plain.parameters()).detach()
    optimizer = torch.optim.Adam(plain.parameters(), lr=args.learning_rate, eps=1e-5)
    plain_update = reference.make_update(plain, optimizer, filled_rollout(reference, torch.device("cpu")), args)
    plain_losses = [plain_update(inds.cpu()) for inds in minibatches(device)]

    adam = Adam(quick.parameters(), lr=args.learning_rate, eps=1e-5)
    update = fast.make_update(quick, adam, filled_rollout(fast, device), args)
    _, update = fast.make_executables(quick, update, args, device)
    losses = [update(inds).clone() for inds in minibatches(device)]

    expected, got = (parameters_to_vector(network.parameters()).detach().cpu() for network in (plain, quick))
    assert (expected - start).abs().max() > 5e-3, "the reference took no real steps"
    assert adam.num_steps.item() == UPDATES
    error = (got - expected).norm() / (expected - start).norm()
    # bf16 rounds differently in a fused kernel. Another device sums in another order.
    assert error < (0.1 if amp == "bf16" else 1e-4 if device.type == "cpu" else 1e-3), error
    if amp == "none":
        torch.testing.assert_close(torch.stack(losses).cpu(), torch.stack(plain_losses), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("num_envs", [1, 5, 40])
@in_every_mode
def test_the_best_actions_are_the_references_after_every_update(mode: str, num_envs: int) -> None:
    """As sums and as products; there is no copy of the parameters to go stale."""
    args, device = mode_args(mode, num_envs=num_envs)
    _, quick = networks(device)
    optimizer = Adam(quick.parameters(), lr=1e-2, eps=1e-5)
    update = fast.make_update(quick, optimizer, filled_rollout(fast, device), args)
    best_actions, update = fast.make_executables(quick, update, args, device)
    chosen = set()
    for inds in minibatches(device)[:10]:
        obs = torch.randn(num_envs, OBS_DIM, device=device)
        values = quick(obs).detach()
        actions = best_actions(obs)
        # Where two actions are as good but for rounding, either is best.
        torch.testing.assert_close(values.gather(1, actions.unsqueeze(1)).squeeze(1), values.amax(1))
        chosen |= set(actions.tolist())
        update(inds)
    assert chosen == set(range(NUM_ACTIONS))


@in_every_mode
def test_a_new_learning_rate_reaches_the_step(mode: str) -> None:
    args, device = mode_args(mode)
    _, quick = networks(device)
    optimizer = Adam(quick.parameters(), lr=1e-3, eps=1e-5)
    update = fast.make_update(quick, optimizer, filled_rollout(fast, device), args)
    _, update = fast.make_executables(quick, update, args, device)

    def moved(inds: torch.Tensor) -> bool:
        before = [p.detach().clone() for p in quick.parameters()]
        update(inds)
        return not all(map(torch.equal, quick.parameters(), before))

    assert all(map(moved, minibatches(device)[:6]))
    optimizer.param_groups[0]["lr"].fill_(0.0)
    assert not moved(minibatches(device)[6])
