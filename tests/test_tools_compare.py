"""leanrl.tools.compare: what it runs, in which order, and what it makes of it; the peers' hyperparameters and clock."""

import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import cells, run_tool_in_process, wait_until

from leanrl.support.errors import UsageError
from leanrl.support.run import machine_facts
from leanrl.tools import compare, peers, speedrun, trials
from leanrl.tools.trials import REPOSITORY, Contender, Trial, contenders_of, run_trials

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FAST, TD3 = "ppo_continuous_action_torchcompile", "td3_continuous_action_torchcompile"
# 4 updates of 4 gradient steps; an episode of InvertedPendulum ends within one.
TINY = ["--env-id=InvertedPendulum-v5", "--device=cpu", "--num-steps=128", "--num-minibatches=4", "--update-epochs=1"]


@pytest.fixture
def a_compiler(monkeypatch):
    """Whatever this machine has."""
    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda _: True)


# ------------------------------------------------------------------------------------------------------------ ENTRIES


ACTORS = "--contenders cleanba_ppo:eager --total-timesteps 30000 -- --device cpu"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"--contenders {FAST}:one-graph", "no such mode; choose from eager, compile, cudagraphs, compile+cudagraphs"),
        ("--contenders ppo_continuos_action", "did you mean ppo_continuous_action"),
        (f"--contenders {FAST}:eager {FAST}:eager", "none repeated"),
        ("--contenders ppo_continuous_action ppo_continuous_action:eager", "more than once"),
        (f"--contenders {FAST}:cudagraphs -- --device cpu", "needs a CUDA device"),
        (f"--contenders '{FAST} --compile'", "--compile: this tool sets it"),
        (f"--contenders '{FAST} bf16'", "bf16: not a flag"),
        ("--contenders sb3:PPA", "no such peer; did you mean sb3:PPO"),
        ("--contenders nobody:PPO", "-m pip install -r requirements/requirements-peers.txt"),
        ("--contenders 'sb3:PPO --env-backend=envpool'", "does not take"),
        ("--contenders 'sb3:SAC --amp=bf16'", "--amp bf16: the peers have no such mode"),
        ("--contenders sb3:SAC -- --target-network-frequency=2", "is a setting that the peers do not have"),
        ("--contenders sb3:PPO -- --target-kl=1", "means something else in each peer"),
        ("--contenders sb3:DQN --total-timesteps 1000000 -- --updates-per-step=0.00001", "less than the peers can do"),
        ("--contenders sb3:DQN --total-timesteps=10500", "warm-up of 10500 steps and a round of 10"),
        ("-- --max-seconds 5", "--max-seconds"),
        ("-- --nonsense 3", "--nonsense 3"),
        ("ppo_continuous_action", "not a flag"),
        ("--max-seconds 0", "--max-seconds 0.0: must be above 0"),
        ("--sweep num-env 1", "did you mean num-envs"),
        ("--sweep seed 1", "--seed is set by this tool"),
        ("--sweep num-envs", "must be a flag and numbers above 0"),
        ("--sweep num-envs 1 -- --num_envs=4", "--num_envs=4: this tool sets it"),
        (f"--sweep tau 2 --contenders {TD3}", "--tau 2.0: must be between 0 and 1"),
        (f"{ACTORS} --local-num-envs=192", "--total-timesteps 30000: is less than one rollout"),
    ],
)
def test_bad_input_is_one_line(a_compiler, monkeypatch, refusal, flags, said):
    nobody = peers.PEERS["sb3:PPO"]._replace(module="no_such_library")
    installed = {name: peer._replace(module="sys") for name, peer in peers.PEERS.items()}
    monkeypatch.setattr(trials, "PEERS", {**installed, "nobody:PPO": nobody})
    monkeypatch.setattr(trials, "run_trial", lambda *_: pytest.fail("must not run"))
    assert said in refusal(compare, *shlex.split(flags))


