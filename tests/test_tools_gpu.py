"""leanrl.tools.gpu: what it plans and refuses; and its checks, speeds and going on, with runs of this machine's CPU."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripts import run, run_tool_in_process, tiny

from leanrl.tools import common, gpu, trials
from leanrl.tools.gpu import ALGORITHMS, Algorithm, against_eager
from leanrl.tools.trials import Contender, Deadline, Trial

CPU = torch.device("cpu")
REFERENCE, FAST = "td3_continuous_action", "td3_continuous_action_torchcompile"
TINY = [flag for flag in tiny(FAST) if not flag.startswith("--updates-per-step")]
CHECK_FLAGS = (*TINY, "--checkpoint-every=48", "--total-timesteps=80")
# Another way to compute what eager does, as the modes of a GPU are.
ON_CPU = Algorithm(None, (f"{FAST}:eager", f"{REFERENCE}:eager"), CHECK_FLAGS, (*TINY, "--total-timesteps=96"))
CHECK = f"{REFERENCE} trains as eager"


def test_without_cuda_it_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_tool_in_process(monkeypatch, gpu, "--runs-dir", tmp_path / "runs") == 2
    error = capsys.readouterr().err
    assert error.startswith("gpu: this tool needs a CUDA device") and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def some_gpu(monkeypatch) -> torch.device:
    """One to plan for, as nothing is run."""
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda device_type: True)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--algorithms", "sac", "sac"], "--algorithms sac sac: needs at least one, and none twice"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--seconds", "0"], "--seconds 0.0: must be at least 1"),
        (["--leanrl", "nowhere"], "--leanrl nowhere: has no leanrl/sac_continuous_action_torchcompile.py; "),
        (["--out", "/dev/null/out"], "--out /dev/null/out: cannot be made (Not a directory)"),
    ],
)
def test_bad_input_is_one_line(flags, reason, some_gpu, tmp_path, monkeypatch, capsys):
    assert run_tool_in_process(monkeypatch, gpu, "--out", tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gpu: {reason}") and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_scripts_take_the_flags_of_their_checks_and_measurements(name, some_gpu):
    algorithm = ALGORITHMS[name]
    checked, measured = gpu.checked_contenders(name, some_gpu), gpu.measured_contenders(name, some_gpu)
    for contender in (*checked, *measured):
        trials.require_valid(contender)
    labels = [contender.label for contender in measured]
    fast = algorithm.fast[0]
    assert labels[0] == (algorithm.reference or fast) and checked[0].label == fast
    assert {f"{fast} --compile --cudagraphs"} <= set(labels) and labels[-len(checked) :] == [c.label for c in checked]
    assert ("cleanba" in name or "atari" in name) == labels[-1].endswith("--amp bf16")


def test_what_counts_most_is_measured_first(some_gpu, tmp_path):
    (tmp_path / "leanrl").mkdir()
    (tmp_path / "leanrl" / f"{FAST}.py").touch()
    contenders = {name: gpu.measured_contenders(name, some_gpu, str(tmp_path)) for name in ("td3", "cleanba_ppo")}
    turns = [(contender.label, seed) for _, contender, seed in gpu.turns_of(contenders, 2)]
    both = " --compile --cudagraphs"
    first = [f"leanrl:{FAST}{both}", REFERENCE, FAST + both, f"{FAST} --compile --one-graph"]
    first += ["cleanba_ppo", f"cleanba_ppo{both}", f"cleanba_ppo{both} --amp bf16"]
    half = len(turns) // 2
    assert turns[:7] == [(label, 1) for label in first]
    assert turns[half : half + 7] == [(label, 2) for label in first[::-1]]
    assert len(set(turns)) == len(turns) == 2 * sum(map(len, contenders.values()))


@pytest.fixture
def on_cpu(monkeypatch):
    """The tool works on a CPU, for TD3 alone; returns a call of it."""
    monkeypatch.setitem(ALGORITHMS, "td3", ON_CPU)
    facts = common.machine_facts(CPU) | {"git_commit": "0123abc"}
    monkeypatch.setattr(common, "machine_facts", lambda device: facts | {"versions": facts["versions"].copy()})
    return lambda out, **changes: gpu.examine(gpu.Args(algorithms=("td3",), out=str(out), rounds=1, **changes), CPU)


def test_it_goes_on_with_what_is_missing_or_failed(on_cpu, tmp_path, capsys):
    assert on_cpu(tmp_path, seconds=1) == 0
    assert "no time left for 4 checks and runs; the same call with " in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["checks"] == []

    assert on_cpu(tmp_path) == 0
    checks, speeds = (tmp_path / name for name in ("gpu.json", "td3/compare.json"))
    rows = json.loads(checks.read_text())["checks"]
    assert {row["check"] for row in rows} == {gpu.TESTS, CHECK} and all(row["passed"] for row in rows)
    record = json.loads(speeds.read_text())
    assert [row["label"] for row in record["rows"]] == [FAST, REFERENCE]
    assert all(run["summary"]["global_step"] == 96 for run in record["runs"])
    assert f"| {REFERENCE} " in (tmp_path / "td3" / "table.md").read_text()
    assert (tmp_path / "td3" / "compare.png").stat().st_size > 10_000

    failed, kept = record["runs"]
    failed["exit_code"] = 1
    speeds.write_text(json.dumps(record))
    capsys.readouterr()
    assert on_cpu(tmp_path, seconds=1) == 1
    assert f"FAILED: {failed['label']}, round 1: exit 1\nno time left for 1 checks and runs" in capsys.readouterr().out
    assert on_cpu(tmp_path) == 0
    first, again = json.loads(speeds.read_text())["runs"]
    assert first == kept and again["label"] == failed["label"] and again["run_dir"] != failed["run_dir"]


@pytest.mark.parametrize(
    ("commit", "reason"),
    [("4567def", "its gpu.json is of 4567def on "), ("0123abc-dirty", "may have changed"), (None, "GIT_COMMIT")],
)
def test_other_results_are_not_gone_on_with(commit, reason, on_cpu, tmp_path, monkeypatch):
    ours = common.machine_facts(CPU) | {"git_commit": commit if commit != "4567def" else "0123abc"}
    theirs = {"git_commit": commit, "device_name": ours["device_name"]}
    (tmp_path / "gpu.json").write_text(json.dumps({"machine": theirs, "checks": []}))
    monkeypatch.setattr(common, "machine_facts", lambda device: ours.copy())
    with pytest.raises(gpu.UsageError, match=reason):
        on_cpu(tmp_path)


def trained(folder: Path, seed: int) -> Trial:
    flags = [f"--runs-dir={folder}", f"--run-name={seed}", f"--seed={seed}"]
    trial = Trial(FAST, seed, [], str(folder / str(seed)), exit_code=run(FAST, *CHECK_FLAGS, *flags))
    trial.read()
    return trial


def test_training_that_differs_fails(tmp_path, monkeypatch):
    """Another seed's parameters are not rounding; in bfloat16 they may be, but must move and be finite."""
    ours, other = trained(tmp_path, 1), trained(tmp_path, 2)
    row = against_eager(ours, other)
    assert not row["passed"] and row["detail"].startswith("off by ")
    assert against_eager(ours, ours) == {**row, "passed": True, "detail": "bit for bit"}
    assert against_eager(ours, replace(other, exit_code=1))["detail"] == f"{FAST}: exit 1"
    rounded = replace(other, label=f"{FAST} --amp bf16")
    assert against_eager(ours, rounded)["passed"]
    read, vectors = gpu.last_parameters, gpu.last_parameters(Path(other.run_dir))
    for bad in (vectors[0], vectors[1] * float("nan")):
        told = {ours.run_dir: read(Path(ours.run_dir)), other.run_dir: (vectors[0], bad)}
        monkeypatch.setattr(gpu, "last_parameters", lambda run_dir, told=told: told[str(run_dir)])
        assert not against_eager(ours, rounded)["passed"]


@pytest.mark.parametrize(("shown", "sps"), [("speed:  99.5 sps,\\r 812.2500 sps, r=1", 812.25), ("no speed", None)])
def test_the_speed_of_another_script_is_the_last_that_it_prints(shown, sps, tmp_path):
    code = f"import os, sys; sys.stderr.write('{shown}'); assert os.environ['WANDB_MODE'] == 'disabled'"
    contender = Contender(f"leanrl:{FAST}", (sys.executable, "-c", code))
    trial = gpu.run_upstream(contender, 2, tmp_path, Deadline.within(60))
    assert trial.command[-1] == "--seed=2" and trial.summary.get("sps") == sps and bool(trial.failure) == (sps is None)
    ours = Trial(
        FAST, 2, [], "", 0, summary={"sps": 1624.5, "warmup_seconds": 1.0, "global_step": 96, "interrupted": False}
    )
    first, second = gpu.record_of([ours, trial], [Contender(FAST, ())], CPU)["rows"]
    assert first["label"] == contender.label and second["ratios"] == {"speed-up": [2.0] if sps else []}
