"""PPO on Atari: the fast variant computes what the reference computes; Catch, whose every tenth step only resets."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from scripts import run, summary, tiny
from torch.distributions import Categorical

import leanrl.ppo_atari_envpool as reference
import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.support.envs import EnvPoolVectorEnv, env_seeds
from leanrl.support.executables import untouched
from leanrl.support.optim import Adam
from leanrl.support.tracking import read_metrics

NUM_ACTIONS, NUM_STEPS, NUM_ENVS, MINIBATCH = 6, 16, 4, 16
UPDATES = 50

MODES = {
    "eager": {},
    "compile": dict(compile=True),
    "cudagraphs": dict(cudagraphs=True),
    "compile+cudagraphs": dict(compile=True, cudagraphs=True),
    "one-graph": dict(cudagraphs=True, one_graph=True),
    "compile+one-graph": dict(compile=True, cudagraphs=True, one_graph=True),
}


def cases() -> list:
    found = []
    for mode, levers in MODES.items():
        for amp in ("none", "bf16"):
            marks = [pytest.mark.cuda] if "cudagraphs" in levers else []
            found.append(pytest.param((mode, amp), marks=marks, id=f"{mode}-{amp}"))
    return found


def parameters_of(agent: nn.Module) -> torch.Tensor:
    """A copy of all of them in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()])


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


def filled_rollout(module, args, device: torch.device) -> tuple[SimpleNamespace, list[torch.Tensor]]:
    """A rollout of ``module``'s class, and the columns [T, N, ...] that it holds; the same numbers every time."""
    generator = torch.Generator().manual_seed(0)
    rows = NUM_STEPS * NUM_ENVS
    obs = torch.randint(0, 256, (rows, 4, 84, 84), generator=generator, dtype=torch.uint8)
    actions = torch.randint(0, NUM_ACTIONS, (rows,), generator=generator)
    logprobs = torch.randn(rows, generator=generator) * 0.1 - 1.8
    advantages, returns, values = torch.randn(3, rows, generator=generator)
    weights = (torch.rand(rows, generator=generator) > 0.1).float()
    columns = obs, actions, logprobs, advantages, returns, values, weights
    columns = [column.unflatten(0, (NUM_STEPS, NUM_ENVS)).to(device) for column in columns]
    return module.Rollout.allocate(columns[0][0], args), columns


@pytest.fixture(scope="module", params=cases())
def pair(request, float32_convolutions) -> SimpleNamespace:
    """Both variants with the same weights and rollout, the fast one compiled or captured once for all tests."""
    mode, amp = request.param
    args = fast.Args(num_envs=NUM_ENVS, num_steps=NUM_STEPS, amp=amp, learning_rate=1e-4, **MODES[mode])
    device = torch.device("cuda", 0) if args.cudagraphs else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    plain = reference.Agent(NUM_ACTIONS).to(memory_format=torch.channels_last)
    torch.manual_seed(3)
    quick = fast.Agent(NUM_ACTIONS).to(device, memory_format=torch.channels_last)
    plain_rollout, plain_columns = filled_rollout(reference, args, torch.device("cpu"))
    rollout, columns = filled_rollout(fast, args, device)

    def fill() -> None:
        for side, steps in ((plain_rollout, plain_columns), (rollout, columns)):
            for column, values in zip(side, steps, strict=True):
                column[:NUM_STEPS] = values

    noise = torch.zeros(NUM_STEPS + 1, NUM_ENVS, NUM_ACTIONS, device=device)
    policy_step, start = fast.make_policy_step(quick, rollout, noise, args)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=args.learning_rate, eps=1e-5)
    plain_update = reference.make_update(plain, plain_optimizer, plain_rollout, args)
    optimizer = Adam(quick.parameters(), lr=args.learning_rate, eps=1e-5)
    update = fast.make_update(quick, optimizer, rollout, args)
    # Epochs of one minibatch, so that parameters can be compared after each.
    epoch_args = replace(args, num_steps=MINIBATCH // NUM_ENVS, num_minibatches=1)
    act, update = fast.make_executables(policy_step, update, columns[0][0].clone(), epoch_args)
    made = dict(quick=quick, optimizer=optimizer, rollout=rollout, noise=noise, start=start, act=act, update=update)
    made |= dict(plain=plain, plain_update=plain_update, obs=plain_columns[0], fill=fill)
    return SimpleNamespace(amp=amp, device=device, **made)


def minibatches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(NUM_STEPS * NUM_ENVS, generator=generator)[:MINIBATCH] for _ in range(UPDATES)]


