"""PQN: the fast variant acts as the reference does."""

import pytest
import torch
from test_on_policy_equality import NUM_ACTIONS, OBS_DIM, in_every_mode, make_side, mode_args

import leanrl.pqn_torchcompile as fast
from leanrl.support.optim import Adam


@pytest.mark.parametrize("num_envs", [1, 5, 40])
@in_every_mode
def test_the_best_actions_are_the_references_after_every_update(mode: str, num_envs: int) -> None:
    """As sums and as products; there is no copy of the parameters to go stale."""
    args, device = mode_args("pqn", mode, num_envs=num_envs)
    quick = make_side(fast, Adam, args, device)
    best_actions, _ = fast.make_executables(quick.network, quick.update, args, device)
    chosen = set()
    for _ in range(10):
        obs = torch.randn(num_envs, OBS_DIM, device=device)
        values = quick.network(obs).detach()
        actions = best_actions(obs)
        # Where two actions are as good but for rounding, either is best.
        torch.testing.assert_close(values.gather(1, actions.unsqueeze(1)).squeeze(1), values.amax(1))
        chosen |= set(actions.tolist())
        with torch.no_grad():
            for parameter in quick.network.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert chosen == set(range(NUM_ACTIONS))
