"""leanrl.tools.peer_worker: the peers' off-policy algorithms have our references' hyperparameters; their clock."""

import importlib

import pytest

from leanrl.support.errors import UsageError
from leanrl.tools import peer_worker, peers
from leanrl.tools.trials import run_trials

PENDULUM = "--env-id=InvertedPendulum-v5"
SMALL = {"buffer_size": 600, "gamma": 0.9, "batch_size": 16, "learning_starts": 70, "seed": 3}


def build(peer: str, script: str, **arguments):
    """The peer's algorithm for our reference's ``arguments``."""
    pytest.importorskip(peer_worker.PEERS[peer])
    algorithm = peer_worker.ALGORITHMS[script]
    args = importlib.import_module(f"leanrl.{script}").Args(**SMALL, device="cpu", **arguments)
    model = algorithm.make_model(args, peer, algorithm.make_envs(args))
    assert {name: getattr(model, name) for name in SMALL} == SMALL
    assert model._vec_normalize_env is None
    return model


def widths(*networks) -> list[set[int]]:
    """Output sizes of the dense layers of SB3's modules, or of SBX's states."""
    if hasattr(networks[0], "modules"):
        return [{layer.out_features for layer in n.modules() if hasattr(layer, "out_features")} for n in networks]
    import jax

    return [{leaf.shape[-1] for leaf in jax.tree.leaves(n.params) if leaf.ndim > 1} for n in networks]


@pytest.mark.parametrize("peer", peer_worker.PEERS)
def test_sac(peer):
    lrs = {"policy_lr": 2e-4, "q_lr": 3e-3}
    model = build(peer, "sac_continuous_action", env_id="InvertedPendulum-v5", num_envs=2, tau=0.01, **lrs)
    assert (model.tau, model.train_freq.frequency, model.gradient_steps) == (0.01, 1, 2)
    assert model.target_entropy == -1.0 and model.lr_schedule(1.0) == 2e-4
    if peer == "sb3":
        networks = model.actor, model.critic
        assert model.log_ent_coef.item() == 0.0 and model.target_update_interval == 1
    else:
        networks = model.policy.actor_state, model.policy.qf_state
        assert model.qf_learning_rate == 3e-3 and model.policy_delay == 1 and model.ent_coef.ent_coef_init == 1.0
    assert widths(*networks) == [{256, 1}] * 2

    fixed = build(peer, "sac_continuous_action", env_id="InvertedPendulum-v5", autotune=False, alpha=0.3)
    assert (fixed.ent_coef_tensor if peer == "sb3" else fixed.ent_coef.ent_coef_init) == pytest.approx(0.3)


@pytest.mark.parametrize("peer", peer_worker.PEERS)
def test_td3(peer):
    noises = {"policy_noise": 0.3, "noise_clip": 0.4, "exploration_noise": 0.15}
    more = {"learning_rate": 2e-4, "policy_frequency": 3, "tau": 0.01}
    model = build(peer, "td3_continuous_action", env_id="InvertedPendulum-v5", **noises, **more)
    assert (model.tau, model.train_freq.frequency, model.gradient_steps) == (0.01, 1, 1)
    assert (model.policy_delay, model.target_policy_noise, model.target_noise_clip) == (3, 0.3, 0.4)
    assert model.lr_schedule(1.0) == 2e-4 and model.action_noise._sigma.tolist() == [0.15]
    sb3 = peer == "sb3"
    networks = (model.actor, model.critic) if sb3 else (model.policy.actor_state, model.policy.qf_state)
    assert widths(*networks) == [{256, 1}] * 2


@pytest.mark.parametrize("peer", peer_worker.PEERS)
def test_dqn(peer):
    exploration = {"start_e": 0.9, "end_e": 0.1, "exploration_fraction": 0.3}
    model = build(peer, "dqn", learning_rate=2e-4, target_network_frequency=40, **exploration)
    assert (model.tau, model.train_freq.frequency, model.gradient_steps) == (1.0, 10, 1)
    assert model.target_update_interval == 40 and model.lr_schedule(1.0) == 2e-4
    assert model.exploration_schedule(1.0) == 0.9 and model.exploration_schedule(0.6) == pytest.approx(0.1)
    if peer == "sb3":
        assert widths(model.q_net) == [{120, 84, 2}] and model.max_grad_norm == float("inf")
    else:
        assert widths(model.policy.qf_state) == [{120, 2}]  # it reads the first number only


