"""PPO for continuous actions: the fast variant trains and acts as the reference does, in every mode."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from scripts import run, tiny
from torch.utils._pytree import tree_leaves

import leanrl.ppo_continuous_action as reference
import leanrl.ppo_continuous_action_torchcompile as fast
from leanrl.support.envs import make_envs
from leanrl.support.evaluation import load_model
from leanrl.support.executables import CompiledStep, untouched
from leanrl.support.normalization import RewardNormalizer, RunningMoments
from leanrl.support.optim import Adam

OBS_DIM, ACTION_DIM, NUM_STEPS, NUM_ENVS = 11, 3, 128, 2
UPDATES = 50

MODES = {
    "eager": dict(compile=False, cudagraphs=False),
    "compile": dict(compile=True, cudagraphs=False),
    "cudagraphs": dict(compile=False, cudagraphs=True),
    "compile+cudagraphs": dict(compile=True, cudagraphs=True),
}
in_every_mode = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.cuda) if "cudagraphs" in mode else mode for mode in MODES]
)


def mode_args(mode: str, **changes) -> tuple[fast.Args, torch.device]:
    args = fast.Args(**{"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, **MODES[mode], **changes})
    return args, torch.device("cuda", 0) if args.cudagraphs else torch.device("cpu")


def random_rollout(device: torch.device, module=fast):
    """A rollout with plausible numbers and a few steps that only reset."""
    generator = torch.Generator().manual_seed(0)
    rollout = module.Rollout.allocate(NUM_STEPS, NUM_ENVS, OBS_DIM, ACTION_DIM, device)
    for name in ("obs", "actions", "advantages", "returns", "values"):
        tensor = getattr(rollout, name)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    rollout.logprobs.copy_(torch.randn(rollout.logprobs.shape, generator=generator) * 0.3 - 4.0)
    rollout.weights.copy_((torch.rand(rollout.weights.shape, generator=generator) > 0.1).float())
    return rollout


def minibatches(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(NUM_STEPS * NUM_ENVS, generator=generator)[:64].to(device) for _ in range(UPDATES)]


def agents(device: torch.device) -> tuple[reference.Agent, fast.Agent]:
    torch.manual_seed(3)
    plain = reference.Agent(OBS_DIM, ACTION_DIM)
    quick = fast.Agent(OBS_DIM, ACTION_DIM).to(device)
    quick.load_state_dict(plain.state_dict())
    return plain, quick


@pytest.mark.parametrize("amp", ["none", "bf16"])
@in_every_mode
def test_fifty_updates_equal_the_reference(mode: str, amp: str) -> None:
    args, device = mode_args(mode, ent_coef=0.01, amp=amp)
    plain, quick = agents(device)
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizer = torch.optim.Adam(plain.parameters(), lr=args.learning_rate, eps=1e-5)
    plain_update = reference.make_update(plain, optimizer, random_rollout(torch.device("cpu"), reference), args)
    plain_losses = [plain_update(inds.cpu()) for inds in minibatches(device)]

    adam = Adam(quick.parameters(), lr=args.learning_rate, eps=1e-5)
    update = fast.make_update(quick, adam, random_rollout(device), args)
    _, update = fast.make_executables(lambda: None, update, args, device)
    losses = [update(inds).clone() for inds in minibatches(device)]

    moved = max((p - start[name]).abs().max().item() for name, p in plain.named_parameters())
    assert moved > 1e-2, "the reference took no real steps"
    assert adam.num_steps.item() == UPDATES
    # bf16 rounds differently in a fused kernel; its steps still have to agree far within what they move.
    # Another device sums in another order.
    tolerance = 0.15 * moved if amp == "bf16" else 2e-6 if device.type == "cpu" else 2e-5
    for name, parameter in quick.named_parameters():
        assert (parameter.cpu() - dict(plain.named_parameters())[name]).abs().max() < tolerance, name
    if amp == "none":
        torch.testing.assert_close(torch.stack(losses).cpu(), torch.stack(plain_losses), rtol=1e-4, atol=2e-5)


@in_every_mode
def test_a_new_learning_rate_reaches_the_step(mode: str) -> None:
    """A loaded one too."""
    args, device = mode_args(mode)
    _, quick = agents(device)
    optimizer = Adam(quick.parameters(), lr=1e-3, eps=1e-5)
    still = optimizer.state_dict() | {"state": {}, "param_groups": [{"lr": 0.0}]}
    update = fast.make_update(quick, optimizer, random_rollout(device), args)
    _, update = fast.make_executables(lambda: None, update, args, device)

    def moved(inds: torch.Tensor) -> bool:
        before = [p.detach().clone() for p in quick.parameters()]
        update(inds)
        return not all(map(torch.equal, quick.parameters(), before))

    assert all(map(moved, minibatches(device)[:6]))
    optimizer.param_groups[0]["lr"].fill_(0.0)
    assert not moved(minibatches(device)[6])
    optimizer.param_groups[0]["lr"].fill_(1e-3)
    assert moved(minibatches(device)[7])
    optimizer.load_state_dict(still)
    assert not moved(minibatches(device)[8])


@pytest.mark.parametrize("num_envs", [1, 3])
@in_every_mode
def test_acting_equals_wrappers_and_reference_network(mode: str, num_envs: int) -> None:
    """NormalizeObservation, the clip, the policy and the sampled action, over calls enough to pass capture."""
    args, device = mode_args(mode, num_envs=num_envs)
    plain, quick = agents(device)
    moments = RunningMoments.start((OBS_DIM,), device)
    rollout = fast.Rollout.allocate(NUM_STEPS, num_envs, OBS_DIM, ACTION_DIM, device)
    low, high = np.array([-3.0, -0.4, -1.0], np.float32), np.array([3.0, 0.4, 1.0], np.float32)
    as_sums = mode == "compile" and num_envs == 1
    noise, row = torch.randn_like(rollout.actions), torch.zeros(1, dtype=torch.int64, device=device)
    *_, policy_step = fast.make_acting(quick, moments, rollout, noise, row, low, high, as_sums)
    rms = gym.wrappers.utils.RunningMeanStd(shape=(OBS_DIM,))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        policy_step, _ = fast.make_executables(policy_step, lambda inds: inds, args, device)
        for t in range(NUM_STEPS):
            raw = rng.normal(size=(num_envs, OBS_DIM)) * 5 + 100
            action = policy_step(torch.from_numpy(raw).to(device)).cpu()
            rms.update(raw)
            obs = torch.as_tensor(np.clip((raw - rms.mean) / np.sqrt(rms.var + 1e-8), -10, 10), dtype=torch.float32)
            sampled = plain.actor_mean(obs) + plain.actor_logstd.exp() * noise[t].cpu()
            torch.testing.assert_close(rollout.obs[t].cpu(), obs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rollout.actions[t].cpu(), sampled, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                action, sampled.clamp(torch.tensor(low), torch.tensor(high)), rtol=1e-5, atol=1e-5
            )
    assert row.item() == NUM_STEPS
    assert len(rollout.actions[:-1].unique(dim=0)) == NUM_STEPS, "samples repeat from call to call"
    torch.testing.assert_close(moments.var.cpu(), torch.from_numpy(rms.var), rtol=1e-9, atol=0)


def test_moments_are_float64_from_the_start_and_after_a_resume() -> None:
    """Of float32 observations too, Pendulum's: a resumed run normalises them as an uninterrupted one does."""

    def wrapped() -> tuple[gym.vector.VectorEnv, gym.vector.VectorEnv, list]:
        raw = make_envs("Pendulum-v1", NUM_ENVS, seed=1)
        envs = reference.wrap_envs(raw, 0.99)
        obs_normalizer = reference.find_wrapper(envs, gym.wrappers.vector.NormalizeObservation)
        reward_normalizer = reference.find_wrapper(envs, gym.wrappers.vector.NormalizeReward)
        return raw, envs, [obs_normalizer.obs_rms, reward_normalizer.return_rms]

    raw, envs, moments = wrapped()
    ours = RunningMoments.start((3,), torch.device("cpu"))
    actions = np.random.default_rng(0).uniform(-2, 2, (60, NUM_ENVS, 1)).astype(np.float32)
    envs.reset()
    ours.update(torch.from_numpy(raw._obs.astype(np.float64)))
    for action in actions[:30]:
        envs.step(action)
        ours.update(torch.from_numpy(raw._obs.astype(np.float64)))
        assert all(rms.mean.dtype == rms.var.dtype == np.float64 for rms in moments)
    assert raw._obs.dtype == np.float32
    torch.testing.assert_close(ours.mean, torch.from_numpy(moments[0].mean), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.var, torch.from_numpy(moments[0].var), rtol=1e-12, atol=0)

    resumed_raw, resumed, resumed_moments = wrapped()
    resumed.reset()
    resumed_raw.load_state_dict(raw.state_dict())
    for rms, loaded in zip(moments, resumed_moments, strict=True):
        reference.load_rms_state(loaded, reference.rms_state(rms))
    for action in actions[30:]:
        np.testing.assert_array_equal(resumed.step(action)[0], envs.step(action)[0])
        assert all(rms.mean.dtype == rms.var.dtype == np.float64 for rms in resumed_moments)


