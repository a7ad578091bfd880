"""The tools around distributed runs: timelines, benchmarks, reproduction, plans."""

import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import tyro
from scripts import summary
from sebulba_runs import alive

import leanrl.cleanba_ppo as ppo
from leanrl.support.errors import UsageError
from leanrl.tools import benchmark, plan_layout, plot, reproduce, timeline, trials
from leanrl.tools.trials import REPOSITORY

TEMPLATE = REPOSITORY / "leanrl" / "tools" / "cleanba.slurm"


@pytest.fixture
def run_dir(tmp_path):
    spans = [
        {"learner 0 (rank 0)": [["wait for rollouts", 10.0, 11.0], ["update", 11.0, 13.0]]},
        {"learner 0 (rank 0)": [["wait for rollouts", 13.0, 13.5], ["update", 13.5, 14.0]]},
    ]
    lines = [json.dumps({"update": i, "global_step": i, "spans": s}) + "\n" for i, s in enumerate(spans)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "timeline.jsonl").write_text("".join(lines) + '{"torn')
    (tmp_path / "run" / "args.json").write_text("{}")
    return tmp_path / "run"


def test_timeline_counts_and_draws(run_dir, capsys):
    spans = timeline.read_spans(run_dir, 10)
    assert spans["learner 0 (rank 0)"][2] == ("wait for rollouts", 3.0, 3.5)
    assert [round(part, 3) for *_, part in timeline.shares(spans)] == [0.375, 0.625]
    assert timeline.read_spans(run_dir, 1)["learner 0 (rank 0)"][0] == ("wait for rollouts", 0.0, 0.5)
    assert plot.main(plot.Args(runs=(str(run_dir),), timeline=10)) == 0
    assert (run_dir / "timeline.png").stat().st_size > 5_000
    assert "62%" in capsys.readouterr().out
    out = run_dir / "deep" / "who_waits"
    assert plot.main(plot.Args(runs=(str(run_dir.parent),), timeline=1, out=out)) == 0
    assert out.with_suffix(".png").stat().st_size > 5_000 and "50%" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "{}\n", "garbage\n", '{"spans": 3}\n'])
