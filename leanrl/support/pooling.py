"""Max-pooling that TorchInductor leaves to PyTorch: the code that it generates for CPUs is slower."""

import torch
import torch.nn.functional as F
from torch import Tensor


def max_pool_same(x: Tensor) -> Tensor:
    """3x3 max-pooling with stride 2: [B, C, H, W] -> [B, C, ⌈H/2⌉, ⌈W/2⌉]

    The padding is SAME, as in TensorFlow and Flax: an odd size is padded on both sides, an even one at the end only.
    """
    opaque = torch.compiler.is_compiling() and x.device.type == "cpu"
    return (_operator if opaque else _max_pool)(x)[0]


def _max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.max_pool2d(x, 3, stride=2, padding=_odd(x), ceil_mode=True, return_indices=True)


def _max_pool_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, [3, 3], [2, 2], _odd(x), [1, 1], True, indices)


def _odd(x: Tensor) -> list[int]:
    return [size % 2 for size in x.shape[-2:]]


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output[1])


# Custom operators are opaque to TorchInductor. Their shapes and strides come from the same functions.
_operator = torch.library.custom_op("leanrl::max_pool", _max_pool, mutates_args=())
_backward = torch.library.custom_op("leanrl::max_pool_backward", _max_pool_backward, mutates_args=())
_operator.register_fake(_max_pool)
_backward.register_fake(_max_pool_backward)
_operator.register_autograd(lambda ctx, grad, _: _backward(grad, *ctx.saved_tensors), setup_context=_save)
