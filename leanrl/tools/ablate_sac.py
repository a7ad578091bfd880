"""What each trick of the fast SAC is worth: rows of ``leanrl.tools.ablate``.

At the default hyperparameters, with HalfCheetah-v5's sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import ModuleType

import torch

import leanrl.sac_continuous_action as reference
import leanrl.sac_continuous_action_torchcompile as fast
from leanrl.support.optim import Adam
from leanrl.tools.ablate_off_policy import (
    ACTOR_SIZES,
    CRITICS_SIZES,
    ENV_ID,
    LEGEND,
    Learner,
    around,
    filled_replay,
    roughly,
    same_way,
    updating,
)
from leanrl.tools.ablation import Group, Side, compiled, eager, row_of

SAC = Group(f"SAC, {ENV_ID}", LEGEND)


def learner_of(script: ModuleType, make_optimizer: Callable, **changes) -> Learner:
    """What the script's ``main`` makes before its loop, with a full replay; the same numbers every time."""
    args = fast.Args(**changes)
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        actor, critics = script.Actor(*ACTOR_SIZES), script.Critics(*CRITICS_SIZES)
    critics_target, log_alpha = deepcopy(critics), torch.zeros(1, requires_grad=True)
    networks = [list(network.parameters()) for network in (actor, critics)] + [[log_alpha]]
    rates = args.policy_lr, args.q_lr, args.q_lr
    optimizers = [make_optimizer(network, lr=lr) for network, lr in zip(networks, rates, strict=True)]
    update, losses = script.make_update(actor, critics, critics_target, log_alpha, *optimizers, filled_replay(), args)
    networks.append(list(critics_target.parameters()))
    compiler = compiled(**fast.EXACT_TANH)
    return Learner(partial(update, with_targets=True), networks, losses, optimizers, compiler=compiler)


def fast_learner(**changes) -> Learner:
    return learner_of(fast, Adam, **changes)


def reference_learner(**changes) -> Learner:
    return learner_of(reference, torch.optim.Adam, **changes)


@row_of(SAC)
def sac_update():
    for what, changes in (("", {}), (", both with --amp bf16", {"amp": "bf16"})):
        sides = updating(reference_learner(**changes), eager), updating(fast_learner(**changes))
        yield (roughly if changes else same_way)(f"update compiled, not eager{what}", *sides)


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
        learner = fast_learner()
        for network in learner.networks[:2]:
            for parameter in network:
                # A hidden layer's biases, [256] or [2, 1, 256].
                if parameter.shape[-1] == 256 and parameter.numel() <= 2 * 256:
                    parameter.detach()[..., :26] = -1e3
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            learner.update(True)
        averages = [x for optimizer in learner.optimizers[:2] for x in (optimizer.exp_avg, optimizer.exp_avg_sq)]
        num_dead = sum((x == 0).sum().item() for x in averages)
        with flushing(False):
            for x in averages:
                x[x == 0] = 1e-40
        return learner, num_dead / sum(x.numel() for x in averages)

    def side(flush: bool) -> Side:
        learner, _ = decayed()
        return around(updating(learner, num_threads=1), partial(flushing, flush))

    facts = f"{decayed()[1]:.0%} of SAC's averages in Adam are denormal for this; one thread."
    yield same_way("denormal numbers count as 0", side(False), side(True), facts)
