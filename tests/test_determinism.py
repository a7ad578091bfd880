"""The same seed gives the same losses, another seed gives others."""

import pytest
from scripts import ATARI, FAST_SCRIPTS, FINISHED, ON_POLICY, PPO, course, run_tiny, run_until, start_process, tiny


def test_same_seed_same_losses(script, finished_run, tmp_path):
    same = course(finished_run)
    if script in PPO + ATARI:  # the others, even interrupted, come to the same in test_resume.py
        assert course(run_tiny(script, tmp_path, f"--total-timesteps={FINISHED}", name="same")) == same
    loss = next(key for key in same[0] if key.endswith(("value_loss", "qf1_loss", "td_loss")))
    flags = [*tiny(script), f"--total-timesteps={FINISHED}", f"--runs-dir={tmp_path}", "--run-name=other", "--seed=2"]
    assert run_until(script, 320, *flags) == 0
    others = [*zip(course(tmp_path / "other"), same, strict=False)]
    assert len(others) > 3 and all(ours[loss] != theirs[loss] for ours, theirs in others)
    assert not any(None in row.values() for row in same)


MODES = [
    pytest.param(["--compile", "--device=cpu"], marks=pytest.mark.long),
    pytest.param(["--cudagraphs", "--device=cuda"], marks=pytest.mark.cuda),
    pytest.param(["--compile", "--cudagraphs", "--device=cuda"], marks=pytest.mark.cuda),
]


# Compiled updates are in test_on_policy_equality.py, and a whole run in test_off_policy.py, which resumes it exactly.
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("script", [name for name in ON_POLICY if name in FAST_SCRIPTS])
def test_fast_modes_are_deterministic(script, mode, tmp_path):
    # Processes of their own: compilation sets switches of the whole process.
    for name in ("first", "same"):
        flags = ["--total-timesteps=640", f"--runs-dir={tmp_path}", f"--run-name={name}"]
        assert start_process(script, *tiny(script), *mode, *flags).wait(timeout=600) == 0
    assert course(tmp_path / "first") == course(tmp_path / "same")
