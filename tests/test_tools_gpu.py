"""leanrl.tools.gpu: what it checks, measures and writes, on runs of this machine; and what graphs must do, on a GPU."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scripts import run, tiny
from test_tools_compare import cells, run_tool_in_process

from leanrl.support.tracking import read_metrics
from leanrl.tools import gpu, gpu_checks, trials
from leanrl.tools.gpu import Plan, Results, against_eager, check, measure
from leanrl.tools.trials import Deadline, Trial

CPU = torch.device("cpu")
SIBLING, RUNG = "td3_continuous_action_torchcompile", "td3_continuous_action_onegraph"
TINY = [flag for flag in tiny(SIBLING) if not flag.startswith("--updates-per-step")]
PLAN = Plan(
    "td3_continuous_action",
    (f"{SIBLING}:eager", f"{RUNG}:eager"),
    (*TINY, "--checkpoint-every=48", "--total-timesteps=80"),
    steps=(96, 96),
    flags=tuple(TINY),
)
MEASURED = replace(PLAN, modes=(f"{RUNG}:eager",))


def test_without_cuda_it_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags in ([], ["--learn"]):
        assert run_tool_in_process(monkeypatch, gpu, *flags, "--runs-dir", tmp_path / "runs") == 2
        error = capsys.readouterr().err
        assert error.startswith("gpu: this tool needs a CUDA device") and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--algorithms", "sac", "sac"], "--algorithms sac sac: needs at least one, and none twice"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--learn", "--seeds", "1", "1"], "--seeds 1 1: needs at least one, and none twice"),
        (["--max-seconds", "0"], "--max-seconds 0.0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(flags, reason, tmp_path, monkeypatch, capsys):
    assert run_tool_in_process(monkeypatch, gpu, *flags, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == f"gpu: {reason}\n"
    assert not (tmp_path / "out").exists()


def test_every_plan_names_scripts_and_modes_that_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = torch.device("cuda", 0)
    for plan in gpu.PLANS.values():
        labels = [contender.label for contender in gpu.measured_contenders(plan, device)]
        assert labels[0] == plan.reference and len(labels) == len(set(labels)) >= 5
        assert f"{plan.reference}_torchcompile --compile --cudagraphs" in labels
        assert set(plan.part_modes) <= set(plan.modes)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A check and a measurement of one algorithm, in processes of their own."""
    folder = tmp_path_factory.mktemp("gpu")
    results = Results(folder, CPU)
    results.checks = check([PLAN], CPU, folder / "runs", Deadline.within(120))
    measure([MEASURED], 1, CPU, folder / "runs", Deadline.within(120), results)
    return results, folder


def test_checks_tell_equal_training_and_what_failed(results):
    results, _ = results
    graphs, rung = results.checks[:-1], results.checks[-1]
    assert rung == {"check": f"{RUNG} trains as eager", "passed": True, "detail": "bit for bit"}
    if not torch.cuda.is_available():  # the checks of graphs cannot pass; their end says how many there were
        assert len(graphs) == len(gpu_checks.CHECKS) + 1 and not any(row["passed"] for row in graphs)
        assert graphs[-1]["detail"] == f"exit 0, {len(gpu_checks.CHECKS)} checks told"
        assert "Traceback" in graphs[-1]["output"]
        assert not results.passed


def test_speeds_are_written_after_every_run(results):
    results, folder = results
    record = json.loads((folder / "gpu.json").read_text())
    labels = ["td3_continuous_action", RUNG]
    assert [run["label"] for run in record["runs"]] == [row["mode"] for row in record["rows"]] == labels
    assert all(run["summary"]["global_step"] == 96 for run in record["runs"])
    assert [row[0] for row in cells((folder / "table.md").read_text())] == labels
    speedups = [row["speedup"][0] for row in record["rows"]]
    assert speedups[0] == 1.0 and all(ratio > 0 for ratio in speedups)
    assert results.step_of(RUNG)["step_us"] == pytest.approx(1e6 / record["rows"][1]["sps"][0])
    results.load = [[(0.2, 50.0, 1e3), (0.4, 60.0, 1e3)]] * 2
    results.parts = [{"who": RUNG, "profiled_step_us": 100.0, "parts_us": dict.fromkeys(gpu.parts.KINDS, 9.0)}]
    results.parts[0]["parts_us"] |= {gpu.parts.OTHER_KERNELS: 5.0, gpu.parts.REST: 50.0}
    results.draw()
    assert all((folder / f"{name}.png").stat().st_size > 10_000 for name in ("gpu", "load", "parts"))
    assert gpu.parts.OTHER_KERNELS in results.text() and "checks: " in results.text()