@torch.no_grad()
def check_acting(pair: SimpleNamespace, tolerance: float, logprob_tolerance: float) -> None:
    """Some steps of the fast variant against the reference's outputs; the samples are those of the noise."""
    pair.start()
    seen = []
    for t in range(6):
        obs = pair.obs[t].flip(1)
        actions = torch.from_numpy(pair.act(obs.numpy()))
        with torch.autocast("cpu", torch.bfloat16, enabled=pair.amp == "bf16"):
            probs, value = pair.plain(obs)
        scores = probs.logits + pair.noise[t].cpu()
        # Where rounding decides between two actions, it may.
        assert (scores.amax(1) - scores.gather(1, actions[:, None])[:, 0] <= tolerance).all()
        _, rows, logprobs, _, _, values, _ = (column[t].cpu() for column in pair.rollout)
        torch.testing.assert_close(logprobs, probs.log_prob(actions), rtol=0, atol=logprob_tolerance)
        torch.testing.assert_close(values, value, rtol=0, atol=tolerance)
        assert torch.equal(rows, actions)
        assert torch.equal(pair.rollout.obs[t].cpu(), obs)
        seen.append(actions)
    assert len(torch.stack(seen).unique(dim=0)) > 1, "samples repeat from call to call"


def test_fifty_updates_equal_the_reference(pair) -> None:
    plain, quick = pair.plain, pair.quick
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for name, parameter in quick.named_parameters():
        assert torch.equal(parameter.cpu(), before[name]), name
    tolerances = (1e-5, 1e-5) if pair.amp == "none" else (0.02, 1e-3)
    check_acting(pair, *tolerances)

    pair.fill()
    plain_losses, losses, drifts = [], [], []
    for inds in minibatches():
        plain_losses.append(pair.plain_update(inds))
        losses.append(pair.update(inds.to(pair.device)).cpu().clone())
        ours, theirs = (dict(agent.named_parameters()) for agent in (quick, plain))
        drifts.append({name: (ours[name].detach().cpu() - theirs[name].detach()).abs() for name in before})

    assert pair.optimizer.num_steps.item() == UPDATES
    moved = torch.cat([(p.detach() - before[name]).abs().flatten() for name, p in plain.named_parameters()]).mean()
    assert moved > 1e-4, "the reference took no real steps"
    for name in before:
        # A rounding error may switch a unit off, and grows from step to step: at first there is none but rounding.
        # bf16 rounds differently in a fused kernel: on a CPU that makes up to 0.34, half the learning rate would 0.5.
        if pair.amp == "none":
            if pair.device.type == "cpu":  # a GPU rounds otherwise from the first layer on
                assert drifts[9][name].max() < 1e-6, name
            assert drifts[-1][name].mean() < 0.05 * moved, name
        else:
            assert drifts[-1][name].mean() < 0.45 * moved, name
    losses, plain_losses = torch.stack(losses), torch.stack(plain_losses)
    if pair.amp == "none":
        torch.testing.assert_close(losses, plain_losses, rtol=1e-3, atol=1e-3)
    else:  # one row of 16 that rounding takes over the clip's edge is much of clipfrac
        torch.testing.assert_close(losses[0], plain_losses[0], rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(losses[:, :-1], plain_losses[:, :-1], rtol=2e-2, atol=2e-2)
    # And what acts now is what was learned: with a stale copy of the parameters the log-probabilities are 0.017 apart.
    plain.load_state_dict(quick.state_dict())
    tolerances = (1e-4, 1e-4) if pair.amp == "none" else (0.05, 5e-3)
    check_acting(pair, *tolerances)


def test_a_new_learning_rate_reaches_the_step(pair) -> None:
    pair.fill()
    inds = minibatches()[0].to(pair.device)
    with untouched([pair.quick.state_dict(), pair.optimizer.state_dict()], pair.device):
        for rate in (0.0, 1e-3):
            before = parameters_of(pair.quick)
            pair.optimizer.param_groups[0]["lr"].fill_(rate)
            pair.update(inds)
            assert torch.equal(parameters_of(pair.quick), before) == (rate == 0.0)


def test_the_same_updates_again_give_the_same_bits(pair) -> None:
    results = []
    for _ in range(2):
        with untouched([pair.quick.state_dict(), pair.optimizer.state_dict()], pair.device):
            pair.fill()
            losses = [pair.update(inds.to(pair.device)).clone() for inds in minibatches()[:5]]
            results.append((parameters_of(pair.quick), *losses))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_atari_envpool", []),
        ("ppo_atari_envpool_torchcompile", ["--num-env-groups=2"]),
        ("ppo_atari_envpool_torchcompile", ["--num-env-groups=4", "--amp=bf16"]),
    ],
)
def test_the_first_update_finds_the_policy_that_played(script, flags, monkeypatch, tmp_path) -> None:
    """Its ratios are 1: what the rollout holds of a step is of that step, in its place."""
    module = reference if script == "ppo_atari_envpool" else fast
    # As it starts, the policy is nearly the same in all steps, and no mistake would be seen.
    monkeypatch.setattr(module, "layer_init", lambda layer, std=2.0, init=module.layer_init: init(layer, max(std, 2.0)))
    flags = [*tiny(script), *flags, "--num-minibatches=1", "--total-timesteps=192"]
    assert run(script, *flags, f"--runs-dir={tmp_path}", "--run-name=run") == 0
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        assert row["losses/clipfrac"] == 0.0
        assert abs(row["losses/approx_kl"]) < (1e-4 if "--amp=bf16" in flags else 1e-7)


