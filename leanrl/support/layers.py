"""Layers of the networks, and a fast way to call small networks."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TwinLinear(nn.Module):
    """The linear layers of two networks as one batched matmul: [2, B, in_features] -> [2, B, out_features]

    Given input for the first network only, [1, B, in_features], it is that network's layer.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        layers = [nn.Linear(in_features, out_features) for _ in range(2)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))  # [2, in, out]
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1))  # [2, 1, out]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not baddbmm: TorchInductor fuses the addition with what follows, but fuses nothing into a library's matmul.
        return torch.bmm(x, self.weight[: len(x)]) + self.bias[: len(x)]


class TwinLayerNorm(nn.Module):
    """The layer norms of two networks: [2, B, features] -> [2, B, features]"""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1, features))
        self.bias = nn.Parameter(torch.zeros(2, 1, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


class Float32:
    """Mixin for a layer that stays in float32 under autocast; its input may have any precision.

    For the first and last layers of a network, because in bfloat16 observations and values have three significant
    digits; and for layer norms, whose mean and variance are sums of many numbers.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class Float32Linear(Float32, nn.Linear):
    """[..., in_features] -> [..., out_features]"""


class Float32TwinLinear(Float32, TwinLinear):
    """[2, B, in_features] -> [2, B, out_features]"""


class Float32LayerNorm(Float32, nn.LayerNorm):
    """[..., features] -> [..., features]"""


class Float32TwinLayerNorm(Float32, TwinLayerNorm):
    """[2, B, features] -> [2, B, features]"""


class ChannelsLastLayerNorm(nn.LayerNorm):
    """Layer norm over channels, rows and columns: [B, C, H, W] -> [B, C, H, W]

    Its weights are [H, W, C], the order of channels_last images in memory, so that nothing is copied.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ChannelsLastLinear(nn.Linear):
    """A linear layer over channels, rows and columns: [B, C, H, W] -> [B, out_features]

    Its weight's columns are in the order [H, W, C], as channels_last images are in memory, so that nothing is copied.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1).flatten(1))


def interleaved(images: torch.Tensor) -> torch.Tensor:
    """uint8 [B, 4, H, W] copied to channels_last, each pixel written as one int32: faster than four separate bytes."""
    first, second, third, fourth = images.int().unbind(1)
    return (first | second << 8 | third << 16 | fourth << 24).view(torch.uint8).unflatten(-1, (-1, 4)).movedim(-1, 1)


def mlp_as_sums(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """``network(x)`` for a few rows [N, in], with its matrix products written as sums.

    TorchInductor fuses the sums with everything around them. In a small network, calling BLAS costs more than the few
    thousand multiplications themselves.
    """
    for layer in network:
        x = (layer.weight * x.unsqueeze(1)).sum(-1) + layer.bias if isinstance(layer, nn.Linear) else layer(x)
    return x
