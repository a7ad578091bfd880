"""The same seed gives the same losses, another seed gives others."""

import pytest
from scripts import ATARI, ON_POLICY, run, start_process, tiny

from leanrl.support.tracking import read_metrics


def losses(run_dir):
    """The losses of each log point, and the returns that they led to."""
    keys = ("losses/", "charts/episodic")
    rows = [{k: v for k, v in row.items() if k.startswith(keys)} for row in read_metrics(run_dir)]
    assert len(rows) > 3 and all(None not in row.values() and len(row) > 1 for row in rows)
    return rows


def test_same_seed_same_losses(script, finished_run, tmp_path):
    for name, seed, steps in (("same", 1, 1920), ("other", 2, 640)):
        flags = [f"--total-timesteps={steps}", f"--runs-dir={tmp_path}", f"--run-name={name}", f"--seed={seed}"]
        assert run(script, *tiny(script), *flags) == 0
    assert losses(tmp_path / "same") == losses(finished_run)
    loss = next(key for key in losses(finished_run)[0] if key.endswith(("value_loss", "qf1_loss", "td_loss")))
    others = zip(losses(tmp_path / "other"), losses(finished_run), strict=False)
    assert all(ours[loss] != theirs[loss] for ours, theirs in others)


MODES = [
    ["--compile", "--device=cpu"],
    pytest.param(["--cudagraphs", "--device=cuda"], marks=pytest.mark.cuda),
    pytest.param(["--compile", "--cudagraphs", "--device=cuda"], marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize(
    "script",
    [
        # Its compiled update is shown to be in test_ppo_atari.py.
        pytest.param(name, marks=pytest.mark.long) if name in ATARI else name
        for name in ON_POLICY
        if name.endswith("_torchcompile")
    ],
)
def test_fast_modes_are_deterministic(script, mode, tmp_path):
    # Processes of their own: compilation sets switches of the whole process.
    for name, seed in (("first", 1), ("same", 1), ("other", 2)):
        flags = ["--total-timesteps=640", f"--runs-dir={tmp_path}", f"--run-name={name}", f"--seed={seed}"]
        assert start_process(script, *tiny(script), *mode, *flags).wait(timeout=300) == 0
    assert losses(tmp_path / "first") == losses(tmp_path / "same")
    assert losses(tmp_path / "first") != losses(tmp_path / "other")
