"""Returns and lengths of the episodes that end within a rollout."""

import numpy as np


class EpisodeStatistics:
    """What Gymnasium's RecordEpisodeStatistics counts, for a whole rollout at once.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, int)

    def add(self, rewards: np.ndarray, dones: np.ndarray, resets: np.ndarray) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended, in the order of their ends.

        Args:
            rewards, dones, resets: [T, N]; ``resets`` marks the steps that only reset their environment.
        """
        # Sums over a rollout, so that one subtraction gives each episode's part of it.
        returns = self._returns + np.cumsum(rewards, 0)
        lengths = self._lengths + np.cumsum(~resets, 0)
        ended_returns, ended_lengths = [], []
        base_returns, base_lengths = np.zeros_like(self._returns), np.zeros_like(self._lengths)
        for t, n in zip(*np.nonzero(dones), strict=True):
            ended_returns.append(float(returns[t, n] - base_returns[n]))
            ended_lengths.append(int(lengths[t, n] - base_lengths[n]))
            base_returns[n], base_lengths[n] = returns[t, n], lengths[t, n]
        self._returns, self._lengths = returns[-1] - base_returns, lengths[-1] - base_lengths
        return ended_returns, ended_lengths