def test_modes_of_this_machine(a_compiler, monkeypatch, capsys):
    def found(device, script=FAST) -> list[str]:
        contenders = contenders_of([f"{script} --tau=1", "dqn"], "contenders", device, ["--gamma=0.9"])
        assert contenders[-1].command[2:] == ("--gamma=0.9",)
        assert all(c.command[-2:] == ("--gamma=0.9", "--tau=1") for c in contenders[:-1])  # its own come last
        return [c.label.removeprefix(script).removesuffix(" --tau=1") for c in contenders[:-1]]

    assert found(CPU) == ["", " --compile"]
    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda device_type: device_type == "cuda")
    assert found(CPU) == [""]
    assert "install g++" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"install g\+\+"):
        contenders_of([f"{FAST}:compile"], "contenders", CPU)
    with pytest.raises(UsageError, match="--one-graph needs a CUDA device"):
        contenders_of([f"{TD3}:one-graph"], "contenders", CPU)

    monkeypatch.setattr(trials, "resolve_device", lambda args: CPU)
    graphs = ["", " --compile", " --cudagraphs", " --compile --cudagraphs"]
    assert found(CUDA) == graphs
    assert found(CUDA, TD3) == [*graphs, " --one-graph", " --compile --one-graph"]


# ------------------------------------------------------------------------------------------------------------ RUNNING


def fake_script(folder, name: str, code: str) -> Contender:
    """A contender whose script runs ``code`` with its flags in ``args`` and its run directory in ``run``."""
    path = folder / f"{name}.py"
    path.write_text(
        "import json, os, pathlib, sys\n"
        "args = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "run = pathlib.Path(args['--runs-dir'], args['--run-name'])\n"
        "run.mkdir(parents=True)\n"
        f"{code}\n"
    )
    return Contender(name, (sys.executable, str(path)))


