"""The two files of a pair are one program: what decides what is learned has the same words in both."""

import importlib
import inspect

import pytest

# All but the optimiser's class.
SHARED = {
    "ppo_continuous_action": (
        "layer_init Agent Minibatch Rollout compute_gae weighted_mean Losses ppo_loss make_update load_policy validate"
    ),
    "ppo_atari_envpool": (
        "layer_init Agent Minibatch Rollout compute_gae finish_rollout weighted_mean Losses ppo_loss make_update "
        "train_epoch load_policy"
    ),
    "sac_continuous_action": (
        "Critics Actor sac_target critic_loss actor_loss alpha_loss Noise make_update load_policy validate"
    ),
    "td3_continuous_action": "Critics Actor td3_target critic_loss make_update load_policy validate",
    "pqn": (
        "layer_init QNetwork Minibatch Rollout lambda_returns finish_rollout weighted_mean Losses pqn_loss "
        "linear_schedule make_update greedy load_policy validate"
    ),
    "pqn_atari_envpool": (
        "layer_init QNetwork Minibatch Rollout lambda_returns finish_rollout weighted_mean Losses pqn_loss "
        "linear_schedule make_update load_policy validate"
    ),
    "dqn": "QNetwork dqn_target dqn_loss linear_schedule make_update update_target greedy act load_policy validate",
}


@pytest.mark.parametrize("name", [f"{script} {name}" for script, names in SHARED.items() for name in names.split()])
def test_a_pair_is_one_program(name):
    script, name = name.split()
    reference, fast = (importlib.import_module(f"leanrl.{script}{end}") for end in ("", "_torchcompile"))
    ours, theirs = (inspect.getsource(getattr(module, name)) for module in (reference, fast))
    assert theirs == ours.replace("torch.optim.Adam", "Adam")
