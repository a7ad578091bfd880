"""Gymnasium's vector NormalizeObservation and NormalizeReward as tensor operations.

The wrappers take longer than a step of a MuJoCo simulator. tests/test_ppo_continuous.py checks these against them.
"""

import torch
import torch.nn as nn

from leanrl.support.scan import linear_recurrence


class RunningMoments(nn.Module):
    """Mean, variance and count of a stream, in float64, updated in place (Gymnasium's RunningMeanStd).

    Calling it normalises. If a batch of vectors is sharded over several learners, each computes the ``sums`` of its
    shard, and all ``add`` the total.

    Args:
        shape: of an element of the stream.
        count: initial count.
    """

    def __init__(self, shape: tuple[int, ...], count: float = 1e-4) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        # Shape [1] for the reason given in Traceable.
        self.register_buffer("count", torch.full((1,), count, dtype=torch.float64))

    def update(self, batch: torch.Tensor) -> None:
        """Merges ``batch`` [N, size]."""
        self.add(self.sums(batch, batch.new_ones(len(batch))))

    def sums(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The count of ``x`` [..., size], the sums of its deviations from the mean so far, and those of their squares:
        [1 + 2 size], float64. ``mask`` [...] is 1 for the vectors that count, else 0."""
        # Deviations, to avoid cancellation between large sums.
        deviations = ((x - self.mean) * mask.unsqueeze(-1)).flatten(0, -2)
        return torch.cat([mask.sum().double().view(1), deviations.sum(0), deviations.square().sum(0)])

    def add(self, sums: torch.Tensor) -> None:
        """Merges a batch, given the total of its shards' ``sums``."""
        number, deviations, squares = sums.split([1, len(self.mean), len(self.mean)])
        total = self.count + number
        shift = deviations / total
        # Of large equal values, rounding may leave less than nothing.
        self.var.copy_(((self.var * self.count + squares) / total - shift**2).clamp(min=0))
        self.mean.add_(shift)
        self.count.copy_(total)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., shape] minus the mean, over the standard deviation, clipped to [-10, 10], in float32."""
        return ((x - self.mean) / torch.sqrt(self.var + 1e-8)).float().clamp(-10, 10)


class RewardNormalizer:
    """Gymnasium's vector NormalizeReward, for the rewards of a whole rollout at once.

    Each reward is divided by the standard deviation of all discounted returns so far; running sums give it for all t.

    Args:
        num_envs: N.
        gamma: discount.
        device: where the rewards will be.
    """

    def __init__(self, num_envs: int, gamma: float, device: torch.device) -> None:
        self.gamma = gamma
        self.moments = RunningMoments(()).to(device)
        self.discounted = torch.zeros(num_envs, dtype=torch.float64, device=device)

    def __call__(self, rewards: torch.Tensor, terminations: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Normalises rewards and clips them to [-10, 10].

        Args:
            rewards, terminations, mask: [T, N]; the mask is 0 where a step only reset its environment, else 1.

        Returns:
            [T, N], float32
        """
        rewards, mask = rewards.double(), mask.double()
        # As in Gymnasium: a termination restarts the discounted return, truncations and resets do not.
        decays = torch.where(mask > 0, self.gamma * (1.0 - terminations.double()), 1.0)
        inputs = rewards * mask
        inputs[0] += decays[0] * self.discounted
        returns = linear_recurrence(inputs, decays)
        self.discounted.copy_(returns[-1])
        # Deviations from the old mean, to avoid cancellation between large sums.
        deviations = (returns - self.moments.mean) * mask
        counts = self.moments.count + mask.sum(1).cumsum(0)
        shifts = deviations.sum(1).cumsum(0) / counts
        variances = (self.moments.var * self.moments.count + (deviations**2).sum(1).cumsum(0)) / counts - shifts**2
        self.moments.mean.add_(shifts[-1])
        self.moments.var.copy_(variances[-1])
        self.moments.count.copy_(counts[-1:])
        return (rewards / torch.sqrt(variances + 1e-8).unsqueeze(1)).float().clamp(-10, 10)
