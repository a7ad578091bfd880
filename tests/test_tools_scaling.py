"""leanrl.tools.scaling: what it runs, in which order, and what it makes of the results."""

import json
import shlex

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from test_tools_compare import canned, cells, run_tool_in_process

from leanrl.support.errors import UsageError
from leanrl.tools import scaling, trials
from leanrl.tools.common import COLORS
from leanrl.tools.trials import Contender, Trial

TD3 = "td3_continuous_action_torchcompile"
# 4 gradient steps and more; an episode of InvertedPendulum ends within the run.
TINY = ["--env-id=InvertedPendulum-v5", "--device=cpu", "--num-threads=1", "--batch-size=32", "--learning-starts=64"]


@pytest.fixture
def fake_runs(monkeypatch):
    """``fake_runs(speed)``: trials only ask ``speed(command, seed)``, None for a crash; returns the list of them."""

    def install(speed):
        def run_trial(contender: Contender, seed: int, runs_dir) -> Trial:
            asked.append((contender.label, seed))
            return canned(contender.label, seed, speed(shlex.join(contender.command), seed))

        asked = []
        monkeypatch.setattr(trials, "run_trial", run_trial)
        return asked

    return install


def pixels(path, color: str) -> np.ndarray:
    """Where a picture has this colour: rows and columns of pixels, [2, P]."""
    image = matplotlib.image.imread(path)[..., :3]
    return np.stack(np.nonzero(np.all(np.abs(image - matplotlib.colors.to_rgb(color)) < 0.01, axis=2)))


# -------------------------------------------------------------------------------------------------------------- INPUT


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--flag", "num-env"], "did you mean num-envs"),
        (["--flag", "seed"], "--seed is set by this tool"),
        (["--flag", "compile"], "--compile is set by this tool"),
        (["--values", "1", "1"], "none twice"),
        (["--values", "1", "1.0"], "none twice"),
        (["--values", "1", "many"], "numbers above 0"),
        (["--values", "0", "1"], "numbers above 0"),
        (["--values", "4", "1.5"], "does not take"),
        (["--values", "2000", "1"], "--total-timesteps 1000"),
        (["--values"], "at least one"),
        (["--seeds"], "--seeds"),
        (["--scripts", "td3_continuos_action"], "did you mean td3_continuous_action"),
        (["--scripts", f"{TD3}:fast"], "no such mode"),
        (["--variants", "tau=0.1", "tau=0.1"], "none twice"),
        (["--variants", "tua=0.1"], "did you mean tau"),
        (["--variants", "num_envs=4"], "--num-envs is set by this tool"),
        (["--variants", "no-compile"], "--compile is set by this tool"),
        (["--variants", "tau=high"], "--tau=high"),
        (["--variants", "tau=2"], "--tau 2.0: must be between 0 and 1"),
        (["--variants", "tau=0.1", "--", "--tau", "0.2"], "--tau"),
        (["--", "--num-envs", "4"], "--num-envs"),
        (["--", "--total-timesteps=9"], "--total-timesteps"),
        (["--", "--nonsense", "3"], "--nonsense 3"),
        ([TD3], "not a flag"),
    ],
)
def test_bad_input_is_one_line(fake_runs, monkeypatch, capsys, flags, said):
    asked = fake_runs(lambda *_: pytest.fail("must not run"))
    flags = flags if "--" in flags or flags == [TD3] else [*flags, "--", "--learning-starts=500"]
    start = [] if "--scripts" in flags else ["--scripts", f"{TD3}:eager"]
    assert run_tool_in_process(monkeypatch, scaling, *start, "--total-timesteps", 1000, *flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and asked == []
    assert err.startswith("scaling: ") and err.count("\n") == 1 and said in err


# ------------------------------------------------------------------------------------------------------------ RESULTS


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--local-num-envs=192", "--total-timesteps=30000"], "--total-timesteps 30000: is less than one rollout"),
        (["--num-minibatches=7"], "--num-minibatches 7: "),
        (["--local-num-envs=7", "--num-actor-threads=1", "--learner-device-ids=0", "1"], "--local-num-envs 7: "),
        (["--timeout=1"], "--timeout 1.0: must be at least 2"),
    ],
)
def test_layouts_of_distributed_scripts_are_checked_too(flags, said):
    command = ("python", "leanrl/cleanba_ppo.py", "--device=cpu")
    scaling.require_valid(Contender("PPO", command))
    with pytest.raises(UsageError, match=f"^{said}"):
        scaling.require_valid(Contender("PPO", (*command, *flags)))


