"""Compiled steps: what they return and change, how often they compile, a warm-up without a trace."""

import gc

import pytest
import torch
from test_on_policy_equality import make_side, minibatches, mode_args
from torch.utils._pytree import tree_leaves

import leanrl.ppo_continuous_action_torchcompile as fast
from leanrl.support.executables import CompiledStep, untouched
from leanrl.support.optim import Adam


def test_warm_up_leaves_no_trace() -> None:
    """Parameters, optimiser and random numbers are bitwise what they were, at the same addresses."""
    args, device = mode_args("ppo_continuous_action", "eager")
    quick = make_side(fast, Adam, args, device)
    state = {"agent": quick.network.state_dict(), "optimizer": quick.optimizer.state_dict()}
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    before, addresses = [x.clone() for x in tensors], [x.data_ptr() for x in tensors]
    rng = torch.get_rng_state()
    with untouched(state, device):
        for inds in minibatches(args, device, 3):
            quick.update(inds)
            torch.rand(1)
        assert not torch.equal(tensors[0], before[0])
    after = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    assert all(map(torch.equal, after, before)) and addresses == [x.data_ptr() for x in after]
    assert torch.equal(torch.get_rng_state(), rng)


def test_compiled_step_passes_arguments_and_keeps_in_place_changes() -> None:
    """Float64 and int64 counters of shape [1] too: TorchInductor loses changes to 0-d ones."""
    count, clock, total = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), torch.zeros(4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        clock.add_(0.5)
        total.add_(x - 2 * y)
        return x * 10 + y

    step = CompiledStep(fn, torch.device("cpu"))
    expected = torch.zeros(4)
    for i in range(5):
        x, y = torch.full((4,), float(i)), torch.arange(4.0)
        torch.testing.assert_close(step(x, y), x * 10 + y)
        expected += x - 2 * y
    assert count.item() == 5 and clock.item() == 2.5
    torch.testing.assert_close(total, expected)


def test_functions_of_one_code_each_compile_once() -> None:
    """More of them than Dynamo allows, which takes them for recompilations of one function."""

    def factory() -> tuple[CompiledStep, torch.Tensor]:
        count = torch.zeros(1)

        def fn() -> None:
            count.add_(1)

        return CompiledStep(fn, torch.device("cpu")), count

    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            step, count = factory()
            for _ in range(3):
                step()
            assert count.item() == 3


def test_a_step_with_two_backwards_leaves_the_next_alone() -> None:
    """Other networks, in other places."""

    def factory(networks: dict[str, torch.nn.Module], num_backwards: int) -> CompiledStep:
        def fn() -> None:
            for _ in range(num_backwards):
                for network in networks.values():
                    network(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

        optimizer = Adam([p for network in networks.values() for p in network.parameters()], lr=0.1)
        return CompiledStep(fn, torch.device("cpu"))

    for name, num_backwards in (("first", 2), ("second", 1)):
        network = torch.nn.Linear(3, 1)
        before = network.bias.detach().clone()
        factory({name: network}, num_backwards)()
        torch.testing.assert_close(network.bias.detach(), before - 0.1 * num_backwards)


def test_compiled_step_refuses_a_graph_break() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(Exception, match=r"(?i)data-dependent|unsupported|graph"):
        CompiledStep(fn, torch.device("cpu"))(torch.ones(3))
    assert gc.isenabled(), "it is off while a step compiles"
