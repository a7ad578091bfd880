"""The replay equals a slow list of transitions, and samples all of it alike."""

import numpy as np
import pytest
import torch

from leanrl.support.replay import Replay

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]
OBS_DIM, ACTION_DIM = 3, 2


class SlowReplay:
    """A ring of rows."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows, self.cursor = [], 0

    def add(self, obs, next_obs, actions, rewards, terminations, resets) -> None:
        for n in range(len(obs)):
            if resets[n]:
                continue
            row = [*obs[n], *next_obs[n], *actions[n], rewards[n], terminations[n]]
            if len(self.rows) < self.capacity:
                self.rows.append(row)
            else:
                self.rows[self.cursor] = row
            self.cursor = (self.cursor + 1) % self.capacity


def random_step(rng: np.random.Generator, num_envs: int) -> list[np.ndarray]:
    floats = [rng.normal(size=(num_envs, width)) for width in (OBS_DIM, OBS_DIM, ACTION_DIM)]
    return [np.float32(x) for x in (*floats, rng.normal(size=num_envs), *(rng.random((2, num_envs)) < 0.2))]


def fill(replay: Replay, num_steps: int, num_envs: int = 1) -> None:
    """Rewards count from 1, so that a row never written tells itself; nothing is a reset."""
    for step in range(num_steps):
        floats = [torch.zeros(num_envs, width) for width in (OBS_DIM, OBS_DIM, ACTION_DIM)]
        rewards = 1.0 + torch.arange(step * num_envs, (step + 1) * num_envs)
        replay.add(*(x.to(replay.rows.device) for x in (*floats, rewards, *torch.zeros(2, num_envs))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_envs, capacity", [(1, 7), (3, 3), (3, 50), (4, 30), (16, 100), (5, 10_000)])
def test_replay_equals_a_slow_list(device, num_envs, capacity):
    rng = np.random.default_rng(0)
    replay, slow = Replay(capacity, OBS_DIM, ACTION_DIM, device), SlowReplay(capacity)
    for _ in range(300):
        step = random_step(rng, num_envs)
        replay.add(*(torch.from_numpy(x).to(device) for x in step))
        slow.add(*step)
        assert (replay.size.item(), replay.cursor.item()) == (len(slow.rows), slow.cursor)
    np.testing.assert_array_equal(replay.rows[: len(slow.rows)].cpu(), np.float32(slow.rows))
    inds = torch.randint(len(slow.rows), (64,))
    batch = replay.take(inds.to(device))
    rows = torch.tensor(slow.rows)[inds].float()
    for ours, expected in zip(batch, rows.split([OBS_DIM, OBS_DIM, ACTION_DIM, 1, 1], 1), strict=True):
        assert torch.equal(ours.cpu(), expected.reshape(ours.shape))
    assert [x.shape for x in batch] == [(64, OBS_DIM), (64, OBS_DIM), (64, ACTION_DIM), (64,), (64,)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "num_steps, kept", [(1, range(1, 2)), (37, range(1, 38)), (100, range(1, 101)), (130, range(31, 131))]
)
def test_samples_are_uniform_over_what_is_filled(device, num_steps, kept):
    torch.manual_seed(0)
    replay = Replay(100, OBS_DIM, ACTION_DIM, device)
    fill(replay, num_steps)
    draws = torch.cat([replay.sample(1_000).rewards for _ in range(100)]).long().cpu()
    counts = torch.bincount(draws, minlength=131).double()
    assert counts.nonzero().flatten().tolist() == list(kept)
    # Pearson's statistic has the mean k - 1 and the variance 2 (k - 1).
    expected, k = len(draws) / len(kept), len(kept)
    statistic = ((counts[counts > 0] - expected) ** 2 / expected).sum().item()
    assert abs(statistic - (k - 1)) <= 5 * (2 * (k - 1)) ** 0.5
    # Draws of one batch do not depend on one another, nor on those of the batch before.
    assert k == 1 or abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / len(draws) ** 0.5
    assert k == 1 or abs(np.corrcoef(draws[:-1_000], draws[1_000:])[0, 1]) < 5 / len(draws) ** 0.5


@pytest.mark.parametrize("num_steps", [0, 5, 10, 24])
def test_state_holds_the_filled_part_only(num_steps):
    replay, other = (Replay(10, OBS_DIM, ACTION_DIM, CPU) for _ in range(2))
    fill(replay, num_steps)
    state = replay.state_dict()
    assert len(state["rows"]) == min(num_steps, 10)
    assert state["rows"].untyped_storage().nbytes() == state["rows"].nbytes  # nor does the file hold the whole ring
    assert num_steps == 0 or state["rows"].data_ptr() == replay.rows.data_ptr()  # no second replay in memory
    state = {name: tensor.clone() for name, tensor in state.items()}
    fill(replay, 3)
    # A ring restored from it goes on as the first did, at the same addresses.
    rows = other.rows.data_ptr()
    other.load_state_dict(state)
    fill(other, 3)
    assert other.rows.data_ptr() == rows
    assert torch.equal(other.rows[:10], replay.rows[:10])
    assert torch.equal(other.cursor, replay.cursor) and torch.equal(other.size, replay.size)
