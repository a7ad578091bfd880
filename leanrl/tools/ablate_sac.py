"""What each trick of the fast SAC is worth: rows of ``leanrl.tools.ablate``.

At the default hyperparameters, with HalfCheetah-v5's sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import torch

import leanrl.sac_continuous_action as reference
import leanrl.sac_continuous_action_torchcompile as fast
from leanrl.support.optim import FlatAdam
from leanrl.tools.ablate_off_policy import (
    ACTOR_SIZES,
    CRITICS_SIZES,
    ENV_ID,
    LEGEND,
    Adam,
    Learner,
    all_tensors,
    around,
    filled_replay,
    named_parameters,
    roughly,
    same_way,
    updating,
)
from leanrl.tools.ablation import Group, Side, compiled, row_of

SAC = Group(f"SAC, {ENV_ID}", LEGEND)


class Sac:
    """What the fast rung's ``main`` makes before its loop, with a full replay; the same numbers every time."""

    def __init__(self, actor: type = fast.Actor, **changes) -> None:
        self.args = args = fast.Args(**changes)
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            networks = actor(*ACTOR_SIZES), fast.Critics(*CRITICS_SIZES), fast.Temperature(1.0)
        rates = args.policy_lr, args.q_lr, args.q_lr
        self.optimizers = [FlatAdam(network, lr, eps=1e-8) for network, lr in zip(networks, rates, strict=True)]
        q_optimizer = self.optimizers[1]
        critics_target = q_optimizer.params.clone()
        update, losses = fast.make_update(*self.optimizers, critics_target, filled_replay(), args)
        parameters = [optimizer.unflatten(optimizer.params) for optimizer in self.optimizers]
        parameters.append(q_optimizer.unflatten(critics_target))
        touched = [*all_tensors(self.optimizers), critics_target, losses]
        self.learner = Learner(update, [losses], parameters, touched, compiler=compiled(**fast.EXACT_TANH))


def fast_learner(actor: type = fast.Actor, **changes) -> Learner:
    return Sac(actor, **changes).learner


def reference_learner(**changes) -> Learner:
    """The reference's: ``.backward()`` and ``torch.optim.Adam``."""
    args = reference.Args(**changes)
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        actor, critics = reference.Actor(*ACTOR_SIZES), reference.Critics(*CRITICS_SIZES)
    critics_target, log_alpha = deepcopy(critics), torch.zeros(1, requires_grad=True)
    rates = {actor: args.policy_lr, critics: args.q_lr}
    optimizers = [Adam(network.parameters(), lr) for network, lr in rates.items()] + [Adam([log_alpha], args.q_lr)]
    update, losses = reference.make_update(
        actor, critics, critics_target, log_alpha, *optimizers, filled_replay(), args
    )
    actor, critics, critics_target = named_parameters(actor, critics, critics_target)
    networks = [actor, critics, {"log_alpha": log_alpha}, critics_target]
    touched = [*all_tensors(optimizers), *(p.detach() for p in critics_target.values()), losses]
    return Learner(partial(update, with_targets=True), [losses], networks, touched, with_grad=True)


@row_of(SAC)
def sac_update():
    yield same_way("update written out and compiled", updating(reference_learner()), updating(fast_learner()))
    bf16 = {"amp": "bf16"}
    sides = updating(reference_learner(**bf16)), updating(fast_learner(**bf16))
    yield roughly("update written out and compiled, both with --amp bf16", *sides)


@row_of(SAC)
def sac_heads():
    separate = updating(fast_learner(reference.Actor))
    yield same_way("mean and deviation in one product, not two", separate, updating(fast_learner()))


@row_of(SAC)
def sac_denormals():
    """On one thread, since each has a setting of its own, taken over from the one that started it."""

    @contextmanager
    def flushing(flush: bool) -> Iterator[None]:
        torch.set_flush_denormal(flush)
        try:
            yield
        finally:
            torch.set_flush_denormal(True)

    def decayed() -> tuple[Learner, float]:
        """Behind relus that are dead, Adam's averages have become denormal; and the part of them that has."""
        parts = Sac()
        for optimizer in parts.optimizers[:2]:
            for name, parameter in optimizer.module.named_parameters():
                if "bias" in name and parameter.shape[-1] == 256:
                    parameter.detach()[..., :26] = -1e3
        with torch.no_grad(), torch.random.fork_rng([]):
            torch.manual_seed(1)
            parts.learner.update(True)
        averages = [x for optimizer in parts.optimizers[:2] for x in (optimizer.exp_avg, optimizer.exp_avg_sq)]
        num_dead = sum((x == 0).sum().item() for x in averages)
        with flushing(False):
            for x in averages:
                x[x == 0] = 1e-40
        return parts.learner, num_dead / sum(x.numel() for x in averages)

    def side(flush: bool) -> Side:
        learner, _ = decayed()
        return around(updating(learner, num_threads=1), partial(flushing, flush))

    facts = f"{decayed()[1]:.0%} of SAC's averages in Adam are denormal for this; one thread."
    yield same_way("denormal numbers count as 0", side(False), side(True), facts)
