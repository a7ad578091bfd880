"""leanrl.tools.compare and peers: what they run, in which order, and what they make of the results."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import torch
import tyro
from scripts import wait_until

from leanrl.support.errors import UsageError
from leanrl.support.run import machine_facts
from leanrl.tools import compare, peers, trials
from leanrl.tools.common import COLORS, run_tool
from leanrl.tools.trials import (
    Contender,
    Trial,
    alternate,
    contenders_of,
    last_episodes,
    parse_entry,
    run_trials,
    sps_ratios,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FAST, TD3 = "ppo_continuous_action_torchcompile", "td3_continuous_action_torchcompile"
# 4 updates of 4 gradient steps; an episode of InvertedPendulum ends within one.
TINY = ["--env-id=InvertedPendulum-v5", "--device=cpu", "--num-steps=128", "--num-minibatches=4", "--update-epochs=1"]


def run_tool_in_process(monkeypatch, tool, *argv) -> int:
    """What ``python -m leanrl.tools.TOOL ARGV`` exits with."""
    monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        run_tool(tool.main, tool.Args)
    return end.value.code


@pytest.fixture
def known_scripts(tmp_path, monkeypatch):
    """A folder of scripts that this test decides on, and a compiler whatever this machine has."""
    for name in ("ppo_continuous_action", FAST, "cleanba_ppo"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(trials, "SCRIPTS", tmp_path)
    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda _: True)
    return tmp_path


# ------------------------------------------------------------------------------------------------------------ ENTRIES


@pytest.mark.parametrize(
    ("entry", "script", "levers"),
    [
        (FAST, FAST, None),
        (f"{FAST}:eager", FAST, set()),
        (f"{FAST}:compile", FAST, {"compile"}),
        (f"{FAST}:cudagraphs+compile", FAST, {"compile", "cudagraphs"}),
        ("cleanba_ppo:cudagraphs", "cleanba_ppo", {"cudagraphs"}),
        ("sac_continuous_action_torchcompile:one-graph", "sac_continuous_action_torchcompile", {"one-graph"}),
        ("td3_continuous_action_torchcompile:one-graph+compile", TD3, {"compile", "one-graph"}),
        ("ppo_continuous_action:eager", "ppo_continuous_action", set()),
    ],
)
def test_entry(entry, script, levers):
    assert parse_entry(entry, "scripts") == (script, levers)


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
@pytest.mark.parametrize("mode", ["", ":compile+cudagraphs"])
def test_an_entry_that_is_a_mode_now(algorithm, mode):
    old, now = (f"{algorithm}_continuous_action_{name}" for name in ("onegraph", "torchcompile"))
    with pytest.raises(UsageError) as error:
        parse_entry(f"{old}{mode}", "scripts")
    assert str(error.value) == f"--scripts {old}{mode}: is a mode now: {now}:one-graph or {now}:compile+one-graph"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--scripts", f"{FAST}:fast"], "no such mode; there are eager, compile, cudagraphs, compile+cudagraphs"),
        (["--scripts", f"{FAST}:one-graph"], "no such mode; there are eager, compile, cudagraphs, compile+cudagraphs"),
        (["--scripts", f"{FAST}:cudagraphs+one-graph"], "no such mode"),
        (["--scripts", "ppo_continuous_action:fast"], "no such mode; there are eager"),
        (["--scripts", f"{FAST}:"], "no such mode"),
        (["--scripts", f"{FAST}:eager+compile"], "no such mode"),
        (["--scripts", "ppo_continuos_action"], "did you mean ppo_continuous_action"),
        (["--scripts", "ppo_continuous_action:compile"], f"try {FAST}:compile"),
        (["--scripts", f"{FAST}:eager", f"{FAST}:eager"], "none twice"),
        (["--scripts", "ppo_continuous_action", "ppo_continuous_action:eager"], "more than once"),
        (["--scripts", f"{FAST}:cudagraphs", "--", "--device", "cpu"], "needs a CUDA device"),
        (["--seeds"], "--seeds"),
        (["--", "--seed=3"], "--seed=3"),
        (["--", "--no-compile"], "--no-compile"),
        (["--", "--one_graph"], "--one_graph"),
        (["ppo_continuous_action"], "not a flag"),
        (["--amp", "bf16", "bf16"], "none twice"),
        (["--amp", "bf16", "--scripts", f"{FAST}:eager"], "none of --scripts is compiled"),
        (["--amp", "none", "bf16", "--", "--amp=bf16"], "-- --amp=bf16"),
        (["--", "--max-seconds", "5"], "-- --max-seconds"),
        (["--max-seconds", "0"], "--max-seconds 0.0: must be above 0"),
    ],
)
def test_bad_input_is_one_line(known_scripts, monkeypatch, capsys, flags, said):
    monkeypatch.setattr(trials, "run_trial", lambda *_: pytest.fail("must not run"))
    assert run_tool_in_process(monkeypatch, compare, *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("compare: ") and err.count("\n") == 1 and said in err


def test_modes_of_this_machine(known_scripts, monkeypatch, capsys):
    def flags_of(device):
        contenders = contenders_of([FAST, "ppo_continuous_action"], "scripts", device, ["--fast"], ["--slow"])
        return [contender.command[2:] for contender in contenders]

    eager, compiled = ("--no-compile", "--no-cudagraphs", "--fast"), ("--compile", "--no-cudagraphs", "--fast")
    assert flags_of(CPU) == [eager, compiled, ("--slow",)]

    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda device_type: device_type == "cuda")
    assert flags_of(CPU) == [eager, ("--slow",)]
    assert "install g++" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"install g\+\+"):
        contenders_of([f"{FAST}:compile"], "scripts", CPU, [], [])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    graphed, both = ("--no-compile", "--cudagraphs", "--fast"), ("--compile", "--cudagraphs", "--fast")
    assert flags_of(CUDA) == [eager, compiled, graphed, both, ("--slow",)]


def test_one_graph_is_a_mode_of_those_scripts_that_have_it(monkeypatch):
    monkeypatch.setattr(trials, "lack", lambda levers, device: None)
    found = contenders_of([TD3], "scripts", CUDA, ["--num-envs=2"], [])
    assert [contender.label.removeprefix(TD3) for contender in found] == [
        *("", " --compile", " --cudagraphs", " --compile --cudagraphs", " --one-graph", " --compile --one-graph")
    ]
    assert found[-1].command[2:] == ("--compile", "--one-graph", "--num-envs=2")
    assert found[3].command[2:] == ("--compile", "--cudagraphs", "--no-one-graph", "--num-envs=2")
    for contender in found:
        trials.require_valid(contender)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="--one-graph needs a CUDA device"):
        contenders_of([f"{TD3}:one-graph"], "scripts", CPU, [], [])


def test_amp_is_for_what_is_compiled(known_scripts):
    entries = ["ppo_continuous_action", FAST]
    flags = (["--fast"], ["--slow"])
    found = contenders_of(entries, "ours", CPU, *flags, amp=["none", "bf16"])
    assert [contender.label for contender in found] == [*entries, f"{FAST} --compile", f"{FAST} --compile --amp bf16"]
    assert found[-1].command == (*found[-2].command, "--amp", "bf16")
    assert found[:-1] == contenders_of(entries, "ours", CPU, *flags)
    assert contenders_of(entries, "ours", CPU, *flags, amp=["bf16"]) == [*found[:2], found[3]]


# ------------------------------------------------------------------------------------------------------------ RUNNING


def test_order_alternates():
    a, b, c = (Contender(label, ()) for label in "abc")
    order = alternate([a, b, c], seeds=[7, 8, 9])
    assert "".join(contender.label for contender, _ in order) == "abccbaabc"
    assert [seed for _, seed in order] == [7] * 3 + [8] * 3 + [9] * 3


def fake_script(folder, name: str, code: str) -> Contender:
    """A contender whose script runs ``code`` with its flags in ``args`` and its run directory in ``run``."""
    path = folder / f"{name}.py"
    path.write_text(
        "import argparse, json, os, pathlib, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "for flag in ('--seed', '--run-name', '--runs-dir'): parser.add_argument(flag)\n"
        "args = parser.parse_args()\n"
        "run = pathlib.Path(args.runs_dir, args.run_name)\n"
        "run.mkdir(parents=True)\n"
        f"{code}\n"
    )
    return Contender(name, (sys.executable, str(path)))


GOOD = (
    "(run / 'summary.json').write_text(json.dumps({'sps': 100 * int(args.seed), 'warmup_seconds': 0.0,"
    " 'episodic_return': None, 'global_step': 1, 'interrupted': False}))"
)


def test_a_failed_run_does_not_stop_the_others(tmp_path, capfd):
    good = fake_script(tmp_path, "good", GOOD)
    crash = fake_script(tmp_path, "crash", "raise ValueError('broken')")
    killed = fake_script(tmp_path, "killed", f"os.kill(os.getpid(), {signal.SIGKILL.value})")
    silent = fake_script(tmp_path, "silent", "pass")
    found = run_trials([crash, killed, silent, good], [2], tmp_path / "runs")
    assert [trial.failure for trial in found] == ["exit 1", "signal 9", "no summary.json", None]
    assert found[-1].summary["sps"] == 200
    out, err = capfd.readouterr()
    assert "[1/4] crash, seed 2" in out and "[4/4] good, seed 2" in out
    assert "crash, seed 2: failed (exit 1)" in err and "ValueError: broken" in err


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_peak_memory_of_a_run(tmp_path):
    code = f"block = b'x' * {10**8}; del block; import time; time.sleep(1); {GOOD}"
    (trial,) = run_trials([fake_script(tmp_path, "hungry", code)], [1], tmp_path / "runs")
    # What it has given back counts, what this process holds does not, and that is more.
    assert 100 < trial.peak_memory_mb < 150 < trials.peak_memory_mb(os.getpid())
    assert trials.peak_memories([trial], "hungry") == [trial.peak_memory_mb]
    assert trials.peak_memory_mb(2**22 + 1) is None  # no such process


HUNGRY = "block = b'x' * 10**8; time.sleep(1)"
LAUNCH = f"""
import subprocess, time
ranks = [subprocess.Popen([sys.executable, *sys.argv], env={{**os.environ, "RANK": str(rank)}}) for rank in (0, 1)]
compiler = subprocess.Popen([sys.executable, "-c", "import time; {HUNGRY}"])
for process in (*ranks, compiler):
    process.wait()
