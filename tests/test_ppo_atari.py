"""PPO on Atari: the fast rung computes what the reference computes; Catch, whose every tenth step only resets."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from scripts import run, summary, tiny

import leanrl.ppo_atari_envpool as reference
import leanrl.ppo_atari_envpool_onegraph as onegraph
import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.support.envs import EnvPoolVectorEnv, env_seeds
from leanrl.support.executables import untouched
from leanrl.support.optim import FlatAdam
from leanrl.support.tracking import read_metrics

NUM_ACTIONS, NUM_STEPS, NUM_ENVS, MINIBATCH = 6, 16, 4, 16
UPDATES = 50

MODES = {
    "eager": (fast, dict(compile=False, cudagraphs=False)),
    "compile": (fast, dict(compile=True, cudagraphs=False)),
    "cudagraphs": (fast, dict(compile=False, cudagraphs=True)),
    "compile+cudagraphs": (fast, dict(compile=True, cudagraphs=True)),
    "onegraph cudagraphs": (onegraph, dict(compile=False, cudagraphs=True)),
    "onegraph compile+cudagraphs": (onegraph, dict(compile=True, cudagraphs=True)),
}


def cases() -> list:
    found = []
    for mode in MODES:
        for amp in ("none", "bf16"):
            marks = [pytest.mark.cuda] if "cudagraphs" in mode else []
            found.append(pytest.param((mode, amp), marks=marks, id=f"{mode}-{amp}"))
    return found


def parameters_of(agent: fast.Agent) -> dict[str, torch.Tensor]:
    """Its parameters in the reference's names and order."""
    convs = agent.conv1, agent.conv2, agent.conv3
    first, *others = (conv.weight.detach() for conv in convs)
    kernels = [first.view(32, 2, 2, 4, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(32, 4, 8, 8)]
    kernels += [weight.permute(0, 3, 1, 2) for weight in others]
    found = {f"network.{2 * i}.weight": kernel for i, kernel in enumerate(kernels)}
    found |= {f"network.{2 * i}.bias": conv.bias.detach() for i, conv in enumerate(convs)}
    found["network.7.weight"] = agent.linear.weight.detach().view(512, 49, 64).mT.reshape(512, -1)
    found["network.7.bias"] = agent.linear.bias.detach()
    heads = {"actor": agent.actor, "critic": agent.critic}
    return found | {f"{n}.{m}": getattr(head, m).detach() for n, head in heads.items() for m in ("weight", "bias")}


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
def rungs(request, float32_convolutions) -> SimpleNamespace:
    """Both rungs with the same weights and the same rollout, the fast one compiled or captured once for all tests."""
    mode, amp = request.param
    script, levers = MODES[mode]
    args = script.Args(num_envs=NUM_ENVS, num_steps=NUM_STEPS, amp=amp, learning_rate=1e-4, **levers)
    device = torch.device("cuda", 0) if args.cudagraphs else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    plain = reference.Agent(NUM_ACTIONS)
    torch.manual_seed(3)
    quick = fast.Agent(NUM_ACTIONS).to(device)
    generator = torch.Generator().manual_seed(0)
    rows = NUM_STEPS * NUM_ENVS
    obs = torch.randint(0, 256, (rows, 4, 84, 84), generator=generator, dtype=torch.uint8)
    actions = torch.randint(0, NUM_ACTIONS, (rows,), generator=generator)
    logprobs = torch.randn(rows, generator=generator) * 0.1 - 1.8
    advantages, returns, values = torch.randn(3, rows, generator=generator)
    weights = (torch.rand(rows, generator=generator) > 0.1).float()
    batch = (obs, actions, logprobs, advantages, returns, values, weights)

    with torch.no_grad():
        flat = FlatAdam(quick, lr=args.learning_rate, eps=1e-5)
        rollout = fast.Rollout.allocate(quick.pack(obs[:NUM_ENVS].to(device)), NUM_ACTIONS, args)
        policy_step, start = fast.make_policy_step(quick, rollout, args)
        update = fast.make_update(quick, flat, rollout, args)
        # Epochs of one minibatch, so that parameters can be compared after each.
        epoch_args = replace(args, num_steps=MINIBATCH // NUM_ENVS, num_minibatches=1)
        act, update = script.make_executables(policy_step, update, epoch_args, device)

        def fill() -> None:
            rollout.obs[:-1] = quick.pack(obs.to(device)).unflatten(0, (NUM_STEPS, NUM_ENVS))
            for name, column in zip(
                ("actions", "logprobs", "advantages", "returns", "values", "weights"), batch[1:], strict=True
            ):
                getattr(rollout, name)[:NUM_STEPS] = column.view(NUM_STEPS, NUM_ENVS).to(device)

    made = dict(plain=plain, quick=quick, flat=flat, rollout=rollout, start=start, act=act, update=update, fill=fill)
    return SimpleNamespace(amp=amp, args=args, device=device, obs=obs, batch=batch, **made)


def minibatches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(NUM_STEPS * NUM_ENVS, generator=generator)[:MINIBATCH] for _ in range(UPDATES)]


@torch.no_grad()
def check_acting(rungs: SimpleNamespace, plain: nn.Module, tolerance: float, logprob_tolerance: float) -> None:
    """Some steps of the fast rung against ``plain``'s outputs; the samples are those of the noise."""
    rungs.start()
    seen = []
    for t in range(6):
        obs = rungs.obs[t * NUM_ENVS : (t + 1) * NUM_ENVS].flip(1)
        actions = torch.from_numpy(rungs.act(obs.numpy()))
        with torch.autocast("cpu", torch.bfloat16, enabled=rungs.amp == "bf16"):
            logits, value = plain(obs)
        noise = rungs.rollout.noise[t].cpu()
        # Where rounding decides between two actions, it may.
        assert ((logits + noise).amax(1) - (logits + noise).gather(1, actions[:, None])[:, 0] <= tolerance).all()
        logprob = logits.log_softmax(1).gather(1, actions[:, None])[:, 0]
        torch.testing.assert_close(rungs.rollout.logprobs[t].cpu(), logprob, rtol=0, atol=logprob_tolerance)
        torch.testing.assert_close(rungs.rollout.values[t].cpu(), value, rtol=0, atol=tolerance)
        assert torch.equal(rungs.rollout.actions[t].cpu(), actions)
        assert torch.equal(rungs.rollout.obs[t].cpu(), rungs.quick.pack(obs))
        seen.append(actions)
    assert rungs.rollout.row.item() == 6
    assert len(torch.stack(seen).unique(dim=0)) > 1, "samples repeat from call to call"


def test_fifty_updates_equal_the_reference(rungs) -> None:
    plain, flat = rungs.plain, rungs.flat
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for name, parameter in parameters_of(rungs.quick).items():
        assert torch.equal(parameter.cpu(), before[name]), name
    tolerances = (1e-5, 1e-5) if rungs.amp == "none" else (0.02, 1e-3)
    check_acting(rungs, plain, *tolerances)

    optimizer = torch.optim.Adam(plain.parameters(), lr=rungs.args.learning_rate, eps=1e-5)
    plain_update = reference.make_update(plain, optimizer, reference.Args(amp=rungs.amp))
    rungs.fill()
    plain_parts, parts, drifts = [], [], []
    for inds in minibatches():
        plain_parts.append(plain_update(*(column[inds] for column in rungs.batch)))
        with torch.no_grad():
            parts.append(rungs.update(inds.to(rungs.device)).cpu().clone())
        ours, theirs = parameters_of(rungs.quick), dict(plain.named_parameters())
        drifts.append({name: (ours[name].cpu() - theirs[name].detach()).abs() for name in before})

    assert flat.num_steps.item() == UPDATES
    moved = torch.cat([(p.detach() - before[name]).abs().flatten() for name, p in plain.named_parameters()]).mean()
    assert moved > 1e-4, "the reference took no real steps"
    for name in before:
        # A rounding error may switch a unit off, and grows from step to step: at first there is none but rounding.
        # bf16 rounds differently in a fused kernel: on a CPU that makes up to 0.34, half the learning rate would 0.5.
        if rungs.amp == "none":
            if rungs.device.type == "cpu":  # a GPU rounds otherwise from the first layer on
                assert drifts[9][name].max() < 1e-6, name
            assert drifts[-1][name].mean() < 0.05 * moved, name
        else:
            assert drifts[-1][name].mean() < 0.45 * moved, name
    parts, plain_parts = torch.stack(parts), torch.stack(plain_parts)
    if rungs.amp == "none":
        torch.testing.assert_close(parts, plain_parts, rtol=1e-3, atol=1e-3)
    else:  # one row of 16 that rounding takes over the clip's edge is much of clipfrac
        torch.testing.assert_close(parts[0], plain_parts[0], rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(parts[:, :-1], plain_parts[:, :-1], rtol=2e-2, atol=2e-2)
    # And what acts now is what was learned: with a stale copy of the parameters the log-probabilities are 0.017 apart.
    plain.load_state_dict(parameters_of(rungs.quick))
    tolerances = (1e-4, 1e-4) if rungs.amp == "none" else (0.05, 5e-3)
    check_acting(rungs, plain, *tolerances)


@torch.no_grad()
def test_a_new_learning_rate_reaches_the_step(rungs) -> None:
    rungs.fill()
    inds = minibatches()[0].to(rungs.device)
    with untouched(rungs.flat.tensors(), rungs.device):
        for rate in (0.0, 1e-3):
            before = rungs.flat.params.clone()
            rungs.flat.lr.fill_(rate)
            rungs.update(inds)
            assert torch.equal(rungs.flat.params, before) == (rate == 0.0)


@torch.no_grad()
def test_the_same_updates_again_give_the_same_bits(rungs) -> None:
    results = []
    for _ in range(2):
        with untouched([*rungs.flat.tensors(), rungs.rollout.row], rungs.device):
            rungs.fill()
            losses = [rungs.update(inds.to(rungs.device)).clone() for inds in minibatches()[:5]]
            results.append((rungs.flat.params.clone(), *losses))
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
    """For Catch: float [B, 10, 5] -> logits [B, 3], value [B]."""

    def __init__(self, num_actions: int) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(50, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, num_actions), nn.Linear(64, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(obs)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    @staticmethod
    def pack(obs: torch.Tensor) -> torch.Tensor:
        return obs


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
        logits, value = (x.detach() for x in agent(obs))
        probs = torch.distributions.Categorical(logits=logits)
        action = probs.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        done = torch.from_numpy(terminated | truncated).float()
        rows.append((obs, action, probs.log_prob(action), value, torch.from_numpy(reward), done, 1 - resets))
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
        if module is reference:
            loss, parts = module.ppo_loss(agent, *batch, args)
        else:
            loss, parts = module.ppo_loss(*agent(batch[0]), *batch[1:], args)
        return [loss.detach(), parts, *torch.autograd.grad(loss, list(agent.parameters()))]

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
        logits, _ = agent(torch.from_numpy(obs))
        obs, rewards, *_ = envs.step(logits.argmax(1).numpy())
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
