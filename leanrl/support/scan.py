"""Linear recurrences (GAE, discounted returns) without a loop over time."""

import torch


def linear_recurrence(inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """``y[t] = inputs[t] + decays[t] * y[t - 1]`` along the first dimension, with ``y[-1] = 0``.

    By doubling, in log2(T) passes: after pass k, ``y[t]`` is the decayed sum of the last 2**k inputs, and
    ``decay[t]`` the product of their decays. A loop over T = 2,048 steps would take thousands of small operations, and
    minutes to compile unrolled. (Hillis and Steele 1986, "Data parallel algorithms", section on prefix sums.)

    Args:
        inputs, decays: [T, ...], of one shape; neither is changed.

    Returns:
        y [T, ...]
    """
    y, decay = inputs.clone(), decays.clone()
    shift = 1
    while shift < len(inputs):
        y[shift:] = y[shift:] + decay[shift:] * y[:-shift]
        decay[shift:] = decay[shift:] * decay[:-shift]
        shift *= 2
    return y