time.sleep(0.6)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_peak_memory_of_a_distributed_run(tmp_path):
    """The ranks count, which the launcher starts with its own flags, and no other process that it starts."""
    script = fake_script(tmp_path, "distributed", f"{LAUNCH}\n{GOOD}")
    path = tmp_path / "distributed.py"
    path.write_text(f"import os, time\nif 'RANK' in os.environ:\n    {HUNGRY}\n    os._exit(0)\n{path.read_text()}")
    (trial,) = run_trials([script], [1], tmp_path / "runs")
    assert not trial.failure and 200 < trial.peak_memory_mb < 270


def test_refused_flags_stop_everything(tmp_path, capfd):
    refused = fake_script(tmp_path, "refused", "sys.exit(2)")
    with pytest.raises(SystemExit) as end:
        run_trials([refused, fake_script(tmp_path, "good", GOOD)], [1], tmp_path / "runs")
    assert end.value.code == 2
    assert "good" not in capfd.readouterr().out


@pytest.mark.parametrize("num_before", [0, 1])
def test_ctrl_c_ends_the_run_that_is_on(num_before, tmp_path):
    """And keeps what was measured before it, if anything was."""
    good = fake_script(tmp_path, "good", GOOD)
    sleeper = fake_script(
        tmp_path, "sleeper", "(run / 'pid').write_text(str(os.getpid())); import time; time.sleep(600)"
    )
    driver = tmp_path / "driver.py"
    driver.write_text(
        "from pathlib import Path\n"
        "from leanrl.tools.common import run_tool\n"
        "from leanrl.tools.trials import Contender, exit_code, run_trials\n"
        "def main(args):\n"
        f"    trials = run_trials({[good] * num_before + [sleeper, good]}, [1], Path('runs'))\n"
        "    print([trial.failure for trial in trials])\n"
        "    return exit_code(trials)\n"
        "run_tool(main, dict[str, int])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(trials.REPOSITORY)}

    def heed_ctrl_c() -> None:  # a shell's background jobs ignore it, and hand that down
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": tmp_path, "env": env, **pipes, "preexec_fn": heed_ctrl_c}
    process = subprocess.Popen([sys.executable, driver], **how)
    try:
        pid = int(wait_until(lambda: "".join(path.read_text() for path in tmp_path.glob("runs/*/pid")), process))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    if num_before == 0:
        assert err.strip() == "driver: interrupted"
    else:
        assert err.strip() == "interrupted: the results of the runs so far"
        assert out.splitlines()[-1] == "[None, 'not run', 'not run']"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ------------------------------------------------------------------------------------------------------------ RESULTS


def canned(
    label: str,
    seed: int,
    sps: float | None,
    warmup_seconds: float = 0.0,
    episodic_return: float = 1.0,
    peak_memory_mb: float | None = None,
) -> Trial:
    """A trial that ran at ``sps``, or crashed where that is None."""
    if sps is None:
        return Trial(label, seed, [], "", exit_code=1)
    numbers = {"sps": sps, "warmup_seconds": warmup_seconds, "global_step": 4096, "interrupted": False}
    points = [] if episodic_return is None else [ended(4096, 10, episodic_return)]
    return Trial(label, seed, [], "", 0, summary=numbers, metrics=points, peak_memory_mb=peak_memory_mb)


def ended(step: int, episodes: int, mean: float) -> dict:
    """A log point: so many episodes have ended, with that mean return those since the last point."""
    point = {"charts/episodes": episodes, "charts/episodic_return": mean, "charts/wall_seconds": step / 100}
    return {"global_step": step, **point}


def cells(table: str) -> list[list[str]]:
    """The body of a markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns do not line up"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_table():
    found = [
        *(canned("slow", 1, 1000.0), canned("fast", 1, 3000.0, 8.0, 10.0, 400.0), canned("crash", 1, None)),
        *(canned("crash", 2, 500.0), canned("fast", 2, 4000.0, 6.0, 30.0, 1400.0), canned("slow", 2, 2000.0)),
    ]
    table = compare.render_table(compare.summarize(found, ["slow", "fast", "crash"]))
    assert cells(table) == [
        ["slow", "1,500 ± 707", "0.0 ± 0.0", "1.00 ± 0.00x", "1 ± 0", "4,096 ± 0", "-"],
        # 3 times as fast with seed 1, twice with seed 2.
        ["fast", "3,500 ± 707", "7.0 ± 1.4", "2.50 ± 0.71x", "20 ± 14", "4,096 ± 0", "900 ± 707"],
        ["crash (1 failed: exit 1)", "500", "0.0", "0.25x", "1", "4,096", "-"],
    ]


def test_table_of_one_seed_without_episodes():
    found = [canned("a", 1, 2000.0), canned("b", 1, 9000.0, 7.25, None), canned("c", 1, None)]
    assert cells(compare.render_table(compare.summarize(found, ["a", "b", "c"]))) == [
        ["a", "2,000", "0.0", "1.00x", "1", "4,096", "-"],
        ["b", "9,000", "7.2", "4.50x", "-", "4,096", "-"],
        ["c (1 failed: exit 1)", "-", "-", "-", "-", "-", "-"],
    ]


def test_last_episodes():
    points = [ended(10, 60, 1.0), {"global_step": 20}, ended(30, 120, 2.0), ended(40, 160, 4.0)]
    assert last_episodes(points[:2]) is None and last_episodes([], or_fewer=True) is None
    assert last_episodes(points[:2], or_fewer=True) == pytest.approx(1.0)
    assert last_episodes(points[:3]) == pytest.approx((60 * 2.0 + 40 * 1.0) / 100)
    assert last_episodes(points) == pytest.approx((60 * 2.0 + 40 * 4.0) / 100)
    assert last_episodes(points, count=150) == pytest.approx((50 * 1.0 + 60 * 2.0 + 40 * 4.0) / 150)


def test_returns_are_compared_where_all_have_come():
    """In the table and in the panel against steps; not in that against wall clock."""
    found = [canned("slow", 1, 1000.0), canned("fast", 1, 2000.0), canned("fast", 2, 2000.0), canned("crash", 1, None)]
    ends = [300, 900, 800]
    for trial, end in zip(found, ends, strict=False):
        trial.summary["global_step"] = end + 50  # no log point there
        trial.metrics = [ended(step, step // 10, float(step)) for step in range(100, end + 1, 100)]
    found[-1].metrics = [ended(100, 10, 1.0)]
    rows = compare.summarize(found, ["slow", "fast", "crash"])
    # 30 episodes by then, a third each of 100, 200 and 300.
    assert [row["episodic_return"] for row in rows] == [[pytest.approx(200.0)], [pytest.approx(200.0)] * 2, []]
    table = compare.render_table(rows)
    assert "| return at step 350 |" in table
    assert [row[5] for row in cells(table)] == ["350", "900 ± 71", "-"]
    record = {"rows": rows, "runs": [asdict(trial) for trial in found], "machine": machine_facts(CPU)}
    _, steps, clock = compare.draw(record, found).axes
    assert [line.get_xdata()[-1] for line in steps.lines] == [300] * len(steps.lines) == [300] * 4
    assert max(line.get_xdata()[-1] for line in clock.lines) == 9.0


@pytest.mark.parametrize(
    "flags, passed", [([], 30.0), (["--max-seconds", "2.5"], 2.5), (["--max-seconds", "None"], None)]
)
def test_every_script_has_the_time_limit(monkeypatch, tmp_path, flags, passed):
    def run_trials(contenders, *_) -> list:
        for contender in contenders:
            args = tyro.cli(trials.script_module(contender).Args, args=contender.command[2:])
            assert (args.max_seconds, args.total_timesteps) == (passed, 102_400)
        assert len(contenders) >= 2
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_trials", run_trials)
    assert run_tool_in_process(monkeypatch, compare, "--out", tmp_path, *flags) == 130


def test_an_interrupted_run_does_not_count():
    trial = canned("a", 1, 2000.0)
    trial.summary["interrupted"] = True
    assert trial.failure == "interrupted"
    assert sps_ratios([trial, canned("b", 1, 1000.0)], "b", "a") == []


def test_mean_curve_covers_the_shared_range():
    x, y = compare.mean_curve([([0, 10, 20], [0.0, 10.0, 20.0]), ([10, 20, 30], [30.0, 40.0, 50.0])])
    assert x[0] == 10 and x[-1] == 20
    np.testing.assert_allclose(y, x + 10)
    # As of two seeds whose compilation, at first without a cache, took longer than the other's run.
    x, y = compare.mean_curve([([20, 25], [0.0, 10.0]), ([5, 10], [0.0, 20.0])])
    assert len(x) == len(y) == 0


def test_peers_table():
    found = [
        *(canned("sb3, 1 thread", i, sps) for i, sps in enumerate([2000.0, 1000.0, 2000.0])),
        *(canned("ours", i, sps, 5.0, 1.0, 300.0 + i) for i, sps in enumerate([8000.0, 8000.0, 6000.0])),
    ]
    rows = peers.summarize(found, ["sb3, 1 thread", "ours"], best={"sb3": "sb3, 1 thread"})
    table = peers.render_table(rows, {"sb3": {"sb3, 1 thread": 2000.0, "sb3, default threads": 1500.0}})
    assert cells(table) == [
        ["sb3, 1 thread", "2,000 1,000 2,000", "2,000", "1.00x", "0.0", "-"],
        # Ratios of the rounds: 4, 8, 3.
        ["ours", "8,000 8,000 6,000", "8,000", "4.00x", "5.0", "301"],
    ]
    assert "sb3, default threads 1,500" in table


# --------------------------------------------------------------------------------------------------------- END TO END


def bar_width(image: np.ndarray, color: str) -> int:
    """How many pixels the widest line of that colour has in the left third, where the bars are."""
    left = image[:, : image.shape[1] // 3, :3]
    return np.all(np.abs(left - matplotlib.colors.to_rgb(color)) < 0.01, axis=2).sum(axis=1).max()


def test_compare_end_to_end(tmp_path, monkeypatch, capfd):
    entries = ["ppo_continuous_action", f"{FAST}:eager"]
    flags = ["--scripts", *entries, "--seeds", 1, 2, "--total-timesteps", 512, "--out", tmp_path]
    assert run_tool_in_process(monkeypatch, compare, *flags, "--", *TINY) == 0

    out = capfd.readouterr().out
    assert out.strip().splitlines()[-1] == f"picture: {tmp_path / 'compare.png'}"
    headings = [line.split("] ")[1] for line in out.splitlines() if line.startswith("[")]
    reference, fast = (f"{entry.removesuffix(':eager')}, seed " for entry in entries)
    assert headings == [reference + "1", fast + "1", fast + "2", reference + "2"]

    record = json.loads((tmp_path / "compare.json").read_text())
    assert [(run["summary"]["global_step"], run["summary"]["optimizer_steps"]) for run in record["runs"]] == [
        (512, 16)
    ] * 4
    assert [run["args"]["args"]["seed"] for run in record["runs"]] == [1, 1, 2, 2]
    assert all(len(run["metrics"]) == 4 and run["summary"]["episodes"] > 0 for run in record["runs"])
    assert all(run["args"]["args"]["max_seconds"] == 30.0 for run in record["runs"])
    reached = [run["summary"]["episodic_return"] for run in record["runs"]]  # of all episodes, fewer than 100
    assert record["rows"][0]["episodic_return"] == pytest.approx([reached[0], reached[3]])
    assert record["rows"][1]["episodic_return"] == pytest.approx(reached[1:3])
    assert record["machine"]["cpu_cores"] > 0 and "compare" in record["command"]
    sps = {(run["label"], run["seed"]): run["summary"]["sps"] for run in record["runs"]}
    speedups = [sps[FAST, seed] / sps["ppo_continuous_action", seed] for seed in (1, 2)]
    assert record["rows"][1]["speedup"] == pytest.approx(speedups)
    assert "| return at step 512 |" in (tmp_path / "table.md").read_text()
    table = cells((tmp_path / "table.md").read_text())
    assert [row[0] for row in table] == ["ppo_continuous_action", FAST]
    assert table[1][3].startswith(f"{np.mean(speedups):.2f} ± ")

    image = matplotlib.image.imread(tmp_path / "compare.png")
    means = [np.mean(row["sps"]) for row in record["rows"]]
    widths = [bar_width(image, color) for color in COLORS[:2]]
    assert min(widths) > 10
    assert widths[1] / widths[0] == pytest.approx(means[1] / means[0], rel=0.1)


def test_peer_worker(tmp_path):
    pytest.importorskip("stable_baselines3")
    label = "sb3, 1 thread"
    (contender,) = peers.peer_contenders("sb3", "ppo_continuous_action", [1], [*TINY, "--total-timesteps=600"])
    assert contender.label == label
    (trial,) = run_trials([contender], [3], tmp_path)
    assert trial.failure is None
    # 600 is cut to 4 rollouts; the first is the warm-up.
    assert (trial.summary["global_step"], trial.summary["optimizer_steps"]) == (512, 16)
    assert trial.summary["script"] == "sb3" and trial.summary["episodes"] > 5
    assert trial.summary["episodic_return"] > 1
    assert trial.summary["warmup_seconds"] > 0 and trial.peak_memory_mb > 50
    assert trial.args["torch_threads"] == 1
    # The clock runs from the second rollout to the end: longer than between these log points, shorter than all
    # that was not warm-up.
    first, last = trial.metrics[0], trial.metrics[-1]
    assert [point["global_step"] for point in trial.metrics] == [256, 384, 512]
    seconds = (512 - 128) / trial.summary["sps"]
    assert seconds > last["charts/wall_seconds"] - first["charts/wall_seconds"]
    assert seconds < trial.summary["wall_seconds"] - trial.summary["warmup_seconds"]
