"""The tools around distributed runs: timelines, benchmarks, reproduction, plans."""

import json
import shlex
import sys

import pytest

from leanrl.support.errors import UsageError
from leanrl.tools import benchmark, reproduce, timeline
from leanrl.tools.trials import REPOSITORY

TEMPLATE = REPOSITORY / "slurm" / "cleanba.slurm"


@pytest.fixture
def run_dir(tmp_path):
    spans = [
        {"learner 0 (rank 0)": [["wait for rollouts", 10.0, 11.0], ["update", 11.0, 13.0]]},
        {"learner 0 (rank 0)": [["wait for rollouts", 13.0, 13.5], ["update", 13.5, 14.0]]},
    ]
    lines = [json.dumps({"update": i, "global_step": i, "spans": s}) + "\n" for i, s in enumerate(spans)]
    (tmp_path / "timeline.jsonl").write_text("".join(lines) + '{"torn')
    return tmp_path


def test_timeline_counts_and_draws(run_dir, capsys):
    spans = timeline.read_spans(run_dir, 10)
    assert spans["learner 0 (rank 0)"][2] == ("wait for rollouts", 3.0, 3.5)
    assert [round(part, 3) for *_, part in timeline.shares(spans)] == [0.375, 0.625]
    assert timeline.read_spans(run_dir, 1)["learner 0 (rank 0)"][0] == ("wait for rollouts", 0.0, 0.5)
    assert timeline.main(timeline.Args(run_dir)) == 0
    assert (run_dir / "timeline.png").stat().st_size > 5_000
    assert "62%" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "{}\n", "garbage\n", '{"spans": 3}\n'])
def test_timeline_of_what_has_none(tmp_path, content):
    if content is not None:
        (tmp_path / "timeline.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"timeline\.jsonl"):
        timeline.read_spans(tmp_path, 10)


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


def test_benchmark_submits(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\ncp $1 {tmp_path}/submitted\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    args = benchmark.Args(("A-v1",), command=COMMAND, slurm_template=TEMPLATE, runs_dir=str(tmp_path / "runs"))
    assert benchmark.main(args) == 0
    assert "cleanba_ppo.py" in (tmp_path / "submitted").read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no sbatch here"):
        benchmark.main(args)


def test_benchmark_runs_with_workers(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(benchmark, "run_child", lambda line: (ran.append(line), (len(ran) == 2, None))[1])
    assert benchmark.main(benchmark.Args(("A-v1",), num_seeds=3, workers=2, command=COMMAND)) == 1
    assert len(ran) == 3 and all(line[0] == sys.executable for line in ran)
    assert "2 of 3 runs ended well" in capsys.readouterr().out


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
