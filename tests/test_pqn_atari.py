"""PQN on Atari: the network against a transcription; games that are written down; the fast variant is the reference."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Discrete
from scripts import course, run, summary, tiny
from test_ppo_atari import catch, float32_convolutions, parameters_of
from test_ppo_atari_loop import NUM_ENVS, NUM_ROLLOUTS, NUM_STEPS, TOTAL, Games, Pool
from test_ppo_continuous_equality import MODES
from test_pqn import slow_returns

import leanrl.pqn_atari_envpool as reference
import leanrl.pqn_atari_envpool_torchcompile as fast
from leanrl.support.optim import Adam
from leanrl.support.run import Run

__all__ = ["float32_convolutions"]

NUM_ACTIONS, MINIBATCH, UPDATES = 6, 16, 10

both_scripts = pytest.mark.parametrize("module", [reference, fast], ids=["reference", "fast"])


# ----------------------------------------------------------------------------------------------------------- NETWORK


def slow_convolution(layer: nn.Conv2d, x: np.ndarray) -> np.ndarray:
    """[C, H, W] -> [out, H', W'], pixel by pixel."""
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    (size, _), (stride, _) = layer.kernel_size, layer.stride
    places = range(0, x.shape[1] - size + 1, stride)
    pixels = [[(weight * x[:, i : i + size, j : j + size]).sum((1, 2, 3)) + bias for j in places] for i in places]
    return np.array(pixels).transpose(2, 0, 1)


def slow_norm(layer: nn.LayerNorm, x: np.ndarray) -> np.ndarray:
    """Over all of ``x``; the layer's weights are [H, W, C] for an image [C, H, W]."""
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    if x.ndim == 3:
        weight, bias = weight.transpose(2, 0, 1), bias.transpose(2, 0, 1)
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5) * weight + bias


def slow_q_values(network: nn.Sequential, obs: torch.Tensor) -> np.ndarray:
    """Of one observation: three convolutions and a product, each with its norm and relu; a product."""
    x = obs.double().numpy() / 255
    for i in (0, 3, 6):
        x = np.maximum(slow_norm(network[i + 1], slow_convolution(network[i], x)), 0)
    weights = [p.detach().double().numpy() for i in (10, 13) for p in (network[i].weight, network[i].bias)]
    x = np.maximum(slow_norm(network[11], weights[0] @ x.flatten() + weights[1]), 0)
    return weights[2] @ x + weights[3]


def random_frames(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size, 4, 84, 84), generator=generator, dtype=torch.uint8)


@pytest.fixture
def network() -> reference.QNetwork:
    torch.manual_seed(0)
    network = reference.QNetwork(NUM_ACTIONS).to(memory_format=torch.channels_last)
    for p in network.parameters():
        p.data += 0.1 * p.abs().mean().clamp(min=0.1) * torch.randn_like(p)  # biases and the norms' weights too
    return network


def test_values_equal_a_transcription(network):
    frames = random_frames(2)
    expected = torch.tensor(np.stack([slow_q_values(network, obs) for obs in frames]))
    values = network(frames).detach()
    assert expected.std() > 0.1
    torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-4)
    in_order_of_memory = network(frames.contiguous(memory_format=torch.channels_last)).detach()
    torch.testing.assert_close(in_order_of_memory, values, rtol=1e-5, atol=1e-5)


def test_values_have_more_digits_than_bf16(network):
    with torch.autocast("cpu", torch.bfloat16):
        values = network(random_frames(16))
    assert values.dtype == torch.float32 and (values != values.bfloat16()).float().mean() > 0.9


# -------------------------------------------------------------------------------------------------------------- RUNS


class Network(nn.Module):
    """[B, 1] -> five actions; the best one, whose value is the observation, is its hundredths modulo 5."""

    def __init__(self, num_actions: int) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.ones(num_actions))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        best = (100 * obs).round() % 5
        return self.scale * obs - (torch.arange(5) - best).abs()