class Dial(gym.Env):
    """Observations are whole numbers that no action changes; an episode has 20 steps."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, dtype: type) -> None:
        self.observation_space = gym.spaces.Box(0, 100, (3,), dtype)

    def turn(self) -> np.ndarray:
        return self.np_random.integers(101, size=3).astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.turn(), {}

    def step(self, action):
        self.t += 1
        return self.turn(), float(action[0]), self.t == 20, False, {}


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_whole_numbers_are_observed_alike(dtype: type, tmp_path) -> None:
    gym.register("LeanRLDial-v0", Dial, kwargs={"dtype": dtype})
    try:
        models = []
        for script in ("ppo_continuous_action", "ppo_continuous_action_torchcompile"):
            flags = ["--env-id=LeanRLDial-v0", "--total-timesteps=256", "--save-model", "--runs-dir", tmp_path]
            assert run(script, *tiny(script), *flags, "--run-name", script) == 0
            models.append(load_model(tmp_path / script)["model"])
    finally:
        gym.registry.pop("LeanRLDial-v0")
    ours, theirs = (model["obs_rms"] for model in models)
    assert (ours["mean"] > 30).all()
    for name, value in ours.items():
        torch.testing.assert_close(value.flatten(), theirs[name].flatten(), rtol=1e-12, atol=0)


def test_acting_follows_the_learner() -> None:
    """The compiled policy sees every update of the parameters: there is no copy of them to go stale."""
    args, device = mode_args("compile")
    _, quick = agents(device)
    optimizer = Adam(quick.parameters(), lr=1e-2, eps=1e-5)
    rollout = random_rollout(device)
    moments = RunningMoments.start((OBS_DIM,), device)
    bound = np.full(ACTION_DIM, 100, np.float32)
    noise, row = torch.randn_like(rollout.actions), torch.zeros(1, dtype=torch.int64)
    *_, policy_step = fast.make_acting(quick, moments, rollout, noise, row, -bound, bound, False)
    update = fast.make_update(quick, optimizer, rollout, args)
    policy_step, update = fast.make_executables(policy_step, update, args, device)
    for inds in minibatches(device)[:10]:
        row.zero_()
        action = policy_step(torch.randn(NUM_ENVS, OBS_DIM, dtype=torch.float64))
        expected = quick.actor_mean(rollout.obs[0]) + quick.actor_logstd.exp() * noise[0]
        torch.testing.assert_close(action, expected, rtol=1e-5, atol=1e-5)
        update(inds)


def test_a_finished_rollout_is_the_references() -> None:
    """Values and log-probabilities of every step in one batch: those that the reference writes step by step."""
    args, device = mode_args("eager")
    plain, quick = agents(device)
    ours, theirs = random_rollout(device), random_rollout(device, reference)
    rewards, flags = torch.randn(NUM_STEPS, NUM_ENVS), (torch.rand(3, NUM_STEPS, NUM_ENVS) < 0.1).float()
    terminations, dones, resets = flags[0], flags[:2].amax(0), flags[2]
    with torch.no_grad():
        for t in range(NUM_STEPS + 1):
            theirs.values[t] = plain.get_value(theirs.obs[t])
            theirs.logprobs[t] = plain.get_policy(theirs.obs[t]).log_prob(theirs.actions[t]).sum(1)
    advantages = reference.compute_gae(rewards, theirs.values, terminations, dones, args.gamma, args.gae_lambda)
    fast.finish_rollout(quick, ours, lambda rewards, *_: rewards, rewards, terminations, dones, resets, args)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logprobs[:-1], theirs.logprobs[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.advantages[:-1], advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.returns[:-1], advantages + theirs.values[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.weights[:-1], 1 - resets)


class Script(gym.vector.VectorEnv):
    """Plays back given rewards and flags, in NEXT_STEP mode."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray) -> None:
        self.told, self.t, self.num_envs = (rewards, terminations, truncations), -1, rewards.shape[1]

    def reset(self, **kwargs):
        return np.zeros((self.num_envs, 1)), {}

    def step(self, actions):
        self.t += 1
        return np.zeros((self.num_envs, 1)), *(x[self.t].copy() for x in self.told), {}