def test_table_order_and_picture(fake_runs, tmp_path, monkeypatch, capsys):
    def speed(command: str, seed: int) -> float | None:
        if TD3 in command and "--num-envs=8" in command:
            return None
        base = 1000 if TD3 in command else 500 if "--tau=0.1" in command else 100
        return base * (2 if "--num-envs=8" in command else 1) * (1 + seed)

    asked = fake_runs(speed)
    flags = ["--scripts", f"{TD3}:eager", "sac_continuous_action", "--values", 8, 1, "--seeds", 1, 2, 4]
    flags += ["--variants", "", "tau=0.1", "--total-timesteps", 30_000, "--out", tmp_path]
    assert run_tool_in_process(monkeypatch, scaling, *flags, "--", "--gamma", 0.9) == 1

    lines = [f"{script}{tau}" for script in (TD3, "sac_continuous_action") for tau in ("", " --tau=0.1")]
    one_round = [f"{line} --num-envs={value}" for value in (1, 8) for line in lines]
    assert [label for label, _ in asked] == one_round + one_round[::-1] + one_round
    assert [seed for _, seed in asked] == [1] * 8 + [2] * 8 + [4] * 8

    text = (tmp_path / "table.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "--gamma 0.9" in text
    header = next(row for row in text.splitlines() if row.startswith("|"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["sps at --num-envs", "1", "8"]
    assert cells(text) == [
        # Factors 2, 3 and 5: the median is 3.
        [f"{TD3} (3 failed: exit 1)", "3,000", "-"],
        [f"{TD3} --tau=0.1 (3 failed: exit 1)", "3,000", "-"],
        ["sac_continuous_action", "300", "600"],
        ["sac_continuous_action --tau=0.1", "1,500", "3,000"],
    ]
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert record["rows"][3]["sps"] == {"1": [1000, 1500, 2500], "8": [2000, 3000, 5000]}
    assert record["flag"] == "num-envs" and record["machine"]["cpu_cores"] > 0 and len(record["runs"]) == 24


@pytest.mark.parametrize("slowest", [1000.0, 10.0])
def test_picture(tmp_path, slowest):
    speeds = {"flat": (slowest, slowest, slowest), "steep": (1000.0, 2000.0, 4000.0), "failed": (None,) * 3}
    rows = [
        {
            "line": line,
            "sps": {value: [sps] * 3 if sps else [] for value, sps in zip(("1", "4", "16"), medians, strict=True)},
            "median_sps": dict(zip(("1", "4", "16"), medians, strict=True)),
            "failures": [],
        }
        for line, medians in speeds.items()
    ]
    scaling.draw("heading", rows, "num-envs").savefig(tmp_path / "scaling.png")
    (flat_y, flat_x), (steep_y, steep_x) = (pixels(tmp_path / "scaling.png", color) for color in COLORS[1:3])
    in_axes = flat_y < np.median(flat_y) + 20  # not in the legend
    assert np.ptp(flat_y[in_axes]) < 12 < np.ptp(flat_x[in_axes])
    # The value 4 lies half-way, and the steep line there at a third of its height, on a logarithmic axis at a half.
    curve = steep_y < flat_y[in_axes].max()
    left, right = steep_x[curve].min(), steep_x[curve].max()
    ends_and_middle = (left + 7, (left + right) / 2, right - 7)
    low, middle, high = (steep_y[curve & (np.abs(steep_x - x) < 3)].mean() for x in ends_and_middle)
    share = 1 / 2 if slowest * scaling.LINEAR_RANGE < 4000 else 1 / 3
    assert (low - middle) / (low - high) == pytest.approx(share, abs=0.05)


# --------------------------------------------------------------------------------------------------------- END TO END


def test_scaling_end_to_end(tmp_path, monkeypatch, capfd):
    flags = ["--scripts", f"{TD3}:eager", "--flag", "num-envs", "--values", 4, "--seeds", 1]
    flags += ["--total-timesteps", 128, "--variants", "updates-per-step=0.125 tau=0.01", "--out", tmp_path]
    assert run_tool_in_process(monkeypatch, scaling, *flags, "--", *TINY) == 0

    out = capfd.readouterr().out
    assert out.strip().splitlines()[-1] == f"picture: {tmp_path / 'scaling.png'}"
    line = f"{TD3} --updates-per-step=0.125 --tau=0.01"
    headings = [row for row in out.splitlines() if row.startswith("[")]
    assert headings == [f"[1/1] {line} --num-envs=4, seed 1"]

    record = json.loads((tmp_path / "scaling.json").read_text())
    (run,) = record["runs"]
    assert (run["args"]["args"]["num_envs"], run["args"]["args"]["tau"]) == (4, 0.01)
    assert (run["summary"]["global_step"], run["summary"]["optimizer_steps"]) == (128, 8)
    text = (tmp_path / "table.md").read_text()
    assert cells(text) == [[line, f"{run['summary']['sps']:,.0f}"]]
    assert text.startswith("InvertedPendulum-v5, seed 1, ")
    assert pixels(tmp_path / "scaling.png", COLORS[1]).size > 100