def test_training_that_differs_fails(tmp_path):
    """Another seed's parameters are not rounding."""
    runs = []
    for seed in (1, 2):
        assert run(SIBLING, *PLAN.check_flags, f"--runs-dir={tmp_path}", f"--run-name={seed}", f"--seed={seed}") == 0
        runs.append(Trial(SIBLING, seed, [], str(tmp_path / str(seed)), exit_code=0))
        runs[-1].read()
    ours, theirs = runs
    row = against_eager(ours, theirs)
    assert not row["passed"] and row["detail"].startswith("off by ")
    theirs.exit_code = 1
    assert against_eager(ours, theirs)["detail"] == f"{SIBLING}: exit 1"


def test_what_would_end_too_late_is_left_out(tmp_path, monkeypatch, capsys):
    now, ran = 0.0, []

    def run_trial(contender, seed, runs_dir, deadline):
        nonlocal now
        now += 100.0 if contender.label == SIBLING else 10.0
        ran.append((contender.label, seed))
        return Trial(contender.label, seed, [], "", 0, summary={"sps": 1.0, "interrupted": False} | dict.fromkeys(KEYS))

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(gpu, "run_trial", run_trial)
    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(trials, "time", clock)
    measure([PLAN], 2, CPU, tmp_path, Deadline.within(200.0), Results(tmp_path, CPU))
    reference = PLAN.reference
    assert ran == [(reference, 1), (SIBLING, 1), (RUNG, 1), (RUNG, 2), (reference, 2)]
    assert f"no time left for round 2 of {SIBLING}" in capsys.readouterr().out


KEYS = ("warmup_seconds", "episodic_return", "global_step")


class AtTheFirstLogPoint:
    """A deadline that has passed once a run has logged."""

    def __init__(self, run_dir) -> None:
        self.run_dir = run_dir

    @property
    def seconds_left(self) -> float:
        return -1.0 if read_metrics(self.run_dir) else 1.0


def test_learning_starts_once_and_then_resumes(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        gpu, "run_child", lambda command, deadline, output: (commands.append(command[1:]), (0, None))[1]
    )
    for _ in range(2):
        assert gpu.learn_on(RUNG, 3, gpu.Args(learn_timesteps=5000), tmp_path, Deadline.within(1)) == 0
        (tmp_path / f"{RUNG}__3").mkdir(exist_ok=True)
        (tmp_path / f"{RUNG}__3" / "args.json").touch()
    (script, *first), (_, *second) = commands
    assert script.endswith(f"{RUNG}.py") and {"--seed=3", "--total-timesteps=5000", "--cudagraphs"} <= set(first)
    assert second == ["--resume", str(tmp_path / f"{RUNG}__3"), "--total-timesteps=5000"]


@pytest.mark.long
def test_learning_runs_stop_in_time_and_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LEARNING", (RUNG,))
    monkeypatch.setattr(gpu, "LEARNING_FLAGS", tuple(TINY))
    runs_dir, out = tmp_path / "runs", tmp_path
    args = gpu.Args(seeds=(1,), learn_timesteps=10**6)
    with pytest.MonkeyPatch.context() as patch:
        deadline = AtTheFirstLogPoint(runs_dir / f"{RUNG}__1")
        patch.setattr(gpu, "Deadline", SimpleNamespace(within=lambda seconds: deadline))
        assert gpu.learn(args, CPU, runs_dir, out) == 0
    (left,) = json.loads((out / "learn.json").read_text())["runs"]
    step = left["summary"]["global_step"]
    assert left["summary"]["interrupted"] and step > 0 and "interrupted" in (out / "learn.md").read_text()
    args.learn_timesteps = step + 64
    assert gpu.learn(args, CPU, runs_dir, out) == 0
    (left,) = json.loads((out / "learn.json").read_text())["runs"]
    assert left["summary"]["global_step"] == step + 64 and not left["summary"]["interrupted"]
    assert (out / "learn.png").stat().st_size > 10_000 and "done" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- ON A GPU


@pytest.mark.cuda
@pytest.mark.parametrize("fn", gpu_checks.CHECKS, ids=lambda fn: fn.__name__)
def test_graphs_do_what_they_must(fn):
    with torch.no_grad():
        fn(torch.device("cuda", 0))
