"""The command line: help, bad input (exit 2, one line that names the flag, nothing written), what a run records."""

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from scripts import (
    ATARI,
    DISCRETE,
    FAST_SCRIPTS,
    FINISHED,
    KINDS,
    ON_POLICY,
    ON_POLICY_REFERENCES,
    ONE_GRAPH_SCRIPTS,
    SCRIPTS,
    files_in,
    newest_checkpoint,
    of,
    run,
    run_tiny,
    start_process,
    summary,
    tiny,
    tiny_env,
    tiny_num_envs,
    tiny_optimizer_steps,
    with_long,
)

from leanrl.support.devices import resolve_device
from leanrl.support.errors import UsageError
from leanrl.support.run import Run

COMMON_FLAGS = {
    *("--env-id", "--total-timesteps", "--seed", "--num-envs", "--device", "--amp", "--track", "--run-name"),
    *("--runs-dir", "--checkpoint-every", "--max-seconds", "--resume", "--save-model", "--capture-video"),
}
FAST_FLAGS = {"--compile", "--no-compile", "--cudagraphs", "--no-cudagraphs"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys):
    assert run(script, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python leanrl/{script}.py ")
    flags = set(re.findall(r"--[\w-]+", text))
    assert flags >= COMMON_FLAGS
    if script in FAST_SCRIPTS:
        assert flags >= FAST_FLAGS
        assert ("--env-backend" in flags) == (script not in ATARI)
        assert ("--num-env-groups" in flags) == script.startswith("ppo_atari")


@pytest.fixture
def refused(script, tmp_path, capsys):
    """Checks that ``script`` refuses flags in one line that begins with the first of ``words`` and has the others.

    The flags are those of a tiny run, in a folder that is not made, unless they resume one.
    """

    def refused(flags, *words):
        before = files_in(tmp_path)
        if not str(flags[0]).startswith("--resume"):
            flags = [*tiny(script), "--runs-dir", tmp_path / "runs", *flags]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # they would be further lines
            code = run(script, *flags)
        out, err = capsys.readouterr()
        assert code == 2, err
        assert err.startswith(f"{script}.py: {words[0]}") and err.count("\n") == 1 and err.endswith("\n"), err
        assert all(word in err for word in words), err
        assert out == ""
        assert files_in(tmp_path) == before

    return refused


BAD_FLAGS = [
    *[[flag, "0"] for flag in ("--num-envs", "--total-timesteps", "--checkpoint-every", "--num-threads")],
    ["--snapshot-seconds", "0.0"],
    *[["--gamma", value] for value in ("1.5", "-0.1", "nan")],
    *[["--max-seconds", value] for value in ("0.0", "-1.0", "nan", "inf")],
    ["--seed", "-1"],
    ["--env-id", "HalfCheeta-v5"],
]
# What support/ refuses, whatever the script.
BAD_FLAGS_OF_ALL = [
    *[["--seed", value] for value in (str(2**32), "9" * 400)],
    *[["--device", value] for value in ("nonsense", "cuda:x", "meta", "")],
    *[["--run-name", value] for value in ("", ".", "..", "../out", "a/b", "/abs")],
    *[["--env-id", value] for value in ("no such\nthing", "HalfCheetah-v99", "HalfCheetah-v3")],
]
BAD_FLAGS_ON_POLICY = [
    *[[flag, value] for flag in ("--num-steps", "--num-minibatches", "--update-epochs") for value in ("0", "-1")],
    *[["--learning-rate", value] for value in ("0.0", "-1.0", "nan", "inf")],
    *[["--max-grad-norm", value] for value in ("0.0", "nan")],
    ["--num-minibatches", "3"],  # does not divide
    ["--total-timesteps", "63"],  # less than a rollout
]
BAD_FLAGS_OFF_POLICY = [
    *[[flag, value] for flag in ("--buffer-size", "--batch-size", "--log-every") for value in ("0", "-1")],
    *[["--updates-per-step", value] for value in ("0.0", "-1.0", "nan", "inf")],
    *[["--tau", value] for value in ("1.5", "-0.1", "nan")],
    ["--learning-starts", "-1"],
    ["--learning-starts", "1000000"],  # as many as the run has
    ["--learning-starts", "100", "--num-envs", "64", "--total-timesteps", "110"],  # which are 64
    ["--learning-starts", "100", "--updates-per-step", "0.1", "--total-timesteps", "109"],  # 0.9 updates
    ["--total-timesteps", "3", "--num-envs", "4"],  # less than a step
    ["--buffer-size", "3", "--num-envs", "4"],
    ["--buffer-size", str(10**12)],
]
BAD_FLAGS_ATARI = [["--env-id", name] for name in ("HalfCheetah-v5", "Brekout-v5", "Catch-v0")]
BAD_FLAGS_PPO = [["--channels", "0"], *[["--num-env-groups", value] for value in ("0", "3")]]  # 3 does not divide
RATES = [[flag, value] for flag in ("--policy-lr", "--q-lr") for value in ("0.0", "nan")]
CONTINUOUS = [["--env-id", "CartPole-v1"], ["--policy-frequency", "0"]]
# The last one is --v-min.
FAST_SAC = [["--alpha", "0.0"], ["--target-entropy-ratio", "-1.0"], ["--num-atoms", "1"], ["--v-max", "-100.0"]]
EPSILON_GREEDY = [
    ["--env-id", "HalfCheetah-v5"],
    *[[flag, value] for flag in ("--start-e", "--end-e") for value in ("1.5", "nan")],
    *[[flag, "0.0"] for flag in ("--learning-rate", "--exploration-fraction")],
]
BAD_FLAGS_OF = {
    "ppo": [
        ["--env-id", "CartPole-v1"],
        *[["--gae-lambda", value] for value in ("2.0", "-1.0", "inf")],
        *[[f, value] for f in ("--clip-coef", "--vf-coef", "--ent-coef", "--target-kl") for value in ("-1.0", "nan")],
        ["--num-minibatches", "64"],  # minibatches of one
    ],
    "pqn": [*EPSILON_GREEDY, *[["--q-lambda", value] for value in ("2.0", "-1.0", "nan")]],
    "sac": [*CONTINUOUS, *RATES, ["--target-network-frequency", "0"], ["--alpha", "-1.0"]],
    "fast_sac": [*CONTINUOUS, *RATES, *FAST_SAC, ["--v-max", "inf"]],
    "td3": [
        *CONTINUOUS,
        *[[flag, "-1.0"] for flag in ("--policy-noise", "--noise-clip", "--exploration-noise")],
        *[["--learning-rate", value] for value in ("0.0", "nan")],
    ],
    "dqn": [*EPSILON_GREEDY, ["--target-network-frequency", "0"]],
}


def bad_flags(script):
    flags = [*BAD_FLAGS, *(BAD_FLAGS_OF_ALL if script in KINDS else []), *of(script, BAD_FLAGS_OF)]
    flags += BAD_FLAGS_ON_POLICY if script in ON_POLICY else BAD_FLAGS_OFF_POLICY
    flags += BAD_FLAGS_ATARI if script in ATARI else []
    return flags + (BAD_FLAGS_PPO if script == "ppo_atari_envpool_torchcompile" else [])


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_values(refused, script):
    for flags in bad_flags(script):
        value = " ".join(flags[1].split())
        refused(flags, f"{flags[0]} {value}: ")


@pytest.mark.parametrize("script", KINDS)
def test_no_such_cuda_device(refused, script):
    for device in ("cuda", "cuda:1") if not torch.cuda.is_available() else ("cuda:99",):
        refused(["--device", device], f"--device {device}: ", "CUDA device")


@pytest.mark.parametrize("script", FAST_SCRIPTS)
def test_modes_that_this_machine_lacks(refused, script, tmp_path, monkeypatch):
    for flag in ("--cudagraphs", *(["--one-graph"] if script in ONE_GRAPH_SCRIPTS else [])):
        for modes in ([flag], ["--compile", flag]):
            refused(modes, f"{flag} needs a CUDA device; this run is on cpu\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    refused(["--compile"], "--compile ", "C++ compiler", "g++")


def test_compile_without_a_compiler_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").touch(mode=0o755)
    args = SimpleNamespace(device="cuda", compile=True, one_graph=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve_device(args) == torch.device("cuda", 0) and args.cudagraphs
    monkeypatch.setenv("CC", "another")
    with pytest.raises(UsageError, match="needs a C compiler; install gcc"):
        resolve_device(args)


@pytest.mark.parametrize("script", [name for name in FAST_SCRIPTS if name not in ATARI])
def test_bad_environments_of_envpool(refused, script):
    wrong_actions = "HalfCheetah-v5" if script in DISCRETE else "CartPole-v1"
    for env_id in ("HalfCheeta-v5", wrong_actions):
        refused(["--env-backend", "envpool", "--env-id", env_id], f"--env-id {env_id}: ")


def test_envpool_is_imported_without_what_takes_most_of_the_time():
    """JAX and, for Jumanji's pictures, matplotlib. Jumanji's environments are there when one of them is asked for."""
    code = "import sys; from leanrl.support.envs import make_envs; make_envs('CartPole-v1', 1, 1, 'envpool').reset()"
    code += "; assert not {'jax', 'matplotlib'} & {*sys.modules}; make_envs('Maze-v0', 1, 1, 'envpool').reset()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_a_run_without_a_name_gets_one(tmp_path):
    assert run("dqn", *tiny("dqn"), "--total-timesteps=64", f"--runs-dir={tmp_path}/deep/runs") == 0
    (run_dir,) = (tmp_path / "deep" / "runs").iterdir()
    assert re.fullmatch(r"CartPole-v1__dqn__1__\d{19}", run_dir.name)


# root may write where permissions forbid it, but not below a file.
@pytest.mark.parametrize("script", KINDS)
def test_unwritable_runs_dir(refused, script, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("link")
    for runs_dir in (tmp_path / name for name in ("file", "file/runs", "file/deep/runs", "link/runs")):
        refused(["--runs-dir", runs_dir], f"--runs-dir {runs_dir}: cannot be written")
    refused(["--run-name", "n" * 300, "--runs-dir", tmp_path], f"--runs-dir {tmp_path}: cannot be written")


def test_an_existing_run_is_neither_overwritten_nor_changed(refused, script, finished_run, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    refused(["--runs-dir", tmp_path, "--run-name", "run"], "--run-name run: ", f"--resume {run_dir}")
    changes = ["--gamma 0.5", "--seed 2", "--env-id Ant-v5", "--num-envs 8", "--run-name other", "--runs-dir other"]
    for change in [*changes, "--save-model"] if script in KINDS else changes[:1]:
        refused(["--resume", run_dir, *change.split()], f"{change.split()[0]} ", "cannot change on --resume")
    reason = "--total-timesteps 32: " if script in ON_POLICY else "--learning-starts 48: "
    refused(["--resume", run_dir, "--total-timesteps", "32"], reason)
    facts = json.loads((run_dir / "args.json").read_text())
    (run_dir / "args.json").write_text(json.dumps(facts | {"script": "other"}))
    refused(["--resume", run_dir], f"--resume {run_dir}: ", "run of other", f"not of {script}")


@pytest.mark.parametrize("script", KINDS)
def test_resume_of_what_is_no_run(refused, tmp_path):
    refused(["--resume", tmp_path / "nothing"], f"--resume {tmp_path / 'nothing'}: not a run directory")
    (tmp_path / "empty").mkdir()
    refused(["--resume", tmp_path / "empty"], f"--resume {tmp_path / 'empty'}: not a run directory")
    damaged = "", "[]", "{}", '{"script": "x"', '{"args": 1}', '{"args": {}}', '{"script": "x", "args": {"gamma": 1}}'
    for content in (*damaged, "\x00\xff"):
        (tmp_path / "empty" / "args.json").write_text(content)
        refused(["--resume", tmp_path / "empty"], f"--resume {tmp_path / 'empty'}")
    refused(["--resume", tmp_path / "empty" / "args.json"], "--resume ", "not a run directory")


def test_a_process_refuses_in_one_line(tmp_path):
    """What the tests above see within this process is what a shell sees."""
    script, flags = "ppo_continuous_action_torchcompile", ["--gamma", "1.5", "--env-id", "HalfCheetah"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = start_process(script, *flags, "--runs-dir", tmp_path / "runs", **pipes)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"{script}.py: --gamma 1.5: ") and not (tmp_path / "runs").exists()


def test_args_json(finished_run, script):
    facts = json.loads((finished_run / "args.json").read_text())
    module = importlib.import_module(f"leanrl.{script}")
    fields = {field.name for field in dataclasses.fields(module.Args)}
    assert set(facts["args"]) == fields
    assert facts["args"]["env_id"] == tiny_env(script) and facts["args"]["gamma"] == 0.99
    assert facts["script"] == script
    assert facts["cpu_cores"] == len(os.sched_getaffinity(0))
    assert facts["device_name"]
    versions = facts["versions"]
    assert set(versions) >= {"python", "torch", "tensordict", "gymnasium", "envpool", "mujoco"}
    assert versions["torch"] == torch.__version__
    assert all(re.match(r"\d+\.\d+", version) for version in versions.values())

    def git(*words) -> str:
        here = os.path.dirname(__file__)
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True).stdout.strip()

    changed = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    assert facts["git_commit"] == (git("rev-parse", "HEAD") + changed or None)


@pytest.mark.parametrize("commit", [None, "0123abc"])
def test_no_git_is_no_error(commit, tmp_path, monkeypatch):
    """A copy of the repository may be told its commit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    if commit:
        monkeypatch.setenv("GIT_COMMIT", commit)
    run_dir = run_tiny(KINDS[0], tmp_path, "--total-timesteps=64")
    assert json.loads((run_dir / "args.json").read_text())["git_commit"] == commit


@pytest.mark.parametrize("script", ON_POLICY_REFERENCES)
def test_the_speed_of_an_on_policy_reference_is_that_after_its_first_iteration(script, tmp_path, monkeypatch):
    """Which sets a GPU's libraries up; unless there is no other."""
    clock_starts, start_clock = [], Run.start_clock

    def recorded_start_clock(self) -> None:
        clock_starts.append((self.global_step, self.optimizer_steps))
        start_clock(self)

    monkeypatch.setattr(Run, "start_clock", recorded_start_clock)
    for steps, expected in ((64, [(0, 0)]), (192, [(0, 0), (64, 4)])):
        run_dir = run_tiny(script, tmp_path, f"--total-timesteps={steps}", name=f"{steps}")
        assert clock_starts == expected
        assert summary(run_dir)["sps"] > 0
        clock_starts.clear()


SUMMARY_KEYS = [
    *("script", "env_id", "seed", "num_envs", "compile", "cudagraphs", "one_graph", "device", "global_step"),
    *("optimizer_steps", "episodes", "episodic_return", "wall_seconds", "warmup_seconds", "sps", "interrupted"),
]


def test_summary_json(finished_run, script):
    result = summary(finished_run)
    assert list(result) == SUMMARY_KEYS
    expected = {"script": script, "env_id": tiny_env(script), "seed": 1, "num_envs": tiny_num_envs(script)}
    expected |= {"device": "cpu", **dict.fromkeys(("compile", "cudagraphs", "one_graph", "interrupted"), False)}
    expected |= {"global_step": FINISHED, "optimizer_steps": tiny_optimizer_steps(script, FINISHED)}
    assert {key: result[key] for key in expected} == expected
    assert 0 < result["episodes"] < 500 and 0 < result["episodic_return"] < 500
    assert 0 <= result["warmup_seconds"] < result["wall_seconds"]
    # The steps before the first update are warm-up, of an on-policy reference the first iteration's.
    warmup_steps = 64 if script in ON_POLICY_REFERENCES else 0 if script in ON_POLICY else 56
    assert (result["global_step"] - warmup_steps) / result["wall_seconds"] <= result["sps"]
    assert not list(finished_run.rglob("*.tmp"))
    if script in ON_POLICY:
        assert newest_checkpoint(finished_run)[1]["script"]["optimizer"]["param_groups"][0]["eps"] == 1e-5


@pytest.mark.parametrize("script", with_long(ON_POLICY))
def test_several_environments_and_epochs(script, tmp_path):
    result = summary(run_tiny(script, tmp_path, "--num-envs=3", "--update-epochs=2", "--total-timesteps=400"))
    # Whole rollouts of 3 * 64 steps only, or on Atari 3 * 16.
    iterations = 2 * tiny_num_envs(script)
    assert (result["global_step"], result["optimizer_steps"], result["num_envs"]) == (384, iterations * 2 * 4, 3)


@pytest.mark.parametrize("script", KINDS[:1])
def test_a_terminal_sees_where_the_run_is_a_bar_and_what_next(script, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        stopped = property(lambda run: run.request_stop() or True)
        flags = ["--runs-dir", tmp_path, "--run-name=begun", "--total-timesteps=640"]
        with patch.context() as signalled:
            signalled.setattr(Run, "stop_requested", stopped)
            assert run(script, *tiny(script), *flags) == 0
        begun = capsys.readouterr().err.splitlines()[-1]
        assert begun.startswith(f"{tmp_path / 'begun'}: play: needs --save-model; continue: ./run.sh ")
        run_tiny(script, tmp_path, "--total-timesteps=128", "--save-model")
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"{tmp_path / 'run'}: play: ./run.sh evaluate {tmp_path / 'run'}"
    assert out == f"{script}: {tiny_env(script)}, seed 1, cpu, in {tmp_path / 'run'}\n"
    assert f"{script} 100%|" in err and " sps]" in err
    assert run(script, *shlex.split(begun.partition("./run.sh ")[2])[1:]) == 0
    assert summary(tmp_path / "begun")["global_step"] == 640
