"""Returns and lengths of finished episodes, counted as Gymnasium's RecordEpisodeStatistics counts them."""

from collections.abc import Sequence

import numpy as np
import torch


class EpisodeStatistics:
    """Sums the rewards and lengths of the episodes of N environments, one step or one rollout at a time.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._sums = np.zeros((2, num_envs))
        self._returns, self._lengths = self._sums  # views

    def add_step(self, rewards: np.ndarray, dones: np.ndarray, resets: np.ndarray) -> Sequence[Sequence]:
        """Returns and lengths, [E] each, of the E episodes that ended on this step.

        Args:
            rewards, dones, resets: [N]; ``resets`` marks steps that only reset their environment.
        """
        self._returns += rewards
        self._lengths += ~resets
        if not dones.any():
            return (), ()
        ended = self._sums[:, dones]
        self._sums[:, dones] = 0.0
        return ended

    def add(self, rewards: np.ndarray, dones: np.ndarray, resets: np.ndarray) -> np.ndarray:
        """Returns and lengths [2, E] of the E episodes that ended within a rollout, in the order in which they ended.

        Args:
            rewards, dones, resets: [T, N], as in ``add_step``.
        """
        # Running sums [2, T, N]: an episode's total is the sum at its end minus the sum at the previous episode's end.
        sums = self._sums[:, None] + np.cumsum([rewards, ~resets], 1)
        ended, before = [], np.zeros_like(self._sums)
        for t, n in zip(*np.nonzero(dones), strict=True):
            ended.append(sums[:, t, n] - before[:, n])
            before[:, n] = sums[:, t, n]
        self._sums[:] = sums[:, -1] - before
        return np.reshape(ended, (-1, 2)).T

    def state_dict(self) -> dict:
        """The unfinished episodes."""
        return {"returns": torch.tensor(self._returns), "lengths": torch.tensor(self._lengths)}

    def load_state_dict(self, state: dict) -> None:
        """Restores what ``state_dict`` returned."""
        self._returns[:], self._lengths[:] = state["returns"].numpy(), state["lengths"].numpy()