def test_reward_normalizer_equals_gymnasiums_wrapper() -> None:
    """Over rollouts of several lengths, with terminations, truncations and the reset steps after them."""
    rng = np.random.default_rng(5)
    total, num_envs = 300, 3
    terminations = rng.random((total, num_envs)) < 0.05
    truncations = rng.random((total, num_envs)) < 0.05
    resets = np.zeros((total, num_envs), bool)
    for t in range(1, total):
        resets[t] = terminations[t - 1] | truncations[t - 1]
        terminations[t] &= ~resets[t]
        truncations[t] &= ~resets[t]
    assert resets.sum() > 30
    rewards = np.where(resets, 0.0, rng.normal(size=(total, num_envs)) * 3 + 1)
    wrapper = gym.wrappers.vector.NormalizeReward(Script(rewards, terminations, truncations), gamma=0.97)
    wrapper.reset()
    expected = np.stack([wrapper.step(None)[1] for _ in range(total)]).clip(-10, 10)
    normalize = RewardNormalizer(num_envs, 0.97, torch.device("cpu"))
    pieces = [
        normalize(*(torch.as_tensor(x[a:b], dtype=torch.float32) for x in (rewards, terminations, 1.0 - resets)))
        for a, b in ((0, 1), (1, 128), (128, 130), (130, 300))
    ]
    # Gymnasium sums the discounted return in float32.
    torch.testing.assert_close(torch.cat(pieces), torch.as_tensor(expected, dtype=torch.float32), rtol=2e-5, atol=1e-6)


