"""The optimisers that compile: what they save and load."""

import pytest
import torch
import torch.nn as nn

from leanrl.support.optim import FlatAdam, FlatRMSProp

OPTIMIZERS = [lambda module: FlatAdam(module, lr=1e-3, eps=1e-8), lambda module: FlatRMSProp(module, 1e-3, 0.99, 0.01)]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_steps_are_counted_beyond_what_float32_can(make):
    """2**24 + 1 is no float32: the targets' turn, which goes by that count, would shift when a run resumes."""
    saved, loaded = make(nn.Linear(2, 1)), make(nn.Linear(2, 1))
    saved.num_steps.fill_(2**24)
    saved.step(torch.ones(3))
    loaded.load_state_dict(saved.state_dict())
    assert int(loaded.num_steps) == 2**24 + 1
