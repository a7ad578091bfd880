"""leanrl.tools.gpu: what it checks, measures and writes, on runs of this machine; and what graphs must do, on a GPU."""

import json
import math
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from scripts import ONE_GRAPH_SCRIPTS, cells, run, run_tool_in_process, tiny

from leanrl.support.tracking import read_metrics
from leanrl.tools import common, gpu, gpu_checks, gpu_equality, gpu_learn, gpu_plans, profile, trials
from leanrl.tools.gpu import Results, measure
from leanrl.tools.gpu_equality import against_eager, check
from leanrl.tools.gpu_learn import Enough, Task
from leanrl.tools.gpu_plans import PLANS, Plan, Pool
from leanrl.tools.trials import Deadline, Trial

CPU = torch.device("cpu")
REFERENCE, FAST = "td3_continuous_action", "td3_continuous_action_torchcompile"
TINY = [flag for flag in tiny(FAST) if not flag.startswith("--updates-per-step")]
PLAN = Plan(
    REFERENCE,
    (f"{FAST}:eager", f"{REFERENCE}:eager"),
    (*TINY, "--checkpoint-every=48", "--total-timesteps=80"),
    steps=(96, 96),
    flags=tuple(TINY),
)
POOL = Pool(2, "cleanrl")
MEASURED = replace(PLAN, modes=(f"{FAST}:eager",), pool=POOL)


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
        (["--learn", "--learning", "sac", "sac"], "--learning sac sac: needs at least one, and none twice"),
        (["--at-once", "0"], "--at-once 0: must be at least 1"),
        (["--max-seconds", "0"], "--max-seconds 0.0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(flags, reason, tmp_path, monkeypatch, capsys):
    assert run_tool_in_process(monkeypatch, gpu, *flags, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == f"gpu: {reason}\n"
    assert not (tmp_path / "out").exists()


def test_every_plan_names_scripts_and_modes_that_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = torch.device("cuda", 0)
    for name, plan in PLANS.items():
        contenders = gpu.measured_contenders(plan, device)
        labels = [contender.label for contender in contenders]
        assert labels[0] == (plan.reference or name) and len(labels) == len(set(labels)) >= 5
        fast = f"{plan.reference}_torchcompile" if plan.reference else name
        assert f"{fast} --compile --cudagraphs" in labels
        assert {*plan.part_modes, *plan.bf16_modes} <= set(plan.modes)
        first = [contender.label for contender in contenders if gpu.counts_most(plan, contender)]
        assert first[0] == labels[0] and all("--compile --" in label for label in first[1:])
        one_graph = [f"{fast} --one-graph", f"{fast} --compile --one-graph"]
        has_flag = fast in ONE_GRAPH_SCRIPTS
        measured = [label for label in labels if "--one-graph" in label and "bf16" not in label]
        assert measured == (one_graph if has_flag else [])
    assert labels_with_bf16() == ["ppo_atari_envpool_torchcompile", "cleanba_ppo", "cleanba_impala"]
    for task in gpu_learn.TASKS.values():
        assert "compile" in trials.parse_entry(task.entry, "learning")[1]


def labels_with_bf16() -> list[str]:
    """Scripts that are measured in bfloat16 too."""
    device = torch.device("cuda", 0)
    contenders = [c for plan in PLANS.values() for c in gpu.measured_contenders(plan, device)]
    return [c.label.split()[0] for c in contenders if c.label.endswith("--amp bf16")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A check of one algorithm, in processes of its own, and a measurement in this one."""
    folder = tmp_path_factory.mktemp("gpu")
    results = Results(folder, CPU, [MEASURED])
    check([PLAN], CPU, folder / "runs", Deadline.within(120), known=set(), report=results.report)

    def run_trial(contender, seed, runs_dir, deadline):
        _, script, *flags = contender.command
        name = Path(script).stem
        trial = Trial(contender.label, seed, [], str(runs_dir / name), run(name, *flags, *at(runs_dir, name)))
        trial.read()
        return trial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "run_trial", run_trial)
        patch.setattr(gpu_plans, "in_process", lambda fn, *args, deadline: fn(*args))
        patch.setattr(profile, "ALONE_SECONDS", 0.1)
        measure([MEASURED], 1, CPU, folder / "runs", Deadline.within(120), results)
    return results, folder


def at(runs_dir: Path, name: str) -> list[str]:
    """Flags for a run directory."""
    return [f"--runs-dir={runs_dir}", f"--run-name={name}"]


def test_checks_tell_equal_training_and_what_failed(results):
    results, _ = results
    graphs, mode = results.checks[:-1], results.checks[-1]
    assert mode["check"] == f"{REFERENCE} trains as eager" and mode["passed"]
    if not torch.cuda.is_available():  # the checks of graphs cannot pass; their end says how many there were
        assert len(graphs) == 2 and not any(row["passed"] for row in graphs)
        assert graphs[-1]["detail"] == f"exit 0, 1 of {len(gpu_checks.CHECKS)} checks reported"
        assert "Traceback" in graphs[-1]["output"]
        assert not results.passed


@pytest.fixture
def ran(monkeypatch) -> list:
    """What ``check`` runs instead of training that fails at once: labels."""
    ran = []

    def run_trial(contender, seed, runs_dir, deadline, output, variables):
        assert variables == {"NVIDIA_TF32_OVERRIDE": "0"}
        ran.append(contender.label)
        return Trial(contender.label, seed, [], "", exit_code=1)

    monkeypatch.setattr(gpu_equality, "run_trial", run_trial)
    return ran


def checked(plans, device, runs_dir, seconds: float, known) -> list[dict]:
    """The rows that ``check`` reports."""
    rows = []
    check(plans, device, runs_dir, Deadline.within(seconds), known, rows.append)
    return rows


def test_checks_that_have_passed_are_left_out(ran, tmp_path):
    names = gpu_equality.graph_checks()
    assert checked([PLAN], CPU, tmp_path, 60, names | {f"{REFERENCE} trains as eager"}) == ran == []
    (row,) = checked([PLAN], CPU, tmp_path, 60, names)
    assert sorted(ran) == [REFERENCE, FAST] and row["check"] == f"{REFERENCE} trains as eager" and not row["passed"]


def test_a_check_that_the_time_has_cut_off_is_left_out(tmp_path, capsys):
    assert checked([PLAN], CPU, tmp_path, 0.0, set()) == []
    lines = capsys.readouterr().out.splitlines()
    assert {f"no time left for the check of {REFERENCE}", "no time left for all of gpu_checks"} <= set(lines)


def test_what_others_are_compared_with_is_checked_first_then_the_fastest(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "lack", lambda levers, device: None)
    monkeypatch.setattr(gpu_equality, "available_cores", lambda: 1)
    monkeypatch.setattr(gpu_equality, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
    plans = [PLANS["td3"], PLANS["cleanba_ppo"]]
    rows = checked(plans, torch.device("cuda", 0), tmp_path, 60, gpu_equality.graph_checks())
    fastest = [f"{script} --compile --cudagraphs" for script in (FAST, "cleanba_ppo")]
    fastest.insert(1, f"{FAST} --compile --one-graph")
    assert ran[:5] == [FAST, "cleanba_ppo", *fastest]
    assert len(rows) == len(ran) - 2 == sum(len(plan.modes) + len(plan.bf16_modes) - 1 for plan in plans)


def test_a_child_has_the_variables_that_it_is_to_have(tmp_path):
    code = "import os, sys; sys.exit(int(os.environ['NVIDIA_TF32_OVERRIDE']) + 7)"
    contender = trials.Contender("a run", (sys.executable, "-c", code))
    assert trials.run_trial(contender, 1, tmp_path, variables=gpu_equality.NO_TF32).exit_code == 7


@pytest.mark.parametrize("works", [True, False])
def test_a_device_that_failed_gets_no_more_checks(works, tmp_path, monkeypatch, capfd):
    def fails(device):
        """fails"""
        raise torch.AcceleratorError("an illegal memory access was encountered")

    ran = []
    assert gpu_checks.works(torch.device("cuda", 0)) == torch.cuda.is_available()
    monkeypatch.setattr(gpu_checks, "works", lambda device: works)
    monkeypatch.setattr(gpu_checks, "CHECKS", [lambda device: ran.append(1), fails, lambda device: ran.append(3)])
    gpu_checks.main(tmp_path / "checks.json")
    rows = json.loads((tmp_path / "checks.json").read_text())
    assert ran == ([1, 3] if works else [1])
    assert [row["passed"] for row in rows] == ([True, False, True] if works else [True, False])
    assert "AcceleratorError: an illegal memory access" in rows[1]["detail"]
    assert ("are not run" in capfd.readouterr().out) == (not works)


def test_checks_of_graphs_end_with_the_run_that_took_their_signal(tmp_path, monkeypatch):
    """A run of the actor-learner script stops in order at a signal; it does not then look like another result."""

    def main(args) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "summary.json").write_text(json.dumps({"interrupted": True}))

    monkeypatch.setattr(gpu_checks.cleanba_ppo, "main", main)
    with pytest.raises(KeyboardInterrupt):
        gpu_checks.actor_learner_run(CPU, False, gpu_checks.Collectives, tmp_path / "run")


def sleeps() -> dict:
    time.sleep(60)
    return {}


def test_parts_that_take_too_long_are_ended():
    start = time.monotonic()
    with pytest.raises(SystemExit, match="the time was up"):
        profile.in_process(sleeps, deadline=Deadline.within(0.5))
    assert time.monotonic() - start < 30
    assert not multiprocessing.active_children()


def test_speeds_are_written_after_every_run(results):
    results, folder = results
    record = json.loads((folder / "gpu.json").read_text())
    labels = [REFERENCE, FAST]
    assert [run["label"] for run in record["runs"]] == [row["label"] for row in record["rows"]] == labels
    assert all(run["summary"]["global_step"] == 96 for run in record["runs"])
    table, _, rest = (folder / "table.md").read_text().partition("sps: ")
    assert [row[0] for row in cells(table)] == labels
    speedups = [row["ratios"]["speed-up"][0] for row in record["rows"]]
    assert speedups[0] == 1.0 and all(ratio > 0 for ratio in speedups)
    assert results.step_of(FAST)["step_us"] == pytest.approx(1e6 / record["rows"][1]["sps"][0])
    (alone,) = record["envpool"]
    assert alone["num_envs"] == 2 and alone["sps"] == results.envpool_sps(MEASURED) > 0
    assert f"of {alone['sps']:,.0f} steps/s" in rest
    results.load = [[(0.2, 50.0, 1e3), (0.4, 60.0, 1e3)]] * 2
    results.parts = [{"who": FAST, "profiled_step_us": 100.0, "parts_us": dict.fromkeys(profile.KINDS, 9.0)}]
    results.parts[0]["parts_us"] |= {profile.OTHER_KERNELS: 5.0, profile.REST: 50.0}
    results.draw()
    assert all((folder / f"{name}.png").stat().st_size > 10_000 for name in ("gpu", "load", "parts"))
    assert profile.OTHER_KERNELS in results.text() and "checks: " in results.text()


def test_training_that_differs_fails(tmp_path):
    """Another seed's parameters are not rounding."""
    runs = []
    for seed in (1, 2):
        assert run(FAST, *PLAN.check_flags, *at(tmp_path, str(seed)), f"--seed={seed}") == 0
        runs.append(Trial(FAST, seed, [], str(tmp_path / str(seed)), exit_code=0))
        runs[-1].read()
    ours, theirs = runs
    row = against_eager(ours, theirs)
    assert not row["passed"] and row["detail"].startswith("off by ")
    assert against_eager(ours, ours) == {**row, "passed": True, "detail": "bit for bit"}
    theirs.exit_code = 1
    assert against_eager(ours, theirs)["detail"] == f"{FAST}: exit 1"


@pytest.mark.parametrize(
    ("last", "passed"), [([9.0, 9.0], True), ([0.0, 0.0], False), ([math.nan, 9.0], False), ([math.inf, 9.0], False)]
)
def test_bf16_may_go_elsewhere_but_not_nowhere(last, passed, monkeypatch):
    zeros, ones = torch.zeros(2), torch.ones(2)
    vectors = {"eager": (zeros, ones), "bf16": (zeros, torch.tensor(last))}
    monkeypatch.setattr(gpu_equality, "last_parameters", lambda run_dir: vectors[run_dir.name])
    eager, rounded = (
        Trial(f"{FAST} {name}", 1, [], name, exit_code=0, summary={"interrupted": False}) for name in vectors
    )
    assert against_eager(eager, rounded)["passed"] == passed


def test_what_would_end_too_late_is_left_out(tmp_path, monkeypatch, capsys):
    now, ran = 0.0, []

    def run_trial(contender, seed, runs_dir, deadline):
        nonlocal now
        now += 100.0 if contender.label == FAST else 10.0
        ran.append((contender.label, seed))
        return Trial(contender.label, seed, [], "", 0, summary={"sps": 1.0, "interrupted": False} | dict.fromkeys(KEYS))

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(gpu, "run_trial", run_trial)
    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(trials, "time", clock)
    plan = replace(PLAN, modes=(f"{FAST}:eager", "dqn:eager"))
    measure([plan], 2, CPU, tmp_path, Deadline.within(200.0), Results(tmp_path, CPU, [plan]))
    assert ran == [(REFERENCE, 1), (FAST, 1), ("dqn", 1), (REFERENCE, 2), ("dqn", 2)]
    assert f"no time left for round 2 of {FAST}" in capsys.readouterr().out


KEYS = ("warmup_seconds", "episodic_return", "global_step")


@pytest.fixture
def some_gpu(monkeypatch) -> list:
    """Replaces all that needs a GPU or time; returns what was run for how it went: trials, parts."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "some GPU",
        "set_device": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")

    ran = []

    def run_trial(contender, seed, runs_dir, deadline):
        ran.append((contender.label, seed))
        summary = {"sps": 500.0, "interrupted": False} | dict.fromkeys(KEYS)
        return Trial(contender.label, seed, [], "", 0, summary=summary)

    def parts_of(entry, **_):
        ran.append(entry)
        script, _, mode = entry.partition(":")
        entry = " ".join([script, *(f"--{lever}" for lever in mode.split("+"))])
        row = {"who": entry, "num_envs": 8, "envpool_sps": 1000.0, "sps": 500.0, "profiled_step_us": 2000.0}
        kinds = (*profile.KINDS, profile.REST, *profile.TIMED, profile.TIMED_REST)
        return row | {"parts_us": dict.fromkeys(kinds, 9.0), "floors_us": dict.fromkeys(profile.TIMED, 5.0)}

    def check(plans, device, runs_dir, deadline, known, report):
        for name in {"a check"} - known:
            report({"check": name, "passed": True, "detail": "fine"})

    facts = common.machine_facts(CPU) | {"git_commit": "0123abc", "device_name": "some GPU"}
    monkeypatch.setattr(common, "machine_facts", lambda device: facts.copy())
    monkeypatch.setattr(gpu, "check", check)
    monkeypatch.setattr(gpu, "run_trial", run_trial)
    monkeypatch.setattr(Pool, "measure", lambda pool, _: (ran.append(pool), {**asdict(pool), "sps": 1000.0})[1])
    monkeypatch.setattr(profile, "measure", parts_of)
    return ran


def test_the_whole_course(some_gpu, tmp_path, capsys):
    """From the checks to the pictures."""
    out = tmp_path / "out"
    assert gpu.main(gpu.Args(rounds=2, runs_dir=str(tmp_path), out=str(out))) == 0
    written = {"gpu.json", "table.md", "gpu.png", "parts.png", "parts_atari.png"}
    assert {file.name for file in out.iterdir()} == written
    text = capsys.readouterr().out
    assert "checks: 1 of 1 passed" in text and "50%" in text
    fastest, plain = "cleanba_impala --compile --cudagraphs --amp bf16,", "sac_continuous_action_torchcompile,"
    assert "not run yet" in text
    assert text.index(f"[round 1] {fastest}") < text.index(f"[round 1] {plain}") < text.index(f"[round 2] {fastest}")


def test_the_next_call_goes_on(some_gpu, tmp_path, monkeypatch, capsys):
    """What is there is not measured again; what failed is; another commit's results are not mixed with ours."""
    args = gpu.Args(algorithms=("td3",), rounds=1, runs_dir=str(tmp_path), out=str(tmp_path))
    assert gpu.main(args) == 0
    first = some_gpu.copy()
    some_gpu.clear()
    path = tmp_path / "gpu.json"
    record = json.loads(path.read_text())
    failed = record["runs"][1]
    failed["exit_code"] = 1
    path.write_text(json.dumps(record))
    assert gpu.main(replace(args, algorithms=("td3", "dqn"), rounds=2)) == 0
    plans = [PLANS[name] for name in ("td3", "dqn")]
    labels = [c.label for plan in plans for c in gpu.measured_contenders(plan, torch.device("cuda", 0))]
    trials_of_both = {(label, seed) for label in labels for seed in (1, 2)}
    parts_of_both = {entry for plan in plans for entry in plan.part_modes}
    assert set(some_gpu) == (trials_of_both | parts_of_both) - set(first) | {(failed["label"], 1)}
    assert len(some_gpu) == len(set(some_gpu))
    record = json.loads(path.read_text())
    assert sorted((run["label"], run["seed"]) for run in record["runs"]) == sorted(trials_of_both)
    assert len(record["parts"]) == len(parts_of_both) and len(record["checks"]) == 1
    assert not any(run["exit_code"] for run in record["runs"]) and len(record["rows"]) == len(labels)
    record["machine"]["git_commit"] = "another"
    path.write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["gpu"])
    flags = ["--algorithms", "td3", "--out", tmp_path, "--runs-dir", tmp_path]
    assert run_tool_in_process(monkeypatch, gpu, *flags) == 2
    assert "its gpu.json is of another on some GPU" in capsys.readouterr().err
    assert json.loads(path.read_text()) == record


def test_envpool_alone_is_measured_once_a_round(some_gpu, tmp_path):
    """Also over several calls; scripts that play with the same environments share what it is."""
    args = gpu.Args(algorithms=("cleanba_ppo", "cleanba_impala"), rounds=1, runs_dir=str(tmp_path), out=str(tmp_path))
    assert gpu.main(args) == 0
    assert gpu.main(replace(args, algorithms=("cleanba_ppo", "ppo_atari"), rounds=2)) == 0
    games, atari = PLANS["cleanba_ppo"].pool, PLANS["ppo_atari"].pool
    assert [pool for pool in some_gpu if isinstance(pool, Pool)] in ([games, atari] * 2, [games, atari, atari, games])


def test_failures_of_what_is_not_run_again_are_kept(some_gpu, tmp_path, capsys):
    args = gpu.Args(algorithms=("dqn",), rounds=1, runs_dir=str(tmp_path), out=str(tmp_path))
    assert gpu.main(args) == 0
    path = tmp_path / "gpu.json"
    record = json.loads(path.read_text())
    check = f"{PLANS['dqn'].reference}_torchcompile --compile trains as eager"
    record["checks"].append({"check": check, "passed": False, "detail": "off"})
    record["runs"][0]["exit_code"] = 1
    path.write_text(json.dumps(record))
    some_gpu.clear()
    assert gpu.main(replace(args, algorithms=("td3",))) == 1
    assert f"FAILED: {check}: off" in capsys.readouterr().out
    assert gpu.main(args) == 0 and ("dqn", 1) in some_gpu  # asked for again: both are done anew


@pytest.mark.parametrize("commit", [None, "0123abc-dirty"])
def test_results_of_no_one_knows_what_are_not_gone_on_with(commit, some_gpu, tmp_path, monkeypatch, capsys):
    facts = common.machine_facts(CPU) | {"git_commit": commit}
    monkeypatch.setattr(common, "machine_facts", lambda device: facts.copy())
    monkeypatch.setattr("sys.argv", ["gpu"])
    flags = ["--algorithms", "dqn", "--rounds", "1", "--out", tmp_path / "out", "--runs-dir", tmp_path]
    assert run_tool_in_process(monkeypatch, gpu, *flags) == 0
    capsys.readouterr()
    assert run_tool_in_process(monkeypatch, gpu, *flags) == 2
    error = capsys.readouterr().err
    assert "GIT_COMMIT" in error and len(error.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_one_line(some_gpu, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert run_tool_in_process(monkeypatch, gpu, "--out", tmp_path / "file" / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu: --out ") and len(error.splitlines()) == 1


class AtTheFirstLogPoint:
    """A deadline that has passed once a run has logged."""

    def __init__(self, run_dir) -> None:
        self.run_dir = run_dir

    @property
    def seconds_left(self) -> float:
        return -1.0 if read_metrics(self.run_dir) else 1.0


def test_learning_starts_once_and_then_resumes(tmp_path, monkeypatch):
    commands = []

    def run_child(command, deadline, output):
        commands.append(command[1:])
        return 0, None

    monkeypatch.setattr(gpu_learn, "run_child", run_child)
    for _ in range(2):
        assert gpu_learn.learn_on("pong", 3, tmp_path, Deadline.within(1)) == 0
        (tmp_path / "pong__3").mkdir(exist_ok=True)
        (tmp_path / "pong__3" / "args.json").write_text("{}")
    (script, *first), (_, *second) = commands
    assert script.endswith("ppo_atari_envpool_torchcompile.py")
    flags = {"--env-id=Pong-v5", "--seed=3", "--total-timesteps=10000000", "--compile", "--one-graph"}
    assert flags <= set(first)
    assert second == ["--total-timesteps=10000000", "--resume", str(tmp_path / "pong__3")]
    log = tmp_path / "pong__3" / "metrics.jsonl"
    log.write_text(json.dumps(ended(step=1024, episodes=150, mean=18.5)) + "\n")
    assert gpu_learn.learn_on("pong", 3, tmp_path, Deadline.within(1)) == 0
    assert len(commands) == 2  # it has learned its task


@pytest.mark.parametrize(("code", "left", "result"), [(-15, 0.0, 0), (-9, 0.0, 0), (-9, 9.0, -9), (1, 0.0, 1)])
def test_a_run_that_the_time_ends_while_it_begins_did_not_fail(code, left, result, tmp_path, monkeypatch):
    clock = Deadline.within(60.0)

    def run_child(*_):
        clock.at = time.monotonic() + left
        return code, None

    monkeypatch.setattr(gpu_learn, "run_child", run_child)
    assert gpu_learn.learn_on("sac", 1, tmp_path, clock) == result


def test_every_task_learns_with_the_first_seed_before_any_with_the_next(tmp_path, monkeypatch):
    """And what is known is written meanwhile."""
    begun, written, is_written = [], [], threading.Event()

    def learn_on(name, seed, runs_dir, deadline):
        begun.append((name, seed))
        is_written.wait(60)
        return 0

    def write(trials, device, out):
        written.append(len(begun))
        is_written.set()
        return ""

    for name, value in (("learn_on", learn_on), ("write", write), ("WRITE_SECONDS", 0.05)):
        monkeypatch.setattr(gpu_learn, name, value)
    assert gpu_learn.learn(["td3", "sac"], [1, 2], 1, 60.0, CPU, tmp_path, tmp_path) == 0
    assert begun == [("td3", 1), ("sac", 1), ("td3", 2), ("sac", 2)]
    assert written[0] == 1 and written[-1] == 4


def ended(step: int, episodes: int, mean: float) -> dict:
    """A log point."""
    return {"global_step": step, "charts/episodes": episodes, "charts/episodic_return": mean}


def test_a_run_has_learned_enough(tmp_path, monkeypatch):
    points = [ended(10, 60, 1.0), {"global_step": 20}, ended(30, 120, 2.0), ended(40, 160, 4.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    for enough, of in (
        (True, {"target": 2.8}),
        (False, {"target": 2.9}),
        (True, {"stop_at": 40}),
        (False, {"stop_at": 41}),
        (False, {}),
    ):
        task = Task(f"{FAST}:eager", "HalfCheetah-v5", 1000, **of)
        assert task.is_learned(tmp_path) == enough
        deadline = Enough(Deadline.within(60.0), task, tmp_path)
        assert deadline.seconds_left > 0
        monkeypatch.setattr(gpu_learn, "LOOK_SECONDS", 0.0)
        assert (deadline.seconds_left < 0) == enough
        monkeypatch.undo()


@pytest.mark.long
def test_learning_runs_stop_in_time_and_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_learn, "LEARNING_FLAGS", tuple(TINY))
    task = Task(f"{FAST}:eager", "Hopper-v5", 10**6)
    runs_dir, out = tmp_path / "runs", tmp_path
    with pytest.MonkeyPatch.context() as patch:
        deadline = AtTheFirstLogPoint(runs_dir / "td3__1")
        monkeypatch.setitem(gpu_learn.TASKS, "td3", task)
        patch.setattr(gpu_learn, "Deadline", SimpleNamespace(within=lambda seconds: deadline))
        assert gpu_learn.learn(["td3", "sac"], [1], 1, 60.0, CPU, runs_dir, out) == 0
        assert "not begun" in (out / "learn.md").read_text()  # its turn was after the end
    left, _ = json.loads((out / "learn.json").read_text())["runs"]
    step = left["summary"]["global_step"]
    assert left["summary"]["interrupted"] and step > 0 and "to go on" in (out / "learn.md").read_text()
    monkeypatch.setitem(gpu_learn.TASKS, "td3", replace(task, timesteps=step + 64))
    assert gpu_learn.learn(["td3"], [1], 1, 120.0, CPU, runs_dir, out) == 0
    (left,) = json.loads((out / "learn.json").read_text())["runs"]
    assert left["summary"]["global_step"] == step + 64 and not left["summary"]["interrupted"]
    assert (out / "learn.png").stat().st_size > 10_000 and "done" in capsys.readouterr().out
    log = runs_dir / "td3__1.log"
    log.unlink()
    assert gpu_learn.learn(["td3"], [1], 1, 120.0, CPU, runs_dir, out) == 0
    assert not log.exists()  # nothing was started


def test_the_check_of_actor_threads_holds_on_a_cpu(monkeypatch):
    """Over gloo, and without graphs."""
    sums, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, group=None: (sums.append(len(x)), all_reduce(x, group=group)))
    gpu_checks.actor_threads(CPU)
    # Thirty updates of eight gradients each, in one of the two runs; and a barrier.
    assert len(sums) == 30 * 8 + 1 and min(sums[1:]) > 1000


# ----------------------------------------------------------------------------------------------------------- ON A GPU


@pytest.mark.cuda
@pytest.mark.parametrize("fn", gpu_checks.CHECKS, ids=lambda fn: fn.__name__)
def test_graphs_do_what_they_must(fn):
    with torch.no_grad():
        fn(torch.device("cuda", 0))
