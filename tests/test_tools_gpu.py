"""leanrl.tools.gpu: what it plans and refuses; and its checks, speeds and going on, with runs of this machine's CPU."""

import json
import sys

import pytest
import torch
from scripts import tiny

from leanrl.tools import common, gpu, trials
from leanrl.tools.gpu import ALGORITHMS, Algorithm
from leanrl.tools.trials import Contender, Deadline, Trial

CPU = torch.device("cpu")
REFERENCE, FAST = "td3_continuous_action", "td3_continuous_action_torchcompile"
TINY = [flag for flag in tiny(FAST) if not flag.startswith("--updates-per-step")]


def test_without_cuda_it_refuses_in_one_line(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "this tool needs a CUDA device" in refusal(gpu, "--out", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def some_gpu(monkeypatch) -> torch.device:
    """One to plan for, as nothing is run."""
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("leanrl.support.devices.has_compiler", lambda device_type: True)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--algorithms", "sac", "sac"], "--algorithms sac sac: needs at least one value, and none repeated"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--leanrl", "nowhere"], "--leanrl nowhere: has no leanrl/sac_continuous_action_torchcompile.py; "),
        (["--out", "/dev/null/out"], "--out /dev/null/out: cannot be made (Not a directory)"),
    ],
)
def test_bad_input_is_one_line(flags, reason, some_gpu, tmp_path, refusal):
    assert refusal(gpu, "--out", tmp_path / "out", *flags).startswith(f"gpu: {reason}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_scripts_take_the_flags_of_their_measurements(name, some_gpu):
    measured = gpu.measured_contenders(name, some_gpu)
    for contender in measured:
        trials.require_valid(contender)
    labels = [contender.label for contender in measured]
    fast = ALGORITHMS[name].entries["cleanba" not in name]
    assert labels[0] == ALGORITHMS[name].entries[0] and f"{fast} --compile --cudagraphs" in labels
    assert ("cleanba" in name or "atari" in name) == labels[-1].endswith("--amp bf16")


def test_the_plainest_and_the_fastest_are_measured_first(some_gpu, tmp_path):
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


def test_every_file_with_a_gpus_test_shows_it():
    """By the mark's name, which is what is looked for, and which this file does not spell; none comes from a helper."""
    helpers = [path for path in (gpu.REPOSITORY / "tests").glob("*.py") if not path.name.startswith("test_")]
    assert len(helpers) > 2 and not [path.name for path in helpers if "mark" + ".cuda" in path.read_text()]


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    """The tool works on a CPU, for TD3 alone, with two files of tests; returns a call of it."""
    (tmp_path / "tests").mkdir()
    for name, condition in (("good", True), ("bad", "pathlib.Path(__file__).with_name('mended').exists()")):
        test = f"import pathlib, pytest\n@pytest.{'mark'}.cuda\ndef test_it():\n    assert {condition}\n"
        (tmp_path / "tests" / f"test_{name}.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    monkeypatch.setattr(gpu, "REPOSITORY", tmp_path)
    flags = " ".join([*TINY, "--total-timesteps=96"])
    monkeypatch.setitem(ALGORITHMS, "td3", Algorithm((f"{REFERENCE}:eager", f"{FAST}:eager"), flags))
    facts = common.machine_facts(CPU) | {"git_commit": "0123abc"}
    monkeypatch.setattr(common, "machine_facts", lambda device: facts | {"versions": facts["versions"].copy()})
    return lambda out, **changes: gpu.examine(gpu.Args(algorithms=("td3",), out=str(out), rounds=1, **changes), CPU)


def test_it_goes_on_with_what_is_missing_or_failed(on_cpu, tmp_path, capsys):
    out = tmp_path / "out"
    assert on_cpu(out, seconds=0.01) == 0
    assert "no time left for 4 checks and runs; repeat the command with " in capsys.readouterr().out
    assert json.loads((out / "gpu.json").read_text())["checks"] == []

    assert on_cpu(out) == 1
    checks, speeds = (out / name for name in ("gpu.json", "td3/compare.json"))
    passed = {row["check"]: row["passed"] for row in json.loads(checks.read_text())["checks"]}
    assert passed == {"test_good.py": True, "test_bad.py": False} and "AssertionError" in capsys.readouterr().out
    record = json.loads(speeds.read_text())
    assert [row["label"] for row in record["rows"]] == [REFERENCE, FAST]
    assert all(run["summary"]["global_step"] == 96 for run in record["runs"])
    assert f"| {REFERENCE} " in (out / "td3" / "table.md").read_text()
    assert (out / "td3" / "compare.png").stat().st_size > 10_000

    failed, kept = record["runs"]
    failed["exit_code"] = 1
    speeds.write_text(json.dumps(record))
    assert on_cpu(out, seconds=0.01) == 1
    assert f"FAILED: {failed['label']}, round 1: exit 1\nno time left for 2 checks and runs" in capsys.readouterr().out
    (tmp_path / "tests" / "mended").touch()
    assert on_cpu(out) == 0
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


@pytest.mark.parametrize(("shown", "sps"), [("speed:  99.5 sps,\\r 812.2500 sps, r=1", 812.25), ("no speed", None)])
def test_the_speed_of_another_script_is_the_last_that_it_prints(shown, sps, tmp_path):
    code = f"import os, sys; sys.stderr.write('{shown}'); assert os.environ['WANDB_MODE'] == 'disabled'"
    contender = Contender(f"leanrl:{FAST}", (sys.executable, "-c", code))
    trial = gpu.run_upstream(contender, 2, tmp_path, Deadline(gpu.time.monotonic() + 60))
    assert trial.command[-1] == "--seed=2" and trial.summary.get("sps") == sps and bool(trial.failure) == (sps is None)
    numbers = {"sps": 1624.5, "warmup_seconds": 1.0, "global_step": 96, "interrupted": False}
    contenders = [contender, Contender(FAST, ()), Contender("not yet run", ())]
    first, second = gpu.record_of([Trial(FAST, 2, [], "", 0, numbers), trial], contenders, CPU)["rows"]
    assert first["label"] == contender.label and second["ratios"] == {"speed-up": [2.0] if sps else []}
