"""The scripts learn: training returns on tasks whose actions are not bounded by 1, or that end early."""

import pytest
from scripts import ATARI, PPO, run, summary

from leanrl.support.tracking import read_metrics


def mean_return(script: str, folder, env_id: str, steps: int, *flags: str) -> float:
    """Mean return of the last 100 training episodes of a run at the default hyperparameters, seed 1."""
    flags = [*flags, f"--env-id={env_id}", f"--total-timesteps={steps}", f"--runs-dir={folder}", "--run-name=r"]
    assert run(script, *flags) == 0
    result = summary(folder / "r")
    assert result["optimizer_steps"] == steps // 2048 * 320
    return result["episodic_return"]


def test_the_compiled_variant_learns_to_balance_a_pole(tmp_path) -> None:
    """A random policy holds it for 10 steps; seeds 1 to 3 had means of 275 to 291 here."""
    assert mean_return("ppo_continuous_action_torchcompile", tmp_path, "InvertedPendulum-v5", 38_912, "--compile") > 150


@pytest.mark.long
@pytest.mark.parametrize("script", [name for name in PPO if name not in ATARI])
def test_both_variants_balance_a_pole(script: str, tmp_path) -> None:
    """Seeds 1 to 3 had 837 to 854 with the compiled variant."""
    assert mean_return(script, tmp_path, "InvertedPendulum-v5", 102_400) > 650


@pytest.mark.long
def test_the_compiled_variant_learns_to_hop(tmp_path) -> None:
    """Episodes terminate early and, later, run out of time."""
    assert mean_return("ppo_continuous_action_torchcompile", tmp_path, "Hopper-v5", 307_200, "--compile") > 1_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("sac_continuous_action_torchcompile", ["--policy-lr=1e-3"]),
        ("td3_continuous_action_torchcompile", ["--learning-rate=1e-3", "--gamma=0.98", "--learning-starts=10000"]),
    ],
)
def test_the_compiled_off_policy_variants_swing_up_a_pendulum(script: str, flags: list[str], tmp_path) -> None:
    """Random actions make about -1,200; good ones about -155 (the last 25 episodes), with bounds of ±2."""
    flags = [*flags, "--env-id=Pendulum-v1", "--total-timesteps=20000", "--compile"]
    assert run(script, *flags, "--runs-dir", tmp_path, "--run-name=r") == 0
    assert summary(tmp_path / "r")["optimizer_steps"] == 20_000 - (5_000 if script.startswith("sac") else 10_000)
    last_points = read_metrics(tmp_path / "r")[-5:]
    assert sum(point["charts/episodic_return"] for point in last_points) / 5 > -250


@pytest.mark.long
def test_the_compiled_dqn_balances_a_pole(tmp_path) -> None:
    """CleanRL has 488.7 ± 16.1; seeds 1 to 5 had 455 to 499 here."""
    assert run("dqn_torchcompile", "--compile", "--runs-dir", tmp_path, "--run-name=r") == 0
    result = summary(tmp_path / "r")
    assert result["optimizer_steps"] == 49_000 and result["episodic_return"] > 400


@pytest.mark.long
@pytest.mark.parametrize(("env_id", "target"), [("CartPole-v1", 475), ("Acrobot-v1", -110)])
def test_the_compiled_pqn_balances_and_swings_up(env_id: str, target: float, tmp_path) -> None:
    """CleanRL has 495.1 ± 6.9 and -95.6 ± 5.7; seeds 1 to 3 had 496 to 500 and -97 to -90 here."""
    flags = ["--compile", f"--env-id={env_id}", "--runs-dir", tmp_path, "--run-name=r"]
    assert run("pqn_torchcompile", *flags) == 0
    result = summary(tmp_path / "r")
    assert result["optimizer_steps"] == 500_000 // 512 * 16 and result["episodic_return"] > target
