"""Random numbers that depend only on what they are for, not on processes, threads or the number of learners."""

import gymnasium as gym
import numpy as np
import torch

# SplitMix64's constants (https://doi.org/10.1145/2660193.2660195), signed: PyTorch multiplies modulo 2**64 too.
INCREMENT, FACTOR_1, FACTOR_2 = (
    factor - 2**64 for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# log2 of the number of draws that an environment may make in a run.
DRAWS_BITS = 40


def shard_generator(seed: int, shard: int, epoch: int) -> np.random.Generator:
    """The random stream of a shard in an epoch, reached without drawing the earlier ones.

    Philox is counter-based (https://doi.org/10.1145/2063384.2063405): seed and shard are the key, and the counter
    starts at the epoch.
    """
    key, counter = np.array([seed, shard], np.uint64), np.array([0, 0, epoch, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def random_bits(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """64 random bits for each of ``numbers`` (int64), different for different numbers."""
    return _mix(_mix(torch.tensor(seed)) + numbers * INCREMENT)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * FACTOR_1
    x = (x ^ _shifted(x, 27)) * FACTOR_2
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """``x >> bits``, filled with zeros from the left; PyTorch itself repeats the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def policy_size(space: gym.Space) -> int:
    """Size of a policy's output, and of its sampling noise: one per Discrete action, or per dimension of a Box."""
    return int(space.n) if isinstance(space, gym.spaces.Discrete) else space.shape[0]


def action_noise(seed: int, envs: range, steps: range, space: gym.Space, device: torch.device) -> torch.Tensor:
    """Noise that turns policies into samples, [T, n, k] on ``device``.

    Gumbel(0, 1) for a Discrete ``space`` of k actions: the argmax of logits plus noise samples their softmax. Standard
    normal for a Box of k dimensions.

    Args:
        envs: global indices of the n environments.
        steps: indices of the T steps in the run; those of rollout r start at r T.
    """
    size = policy_size(space)
    env, step, number = (torch.arange(r.start, r.stop, device=device) for r in (envs, steps, range(size)))
    draws = step.view(-1, 1, 1) * size + number
    bits = random_bits(seed, (env.view(-1, 1) << DRAWS_BITS) + draws)
    # Never 0 or 1. In float64: a row's place in its batch may change a logarithm's last bits, which float32 drops.
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    if isinstance(space, gym.spaces.Box):
        return torch.special.ndtri(uniform).float()
    return uniform.log_().neg_().log_().neg_().float()
