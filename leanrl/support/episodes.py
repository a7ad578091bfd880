"""Returns and lengths of the episodes that end, counted as Gymnasium's RecordEpisodeStatistics counts them."""

from collections.abc import Sequence

import numpy as np
import torch


class EpisodeStatistics:
    """Counts over the episodes of N environments, a step or a whole rollout at a time.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, int)

    def add_step(self, rewards: np.ndarray, dones: np.ndarray, resets: np.ndarray) -> tuple[Sequence, Sequence]:
        """Returns and lengths of the episodes that ended with this step.

        Args:
            rewards, dones, resets: [N]; ``resets`` marks the steps that only reset their environment.
        """
        self._returns += rewards
        self._lengths += ~resets
        if not dones.any():
            return (), ()
        ended_returns, ended_lengths = self._returns[dones], self._lengths[dones]
        self._returns[dones], self._lengths[dones] = 0.0, 0
        return ended_returns, ended_lengths

    def add(self, rewards: np.ndarray, dones: np.ndarray, resets: np.ndarray) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended within a rollout, in the order of their ends.

        Args:
            rewards, dones, resets: [T, N], as in ``add_step``.
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

    def state_dict(self) -> dict:
        """The unfinished episodes."""
        return {"returns": torch.tensor(self._returns), "lengths": torch.tensor(self._lengths)}

    def load_state_dict(self, state: dict) -> None:
        """Restores what ``state_dict`` returned."""
        self._returns[:], self._lengths[:] = state["returns"].numpy(), state["lengths"].numpy()
