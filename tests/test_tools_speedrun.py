"""leanrl.tools.speedrun: when a target counts as reached, what the table says of it, and one real run."""

import json

import pytest
import torch
from scripts import cells, run_tool_in_process

from leanrl.tools import common, speedrun, trials
from leanrl.tools.speedrun import TASKS, Task, chosen, draw, reached, render_table, task_for


def snapshots(*means):
    """One every 10 seconds, of two episodes each."""
    return [{"seconds": 10.0 * i, "returns": [mean - 1, mean + 1]} for i, mean in enumerate(means, start=1)]


def finished(label, seed, seconds, cache="warm", ended=60.0, failure=None):
    return {"label": label, "cache": cache, "seed": seed, "reached": seconds, "ended": ended, "failure": failure}


REACHED = {(): None, (100,): None, (0, 100): None, (100, 0, 100, 0): None}
REACHED |= {(100, 0, 100, 100): 30.0, (99.9, 100, 101, 0, 0): 20.0}


@pytest.mark.parametrize(("means", "seconds"), REACHED.items())
def test_two_snapshots_in_a_row_reach_a_target(means, seconds):
    assert reached(snapshots(*means), 100) == seconds


def test_table_and_picture():
    runs = [finished("holder", seed, seconds) for seed, seconds in ((1, 60.0), (2, 120.0), (3, 90.0))]
    runs += [finished("fast", seed, seconds) for seed, seconds in ((1, 30.0), (2, 40.0), (3, 90.0))]
    runs += [finished("stuck", 1, 6.0), finished("stuck", 2, None, ended=360.0), finished("stuck", 3, None)]
    runs += [finished("broken", 2, None, failure="exit 1")]
    assert cells(render_table({"runs": runs})) == [
        ["holder", "warm", "1:00, 2:00, 1:30", "1:30", "1.00x"],
        ["fast", "warm", "0:30, 0:40, 1:30", "0:40", "2.00x"],
        ["stuck", "warm", "0:06, > 6:00, > 1:00", "> 1:00", "< 1.50x"],
        ["broken", "warm", "-, failed (exit 1), -", "failed (exit 1)", "-"],
    ]
    runs = [{**run, "snapshots": snapshots(*range(run["seed"]))} for run in runs]
    machine = {"device_name": "a machine", "cpu_cores": 2, "versions": {"torch": "2"}}
    record = {"runs": runs, "holder": "a:compile", "env_id": "CartPole-v1", "target": 475, "machine": machine}
    axes, _, _ = draw(record, *({**record, "target": target} for target in (475, 400, 300))).axes  # none is empty
    *curves, target = (line for line in axes.lines if len(line.get_xdata()))
    assert len(curves) == 2 * len(runs) and list(target.get_ydata()) == [475, 475]
    assert list(curves[2].get_xdata()) == [10, 20, 30] and list(curves[2].get_ydata()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["cartpole", "--seeds", "1", "1"], "none repeated"),
        (["cartpole", "--contenders", "pqn --env-id Acrobot-v1"], "--env-id: this tool sets it"),
        (["cartpole", "--expected-seconds", "0"], "must be above 0"),
        (["cartpole", "--contenders", "pqn --no-such-flag 1"], "does not take"),
    ],
)
def test_bad_input_is_one_line(refusal, argv, said):
    assert said in refusal(speedrun, *argv)


@pytest.mark.parametrize("bf16_units", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_every_holder_can_run(monkeypatch, task, bf16_units):
    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda _: True)
    monkeypatch.setattr(speedrun, "has_bf16_units", lambda: bf16_units)
    (holder,) = chosen(task_for(task, torch.device("cpu")), speedrun.Args(task, script_args=("--device=cpu",)))
    assert f"--env-id={TASKS[task].env_id}" in holder.command
    assert ("bf16" in holder.command) == (bf16_units and "bf16" in TASKS[task].holder)


def test_a_real_run(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "cartpole", Task("CartPole-v1", 5, "pqn_torchcompile:eager --total-timesteps 4096", 0.1))
    # Every log point is a snapshot.
    monkeypatch.setattr(speedrun, "SNAPSHOTS", 10**6)
    facts = common.machine_facts(torch.device("cpu")) | {"git_commit": "0123abc"}
    monkeypatch.setattr(common, "machine_facts", lambda device: facts | {"versions": {**facts["versions"]}})
    argv = ["cartpole", "--seeds", 1, "--cache", "cold", "--expected-seconds", 100, "--out", tmp_path]
    assert run_tool_in_process(monkeypatch, speedrun, *argv) == 0
    (run,) = json.loads((tmp_path / "speedrun.json").read_text())["runs"]
    first, second = run["snapshots"]  # any policy balances for so long
    assert first["global_step"] == 512 and second["global_step"] == 1024 and len(second["returns"]) == 10
    assert 0 < run["reached"] == first["seconds"] < second["seconds"] < run["ended"]
    files = sorted(tmp_path.glob("runs/cold/*/snapshots/step_*.pt"))
    assert len(files) == 8 and set(torch.load(files[-1])["model"]) == {"q_network"} and [*tmp_path.glob("*.png")]
    assert {"pqn_torchcompile", "record,"} <= {*(tmp_path / "table.md").read_text().split()}
    # The same call goes on, and there is nothing left to run; another one is refused.
    assert [run_tool_in_process(monkeypatch, speedrun, *argv, *more) for more in ([], ["--", "--gamma=0.9"])] == [0, 2]
    assert json.loads((tmp_path / "speedrun.json").read_text())["runs"] == [run]
    # One that is killed before its time is up did not run out of time.
    monkeypatch.setattr(trials, "run_trial", lambda *args, **rest: trials.Trial("", 1, [], "", exit_code=-9))
    assert speedrun.timed(TASKS["cartpole"], {}, trials.Contender("", ()), 1, tmp_path)["failure"] == "signal 9"
    # Nor is a cache full that was not filled.
    assert run_tool_in_process(monkeypatch, speedrun, "cartpole", "--cache", "warm", "--out", tmp_path / "warm") == 2
