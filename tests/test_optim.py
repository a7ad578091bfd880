"""The optimisers that compile: they compute what PyTorch's do, and keep their state in its layout and where it is."""

from copy import deepcopy

import pytest
import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from leanrl.support.executables import CompiledStep
from leanrl.support.optim import Adam, RMSprop

PAIRS = [(Adam, torch.optim.Adam), (RMSprop, torch.optim.RMSprop)]


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
        update = CompiledStep(update, torch.device("cpu"))
    batches = torch.randn(num_steps, 5, 3, generator=torch.Generator().manual_seed(1))
    for n, x in enumerate(batches):
        rate = lr * (1 - n / num_steps)
        if isinstance(optimizer, Adam | RMSprop):
            optimizer.param_groups[0]["lr"].fill_(rate)
        else:
            optimizer.param_groups[0]["lr"] = rate
        update(x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
@pytest.mark.parametrize("ours, pytorchs", PAIRS, ids=["adam", "rmsprop"])
def test_steps_are_pytorchs(ours, pytorchs, compiled):
    """Step for step, from a state that PyTorch's saved, at the same addresses, and back again."""
    modules = network(), network()
    mine, theirs = ours(modules[0].parameters(), 1e-2, eps=1e-5), pytorchs(modules[1].parameters(), 1e-2, eps=1e-5)
    mine.load_state_dict(theirs.state_dict())  # which has no state before its first step
    train(modules[1], theirs, 7)
    modules[0].load_state_dict(modules[1].state_dict())
    averages = [name for name in mine.state[mine.params[0]] if name != "step"]
    lr, addresses = mine.param_groups[0]["lr"], [x.data_ptr() for x in tree_leaves(dict(mine.state))]
    mine.load_state_dict(deepcopy(theirs.state_dict()))
    assert float(lr) == pytest.approx(theirs.param_groups[0]["lr"])
    train(modules[0], mine, 20, compiled=compiled)
    train(modules[1], theirs, 20)
    for p, q in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert p.grad is None  # a gradient that outlives a graph is one of its outputs
    assert mine.param_groups[0]["lr"] is lr and mine.lr is lr
    assert [x.data_ptr() for x in tree_leaves(dict(mine.state))] == addresses

    state, expected = mine.state_dict(), theirs.state_dict()
    assert state["param_groups"][0].keys() == expected["param_groups"][0].keys()
    assert state["state"].keys() == expected["state"].keys()
    for i, entry in expected["state"].items():
        assert entry.keys() == state["state"][i].keys() and int(entry["step"]) == int(state["state"][i]["step"]) == 27
        for name in averages:
            torch.testing.assert_close(state["state"][i][name], entry[name], rtol=1e-4, atol=1e-6)
    assert state["state"][0]["step"].dtype == torch.float64
    modules[1].load_state_dict(modules[0].state_dict())
    theirs.load_state_dict(deepcopy(state))
    assert float(theirs.param_groups[0]["lr"]) == float(lr)
    theirs.param_groups[0]["lr"] = float(lr)  # it takes a tensor only with capturable
    for module, optimizer in zip(modules, (mine, theirs), strict=True):
        train(module, optimizer, 3)
    torch.testing.assert_close(*(list(module.parameters()) for module in modules))
    assert {int(entry["step"]) for entry in theirs.state.values()} == {30}
