"""Hyperparameters and initialisation: those of the algorithms' sources, and the same in both variants."""

import importlib
from dataclasses import fields

import pytest
import torch
from scripts import ON_POLICY_REFERENCES, REFERENCES

PPO = {"gamma": 0.99, "gae_lambda": 0.95, "update_epochs": 10, "num_minibatches": 32, "num_steps": 2048, "num_envs": 1}
PPO |= {"learning_rate": 3e-4, "anneal_lr": True, "norm_adv": True, "clip_coef": 0.2, "clip_vloss": True}
PPO |= {"ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None, "total_timesteps": 1_000_000}
ATARI = PPO | {"learning_rate": 2.5e-4, "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
ATARI |= {"clip_coef": 0.1, "ent_coef": 0.01, "total_timesteps": 10_000_000}
OFF_POLICY = {"gamma": 0.99, "tau": 0.005, "batch_size": 256, "buffer_size": 1_000_000, "policy_frequency": 2}
OFF_POLICY |= {"num_envs": 1, "updates_per_step": 1.0, "total_timesteps": 1_000_000}
SAC = {"learning_starts": 5_000, "policy_lr": 3e-4, "q_lr": 1e-3, "target_network_frequency": 1, "autotune": True}
FAST_SAC = {"num_envs": 16, "updates_per_step": 0.25, "policy_lr": 1e-3, "q_lr": 1e-3, "tau": 0.125, "num_atoms": 51}
TD3 = {"learning_starts": 25_000, "learning_rate": 3e-4, "policy_noise": 0.2, "noise_clip": 0.5}
DQN = {"learning_rate": 2.5e-4, "buffer_size": 10_000, "gamma": 0.99, "tau": 1.0, "target_network_frequency": 500}
DQN |= {"batch_size": 128, "start_e": 1.0, "end_e": 0.05, "exploration_fraction": 0.5, "learning_starts": 10_000}
PQN = {"learning_rate": 2.5e-4, "num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
PQN |= {"anneal_lr": True, "gamma": 0.99, "q_lambda": 0.65, "max_grad_norm": 10.0, "total_timesteps": 500_000}
PQN |= {"start_e": 1.0, "end_e": 0.05, "exploration_fraction": 0.5}
PQN_ATARI = PQN | {"num_envs": 8, "end_e": 0.01, "exploration_fraction": 0.1, "total_timesteps": 10_000_000}
CLEANBA = {"local_num_envs": 48, "num_actor_threads": 2, "total_timesteps": 50_000_000, "num_minibatches": 4}
CLEANBA |= {"gamma": 0.99, "ent_coef": 0.01, "vf_coef": 0.5, "channels": (16, 32, 32), "hiddens": (256,)}
EXPECTED = {
    "ppo_continuous_action": PPO,
    "ppo_atari_envpool": ATARI,
    "sac_continuous_action": OFF_POLICY | SAC | {"alpha": 0.2},
    "fast_sac": OFF_POLICY | FAST_SAC | {"alpha": 1.0, "target_entropy_ratio": 1.0},
    "td3_continuous_action": OFF_POLICY | TD3 | {"exploration_noise": 0.1},
    "dqn": DQN | {"updates_per_step": 0.1, "total_timesteps": 500_000},
    "pqn": PQN,
    "pqn_atari_envpool": PQN_ATARI,
    "cleanba_ppo": CLEANBA | {"num_steps": 128, "clip_coef": 0.1, "max_grad_norm": 0.5, "policy_lag": 0},
    "cleanba_impala": CLEANBA | {"num_steps": 20, "rho_bar": 1.0, "c_bar": 1.0, "max_grad_norm": 40.0, "policy_lag": 1},
}
LEVERS = {"compile", "cudagraphs", "one_graph", "env_backend", "num_env_groups"}


def defaults(script: str) -> dict:
    """Every field of a script's arguments that has a default."""
    return {field.name: field.default for field in fields(importlib.import_module(f"leanrl.{script}").Args)}


@pytest.mark.parametrize("script", EXPECTED)
def test_hyperparameters_are_the_sources(script):
    assert EXPECTED[script].items() <= defaults(script).items()


@pytest.mark.parametrize("script", REFERENCES)
def test_both_variants_have_the_same(script):
    reference, fast = defaults(script), defaults(f"{script}_torchcompile")
    assert reference.items() <= fast.items()
    assert fast.keys() - reference.keys() <= LEVERS and {"compile", "cudagraphs"} <= fast.keys()


def assert_orthogonal(layers, gains):
    """Singular values of each layer's matrix are all its gain, and biases are 0."""
    for layer, gain in zip(layers, gains, strict=True):
        values = torch.linalg.svdvals(layer.weight.detach().flatten(1))
        torch.testing.assert_close(values, torch.full_like(values, gain), rtol=1e-4, atol=0)
        assert not layer.bias.any()


def test_networks_start_orthogonal():
    """The fast variants have them in the same words."""
    ppo, atari, pqn, pqn_atari = (importlib.import_module(f"leanrl.{script}") for script in ON_POLICY_REFERENCES)
    agent = ppo.Agent(17, 6)
    assert_orthogonal(agent.actor_mean[::2], (2**0.5, 2**0.5, 0.01))
    assert_orthogonal(agent.critic[::2], (2**0.5, 2**0.5, 1.0))
    assert not agent.actor_logstd.any()
    agent = atari.Agent(4)
    layers = [layer for layer in agent.network if hasattr(layer, "weight")]
    assert_orthogonal([*layers, agent.actor, agent.critic], (*[2**0.5] * 4, 0.01, 1.0))
    assert_orthogonal(list(pqn.QNetwork(4, 2))[::3], [2**0.5] * 3)
    assert_orthogonal([pqn_atari.QNetwork(4)[i] for i in (0, 3, 6, 9, 12)], [2**0.5] * 5)


def test_distributed_agents_start_orthogonal():
    module = importlib.import_module("leanrl.cleanba_ppo")  # the other's are the same
    vector = module.VectorAgent(4, 2)
    assert_orthogonal(vector.actor[::2], (2**0.5, 2**0.5, 0.01))
    assert_orthogonal(vector.critic[::2], (2**0.5, 2**0.5, 1.0))
    nature = module.ImageAgent(module.NatureCNN((4, 84, 84)), 512, 18)
    layers = [layer for layer in nature.torso if hasattr(layer, "weight")]
    assert_orthogonal([*layers, nature.actor, nature.critic], (*[2**0.5] * 4, 0.01, 1.0))
