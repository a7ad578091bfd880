"""The optimisers that compile: they compute what PyTorch's do, and keep their state in its layout and where it is."""

from copy import deepcopy

import pytest
import torch
import torch.nn as nn

from leanrl.support.executables import CompiledStep, untouched
from leanrl.support.optim import Adam, FlatAdam, FlatRMSProp

CPU = torch.device("cpu")
OPTIMIZERS = [lambda module: FlatAdam(module, lr=1e-3, eps=1e-8), lambda module: FlatRMSProp(module, 1e-3, 0.99, 0.01)]


@pytest.mark.parametrize("make", [*OPTIMIZERS, lambda module: Adam(module.parameters(), lr=1e-3)])
def test_steps_are_counted_beyond_what_float32_can(make):
    """2**24 + 1 is no float32: what goes by that count would shift when a run resumes."""
    modules = [nn.Linear(2, 1), nn.Linear(2, 1)]
    saved, loaded = map(make, modules)
    saved.num_steps.fill_(2**24)
    if isinstance(saved, Adam):
        modules[0](torch.ones(1, 2)).sum().backward()
        saved.step()
    else:
        saved.step(torch.ones(3))
    loaded.load_state_dict(saved.state_dict())
    assert int(loaded.num_steps) == 2**24 + 1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(module: nn.Module, optimizer, num_steps: int, lr: float = 1e-2, compiled: bool = False) -> None:
    """The same batches every time, at a learning rate that falls."""

    def update(x: torch.Tensor) -> None:
        (module(x) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if compiled:
        update = CompiledStep(update, CPU)
    batches = torch.randn(num_steps, 5, 3, generator=torch.Generator().manual_seed(1))
    for n, x in enumerate(batches):
        rate = lr * (1 - n / num_steps)
        if isinstance(optimizer, Adam):
            optimizer.param_groups[0]["lr"].fill_(rate)
        else:
            optimizer.param_groups[0]["lr"] = rate
        update(x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_adam_is_pytorchs(compiled):
    """Step for step, from a state that PyTorch's saved, at the same addresses, and back again."""
    ours, theirs = network(), network()
    adam, pytorchs = Adam(ours.parameters(), lr=1e-2, eps=1e-5), torch.optim.Adam(theirs.parameters(), 1e-2, eps=1e-5)
    adam.load_state_dict(pytorchs.state_dict())  # which has no state before its first step
    train(theirs, pytorchs, 7)
    ours.load_state_dict(theirs.state_dict())
    lr, addresses = adam.param_groups[0]["lr"], [x["exp_avg"].data_ptr() for x in adam.state.values()]
    adam.load_state_dict(deepcopy(pytorchs.state_dict()))
    assert float(lr) == pytest.approx(pytorchs.param_groups[0]["lr"])
    train(ours, adam, 20, compiled=compiled)
    train(theirs, pytorchs, 20)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert p.grad is None  # a gradient that outlives a graph is one of its outputs
    assert adam.param_groups[0]["lr"] is lr and adam.lr is lr
    assert [x["exp_avg"].data_ptr() for x in adam.state.values()] == addresses

    state, expected = adam.state_dict(), pytorchs.state_dict()
    assert state["param_groups"][0].keys() == expected["param_groups"][0].keys()
    assert state["state"].keys() == expected["state"].keys()
    for i, entry in expected["state"].items():
        assert entry.keys() == state["state"][i].keys() and int(entry["step"]) == int(state["state"][i]["step"]) == 27
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state["state"][i][name], entry[name], rtol=1e-4, atol=1e-6)
    assert state["state"][0]["step"].dtype == torch.float64
    again = torch.optim.Adam(network().parameters())
    again.load_state_dict(deepcopy(state))
    assert float(again.param_groups[0]["lr"]) == float(lr)


def test_flat_adam_equals_adam_and_exchanges_states_with_it():
    plain, quick = network(), network()
    adam, flat = torch.optim.Adam(plain.parameters(), lr=1e-3, eps=1e-5), FlatAdam(quick, lr=1e-3, eps=1e-5)
    generator = torch.Generator().manual_seed(0)

    def assert_same_steps(count: int) -> None:
        for _ in range(count):
            for parameter in plain.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            adam.step()
            with torch.no_grad():
                flat.step(flat.flatten({name: p.grad for name, p in plain.named_parameters()}))
        torch.testing.assert_close(list(plain.parameters()), list(quick.parameters()), rtol=1e-5, atol=1e-6)

    assert_same_steps(60)
    ours, theirs = flat.state_dict(), adam.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    assert ours["state"][0]["step"] == theirs["state"][0]["step"] == 60
    adam.load_state_dict({**theirs, "state": ours["state"]})
    flat.load_state_dict(theirs)
    for group in adam.param_groups:
        group["lr"] = 1e-4
    flat.lr.fill_(1e-4)
    assert_same_steps(40)


def test_warm_up_of_adam_leaves_no_trace():
    module = network()
    adam = Adam(module.parameters(), lr=1e-2)
    before = deepcopy((module.state_dict(), adam.state_dict()))
    with untouched([module.state_dict(), adam.state_dict()], CPU):
        train(module, adam, 3)
    for ours, theirs in zip(
        (module.state_dict(), adam.state_dict()["state"]), (before[0], before[1]["state"]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