GOOD = (
    "(run / 'summary.json').write_text(json.dumps({'sps': 100 * int(args['--seed']), 'warmup_seconds': 0.0,"
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
    with pytest.raises(SystemExit, match="2"):  # what refuses its flags does
        run_trials([fake_script(tmp_path, "refused", "sys.exit(2)"), good], [1], tmp_path / "runs")
    assert "good" not in capfd.readouterr().out


HUNGRY = "block = b'x' * 10**8; del block; time.sleep(1)"
LAUNCH = f"""
import subprocess, time
ranks = [subprocess.Popen([sys.executable, *sys.argv], env={{**os.environ, "RANK": str(rank)}}) for rank in (0, 1)]
compiler = subprocess.Popen([sys.executable, "-c", "import time; {HUNGRY}"])
for process in (*ranks, compiler):
    process.wait()
time.sleep(0.6)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_peak_memory_of_a_run(tmp_path):
    """What it has given back counts; of a distributed one the ranks, started with its flags, and no other process."""
    launcher = fake_script(tmp_path, "launcher", f"{LAUNCH}\n{GOOD}")
    path = tmp_path / "launcher.py"
    path.write_text(f"import os, time\nif 'RANK' in os.environ:\n    {HUNGRY}\n    os._exit(0)\n{path.read_text()}")
    (trial,) = run_trials([launcher], [1], tmp_path / "runs")
    assert not trial.failure and 200 < trial.peak_memory_mb < 270
    assert trials.peak_memory_mb(2**22 + 1) is None  # no such process


@pytest.mark.parametrize("num_before", [0, 1])
def test_ctrl_c_ends_the_run_that_is_on(num_before, tmp_path):
    """And keeps what was measured before it, if anything was."""
    good = fake_script(tmp_path, "good", GOOD)
    sleep = "(run / 'pid').write_text(f'{os.getpid()}'); import time; time.sleep(600)"
    sleeper = fake_script(tmp_path, "sleeper", sleep)
    driver = tmp_path / "driver.py"
    driver.write_text(
        # A shell's background jobs ignore Ctrl-C, and hand that down.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from leanrl.tools import common, compare, trials\nfrom leanrl.tools.trials import Contender\n"
        "trials.require_valid = lambda contender: None\n"
        f"trials.contenders_of = lambda *_: {[good] * num_before + [sleeper, good]}\n"
        "common.run_tool(compare.main, compare.Args)\n"
    )

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}, **pipes}
    process = subprocess.Popen([sys.executable, driver, "--out", "."], **how)
    try:
        pid = int(wait_until(lambda: "".join(path.read_text() for path in tmp_path.glob("runs/*/pid")), process))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    told = "interrupted: these are the results of the runs so far" if num_before else "compare: interrupted"
    assert err.strip() == told and ("| good " in out) == (num_before > 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ------------------------------------------------------------------------------------------------------------ RESULTS


def canned(label: str, seed: int, sps: float | None, warmup_seconds=0.0, episodic_return=1.0, peak=None) -> Trial:
    """A trial that ran at ``sps``, or crashed where that is None."""
    if sps is None:
        return Trial(label, seed, [], "", exit_code=1)
    numbers = {"sps": sps, "warmup_seconds": warmup_seconds, "global_step": 4096, "interrupted": False}
    points = [] if episodic_return is None else [ended(4096, 10, episodic_return)]
    return Trial(label, seed, [], "", 0, summary=numbers, metrics=points, peak_memory_mb=peak)


def ended(step: int, episodes: int, mean: float) -> dict:
    """A log point: so many episodes have ended, with that mean return those since the last point."""
    point = {"charts/episodes": episodes, "charts/episodic_return": mean, "charts/wall_seconds": step / 100}
    return {"global_step": step, **point}


def table_of(found: list[Trial]) -> list[list[str]]:
    """The rows of the table of these trials."""
    return cells(compare.render_table(compare.summarize(found, list(dict.fromkeys(t.label for t in found)))))


def test_table():
    found = [
        *(canned("slow", 1, 1000.0), canned("fast", 1, 3000.0, 8.0, 10.0, 400.0), canned("crash", 1, None)),
        *(canned("crash", 2, 500.0), canned("fast", 2, 4000.0, 6.0, 30.0, 1400.0), canned("slow", 2, 2000.0)),
    ]
    assert table_of(found) == [
        ["slow", "1,000 2,000", "1,500", "1.00x", "0.0", "1.0 ± 0.0", "4,096", "-"],
        # 3 times as fast with seed 1, twice with seed 2.
        ["fast", "3,000 4,000", "3,500", "2.50x", "7.0", "20 ± 14", "4,096", "900"],
        ["crash (1 failed: exit 1)", "500", "500", "0.25x", "0.0", "1.0", "4,096", "-"],
    ]
    found[1].summary["interrupted"] = True
    assert table_of(found)[1][:4] == ["fast (1 failed: interrupted)", "4,000", "4,000", "2.00x"]

    found = [canned("a", 1, 2000.0, 0, None), canned("b", 1, 9000.0, 7.25, None), canned("c", 1, None)]
    assert table_of(found) == [  # one seed, no episodes
        ["a", "2,000", "1.00x", "0.0", "4,096"],
        ["b", "9,000", "4.50x", "7.2", "4,096"],
        ["c (1 failed: exit 1)", "-", "-", "-", "-"],
    ]


def test_a_peer_counts_with_its_fastest_setting():
    speeds = {
        "sb3:SAC": [1500.0, 1000.0, 1800.0],
        "sb3:SAC --num-threads 1": [2000.0, 1000.0, 2000.0],
        "sbx:SAC": [None, 4000.0, None],
        "ours": [8000.0, 8000.0, 6000.0],
    }
    rows = table_of([canned(label, i, sps) for label, rounds in speeds.items() for i, sps in enumerate(rounds)])
    # Ratios of the rounds: 4, 8, 3 and 2.
    assert [" ".join(row[3:5]) for row in rows] == ["0.90x 0.25x", "1.00x 0.25x", "4.00x 1.00x", "4.00x 2.00x"]


def test_returns_are_compared_where_all_have_come():
    """In the table and in both panels."""
    found = [canned("slow", 1, 1000.0), canned("fast", 1, 2000.0), canned("fast", 2, 2000.0), canned("crash", 1, None)]
    for trial, end in zip(found, [300, 900, 800], strict=False):
        trial.summary["global_step"] = end + 50  # no log point there
        trial.metrics = [ended(step, step // 10, float(step)) for step in range(100, end + 1, 100)]
    found[-1].metrics = [ended(100, 10, 1.0)]
    rows = compare.summarize(found, ["slow", "fast", "crash"])
    # 30 episodes by then, a third each of 100, 200 and 300.
    assert [row["episodic_return"] for row in rows] == [[pytest.approx(200.0)], [pytest.approx(200.0)] * 2, []]
    table = compare.render_table(rows)
    assert "| return at step 350 |" in table and [row[6] for row in cells(table)] == ["350", "900", "-"]
    record = {"sweep": None, "rows": rows, "runs": [asdict(t) for t in found], "machine": machine_facts(CPU)}
    _, steps, clock = compare.draw({**record, "command": ""}).axes
    assert [line.get_xdata()[-1] for line in steps.lines] == [300] * 3
    assert [line.get_xdata()[-1] for line in clock.lines] == [3.0] * 3


def test_sweep(tmp_path, monkeypatch, capsys):
    """Order, table, JSON and picture."""

    def run_trial(contender: Contender, seed: int, runs_dir) -> Trial:
        asked.append((contender.label, seed))
        command = shlex.join(contender.command)
        assert "--gamma 0.9" in command and "--max-seconds=30.0" in command
        base = 1000 if TD3 in command else 500 if "--tau=0.1" in command else 300
        failed = TD3 in command and "--num-envs=8" in command
        return canned(contender.label, seed, None if failed else base * (1 + ("--num-envs=8" in command)) * (1 + seed))

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(trials, "run_trial", run_trial)
    lines = [f"{TD3}:eager", "sac_continuous_action", "sac_continuous_action --tau=0.1"]
    flags = ["--contenders", *lines, "--sweep", "num_envs", 8, 1, "--seeds", 1, 2, 4, "--out", tmp_path]
    assert run_tool_in_process(monkeypatch, compare, *flags, "--", "--gamma", 0.9) == 1

    lines[0] = TD3
    one_round = [f"{line} --num-envs={value}" for value in (1, 8) for line in lines]
    assert [label for label, _ in asked] == one_round + one_round[::-1] + one_round
    assert [seed for _, seed in asked] == [1] * 6 + [2] * 6 + [4] * 6

    text = (tmp_path / "table.md").read_text()
    assert text.strip() in capsys.readouterr().out and "\n--gamma 0.9\n" in text
    assert "| sps at --num-envs" in text and cells(text) == [
        # Factors 2, 3 and 5: the median is 3.
        [f"{TD3} (3 failed: exit 1)", "3,000", "-"],
        [lines[1], "900", "1,800"],
        [lines[2], "1,500", "3,000"],
    ]
    record = json.loads((tmp_path / "compare.json").read_text())
    assert record["sweep"] == "num-envs" and record["machine"]["cpu_cores"] > 0 and len(record["runs"]) == 18
    assert (record["rows"][5]["value"], record["rows"][5]["sps"]) == ("8", [2000, 3000, 5000])
    assert record["rows"][5]["ratios"] == {"speed-up": []}  # within a value
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    (axes,) = compare.draw(record).axes
    assert [list(line.get_ydata()) for line in axes.lines[::2]] == [[3000], [900, 1800], [1500, 3000]]
    assert list(axes.lines[5].get_xdata()) == [1] * 3 + [8] * 3


# ------------------------------------------------------------------------------------------------------------- PEERS

SMALL = {"gamma": 0.9, "seed": 3, "env_id": "InvertedPendulum-v5", "device": "cpu"}
REPLAY = {**SMALL, "buffer_size": 600, "batch_size": 16, "learning_starts": 70, "tau": 0.01}
EVERY = {"train_freq.frequency": 1, "gradient_steps": 1}
ACTOR_CRITIC = {"actor": {256, 1}, "critic": {256, 1}}, {"policy.actor_state": {256, 1}, "policy.qf_state": {256, 1}}
FAIR = {
    "PPO": (
        {**SMALL, "gae_lambda": 0.8, "ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7, "learning_rate": 2e-4}
        | {"num_envs": 2, "num_steps": 64, "num_minibatches": 8, "update_epochs": 3, "clip_coef": 0.1},
        {"n_envs": 2, "n_steps": 64, "batch_size": 16, "n_epochs": 3, "lr_schedule": 2e-4, "clip_range": 0.1},
        ({"policy": {64, 1}}, {"policy.actor_state": {64, 1}, "policy.vf_state": {64, 1}}),
    ),
    "SAC": (
        {**REPLAY, "num_envs": 2, "policy_lr": 2e-4, "q_lr": 3e-3},
        {"train_freq.frequency": 1, "gradient_steps": 2, "target_entropy": -1.0, "lr_schedule": 2e-4},
        (
            {"log_ent_coef": 0.0, "target_update_interval": 1, **ACTOR_CRITIC[0]},
            {"qf_learning_rate": 3e-3, "policy_delay": 1, "ent_coef.ent_coef_init": 1.0, **ACTOR_CRITIC[1]},
        ),
    ),
    "SAC ": (  # not tuned
        {**REPLAY, "autotune": False, "alpha": 0.3},
        EVERY,
        ({"ent_coef_tensor": 0.3}, {"ent_coef.ent_coef_init": 0.3}),
    ),
    "TD3": (
        {**REPLAY, "policy_noise": 0.3, "noise_clip": 0.4, "exploration_noise": 0.15, "policy_frequency": 3}
        | {"learning_rate": 2e-4},
        {**EVERY, "policy_delay": 3, "target_policy_noise": 0.3, "target_noise_clip": 0.4, "action_noise._sigma": 0.15},
        ACTOR_CRITIC,
    ),
    "DQN": (
        {**REPLAY, "env_id": "CartPole-v1", "start_e": 0.9, "end_e": 0.1, "exploration_fraction": 0.3}
        | {"learning_rate": 2e-4, "target_network_frequency": 40, "tau": 1.0},
        {"train_freq.frequency": 10, "gradient_steps": 1, "target_update_interval": 40, "lr_schedule": 2e-4}
        | {"exploration_initial_eps": 0.9, "exploration_final_eps": 0.1},
        # SBX reads the first number of units only.
        ({"q_net": {120, 84, 2}, "max_grad_norm": float("inf")}, {"policy.qf_state": {120, 2}}),
    ),
}


def widths(network) -> set[int]:
    """Output sizes of the dense layers of an SB3 module, or of an SBX state."""
    if hasattr(network, "modules"):
        return {layer.out_features for layer in network.modules() if hasattr(layer, "out_features")}
    import jax

    return {leaf.shape[-1] for leaf in jax.tree.leaves(network.params) if leaf.ndim > 1}


@pytest.mark.parametrize(("library", "which"), [("sb3", 0), ("sbx", 1)])
@pytest.mark.parametrize("algorithm", FAIR)
def test_peers_have_our_hyperparameters(algorithm, library, which):
    arguments, both, own = FAIR[algorithm]
    peer = peers.PEERS[f"{library}:{algorithm.strip()}"]
    pytest.importorskip(peer.module)
    args = importlib.import_module(f"leanrl.{peer.script}").Args(**arguments)
    model = peer.make_model(args, peer.module, peer.make_envs(args))
    same = {key: value for key, value in arguments.items() if key not in ("env_id", "device") and hasattr(model, key)}
    assert len(same) > 5
    for key, value in (same | both | own[which]).items():
        found = attrgetter(key)(model)
        if isinstance(value, set):
            assert widths(found) == value
        else:
            number = torch.as_tensor(found(1.0) if callable(found) else found).item()
            assert number == pytest.approx(value), key
    assert (model._vec_normalize_env is None) == (algorithm != "PPO")


PENDULUM, LATE = "InvertedPendulum-v5", ["--learning-starts=1000", "--batch-size=16", "--log-every=100"]
ATARI = ["--num-envs=2", "--num-steps=128", "--update-epochs=1"]


@pytest.mark.parametrize(
    ("name", "flags", "updates", "points", "clock_start"),
    [
        # 600 is cut to 4 rollouts; the first is the warm-up.
        ("sb3:PPO", [*TINY, "--total-timesteps=600"], 16, [256, 384, 512], 128),
        # The time is up at once, and the run ends after a whole round.
        ("sb3:PPO", [*TINY, "--total-timesteps=600", "--max-seconds=1e-6"], 8, [256], 128),
        # An update after every step; the clock starts 50 of them after learning has started.
        ("sb3:SAC", [*LATE, f"--env-id={PENDULUM}", "--total-timesteps=1200"], 200, [1100, 1200], 1050),
        ("sbx:TD3", [*LATE, f"--env-id={PENDULUM}", "--total-timesteps=1200"], 200, [1100, 1200], 1050),
        # 2 updates after every 5 steps of 4 environments.
        ("sb3:DQN", [*LATE, "--num-envs=4", "--total-timesteps=2110"], 110, [2100], 2000),
        ("sb3:PPO-Atari", [*ATARI, "--total-timesteps=768"], 12, [512, 768], 256),
        ("rl_games:PPO", [*TINY, "--total-timesteps=600"], 16, [256, 384, 512], 128),
    ],
)
def test_run_of_a_peer(monkeypatch, tmp_path, name, flags, updates, points, clock_start):
    pytest.importorskip(peers.PEERS[name].module)
    monkeypatch.setattr(speedrun, "FIRST_EPISODES", 1)
    # The number of threads is the library's own choice, where none is given; our DQN's is 1.
    entry, threads = (name, None) if name == "sb3:DQN" else (f"{name} --num-threads 1", 1)
    # Every log point is a snapshot.
    (contender,) = contenders_of([entry], "contenders", CPU, ["--device=cpu", "--snapshot-seconds=1e-6", *flags])
    trials.require_valid(contender)
    (trial,) = run_trials([contender], [3], tmp_path)
    assert trial.failure is None and trial.label == entry
    assert (trial.summary["global_step"], trial.summary["optimizer_steps"]) == (points[-1], updates)
    assert [point["global_step"] for point in trial.metrics] == points
    # Of Atari whole games, of 120 steps at least.
    assert 2 <= trial.summary["episodes"] <= 8 if "Atari" in name else trial.summary["episodes"] > 5
    assert trial.summary["script"] == name and trial.summary["warmup_seconds"] > 0
    assert trial.args["args"]["num_threads"] == threads and threads in (None, trial.args["torch_threads"])
    assert trial.peak_memory_mb > 50
    # The clock runs from `clock_start` to the end: longer than between log points, shorter than all but the warm-up.
    seconds = (points[-1] - clock_start) / trial.summary["sps"]
    assert seconds > trial.metrics[-1]["charts/wall_seconds"] - trial.metrics[0]["charts/wall_seconds"]
    assert seconds < trial.summary["wall_seconds"] - trial.summary["warmup_seconds"]
    snapshots = speedrun.evaluate(contender, Path(trial.run_dir), start=0.0, limit=math.inf, target=math.inf)
    assert [snapshot["global_step"] for snapshot in snapshots] == points
    assert all(len(snapshot["returns"]) == 1 and math.isfinite(*snapshot["returns"]) for snapshot in snapshots)


def test_a_snapshot_of_rl_games_plays_as_it_does(monkeypatch, tmp_path):
    a2c = pytest.importorskip("rl_games.algos_torch.a2c_continuous")
    agents, start = [], a2c.A2CAgent.__init__
    monkeypatch.setattr(a2c.A2CAgent, "__init__", lambda agent, **how: agents.append(agent) or start(agent, **how))
    peers.main("rl_games:PPO", [*TINY, "--total-timesteps=600", "--snapshot-seconds=1e-6", f"--runs-dir={tmp_path}"])
    *_, last = sorted(tmp_path.glob("*/snapshots/*"))  # after the last update
    (agent,), obs = agents, torch.randn(5, 4)
    means = agent.model.eval()({"is_train": False, "obs": obs})["mus"].detach()
    actions = peers.load_policy(torch.load(last)["model"], None)(obs.numpy())
    torch.testing.assert_close(torch.from_numpy(actions), torch.as_tensor(agent.preprocess_actions(means)))


def test_environments_that_a_peer_refuses(tmp_path, monkeypatch):
    pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    refused = [("TD3", "CartPole-v1", "needs Box"), ("DQN", PENDULUM, "needs Disc"), ("PPO-Atari", "Pung-v5", "Pong")]
    for algorithm, env_id, said in refused:
        with pytest.raises(UsageError, match=said):
            peers.main(f"sb3:{algorithm}", [f"--env-id={env_id}"])
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- END TO END


def test_compare_end_to_end(tmp_path, monkeypatch, capfd):
    entries = ["ppo_continuous_action", f"{FAST}:eager"]
    flags = ["--contenders", *entries, "--seeds", 2, "--total-timesteps", 512, "--out", tmp_path]
    assert run_tool_in_process(monkeypatch, compare, *flags, "--", *TINY) == 0

    out = capfd.readouterr().out
    assert out.strip().splitlines()[-1] == f"in {tmp_path}: compare.json, table.md, compare.png"

    record = json.loads((tmp_path / "compare.json").read_text())
    runs, (slow_row, fast_row) = record["runs"], record["rows"]
    assert [(run["label"], run["args"]["args"]["seed"]) for run in runs] == [(entries[0], 2), (FAST, 2)]
    for run in runs:
        assert (run["summary"]["global_step"], run["summary"]["optimizer_steps"]) == (512, 16)
        assert len(run["metrics"]) == 4 and run["args"]["args"]["max_seconds"] == 30.0
    sps = [run["summary"]["sps"] for run in runs]
    assert fast_row["ratios"]["speed-up"] == pytest.approx([sps[1] / sps[0]])
    assert (tmp_path / "table.md").read_text().startswith("InvertedPendulum-v5, seed 2, ")
    bars = compare.draw(record).axes[0].patches
    assert [bar.get_width() for bar in bars] == [np.median(row["sps"]) for row in (slow_row, fast_row)]
