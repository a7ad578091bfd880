"""Optimisers that compile: ``Adam`` and ``RMSprop``, equal to PyTorch's of the same names up to rounding."""

from inspect import unwrap

import torch


class Traceable(torch.optim.Optimizer):
    """Mixin for one of PyTorch's optimisers that lets ``torch.compile`` trace it, so that a whole update is one graph.

    PyTorch's own ``step`` and ``zero_grad`` break the graph, because they open a profiler range.

    The state and the learning rate are allocated up front and only changed in place, because a graph holds their
    addresses. To change the learning rate, fill ``param_groups[0]["lr"]``, a tensor [1].

    Args:
        params, options: as for PyTorch's optimiser.
        lr: learning rate.
        averages: names of the state tensors that have the parameters' shapes; each becomes an attribute of that name, a
            list with one tensor per parameter.
    """

    # Optimizer.__init__ wraps ``step`` in this; unlike PyTorch's, it changes nothing.
    profile_hook_step = staticmethod(lambda step: step)
    # Without the wrapper that imports torch._dynamo, which takes 1.7 s that an eager run does not need.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)

    def __init__(self, params, lr: float, averages: tuple[str, ...], **options) -> None:
        super().__init__(params, lr=lr, **options)
        (group,) = self.param_groups
        self.params = group["params"]
        # float64, because early in training 1 - 0.999 ** step has only four digits in float32. Shape [1], because
        # TorchInductor before 2.15 takes a 0-d float64 CPU tensor for a Python number and loses what is written to it
        # (not reported upstream).
        self.lr = group["lr"] = self.params[0].new_tensor([lr], dtype=torch.float64)
        # All are equal; PyTorch's optimisers count steps per parameter.
        self.num_steps = self.params[0].new_zeros(len(self.params), 1, dtype=torch.float64)
        for p, count in zip(self.params, self.num_steps, strict=True):
            self.state[p] = {"step": count} | {name: torch.zeros_like(p) for name in averages}
        for name in averages:
            setattr(self, name, [self.state[p][name] for p in self.params])

    def zero_grad(self) -> None:
        """Drops the gradients: one that outlives a graph would become one of its outputs."""
        for p in self.params:
            p.grad = None

    def load_state_dict(self, state_dict: dict) -> None:
        """Copies ``state_dict``, from this or PyTorch's optimiser over the same parameters, in place."""
        for i, saved in state_dict["state"].items():  # PyTorch's has none before its first step
            for name, tensor in saved.items():
                self.state[self.params[i]][name].copy_(tensor)
        self.lr.fill_(float(state_dict["param_groups"][0]["lr"]))


class Adam(Traceable, torch.optim.Adam):
    """``torch.optim.Adam``, traceable.

    PyTorch's functional ``adam`` would trace too, but computes two powers for every element of every parameter (6 % of
    a SAC run).
    """

    def __init__(self, params, lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, lr, ("exp_avg", "exp_avg_sq"), eps=eps)

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters in place along their gradients (https://arxiv.org/abs/1412.6980, algorithm 1)."""
        beta1, beta2 = self.defaults["betas"]
        self.num_steps.add_(1)
        # as_strided forces these into memory, so they are computed once. Otherwise TorchInductor 2.13 would inline the
        # float64 powers into the loops over the elements.
        step_size = (self.lr / (1 - beta1 ** self.num_steps[0])).float().as_strided((), ())
        bias_correction2_sqrt = (1 - beta2 ** self.num_steps[0]).sqrt().float().as_strided((), ())
        grads = [p.grad for p in self.params]
        torch._foreach_lerp_(self.exp_avg, grads, 1 - beta1)
        torch._foreach_mul_(self.exp_avg_sq, beta2)
        torch._foreach_addcmul_(self.exp_avg_sq, grads, grads, value=1 - beta2)
        denominators = torch._foreach_sqrt(self.exp_avg_sq)
        torch._foreach_div_(denominators, bias_correction2_sqrt)
        torch._foreach_add_(denominators, self.defaults["eps"])
        steps = torch._foreach_div(self.exp_avg, denominators)
        torch._foreach_sub_(self.params, torch._foreach_mul(steps, step_size))


class RMSprop(Traceable, torch.optim.RMSprop):
    """``torch.optim.RMSprop``, traceable; eps is outside the root, as in Cleanba's IMPALA."""

    def __init__(self, params, lr: float, alpha: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__(params, lr, ("square_avg",), alpha=alpha, eps=eps)

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters in place along their gradients."""
        alpha = self.defaults["alpha"]
        self.num_steps.add_(1)
        lr = self.lr.float().as_strided((), ())
        grads = [p.grad for p in self.params]
        torch._foreach_mul_(self.square_avg, alpha)
        torch._foreach_addcmul_(self.square_avg, grads, grads, value=1 - alpha)
        denominators = torch._foreach_add(torch._foreach_sqrt(self.square_avg), self.defaults["eps"])
        steps = torch._foreach_div(grads, denominators)
        torch._foreach_sub_(self.params, torch._foreach_mul(steps, lr))
