"""A way to write what TorchInductor would otherwise compile badly."""

import torch
import torch.nn as nn


def mlp_as_sums(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """``network(x)`` for a few rows [N, in] with its matrix products written as sums.

    TorchInductor fuses them with all around them; for a small network, calls of a matrix library cost more than its
    few thousand multiplications do.
    """
    for layer in network:
        x = (layer.weight * x.unsqueeze(1)).sum(-1) + layer.bias if isinstance(layer, nn.Linear) else layer(x)
    return x
