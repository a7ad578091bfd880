"""Layers of the networks."""

import torch
import torch.nn as nn


class Float32Linear(nn.Linear):
    """A linear layer that autocast leaves in float32: a value in bfloat16 would have three digits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features], float32 or bfloat16 -> [..., out_features], float32"""
        if x.dtype == torch.float32:  # no autocast around this, or the layer before had given bfloat16
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())