def test_warm_up_leaves_no_trace() -> None:
    """Parameters, optimiser and random numbers are bitwise what they were, at the same addresses."""
    args, device = mode_args("compile")
    _, quick = agents(device)
    optimizer = Adam(quick.parameters(), lr=1e-3, eps=1e-5)
    update = CompiledStep(fast.make_update(quick, optimizer, random_rollout(device), args), device)
    state = {"agent": quick.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    before, addresses = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    rng = torch.get_rng_state()
    with untouched(state, device):
        for inds in minibatches(device)[:3]:
            update(inds)
            torch.rand(1)
        assert not torch.equal(tensors[0], before[0])
    after = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    assert all(map(torch.equal, after, before)) and addresses == [x.data_ptr() for x in after]
    assert torch.equal(torch.get_rng_state(), rng)


def test_compiled_step_passes_arguments_and_keeps_in_place_changes() -> None:
    """Float64 and int64 counters of shape [1] too: TorchInductor loses changes to 0-d ones."""
    count, clock, total = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), torch.zeros(4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        clock.add_(0.5)
        total.add_(x - 2 * y)
        return x * 10 + y

    step = CompiledStep(fn, torch.device("cpu"))
    expected = torch.zeros(4)
    for i in range(5):
        x, y = torch.full((4,), float(i)), torch.arange(4.0)
        torch.testing.assert_close(step(x, y), x * 10 + y)
        expected += x - 2 * y
    assert count.item() == 5 and clock.item() == 2.5
    torch.testing.assert_close(total, expected)


def test_functions_of_one_code_each_compile_once() -> None:
    """More of them than Dynamo allows, which takes them for recompilations of one function."""

    def factory() -> tuple[CompiledStep, torch.Tensor]:
        count = torch.zeros(1)

        def fn() -> None:
            count.add_(1)

        return CompiledStep(fn, torch.device("cpu"), cpp_wrapper=False), count

    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            step, count = factory()
            for _ in range(3):
                step()
            assert count.item() == 3


def test_a_step_with_two_backwards_leaves_the_next_alone() -> None:
    """Other networks, in other places."""

    def factory(networks: dict[str, torch.nn.Module], num_backwards: int) -> CompiledStep:
        def fn() -> None:
            for _ in range(num_backwards):
                for network in networks.values():
                    network(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

        optimizer = Adam([p for network in networks.values() for p in network.parameters()], lr=0.1)
        return CompiledStep(fn, torch.device("cpu"), cpp_wrapper=False)

    for name, num_backwards in (("first", 2), ("second", 1)):
        network = torch.nn.Linear(3, 1)
        before = network.bias.detach().clone()
        factory({name: network}, num_backwards)()
        torch.testing.assert_close(network.bias.detach(), before - 0.1 * num_backwards)


def test_compiled_step_refuses_a_graph_break() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(Exception, match=r"(?i)data-dependent|unsupported|graph"):
        CompiledStep(fn, torch.device("cpu"))(torch.ones(3))