@both_scripts
@pytest.mark.parametrize("epsilon", [0.0, 0.8])
def test_the_loss_gets_what_the_games_gave(module, epsilon, monkeypatch, tmp_path) -> None:
    games, batches, episodes = Games(), [], []
    loss, record_episodes = module.pqn_loss, Run.record_episodes

    def spy_on_loss(q_network, minibatch):
        batches.append([column.clone() for column in minibatch])
        return loss(q_network, minibatch)

    def spy_on_episodes(self, returns, lengths) -> None:
        episodes.extend(zip(map(float, returns), map(int, lengths), strict=True))
        record_episodes(self, returns, lengths)

    monkeypatch.setattr(module, "QNetwork", Network)
    monkeypatch.setattr(module, "make_atari_envs", lambda *_, **__: Pool(games, slice(0, NUM_ENVS)))
    monkeypatch.setattr(module, "pqn_loss", spy_on_loss)
    monkeypatch.setattr(Run, "record_episodes", spy_on_episodes)
    flags = ["--device=cpu", "--num-threads=1", f"--num-envs={NUM_ENVS}", f"--num-steps={NUM_STEPS}"]
    flags += ["--num-minibatches=1", "--update-epochs=1", f"--total-timesteps={TOTAL * NUM_ENVS}", "--gamma=0.97"]
    flags += ["--q-lambda=0.8", f"--start-e={epsilon}", f"--end-e={epsilon}", f"--runs-dir={tmp_path}"]
    # So small a step changes no float32: the values are what is written down in every rollout.
    assert run(module.__name__.split(".")[1], *flags, "--learning-rate=1e-30", "--run-name=run") == 0

    dones = games.terminations | games.truncations
    columns = games.rewards, games.values, games.terminations, dones, games.resets
    rewards, values, terminations, dones, resets = (torch.as_tensor(x, dtype=torch.float64) for x in columns)
    for i, batch in enumerate(batches[-NUM_ROLLOUTS:]):
        now, after = slice(i * NUM_STEPS, (i + 1) * NUM_STEPS), slice(i * NUM_STEPS + 1, (i + 1) * NUM_STEPS + 1)
        returns = slow_returns(rewards[now], values[after], terminations[now], dones[now], 0.97, 0.8).flatten()
        # By the observations, of which no two are the same.
        ours, theirs = batch[0].flatten().argsort(), values[now].flatten().argsort()
        obs, actions, best_values, actual_returns, weights = (column[ours] for column in batch)
        assert torch.equal(obs.flatten().double(), values[now].flatten()[theirs])
        assert torch.equal(best_values, obs.flatten())
        live = resets[now].flatten()[theirs] == 0.0
        assert (~live).sum() >= 3 and torch.equal(weights, live.float())
        torch.testing.assert_close(actual_returns[live].double(), returns[theirs][live], rtol=1e-5, atol=1e-5)
        assert actions.tolist() == games.actions[now].flatten()[theirs].tolist()

    explored = (games.actions != np.round(100 * games.values[:-1]) % 5).mean()
    # A fifth of what explores does what is best.
    assert 0.5 < explored < 0.78 if epsilon else explored == 0
    assert len(episodes) > NUM_ROLLOUTS * 2 and episodes == games.episodes()


def test_both_make_the_same_run(tmp_path):
    """Apart from rounding, which decides no action here: all are random, and the same."""
    flags = [*tiny("pqn_atari_envpool"), "--start-e=1", "--end-e=1", "--total-timesteps=256", "--runs-dir", tmp_path]
    for script in ("pqn_atari_envpool", "pqn_atari_envpool_torchcompile"):
        assert run(script, *flags, f"--run-name={script}") == 0
    theirs, ours = (course(run_dir) for run_dir in sorted(tmp_path.iterdir()))
    assert len(ours) == 4 and [row.keys() for row in ours] == [row.keys() for row in theirs]
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert our_row == pytest.approx(their_row, rel=1e-3)


class SmallNetwork(nn.Sequential):
    """For Catch: float [B, 10, 5] -> [B, 3]"""

    def __init__(self, num_actions: int) -> None:
        layers = nn.Linear(50, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, num_actions)
        super().__init__(nn.Flatten(), *layers)


