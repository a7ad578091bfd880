"""The same seed gives the same losses, another seed gives others."""

import pytest
from scripts import FAST_SCRIPTS, TINY, run, start_process

from leanrl.support.tracking import read_metrics


def losses(run_dir):
    """The losses of each log point, and the returns that they led to."""
    keys = ("losses/", "charts/episodic")
    rows = [{k: v for k, v in row.items() if k.startswith(keys)} for row in read_metrics(run_dir)]
    assert len(rows) > 3 and all(None not in row.values() for row in rows)
    return rows


def test_same_seed_same_losses(script, finished_run, tmp_path):
    for name, seed in (("same", 1), ("other", 2)):
        flags = ["--total-timesteps=1920", f"--runs-dir={tmp_path}", f"--run-name={name}", f"--seed={seed}"]
        assert run(script, *tiny(script), *flags) == 0
    assert losses(tmp_path / "same") == losses(finished_run)
    others = zip(losses(tmp_path / "other"), losses(finished_run), strict=True)
    assert all(ours["losses/value_loss"] != theirs["losses/value_loss"] for ours, theirs in others)


MODES = [
    ["--compile", "--device=cpu"],
    pytest.param(["--cudagraphs", "--device=cuda"], marks=pytest.mark.cuda),
    pytest.param(["--compile", "--cudagraphs", "--device=cuda"], marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("fast_script", FAST_SCRIPTS)
def test_fast_modes_are_deterministic(fast_script, mode, tmp_path):
    # Processes of their own: compilation sets switches of the whole process.
    for name, seed in (("first", 1), ("same", 1), ("other", 2)):
        flags = ["--total-timesteps=640", f"--runs-dir={tmp_path}", f"--run-name={name}", f"--seed={seed}"]
        assert start_process(fast_script, *tiny(script), *mode, *flags).wait(timeout=300) == 0
    assert losses(tmp_path / "first") == losses(tmp_path / "same")
    assert losses(tmp_path / "first") != losses(tmp_path / "other")
