"""What a script hands to the runtime: its network, optimiser and update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import torch
import torch.nn as nn

from leanrl.sebulba.layout import Layout
from leanrl.sebulba.rollout import Rollout
from leanrl.support.optim import FlatParameters


@dataclass(frozen=True)
class Shards:
    """What a learner trains on: its shards of the global batch, refilled in place with every rollout."""

    numbers: Sequence[int]
    """which of all shards these are"""
    rollouts: Sequence[Rollout]
    """of each, on the learner's device"""
    total: int
    """shards of all learners"""
    sum_over: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """the sum of one vector a shard, over the shards of all learners; a collective"""


class Update(NamedTuple):
    """What a learner does with a rollout."""

    warm_up: Callable[[], None]
    """compiles and captures; it may change the optimiser's tensors, which are put back"""
    run: Callable[[int], torch.Tensor]
    """takes the optimiser steps for the rollout of that number; returns the losses, in the order of ``loss_names``"""
    num_steps: int
    """optimiser steps of an update"""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A script's parts; ``args`` are the script's."""

    make_agent: Callable[[gym.spaces.Box, int, object], nn.Module]
    """(observation space, number of actions, args) -> network: [B, ...] -> logits [B, num_actions], values [B]

    With ``--amp bf16``, actors round the weights of linear layers once per rollout: those in its module ``torso`` only.
    """
    make_optimizer: Callable[[nn.Module, object], FlatParameters]
    """(agent, args)"""
    make_update: Callable[[nn.Module, FlatParameters, Shards, object, torch.device], Update]
    """(agent, optimizer, shards, args, device)"""
    validate: Callable[[object, Layout], None]
    """(args, layout): raises UsageError where the algorithm cannot share its batch out so"""
    network_flags: tuple[str, ...]
    """fields of ``args`` that ``make_agent`` reads; they are kept in model.pt"""
    loss_names: tuple[str, ...]