def test_the_policy_learned_on_catch_is_optimal(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fast, "QNetwork", SmallNetwork)
    monkeypatch.setattr(fast, "make_atari_envs", catch)
    flags = ["--env-id=Catch-v0", "--num-threads=1", "--learning-rate=0.003", "--num-steps=64", "--save-model"]
    flags += ["--total-timesteps=40960", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert run("pqn_atari_envpool_torchcompile", *flags) == 0
    assert summary(tmp_path / "run")["episodes"] == pytest.approx(4096, abs=8)  # every tenth step
    q_network = SmallNetwork(3)
    model = torch.load(tmp_path / "run" / "model.pt", weights_only=True)["model"]
    q_network.load_state_dict(model["q_network"])
    envs = catch("Catch-v0", 50, seed=100)
    obs, _ = envs.reset()
    for step in range(90):
        obs, rewards, *_ = envs.step(q_network(torch.from_numpy(obs)).argmax(1).numpy())
        assert (rewards == (1.0 if step % 10 == 8 else 0.0)).all()


# ------------------------------------------------------------------------------------------------------------- MODES


def cases() -> list:
    marks = {mode: [pytest.mark.cuda] if MODES[mode]["cudagraphs"] else [] for mode in MODES}
    return [pytest.param((m, amp), marks=marks[m], id=f"{m}-{amp}") for m in MODES for amp in ("none", "bf16")]


@pytest.fixture(scope="module", params=cases())
def pair(request, float32_convolutions) -> SimpleNamespace:
    """Both variants with the same weights and rollout, the fast one compiled or captured once for all tests."""
    mode, amp = request.param
    args = fast.Args(num_envs=4, num_steps=16, amp=amp, learning_rate=1e-4, max_grad_norm=1.0, **MODES[mode])
    device = torch.device("cuda", 0) if args.cudagraphs else torch.device("cpu")
    torch.set_num_threads(1)
    frames = random_frames(17 * 4).unflatten(0, (17, 4))
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(17, 4, generator=generator)
    actions = torch.randint(NUM_ACTIONS, (17, 4), generator=generator)
    sides = []
    for module, adam, where in ((reference, torch.optim.Adam, torch.device("cpu")), (fast, Adam, device)):
        torch.manual_seed(3)
        network = module.QNetwork(NUM_ACTIONS).to(where, memory_format=torch.channels_last)
        rollout = module.Rollout.allocate(frames[0].to(where), args)
        rollout.actions.copy_(actions)
        rollout.returns.copy_(returns)
        rollout.weights.copy_(returns.abs() > 0.1)
        optimizer = adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
        update = module.make_update(network, optimizer, rollout, args)
        sides.append(SimpleNamespace(network=network, rollout=rollout, optimizer=optimizer, update=update))
    plain, quick = sides
    policy_step, start = fast.make_policy_step(quick.network, quick.rollout, args)
    policy_step, quick.update = fast.make_executables(policy_step, quick.update, args, device)
    made = dict(plain=plain, quick=quick, policy_step=policy_step, start=start, frames=frames, device=device)
    return SimpleNamespace(**made, args=args)


def check_acting(pair: SimpleNamespace, tolerance: float) -> None:
    """A rollout of each; where rounding decides between two actions, it may."""
    pair.start()
    for step, obs in enumerate(pair.frames):
        actions = pair.policy_step(obs.to(pair.device)).cpu()
        reference.policy_step(pair.plain.network, pair.plain.rollout, step, obs, pair.args)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=pair.args.amp == "bf16"):
            values = pair.plain.network(obs)
        assert (values.amax(1) - values.gather(1, actions[:, None])[:, 0] <= tolerance).all()
    plain, quick = pair.plain.rollout, pair.quick.rollout
    assert torch.equal(quick.obs.cpu(), pair.frames) and torch.equal(plain.obs, pair.frames)
    torch.testing.assert_close(quick.values.cpu(), plain.values, rtol=0, atol=tolerance)
    assert plain.values.std() > 5 * tolerance


def test_acting_and_updates_equal_the_reference(pair) -> None:
    plain, quick = pair.plain, pair.quick
    in_bf16 = pair.args.amp == "bf16"
    check_acting(pair, 0.03 if in_bf16 else 1e-4)
    start = parameters_of(plain.network)
    assert torch.equal(parameters_of(quick.network).cpu(), start)
    generator = torch.Generator().manual_seed(1)
    for i in range(UPDATES):
        inds = torch.randperm(64, generator=generator)[:MINIBATCH]
        expected, losses = plain.update(inds), quick.update(inds.to(pair.device)).cpu()
        if i == 0 or not in_bf16:
            tolerance = 3e-2 if in_bf16 else 1e-3
            torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
        expected, got = (parameters_of(side.network).cpu() for side in (plain, quick))
        error = (got - expected).norm() / (expected - start).norm()
        # Adam's first steps are as long where the gradient is rounding alone.
        assert error < (0.5 if in_bf16 else 0.02), (i, error)
    assert quick.optimizer.num_steps.item() == UPDATES and (expected - start).abs().mean() > 1e-4
    # And what acts now is what was learned.
    plain.network.load_state_dict(quick.network.state_dict())
    check_acting(pair, 0.03 if in_bf16 else 1e-4)


def test_a_new_learning_rate_reaches_the_step(pair) -> None:
    network = pair.quick.network
    for rate in (0.0, 1e-3):
        before = parameters_of(network)
        pair.quick.optimizer.param_groups[0]["lr"].fill_(rate)
        pair.quick.update(torch.arange(MINIBATCH, device=pair.device))
        assert torch.equal(parameters_of(network), before) == (rate == 0.0)


@both_scripts
def test_a_saved_policy_explores_one_step_in_twenty(module, network) -> None:
    spaces = SimpleNamespace(single_action_space=Discrete(NUM_ACTIONS))
    policy = module.load_policy({"q_network": network.state_dict()}, spaces)
    frames = random_frames(1).expand(600, -1, -1, -1).numpy()
    best = network(random_frames(1)).argmax().item()
    assert 0.015 < (policy(frames) != best).mean() < 0.08
