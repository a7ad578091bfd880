"""What the ablation of PPO on Atari compares."""

import pytest
import torch

from leanrl.tools import ablate_ppo_atari, ablation


@pytest.mark.parametrize("channels_last", [True, False])
def test_variants_that_are_compared_compute_the_same(channels_last):
    num_threads = torch.get_num_threads()
    try:
        sides = ablate_ppo_atari.reference_updating(channels_last), ablate_ppo_atari.updating(ablation.eager)
        assert ablate_ppo_atari.same("eager", *sides).difference < ablate_ppo_atari.TOLERANCE
    finally:
        torch.set_num_threads(num_threads)
