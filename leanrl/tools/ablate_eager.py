"""What common advice for eager code is worth on a CPU: rows of ``leanrl.tools.ablate``.

Advice of the original LeanRL's README and of PyTorch's tuning guide. What concerns the traffic between a CPU and a GPU
(tensors made on the device, pinned memory, non-blocking copies) has no meaning here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

import leanrl.ppo_continuous_action as ppo
import leanrl.td3_continuous_action as td3
from leanrl.tools.ablate_off_policy import (
    ACTION_DIM,
    ACTOR_SIZES,
    CRITICS_SIZES,
    OBS_DIM,
    bursts,
    same_way,
    updating,
)
from leanrl.tools.ablate_td3 import reference_learner
from leanrl.tools.ablation import Group, Side, eager, pair, row_of

EAGER = Group(
    "Advice for eager code",
    "Each is one environment step of HalfCheetah-v5; of TD3's with an update, the actor's every second time.",
)
NUM_STEPS = 500


def stepping(step: Callable[[int], torch.Tensor], finish: Callable | None = None) -> Side:
    """NUM_STEPS environment steps: ``step(t)``, and ``finish`` makes one tensor of what all of them returned."""

    def burst() -> Sequence[torch.Tensor]:
        results = [step(t) for t in range(NUM_STEPS)]
        return [finish(results) if finish else results[-1]]

    return Side(burst, NUM_STEPS, NUM_STEPS)


def observations() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(NUM_STEPS, 1, OBS_DIM))


@row_of(EAGER)
def eager_fused():
    sides = (updating(reference_learner(fused=fused), eager) for fused in (None, True))
    yield same_way("Adam(fused=True): TD3", *sides)


@row_of(EAGER)
def eager_item():
    """Without a device to wait for, what is left is a call."""

    def reading(read: bool) -> Side:
        learner = reference_learner()

        def step(with_actor: bool) -> None:
            learner.update(with_actor)
            if read:
                [loss.tolist() for loss in learner.losses]

        return bursts(learner, step)

    yield same_way("no .item() of the losses at each update: TD3", reading(True), reading(False))


@row_of(EAGER)
def eager_polyak():
    """The targets' way to the trained networks, every second step."""

    def targets(move: Callable) -> Side:
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            trained = [*td3.Actor(*ACTOR_SIZES).parameters(), *td3.Critics(*CRITICS_SIZES).parameters()]
            target = [torch.randn_like(parameter) for parameter in trained]

        def burst() -> list[torch.Tensor]:
            for _ in range(NUM_STEPS // 2):
                move(target, trained)
            return target

        return Side(burst, NUM_STEPS, NUM_STEPS // 2, target)

    def written_out(target: list[torch.Tensor], trained: list[torch.Tensor]) -> None:
        for old, new in zip(target, trained, strict=True):
            old.copy_(0.005 * new + 0.995 * old)

    def lerp(target: list[torch.Tensor], trained: list[torch.Tensor]) -> None:
        for old, new in zip(target, trained, strict=True):
            old.lerp_(new, 0.005)

    def foreach(target: list[torch.Tensor], trained: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(target, trained, 0.005)

    yield pair("lerp_, not tau * p + (1 - tau) * t: moving TD3's targets", targets(written_out), targets(lerp))
    yield pair("_foreach_lerp_, not lerp_ one by one: moving TD3's targets", targets(lerp), targets(foreach))


@row_of(EAGER)
def eager_zero_grad():
    def clearing(set_to_none: bool) -> Side:
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            critics = td3.Critics(*CRITICS_SIZES)
            batch = torch.randn(256, OBS_DIM), torch.randn(256, ACTION_DIM)

        def step(_: int) -> torch.Tensor:
            critics.zero_grad(set_to_none=set_to_none)
            with torch.enable_grad():
                critics(*batch).sum().backward()
            return critics.fc1.weight.grad

        return stepping(step)

    yield pair("zero_grad(set_to_none=True): gradient of TD3's critics", clearing(False), clearing(True))


@row_of(EAGER)
def eager_observation():
    obs = observations()
    as_list = stepping(lambda t: torch.tensor(obs[t].tolist(), dtype=torch.float32), torch.stack)
    as_array = stepping(lambda t: torch.as_tensor(obs[t], dtype=torch.float32), torch.stack)
    yield pair("torch.as_tensor(array), not torch.tensor(list): an observation", as_list, as_array)


@row_of(EAGER)
def eager_rollout():
    """Observation, action, log-probability, reward, done and value of each step."""
    torch.manual_seed(0)
    rows = [torch.randn(NUM_STEPS, 1, OBS_DIM), torch.randn(NUM_STEPS, 1, ACTION_DIM), *torch.randn(4, NUM_STEPS, 1)]
    names = ("obs", "actions", "logprobs", "rewards", "dones", "values")
    storage = [torch.zeros_like(row) for row in rows]

    def flat(columns: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([column.reshape(NUM_STEPS, -1) for column in columns], 1)

    def write(t: int) -> None:
        for column, row in zip(storage, rows, strict=True):
            column[t] = row[t]

    def tensordict(t: int) -> TensorDict:
        return TensorDict({name: row[t] for name, row in zip(names, rows, strict=True)}, batch_size=(1,))

    def stack_tensordicts(steps: list[TensorDict]) -> torch.Tensor:
        rollout = torch.stack(steps)
        return flat([rollout[name] for name in names])

    lists = stepping(
        lambda t: [row[t] for row in rows], lambda steps: flat([torch.stack(c) for c in zip(*steps, strict=True)])
    )
    written = stepping(write, lambda _: flat(storage))
    yield pair(
        "tensors made before, not a TensorDict a step: a rollout", stepping(tensordict, stack_tensordicts), written
    )
    yield pair("tensors made before, not stacked lists: a rollout", lists, written)


@row_of(EAGER)
def eager_acting():
    """PPO's policy for one observation."""
    obs = torch.as_tensor(observations(), dtype=torch.float32)
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        agent = ppo.Agent(OBS_DIM, ACTION_DIM)

    def acting(context: Callable) -> Side:
        def step(t: int) -> torch.Tensor:
            with context():
                return agent.actor_mean(obs[t]).detach()

        return stepping(step, torch.stack)

    with_grad, no_grad = acting(torch.enable_grad), acting(torch.no_grad)
    yield pair("no_grad: acting", with_grad, no_grad)
    yield pair("inference_mode, not no_grad: acting", no_grad, acting(torch.inference_mode))


@row_of(EAGER)
def eager_distribution():
    """The log-probability of a Gaussian policy's sample, PPO's."""
    torch.manual_seed(0)
    mean, noise = torch.randn(2, NUM_STEPS, 1, ACTION_DIM)
    logstd = torch.full((1, ACTION_DIM), -0.5)

    def by_class(validate: bool) -> Callable[[int], torch.Tensor]:
        def step(t: int) -> torch.Tensor:
            normal = torch.distributions.Normal(mean[t], logstd.exp(), validate_args=validate)
            return normal.log_prob(mean[t] + logstd.exp() * noise[t]).sum(1)

        return step

    def written_out(t: int) -> torch.Tensor:
        return (-0.5 * noise[t] ** 2 - logstd - 0.9189385332046727).sum(1)

    checked, unchecked = (stepping(by_class(validate), torch.stack) for validate in (True, False))
    yield pair("validate_args=False: a Normal's log-probability", checked, unchecked)
    yield pair(
        "written out, not a Normal(validate_args=False): its log-probability",
        unchecked,
        stepping(written_out, torch.stack),
    )


@dataclass
class Discounts:
    gamma: float = 0.99
    gae_lambda: float = 0.95


@row_of(EAGER)
def eager_arguments():
    """A loop over steps that reads two arguments, as GAE's does."""
    args = Discounts()
    deltas = torch.linspace(-1, 1, NUM_STEPS).unsqueeze(1)

    def from_object() -> list[torch.Tensor]:
        total = torch.zeros(1)
        for t in range(NUM_STEPS):
            total = deltas[t] + args.gamma * args.gae_lambda * total
        return [total]

    def cached() -> list[torch.Tensor]:
        gamma, gae_lambda, total = args.gamma, args.gae_lambda, torch.zeros(1)
        for t in range(NUM_STEPS):
            total = deltas[t] + gamma * gae_lambda * total
        return [total]

    yield pair(
        "arguments read into names before a loop: GAE",
        Side(from_object, NUM_STEPS, NUM_STEPS),
        Side(cached, NUM_STEPS, NUM_STEPS),
    )
