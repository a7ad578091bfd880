"""Layers of the networks."""

import torch
import torch.nn as nn


class Float32Linear(nn.Linear):
    """A linear layer that autocast leaves in float32: a value in bfloat16 would have three digits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] in any precision -> [..., out_features] in that of the weights"""
        if x.dtype == self.weight.dtype:  # no autocast around this, or the layer before had given bfloat16
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))
