"""The replay buffer of off-policy algorithms: a ring of transitions, preallocated on the learner's device."""

from typing import NamedTuple

import psutil
import torch

from leanrl.support.errors import bad


class Batch(NamedTuple):
    """Transitions: obs, next_obs [B, obs_dim], actions [B, action_dim], rewards and terminations [B], all float32.

    ``next_obs`` is the final observation where an episode ended. ``terminations`` is 1 only where the task itself
    ended it: bootstrapping stops there, but not where time ran out.
    """

    obs: torch.Tensor
    next_obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor


class Replay:
    """A ring of the last ``capacity`` transitions.

    Writing and sampling are tensor operations that do not synchronise, so they can be part of a compiled or captured
    step. A transition is one row of one matrix, so that sampling it takes one or two memory reads instead of five.

    Args:
        capacity: transitions kept.
        obs_dim, action_dim: sizes of an observation and an action.
        device: where it is kept.

    Raises:
        UsageError: the ring does not fit in the free memory of ``device``.
    """

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device) -> None:
        self.capacity = capacity
        self._widths = [obs_dim, obs_dim, action_dim, 1, 1]
        width = sum(self._widths)
        row_bytes = width * torch.float32.itemsize
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        if (capacity + 1) * row_bytes > free:
            takes = f"takes {(capacity + 1) * row_bytes:,} bytes, and {free:,} are free on {device}"
            raise bad("buffer_size", capacity, f"{takes}; at most {free // row_bytes - 1} transitions fit")
        # The extra row takes the steps that only reset an environment, which are not kept.
        self.rows = torch.zeros(capacity + 1, width, device=device)
        # Shape [1]: TorchInductor before 2.15 loses what is written to a 0-d int64 CPU tensor (not reported upstream).
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.size = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, obs, next_obs, actions, rewards, terminations, resets) -> None:
        """Writes one step of N environments over the oldest transitions.

        Args:
            obs, next_obs: tensors [N, obs_dim].
            actions: [N, action_dim].
            rewards, terminations, resets: [N]; steps with ``resets`` 1 only reset their environment and are not kept.
        """
        row = torch.cat([obs, next_obs, actions, rewards.unsqueeze(1), terminations.unsqueeze(1)], 1)
        kept = (resets == 0).long()
        places = torch.where(kept == 1, (self.cursor + kept.cumsum(0) - kept) % self.capacity, self.capacity)
        self.rows.index_copy_(0, places, row)
        count = kept.sum()
        self.cursor.copy_((self.cursor + count) % self.capacity)
        self.size.copy_((self.size + count).clamp(max=self.capacity))

    def sample(self, batch_size: int) -> Batch:
        """``batch_size`` transitions, each drawn uniformly from all that are stored."""
        # 62 random bits modulo the size: uniform to one part in 10**12, and the size stays on the device.
        return self.take(torch.randint(2**62, (batch_size,), device=self.rows.device) % self.size)

    def take(self, inds: torch.Tensor) -> Batch:
        """The transitions at ``inds`` [B]."""
        obs, next_obs, actions, rewards, terminations = self.rows.index_select(0, inds).split(self._widths, 1)
        return Batch(obs, next_obs, actions, rewards.squeeze(1), terminations.squeeze(1))

    def state_dict(self) -> dict:
        """The filled rows and the cursor. On a CPU they share the replay's memory, so that saving takes no second copy:
        write them to a file, or clone them, before the next ``add``."""
        # Through NumPy, because torch.save would write a slice's whole storage.
        return {"rows": torch.from_numpy(self.rows[: self.size.item()].cpu().numpy()), "cursor": self.cursor.cpu()}

    def load_state_dict(self, state: dict) -> None:
        """Restores what the ``state_dict`` of a ring of the same capacity returned."""
        size = len(state["rows"])
        self.rows[:size].copy_(state["rows"])
        self.size.fill_(size)
        self.cursor.copy_(state["cursor"])


class TimestepBuffer:
    """What the environments returned, side by side in CPU memory, so that one copy takes it to the device.

    ``rows`` [N, obs_dim + 3] holds next_obs, reward, termination and done; pinned if ``device`` is a GPU.
    """

    def __init__(self, num_envs: int, obs_dim: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_envs, obs_dim + 3, pin_memory=device.type == "cuda")
        columns = self.rows.numpy()
        self._next_obs = columns[:, :obs_dim]
        self._rewards, self._terminations, self._dones = columns[:, obs_dim:].T

    def write(self, next_obs, rewards, terminations, dones) -> torch.Tensor:
        """Fills ``rows`` from arrays [N, obs_dim] and [N], or from one number each, and returns them."""
        self._next_obs[:], self._rewards[:] = next_obs, rewards
        self._terminations[:], self._dones[:] = terminations, dones
        return self.rows


class LastStep(NamedTuple):
    """The transition under way, kept on the learner's device so that a step can be one compiled function."""

    obs: torch.Tensor  # [N, obs_dim]
    actions: torch.Tensor  # [N, action_dim] chosen for obs
    resets: torch.Tensor  # [N] 1 where the step with these actions only resets the environment

    @classmethod
    def allocate(cls, num_envs: int, obs_dim: int, action_dim: int, device: torch.device) -> "LastStep":
        shapes = ((num_envs, obs_dim), (num_envs, action_dim), (num_envs,))
        return cls(*(torch.zeros(shape, device=device) for shape in shapes))

    def complete(self, replay: Replay, timestep: torch.Tensor) -> None:
        """Writes the transition to ``replay`` and starts the next one, whose actions are still to be chosen.

        Args:
            timestep: [N, obs_dim + 3], the rows of a TimestepBuffer: what the environments returned for the actions.
        """
        next_obs, rewards, terminations, dones = timestep.split([self.obs.shape[1], 1, 1, 1], 1)
        replay.add(self.obs, next_obs, self.actions, rewards.squeeze(1), terminations.squeeze(1), self.resets)
        self.obs.copy_(next_obs)
        self.resets.copy_(dones.squeeze(1))