@pytest.mark.parametrize(
    ("peer", "script", "flags", "updates", "points", "clock_start"),
    [
        # An update after every step; the clock starts 50 of them after learning has started.
        ("sb3", "sac_continuous_action", ["--total-timesteps=1200", PENDULUM], 200, [1100, 1200], 1050),
        ("sbx", "td3_continuous_action", ["--total-timesteps=1200", PENDULUM], 200, [1100, 1200], 1050),
        # 2 updates after every 5 steps of 4 environments.
        ("sb3", "dqn", ["--total-timesteps=2110", "--num-envs=4"], 110, [2100], 2000),
    ],
)
def test_run(tmp_path, peer, script, flags, updates, points, clock_start):
    pytest.importorskip(peer_worker.PEERS[peer])
    settings = ["--learning-starts=1000", "--batch-size=16", "--log-every=100", "--device=cpu"]
    (contender,) = peers.peer_contenders(peer, script, [1], [*settings, *flags])
    (trial,) = run_trials([contender], [1], tmp_path)
    assert trial.failure is None
    assert trial.summary["optimizer_steps"] == updates
    assert trial.summary["global_step"] == points[-1]
    assert [point["global_step"] for point in trial.metrics] == points
    assert trial.summary["episodes"] > 5 and trial.peak_memory_mb > 50
    assert trial.args["torch_threads"] == 1
    # The clock runs from `clock_start` to the end.
    seconds = (points[-1] - clock_start) / trial.summary["sps"]
    assert 0 < seconds < trial.summary["wall_seconds"] - trial.summary["warmup_seconds"]


def test_run_on_atari(tmp_path):
    pytest.importorskip("stable_baselines3")
    flags = ["--num-envs=2", "--num-steps=128", "--update-epochs=1", "--total-timesteps=768", "--device=cpu"]
    (contender,) = peers.peer_contenders("sb3", "ppo_atari_envpool", [1], flags)
    (trial,) = run_trials([contender], [1], tmp_path)
    assert trial.failure is None
    assert (trial.summary["global_step"], trial.summary["optimizer_steps"]) == (768, 12)
    assert 2 <= trial.summary["episodes"] <= 8  # whole games, of 120 steps at least


def test_default_threads_are_the_librarys_own():
    one, own = peers.peer_contenders("sb3", "dqn", [1, 0], [])
    assert (one.label, one.command[-1]) == ("sb3, 1 thread", "--num-threads=1")
    # DQN's own default is 1.
    assert (own.label, own.command[-1]) == ("sb3, default threads", "--num-threads=0")


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("sac_continuous_action", ["--amp=bf16"], "--amp bf16: the peers have no such mode"),
        ("ppo_continuous_action", ["--amp=bf16"], "--amp bf16: the peers have no such mode"),
        ("td3_continuous_action", ["--env-id=CartPole-v1"], "needs continuous"),
        ("dqn", ["--env-id=InvertedPendulum-v5"], "needs Discrete"),
        ("dqn", ["--updates-per-step=0.00001"], "less than the peers can do"),
        ("dqn", ["--total-timesteps=10500"], "warm-up of 10500 steps and a round of 10"),
        ("sac_continuous_action", ["--gamma=2"], "--gamma 2.0"),
        ("ppo_atari_envpool", ["--env-id=Brekout-v5"], "did you mean Breakout-v5"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, script, flags, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        peer_worker.main("sb3", script, flags)
    assert not list(tmp_path.iterdir())


def test_target_network_frequency_is_refused():
    with pytest.raises(UsageError, match="--target-network-frequency 2"):
        build("sb3", "sac_continuous_action", env_id="InvertedPendulum-v5", target_network_frequency=2)
