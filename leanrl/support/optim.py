"""Optimisers that compile: ``Adam`` over parameters as they are, others over the flat vector that learners exchange."""

from collections.abc import Sequence

import torch
import torch.nn as nn

from leanrl.support.inductor import computed_once


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` that ``torch.compile`` traces, so that a whole update is one graph.

    PyTorch's own ``step`` and ``zero_grad`` break the graph: they open a profiler's range. Its functional ``adam``
    would do, but raises two numbers to a power for every element of every parameter (6 % of a SAC update).

    The state is made at once, and then only changed in place, so that a graph may hold its addresses: the learning rate
    too, ``param_groups[0]["lr"]``, is a tensor [1] to be filled. The number of steps is one for all parameters.

    Args:
        params, eps: as in ``torch.optim.Adam``.
        lr: learning rate.
    """

    # What Optimizer.__init__ wraps ``step`` in: nothing.
    profile_hook_step = staticmethod(lambda step: step)

    def __init__(self, params, lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, lr=lr, eps=eps)
        (group,) = self.param_groups
        self.params = group["params"]
        device = self.params[0].device
        # float64: 1 - 0.999 ** step has four digits in float32 when training starts. Shape [1], because TorchInductor
        # takes a 0-d float64 or int64 CPU tensor for a Python number and loses what is written to it.
        self.lr, self.num_steps = torch.tensor([[lr], [0.0]], dtype=torch.float64, device=device)
        # One loop over all parameters compiles faster than one for each.
        self.exp_avg, self.exp_avg_sq = torch.zeros(2, sum(p.numel() for p in self.params), device=device)
        group["lr"] = self.lr
        for p, exp_avg, exp_avg_sq in zip(
            self.params, self.pieces(self.exp_avg), self.pieces(self.exp_avg_sq), strict=True
        ):
            self.state[p] = {"step": self.num_steps, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a vector of all parameters' elements, in their shapes."""
        pieces = flat.split([p.numel() for p in self.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters in place along their gradients (https://arxiv.org/abs/1412.6980, algorithm 1)."""
        beta1, beta2 = self.defaults["betas"]
        self.num_steps.add_(1)
        # as_strided needs memory, so these are computed once: TorchInductor would inline them, powers in float64, into
        # the loop over the elements.
        step_size = (self.lr / (1 - beta1**self.num_steps)).float().as_strided((), ())
        bias_correction2_sqrt = (1 - beta2**self.num_steps).sqrt().float().as_strided((), ())
        grad = torch.cat([p.grad.reshape(-1) for p in self.params])
        self.exp_avg.lerp_(grad, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = self.exp_avg_sq.sqrt() / bias_correction2_sqrt + self.defaults["eps"]
        torch._foreach_sub_(self.params, self.pieces(step_size * self.exp_avg / denominator))

    def zero_grad(self) -> None:
        """Lets the gradients go: one that outlived a graph would be one of its outputs."""
        for p in self.params:
            p.grad = None

    def load_state_dict(self, state_dict: dict) -> None:
        """Copies in place what ``state_dict``, or that of a ``torch.optim.Adam`` over the same parameters, holds."""
        for i, p in enumerate(self.params):
            for name, tensor in self.state[p].items():
                if state_dict["state"]:  # PyTorch's has none before its first step
                    tensor.copy_(state_dict["state"][i][name])
        self.lr.fill_(float(state_dict["param_groups"][0]["lr"]))


class FlatParameters:
    """A module's parameters as one vector (they become views of it, at addresses that never change).

    Args:
        module: its parameters, all of one dtype and device, are optimised.
        lr: learning rate; ``self.lr`` is a tensor [1] to fill in place, so that a captured graph sees the change.
    """

    def __init__(self, module: nn.Module, lr: float = 0.0) -> None:
        self.module = module
        named = dict(module.named_parameters())
        self.names = list(named)
        self.shapes = [parameter.shape for parameter in named.values()]
        self.sizes = [parameter.numel() for parameter in named.values()]
        self.params = torch.cat([parameter.detach().reshape(-1) for parameter in named.values()])
        for parameter, view in zip(named.values(), self.unflatten(self.params).values(), strict=True):
            parameter.data = view
        self.lr = torch.full((1,), lr, dtype=torch.float64, device=self.params.device)

    def unflatten(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of ``flat`` under the parameters' names and shapes, for ``torch.func.functional_call``."""
        pieces = flat.split(self.sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}

    def apply(self, params: torch.Tensor, *inputs: torch.Tensor):
        """What the module makes of ``inputs`` with ``params``, a flat vector, for its parameters."""
        return torch.func.functional_call(self.module, self.unflatten(params), inputs)

    def flatten(self, named: dict[str, torch.Tensor]) -> torch.Tensor:
        """One vector of ``named`` (gradients, say), in the order of the parameters."""
        return torch.cat([named[name].reshape(-1) for name in self.names])


class FlatOptimizer(FlatParameters):
    """What the two below share: averages over the steps, and a state in the format of PyTorch's optimiser.

    Args:
        module, lr: as in ``FlatParameters``.
        averages: their names in the state.
        options: what else PyTorch's ``param_groups`` hold.
    """

    def __init__(self, module: nn.Module, lr: float, averages: Sequence[str], **options) -> None:
        super().__init__(module, lr)
        self.averages = {name: torch.zeros_like(self.params) for name in averages}
        self.options = options
        # float64: 1 - 0.999 ** step has four digits in float32 when training starts, which counts to 2**24. Shape [1],
        # because TorchInductor takes a 0-d float64 or int64 CPU tensor for a Python number and loses what is written.
        self.num_steps = torch.zeros(1, dtype=torch.float64, device=self.params.device)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that a step changes."""
        return [self.params, *self.averages.values(), self.num_steps, self.lr]

    def state_dict(self) -> dict:
        """In the format of PyTorch's."""
        averages = {key: self.unflatten(average.clone()) for key, average in self.averages.items()}
        step = self.num_steps[0].cpu()
        state = {
            i: {"step": step.clone(), **{key: average[name] for key, average in averages.items()}}
            for i, name in enumerate(self.names)
        }
        group = {"lr": self.lr.item(), **self.options, "params": list(range(len(self.names)))}
        return {"state": state, "param_groups": [group]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Copies what ``state_dict``, or PyTorch's over the same parameters, saved."""
        state = state_dict["state"]
        if state:  # PyTorch's have none before their first step
            for key, average in self.averages.items():
                average.copy_(torch.cat([state[i][key].reshape(-1) for i in range(len(self.names))]))
            self.num_steps.fill_(float(state[0]["step"]))
        self.lr.fill_(float(state_dict["param_groups"][0]["lr"]))


class FlatAdam(FlatOptimizer):
    """Adam (https://arxiv.org/abs/1412.6980, algorithm 1) whose whole step is plain tensor operations.

    ``torch.optim.Adam.step`` breaks a ``torch.compile`` graph and walks Python lists; this traces into the graph of the
    loss.

    Args:
        module, lr: as in ``FlatParameters``.
        eps: added to the root of the second moment.
        betas: decay of the two moments.
    """

    def __init__(self, module: nn.Module, lr: float, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(module, lr, ("exp_avg", "exp_avg_sq"), betas=betas, eps=eps)
        self.exp_avg, self.exp_avg_sq = self.averages.values()
        self.eps = eps
        self.betas = betas

    def step(self, grad: torch.Tensor) -> None:
        """Updates the parameters in place along ``grad``, a flat vector."""
        beta1, beta2 = self.betas
        self.num_steps.add_(1)
        step_size = computed_once((self.lr / (1 - beta1**self.num_steps)).to(grad.dtype))
        bias_correction2_sqrt = computed_once((1 - beta2**self.num_steps).sqrt().to(grad.dtype))
        self.exp_avg.lerp_(grad, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = self.exp_avg_sq.sqrt() / bias_correction2_sqrt + self.eps
        self.params.sub_(step_size * self.exp_avg / denominator)


class FlatRMSProp(FlatOptimizer):
    """RMSProp as ``torch.optim.RMSprop`` computes it, which IMPALA wants: eps stands outside the root.

    Args:
        module, lr: as in ``FlatParameters``.
        alpha: decay of the mean square.
        eps: added to its root.
    """

    def __init__(self, module: nn.Module, lr: float, alpha: float, eps: float) -> None:
        super().__init__(module, lr, ("square_avg",), alpha=alpha, eps=eps)
        (self.square_avg,) = self.averages.values()
        self.alpha = alpha
        self.eps = eps

    def step(self, grad: torch.Tensor) -> None:
        """Updates the parameters in place along ``grad``, a flat vector."""
        self.num_steps.add_(1)
        self.square_avg.mul_(self.alpha).addcmul_(grad, grad, value=1 - self.alpha)
        lr = computed_once(self.lr.to(grad.dtype))
        self.params.sub_(lr * grad / (self.square_avg.sqrt() + self.eps))


def clip_grad_norm(grad: torch.Tensor, max_norm: float) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a flat gradient, out of place."""
    return grad * torch.clamp(max_norm / (torch.linalg.vector_norm(grad) + 1e-6), max=1.0)
