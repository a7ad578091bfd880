"""Layers of the networks."""

import torch
import torch.nn as nn


class Float32Linear(nn.Linear):
    """A linear layer that autocast leaves in float32: a value in bfloat16 would have three digits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features], float32 or bfloat16 -> [..., out_features], float32"""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())