# --------------------------------------------------------------------------------------------------------------- CATCH


class SmallNetwork(nn.Module):
    """For Catch: float [B, 10, 5] -> distribution of 3 actions, value [B]."""

    def __init__(self, num_actions: int) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(50, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, num_actions), nn.Linear(64, 1)

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        hidden = self.body(obs)
        return Categorical(logits=self.actor(hidden), validate_args=False), self.critic(hidden).squeeze(-1)


def catch(env_id, num_envs, seed, protocol=None, *, start=0, first_index=0) -> EnvPoolVectorEnv:
    assert env_id == "Catch-v0"
    return EnvPoolVectorEnv(env_id, env_seeds(seed, num_envs, first_index, start), num_threads=1)


@pytest.fixture
def on_catch(monkeypatch):
    """The scripts play Catch with a small network; all else is theirs."""
    small = {}
    for module in (reference, fast):
        small[module] = type("SmallAgent", (SmallNetwork, module.Agent), {})
        monkeypatch.setattr(module, "Agent", small[module])
        monkeypatch.setattr(module, "make_atari_envs", catch)
    return small


@pytest.mark.parametrize("module", [reference, fast])
def test_steps_that_only_reset_teach_nothing(module, on_catch) -> None:
    num_steps, num_envs = 40, 4
    args = module.Args()
    torch.manual_seed(0)
    agent = on_catch[module](3)
    envs = catch("Catch-v0", num_envs, 1)
    obs, resets = torch.from_numpy(envs.reset()[0]), torch.zeros(num_envs)
    rows = []
    for _ in range(num_steps):
        probs, value = agent(obs)
        action = probs.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        done = torch.from_numpy(terminated | truncated).float()
        logprob = probs.log_prob(action).detach()
        rows.append((obs, action, logprob, value.detach(), torch.from_numpy(reward), done, 1 - resets))
        obs, resets = torch.from_numpy(next_obs), done
    obs_, actions, logprobs, values, rewards, dones, weights = (torch.stack(x) for x in zip(*rows, strict=True))
    values = torch.cat([values, agent(obs)[1].detach()[None]])
    dead = weights == 0
    assert dead.float().mean() == 0.1  # nine steps, and one that resets
    assert (rewards[dead] == 0).all()

    def advantages(rewards, values):
        return module.compute_gae(rewards, values, dones, dones, args.gamma, args.gae_lambda)

    expected = advantages(rewards, values)
    changed_values = torch.cat([torch.where(dead, 7.0, values[:-1]), values[-1:]])
    changed = advantages(torch.where(dead, 5.0, rewards), changed_values)
    torch.testing.assert_close(changed[~dead], expected[~dead], rtol=0, atol=0)
    assert (changed[dead] != expected[dead]).all()

    batch = [x.flatten(0, 1) for x in (obs_, actions, logprobs, expected, expected + values[:-1], values[:-1], weights)]

    def loss_and_gradient(batch):
        loss, losses = module.ppo_loss(agent, module.Minibatch(*batch), args)
        return [loss.detach(), *losses, *torch.autograd.grad(loss, list(agent.parameters()))]

    expected = loss_and_gradient(batch)
    for column in range(1, 6):
        for flags, same in ((dead.flatten(), True), (~dead.flatten(), False)):
            changed = list(batch)
            x = batch[column]
            changed[column] = torch.where(flags, (x + 1) % 3 if column == 1 else x + 0.5 + x.abs(), x)
            assert all(map(torch.equal, loss_and_gradient(changed), expected)) == same


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_atari_envpool_torchcompile", ["--num-env-groups=2"]),
        pytest.param("ppo_atari_envpool", [], marks=pytest.mark.long),
    ],
)
def test_the_policy_learned_on_catch_is_optimal(script, flags, on_catch, tmp_path) -> None:
    module = {"ppo_atari_envpool": reference}.get(script, fast)
    flags = [*flags, "--env-id=Catch-v0", "--num-threads=1", "--learning-rate=0.003", "--num-steps=64"]
    flags += ["--total-timesteps=40960", "--save-model", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert run(script, *flags) == 0
    result = summary(tmp_path / "run")
    assert result["episodes"] == pytest.approx(4096, abs=8)  # every tenth step
    assert result["episodic_return"] > 0.9
    agent = on_catch[module](3)
    agent.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True)["model"]["agent"])
    envs = catch("Catch-v0", 50, seed=100)
    obs, _ = envs.reset()
    for step in range(90):
        probs, _ = agent(torch.from_numpy(obs))
        obs, rewards, *_ = envs.step(probs.logits.argmax(1).numpy())
        assert (rewards == (1.0 if step % 10 == 8 else 0.0)).all()


def test_groups_of_environments_make_the_same_run(on_catch, tmp_path) -> None:
    points = []
    for groups in (1, 2, 4):
        flags = ["--env-id=Catch-v0", "--num-threads=1", "--num-steps=32", "--total-timesteps=1024"]
        flags += [f"--num-env-groups={groups}", f"--runs-dir={tmp_path}", f"--run-name={groups}"]
        assert run("ppo_atari_envpool_torchcompile", *flags) == 0
        rows = read_metrics(tmp_path / f"{groups}")
        points.append([[v for k, v in row.items() if k.startswith(("losses/", "charts/episodic"))] for row in rows])
    assert len(points[0]) == 4
    # Not to the last bit: a product rounds differently with another number of rows.
    np.testing.assert_allclose(points[1], points[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(points[2], points[0], rtol=1e-3, atol=1e-5)
