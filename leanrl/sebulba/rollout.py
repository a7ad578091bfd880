"""T steps of n environments in one block of memory, so that a rollout can be sent as one message."""

import math
from typing import NamedTuple

import gymnasium as gym
import torch

# Every field starts on a cache-line boundary.
ALIGNMENT = 64


class Header(NamedTuple):
    """What comes with a piece of a rollout. Times are in seconds; ``started`` and ``ended`` are from time.time()."""

    rollout: float = 0
    """number, from 1"""
    version: float = 0
    """of the parameters that produced it"""
    started: float = 0
    """when its thread started to wait for those parameters"""
    ended: float = 0
    params_wait: float = 0
    inference: float = 0
    env_step: float = 0
    device_to_host: float = 0
    queue_put: float = 0
    """waiting for a free buffer, before ``started``"""
    stop: float = 0
    """1 if its process was asked to stop"""


class Rollout(NamedTuple):
    """A piece of a rollout, or a whole shard's rollout; all fields are views of ``buffer``.

    ``rewards[t]`` and the flags describe the transition made by ``actions[t]``, from ``obs[t]`` to ``obs[t + 1]``,
    which is the final observation if the episode ended.
    """

    buffer: torch.Tensor  # [bytes] uint8
    header: torch.Tensor  # [len(Header)] float64
    obs: torch.Tensor  # [T + 1, n, ...] in the environment's dtype
    actions: torch.Tensor  # [T, n] int64, or [T, n, action_dim] float32 as sampled, not clipped to their bounds
    logprobs: torch.Tensor  # [T, n] of the actions under the policy that chose them
    values: torch.Tensor  # [T + 1, n] of obs, by the same network; IMPALA leaves out the last row
    rewards: torch.Tensor  # [T, n] for learning (clipped on Atari)
    returns: torch.Tensor  # [T, n] raw return of the episode or game that ended on this step; NaN where none did
    lengths: torch.Tensor  # [T, n] its length in environment steps
    terminations: torch.Tensor  # [T, n] bool, like the next two
    dones: torch.Tensor  # terminated or truncated
    resets: torch.Tensor  # the step only reset its environment: no experience

    @classmethod
    def allocate(
        cls, space: gym.spaces.Box, action_space: gym.Space, num_steps: int, num_envs: int, device: torch.device
    ) -> "Rollout":
        """Zeros for T = ``num_steps``, n = ``num_envs`` and observations of ``space``."""
        is_image, per_step = len(space.shape) == 3, (num_steps, num_envs)
        # Channels last, the memory format that convolutions want, so that an update rearranges nothing.
        obs_shape = (*space.shape[1:], space.shape[0]) if is_image else space.shape
        fields = {
            "header": ((len(Header._fields),), torch.float64),
            "obs": ((num_steps + 1, num_envs, *obs_shape), torch.from_numpy(space.sample()).dtype),
            "actions": ((*per_step, *action_space.shape), torch.float32 if action_space.shape else torch.int64),
            "values": ((num_steps + 1, num_envs), torch.float32),
            **dict.fromkeys(("logprobs", "rewards", "returns", "lengths"), (per_step, torch.float32)),
            **dict.fromkeys(("terminations", "dones", "resets"), (per_step, torch.bool)),
        }
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in fields.items()}
        padded = {name: math.ceil(size / ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        buffer = torch.zeros(sum(padded.values()), dtype=torch.uint8, device=device)
        pieces = dict(zip(fields, buffer.split(list(padded.values())), strict=True))
        views = {name: pieces[name][: sizes[name]].view(dtype).view(shape) for name, (shape, dtype) in fields.items()}
        if is_image:
            views["obs"] = views["obs"].movedim(-1, 2)
        return cls(buffer, **views)

    def columns(self) -> tuple[torch.Tensor, ...]:
        """The fields with one entry per environment, along dimension 1."""
        return self[2:]