def test_timeline_of_what_has_none(tmp_path, content):
    if content is not None:
        (tmp_path / "timeline.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"timeline\.jsonl"):
        timeline.read_spans(tmp_path, 10)


def test_a_timeline_is_one_runs(run_dir, tmp_path):
    for runs, reason in (((), "name some"), ((str(run_dir), str(run_dir)), "there are 2 runs")):
        with pytest.raises(UsageError, match=reason):
            plot.main(plot.Args(runs=runs, timeline=10, out=tmp_path / "picture"))
    with pytest.raises(UsageError, match="--timeline 0: must be at least 1"):
        plot.main(plot.Args(runs=(str(run_dir),), timeline=0))


COMMAND = ("leanrl/cleanba_ppo.py", "--device", "cpu")


def test_benchmark_dry_run_prints_every_run(capsys):
    args = benchmark.Args(("A-v1", "B-v1"), num_seeds=2, start_seed=3, dry_run=True, command=COMMAND)
    assert benchmark.main(args) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    flags = [(line[line.index("--env-id") + 1], line[line.index("--seed") + 1]) for line in lines]
    assert flags == [("A-v1", "3"), ("B-v1", "3"), ("A-v1", "4"), ("B-v1", "4")]
    assert len({line[line.index("--run-name") + 1] for line in lines}) == 4


def test_benchmark_fills_the_template_in(capsys):
    options = {"slurm_ntasks": 2, "slurm_gpus_per_task": 4, "dry_run": True, "slurm_template": TEMPLATE}
    assert benchmark.main(benchmark.Args(("A-v1", "B-v1"), command=COMMAND, **options)) == 0
    job = capsys.readouterr().out
    assert "--array=0-5\n" in job and "--ntasks=2\n" in job and "--gpus-per-task=4\n" in job
    assert "exec ${commands[$SLURM_ARRAY_TASK_ID]}" in job and "{" not in job.replace("${", "").replace("() {", "")
    quoted = [line.strip() for line in job.splitlines() if "--env-id" in line]
    assert len(quoted) == 6 and all("--seed" in shlex.split(shlex.split(line)[0]) for line in quoted)


def test_benchmark_takes_cleanbas_name_of_the_template():
    """Its README's --slurm-template-path."""
    words = ["--env-ids", "A-v1", "--slurm-template-path", "a", "--", *COMMAND]
    assert tyro.cli(benchmark.Args, args=words).slurm_template == Path("a")


def test_benchmark_submits(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/output\ncp $2 {tmp_path}/submitted\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    args = benchmark.Args(("A-v1",), command=COMMAND, slurm_template=TEMPLATE, runs_dir="runs")
    assert benchmark.main(args) == 0
    assert (tmp_path / "output").read_text() == f"--output={tmp_path}/runs/slurm/%A_%a.out\n"
    assert "cleanba_ppo.py" in (tmp_path / "submitted").read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no sbatch here"):
        benchmark.main(args)


def test_benchmark_runs_with_workers(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(benchmark, "run_child", lambda line, _: (ran.append(line), (len(ran) == 2, None))[1])
    assert benchmark.main(benchmark.Args(("A-v1",), num_seeds=3, workers=2, command=COMMAND)) == 1
    assert len(ran) == 3 and all(line[0] == sys.executable for line in ran)
    assert "2 of 3 runs ended well" in capsys.readouterr().out


def test_benchmark_ends_its_runs_with_itself(tmp_path):
    flags = ["--env-ids", "CartPole-v1", "--num-seeds", "2", "--workers", "2"]
    script = ["leanrl/cleanba_impala.py", "--device=cpu", "--local-num-envs=8", f"--runs-dir={tmp_path}"]
    command = [sys.executable, "-m", "leanrl.tools.benchmark", *flags, "--", *script, "--total-timesteps=100000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*/metrics.jsonl"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0 and len(started) == 4 and not alive(started)
    assert all(summary(path.parent)["interrupted"] for path in tmp_path.glob("*/metrics.jsonl"))


@pytest.mark.parametrize("command", [(), ("nothing.py",), ("leanrl/__init__.py",), (*COMMAND, "--seed=3")])
def test_benchmark_refuses(command):
    with pytest.raises(UsageError, match=r"^-- "):
        benchmark.main(benchmark.Args(("A-v1",), command=command, dry_run=True))


def test_benchmark_refuses_a_bad_template(tmp_path):
    (tmp_path / "t").write_text("{nonsense}")
    for path in (tmp_path / "t", tmp_path / "none"):
        with pytest.raises(UsageError, match=f"^--slurm-template {path}: "):
            benchmark.main(benchmark.Args(("A-v1",), command=COMMAND, slurm_template=path, dry_run=True))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layouts": ("a0-l0",)}, "a0-l0: not a layout"),
        ({"scripts": ("dqn",)}, "--scripts dqn: "),
        ({"num_envs": 6}, "--num-envs 6: "),
        ({"lags": ()}, "--lags : "),
    ],
)
def test_reproduce_refuses(changes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        reproduce.main(reproduce.Args(**changes))


def test_groups_start_as_slurms_tasks_and_one_that_fails_is_told(tmp_path, capfd):
    tell = (
        "import os, sys, pathlib; pathlib.Path(sys.argv[1], os.environ['SLURM_PROCID']).write_text(repr(sys.argv[2:]))"
    )
    environ = "assert os.environ['SLURM_NTASKS'] == '2' and os.environ['SLURM_JOB_ID'].isdigit()"
    trials.run_groups("a0-l0-d2", [sys.executable, "-c", f"{tell}; {environ}", str(tmp_path)], 2)
    assert [(tmp_path / number).read_text() for number in "01"] == ["['--distributed']"] * 2
    with pytest.raises(SystemExit) as end:
        trials.run_groups("a0-l0-d1", [sys.executable, "-c", "import sys; sys.exit(len(sys.argv) + 2)"], 1)
    assert end.value.code == 3 and capfd.readouterr().err == "a0-l0-d1: ended with exit code 3\n"


# -------------------------------------------------------------------------------------------------------------- PLANS

UPDATE = ((24, plan_layout.Cost(2.0, 2.0)), (48, plan_layout.Cost(4.0, 4.0)))
PARTS = plan_layout.Parts(
    inference=0.6,
    emulation=0.4,
    rollout=plan_layout.Cost(1.0, 1.0),
    update=UPDATE,
    update_alone=UPDATE,
    update_beside=UPDATE,
    waiting=0.0,
    message=(0.0, 1e-6),
    reduction=(0.0, 1e-7),
    rollout_bytes=10_000,
    params=250_000,
    steps=2,
)


def predicted(layout, cores=16, machines=1, parts=PARTS, **flags):
    args = ppo.Args(**{"device": "cpu", "local_num_envs": 48, "num_actor_threads": 1, **flags})
    return plan_layout.predict(layout, parts, args, cores, machines, link_gbytes=1.0)


def test_a_plan_adds_up():
    """Enough cores: a rollout of 1 s, then an update of 4 s for 48 environments; nothing to send."""
    alone = predicted("a0-l0-d1")
    assert alone.seconds == {"rollout": 1.0, "transfer": 0.0, "update": 4.0, "all-reduce": 0.0}
    assert alone.sps == pytest.approx(48 * 128 / 5.0) and alone.bottleneck == "update"
    # 24 environments each: 2 s; their 240 kB and the parameters take a microsecond a byte, two sums of 1 MB 0.1 s each.
    two = predicted("a0-l0,1-d1")
    assert two.seconds == pytest.approx({"rollout": 1.0, "transfer": 0.24, "update": 2.0, "all-reduce": 0.2})
    assert two.sps == pytest.approx(48 * 128 / 3.44)
    apart = predicted("a0-l1-d1")
    assert apart.seconds["transfer"] == pytest.approx(0.48 + 1.0) and apart.devices == 2


def test_a_plan_knows_that_a_learner_alone_takes_more_threads():
    parts = replace(PARTS, update_alone=((24, plan_layout.Cost(1.5, 3.0)), (48, plan_layout.Cost(3.0, 6.0))))
    seconds = [predicted(layout, parts=parts).seconds["update"] for layout in ("a0-l0-d1", "a0-l1-d1", "a0-l0-d2")]
    assert seconds == [3.0, 4.0, 4.0]


def test_a_plan_knows_that_learners_disturb_each_other():
    parts = replace(
        PARTS, update_beside=((24, plan_layout.Cost(3.0, 3.0)), (48, plan_layout.Cost(6.0, 6.0))), waiting=0.5
    )
    one, apart, two = (predicted(name, parts=parts).seconds for name in ("a0-l0-d1", "a0-l1-d1", "a0-l0,1-d1"))
    assert (one["update"], apart["update"], two["update"]) == (4.0, 4.0, 3.0)
    assert (one["all-reduce"], apart["all-reduce"], two["all-reduce"]) == pytest.approx((0.0, 0.0, 0.7))
    # Where every group has a machine of its own, learners only wait for each other.
    far = predicted("a0-l1-d2", machines=2, parts=parts).seconds
    assert far["update"] == 4.0 and far["all-reduce"] == pytest.approx(0.7)


def test_a_plan_knows_the_cores_and_the_lag():
    assert predicted("a0-l0,1-d1", cores=2).seconds["update"] == pytest.approx(2.0)
    assert predicted("a0-l0,1-d1", cores=1).seconds["update"] == pytest.approx(4.0)
    assert predicted("a0-l0-d1", policy_lag=1).sps == pytest.approx(48 * 128 / 4.0)
    assert predicted("a0-l0-d1", policy_lag=1, cores=1).sps == pytest.approx(48 * 128 / 5.0)
    # Twice the machines: twice the speed, less what the sums take.
    one, four = predicted("a0-l0-d1"), predicted("a0-l0-d4", machines=4)
    assert 3.5 < four.sps / one.sps < 4


def test_the_parts_of_a_plan_are_measured(tmp_path, capsys):
    flags = ("--env-id=CartPole-v1", "--device=cpu", "--local-num-envs=8", "--num-steps=8", "--num-minibatches=2")
    args = plan_layout.Args(layouts=("a0-l0-d1", "a0-l1,2,3-d1"), repeats=1, out=str(tmp_path), script_args=flags)
    threads = torch.get_num_threads()
    assert plan_layout.main(args) == 0
    torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert "leaving out a0-l1,2,3-d1: --local-num-envs 8" in err
    record = json.loads((tmp_path / "plan_layout.json").read_text())
    assert [p["layout"] for p in record["predictions"]] == ["a0-l0-d1"] and record["predictions"][0]["sps"] > 0
    parts = record["parts"]
    assert parts["update_alone"] == parts["update"]  # minibatches of 32 rows take one thread
    assert all(parts[name] > 0 for name in ("inference", "emulation", "rollout_bytes", "params", "steps"))
    assert [size for size, _ in parts["update_beside"]] == [4, 8] and parts["waiting"] >= 0
    assert all(wall > 0 and cores > 0 for _, (wall, cores) in parts["update_beside"])
    assert "Fastest: a0-l0-d1" in out


@pytest.mark.parametrize(
    "changes", [{"script": "dqn"}, {"layouts": ("a0",)}, {"repeats": 0}, {"check": ("a0-l1,2,3-d1",)}]
)
def test_plan_layout_refuses(changes):
    flags = ("--env-id=CartPole-v1", "--device=cpu", "--local-num-envs=8")
    with pytest.raises(UsageError):
        plan_layout.main(plan_layout.Args(**{"script_args": flags, **changes}))
