"""The tools around distributed runs: launches, reproduction, plans."""

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import tyro
from scripts import cells, summary, wait_until
from sebulba_runs import alive, run_alone, run_both

import leanrl.cleanba_impala as impala
import leanrl.cleanba_ppo as ppo
from leanrl.support.errors import UsageError
from leanrl.tools import launch, plan_layout, reproduce, trials
from leanrl.tools.plan_layout import Cost
from leanrl.tools.trials import REPOSITORY

COMMAND = ("leanrl/cleanba_ppo.py", "--device", "cpu")


def test_launch_runs_with_workers(monkeypatch, capsys):
    """Every environment with every seed; --dry-run prints the same commands."""
    args = launch.Args(("A-v1", "B-v1"), num_seeds=2, start_seed=3, workers=2, command=COMMAND)
    assert launch.main(replace(args, dry_run=True)) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    flags = [(line[line.index("--env-id") + 1], line[line.index("--seed") + 1]) for line in lines]
    assert flags == [("A-v1", "3"), ("B-v1", "3"), ("A-v1", "4"), ("B-v1", "4")]
    assert len({line[line.index("--run-name") + 1] for line in lines}) == 4

    ran = []
    monkeypatch.setattr(launch.time, "strftime", lambda _: lines[0][-1].rpartition("__")[2])
    monkeypatch.setattr(launch, "run_child", lambda line, _: (ran.append(line), (len(ran) == 2, None))[1])
    assert launch.main(args) == 1
    assert sorted(ran) == sorted(lines) and "3 of 4 runs succeeded" in capsys.readouterr().out


def test_launch_submits(tmp_path, monkeypatch, capsys):
    """The template filled in, named as in Cleanba's README; --dry-run prints it."""
    flags = ["--env-ids", "A-v1", "B-v1", "--slurm-template-path", f"{REPOSITORY}/leanrl/tools/cleanba.slurm"]
    flags += ["--slurm-ntasks=2", "--slurm-gpus-per-task=4"]
    args = tyro.cli(launch.Args, args=[*flags, "--", *COMMAND])
    assert launch.main(replace(args, dry_run=True)) == 0
    job = capsys.readouterr().out
    assert "--array=0-5\n" in job and "--ntasks=2\n" in job and "--gpus-per-task=4\n" in job
    assert "exec ${commands[$SLURM_ARRAY_TASK_ID]}" in job and "{" not in job.replace("${", "").replace("() {", "")
    quoted = [line.strip() for line in job.splitlines() if "--env-id" in line]
    assert len(quoted) == 6 and all("--seed" in shlex.split(shlex.split(line)[0]) for line in quoted)

    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/output\ncp $2 {tmp_path}/submitted\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert launch.main(args) == 0
    assert (tmp_path / "output").read_text() == f"--output={tmp_path}/runs/slurm/%A_%a.out\n"
    assert (tmp_path / "submitted").read_text().count("cleanba_ppo.py") == 6
    monkeypatch.setenv("PATH", f"{tmp_path}/empty")
    with pytest.raises(UsageError, match="sbatch is not here"):
        launch.main(args)


def test_launch_ends_its_runs_with_itself(tmp_path):
    flags = ["--env-ids", "CartPole-v1", "--num-seeds", "1"]
    script = ["leanrl/cleanba_impala.py", "--device=cpu", "--local-num-envs=8", f"--runs-dir={tmp_path}"]
    command = [sys.executable, "-m", "leanrl.tools.launch", *flags, "--", *script, "--total-timesteps=100000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        (metrics,) = wait_until(lambda: list(tmp_path.glob("*/metrics.jsonl")), process, 180)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0 and len(started) == 2 and not alive(started)
    assert summary(metrics.parent)["interrupted"]


def test_launch_refuses(tmp_path):
    for command in ((), ("nothing.py",), ("leanrl/__init__.py",), (*COMMAND, "--seed=3")):
        with pytest.raises(UsageError, match=r"^--(seed=3:| )"):
            launch.main(launch.Args(("A-v1",), command=command, dry_run=True))
    (tmp_path / "t").write_text("{nonsense}")
    for path in (tmp_path / "t", tmp_path / "none"):
        with pytest.raises(UsageError, match=f"^--slurm-template {path}: "):
            launch.main(launch.Args(("A-v1",), command=COMMAND, slurm_template=path, dry_run=True))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layouts": ("a0-l0",)}, "a0-l0: not a layout"),
        ({"num_envs": 6, "num_shards": 2}, "--num-envs 6: "),
        ({"lags": ()}, "--lags : "),
        ({"num_shards": 3}, "--num-shards 3: must divide the 32 environments"),
        ({"num_shards": 2, "layouts": ("a0-l0-d1", "a0-l1,2,3,4-d1")}, "--num-shards 2: must be a multiple of"),
        ({"num_envs": 4, "num_shards": 4}, "--num-minibatches 2: "),
    ],
)
def test_reproduce_refuses(changes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        reproduce.main(reproduce.Args(**changes))


def test_reproduce_counts_what_is_equal():
    same = {"script": "cleanba_ppo", "lag": 0, "fingerprint": "a", "equal": True, "difference": 0.0, "close": True}
    odd = {**same, "fingerprint": "b", "equal": False, "difference": 2, "close": False, "repeatable": False}
    assert cells(reproduce.render([same, odd], reproduce.Args()))[0][2:] == ["a b", "1 of 2", "2.0e+00", "1 of 2", "NO"]


def test_groups_start_as_slurms_tasks_and_one_that_fails_is_told(tmp_path, capfd):
    tell = "import os, sys; open(sys.argv[1] + '/' + os.environ['SLURM_PROCID'], 'w').write(repr(sys.argv[2:]))"
    environ = "assert os.environ['SLURM_NTASKS'] == '2' and os.environ['SLURM_JOB_ID'].isdigit()"
    trials.run_groups("a0-l0-d2", [sys.executable, "-c", f"{tell}; {environ}", str(tmp_path)], 2)
    assert [(tmp_path / number).read_text() for number in "01"] == ["['--distributed']"] * 2
    with pytest.raises(SystemExit) as end:
        trials.run_groups("a0-l0-d1", [sys.executable, "-c", "import sys; sys.exit(len(sys.argv) + 2)"], 1)
    assert end.value.code == 3 and capfd.readouterr().err == "a0-l0-d1: ended with exit code 3\n"


# -------------------------------------------------------------------------------------------------------------- PLANS

UPDATE = ((24, Cost(2.0, 2.0)), (48, Cost(4.0, 4.0)))
ROLLOUT = Cost(wall=1.0, cores=1.0, inference=0.6, emulation=0.4)
PARTS = plan_layout.LayoutParts(
    rollout=((48, ROLLOUT), (96, Cost(*(2 * seconds for seconds in ROLLOUT)))),
    update=UPDATE,
    update_alone=UPDATE,
    update_beside=UPDATE,
    message=(0.0, 1e-6),
    reduction=(0.0, 1e-7),
    rollout_bytes=10_000,
    params=250_000,
    steps=2,
)


def predicted(layout, cores=16, machines=1, parts=PARTS, network_gbytes=1.0, **flags):
    args = ppo.Args(**{"device": "cpu", "local_num_envs": 48, "num_actor_threads": 1, **flags})
    return plan_layout.predict(layout, parts, args, cores, machines, network_gbytes)


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


def test_a_plan_knows_where_messages_travel():
    """A group's within its machine; the sums over groups between machines, where that is slower."""
    here, slow, fast = predicted("a0-l1-d4"), *(predicted("a0-l1-d4", 16, 4, network_gbytes=g) for g in (0.001, 100.0))
    # Two sums of 1 MB over four learners pass 1.5 times through every link: 0.1 us a byte here, 1 us in between.
    assert [round(p.seconds["all-reduce"], 3) for p in (here, slow, fast)] == [0.3, 3.0, 0.3]
    assert slow.seconds["transfer"] == fast.seconds["transfer"] == pytest.approx(here.seconds["transfer"] / 4)


def test_a_plan_knows_that_a_learner_alone_takes_more_threads():
    parts = replace(PARTS, update_alone=((24, Cost(1.5, 3.0)), (48, Cost(3.0, 6.0))))
    seconds = [predicted(layout, parts=parts).seconds["update"] for layout in ("a0-l0-d1", "a0-l1-d1", "a0-l0-d2")]
    assert seconds == [3.0, 4.0, 4.0]


def test_a_plan_knows_that_learners_disturb_each_other():
    parts = replace(PARTS, update_beside=((24, Cost(3.0, 3.0)), (48, Cost(6.0, 6.0))))
    one, apart, two = (predicted(name, parts=parts).seconds for name in ("a0-l0-d1", "a0-l1-d1", "a0-l0,1-d1"))
    assert (one["update"], apart["update"], two["update"]) == (4.0, 4.0, 3.0)
    assert (one["all-reduce"], apart["all-reduce"], two["all-reduce"]) == pytest.approx((0.0, 0.0, 0.2))
    # Where every group has a machine of its own, an update is a learner's alone.
    far = predicted("a0-l1-d2", machines=2, parts=parts).seconds
    assert far["update"] == 4.0 and far["all-reduce"] == pytest.approx(0.2)


def test_a_plan_knows_the_cores_and_the_lag():
    assert [predicted("a0-l0,1-d1", cores=n).seconds["update"] for n in (2, 1)] == pytest.approx([2.0, 4.0])
    plans = [predicted(layout, policy_lag=lag) for layout in ("a0-l0-d1", "a0-l1-d1") for lag in (1, "newest")]
    assert [48 * 128 / plan.sps for plan in plans] == pytest.approx([4.0, 4.0, 5.0, 5.48])
    assert predicted("a0-l0-d1", policy_lag=1, cores=1).sps == pytest.approx(48 * 128 / 5.0)
    # Rollouts travel beside the update, unless a device that sends some learns.
    large = {"parts": replace(PARTS, rollout_bytes=100_000), "policy_lag": 1}
    plans = [predicted("a0-l1-d1", **large, device=device) for device in ("cpu", "cuda")]
    assert [48 * 128 / plan.sps for plan in plans] == pytest.approx([5.0, 5.8])
    assert predicted("a0-l0,1-d1", policy_lag=1).sps == pytest.approx(48 * 128 / 2.44)
    # Twice the machines: twice the speed, less what the sums take.
    assert 3.5 < predicted("a0-l0-d4", machines=4).sps / predicted("a0-l0-d1").sps < 4


def test_a_plan_of_other_numbers_of_environments():
    """A straight line through two measurements, which does not fall far below the smaller."""
    measured = ((8, Cost(2.0, 1.0)), (16, Cost(5.0, 3.0)))
    costs = [plan_layout.cost_of(num_envs, measured) for num_envs in (8, 12, 16, 24, 1)]
    assert [cost[:2] for cost in costs] == [(2.0, 1.0), (3.5, 2.0), (5.0, 3.0), (8.0, 5.0), (0.4, 0.2)]
    seconds = predicted("a0-l0-d1", local_num_envs=24).seconds
    assert seconds["rollout"] == pytest.approx(0.5) and seconds["update"] == pytest.approx(2.0)


def test_alternatives_are_those_that_fit():
    args = impala.Args(device="cpu", local_num_envs=4, num_actor_threads=2, num_minibatches=4)
    found = plan_layout.alternatives(["a0-l0-d1", "a0-l1,2-d1", "a0-l1,2,3-d1"], impala, args, cores=4)
    numbers = [(text, flags.num_actor_threads, flags.local_num_envs) for text, flags in found]
    # A learner needs a multiple of 4 environments, and no more threads than cores are tried.
    one = [(1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (2, 8), (2, 16), (4, 2), (4, 4), (4, 8), (4, 16)]
    two = [(1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 2), (4, 4), (4, 8), (4, 16)]
    assert numbers == [*(("a0-l0-d1", *sizes) for sizes in one), *(("a0-l1,2-d1", *sizes) for sizes in two)]


def recommended(parts):
    """Among twice, half and four times the 48 environments of one thread on one core."""
    args = ppo.Args(device="cpu", local_num_envs=48, num_actor_threads=1)
    plans = plan_layout.alternatives(["a0-l0-d1"], ppo, args, cores=1)
    return plan_layout.recommend([plan_layout.predict(text, parts, flags, 1, 1, 1.0) for text, flags in plans])


def test_a_recommendation_weighs_environments():
    flags = "`--actor-device-ids 0 --learner-device-ids 0 --num-actor-threads 1 --local-num-envs"
    speed = "{} steps per second from {} environments on 1 device; bottleneck: {}"
    # Where every environment costs the same, few are as fast as many.
    few = f"a0-l0-d1 with {flags} 24`, {speed.format('1,229', 24, 'update')}"
    assert recommended(PARTS) == [f"Fastest: {few}", f"Fastest per device: {few}"]
    # 192 environments: a rollout of 4 s, and an update that takes 2 s for any number.
    fixed = ((24, Cost(2.0, 2.0)), (48, Cost(2.0, 2.0)))
    many = f"a0-l0-d1 with {flags} 192`, {speed.format('4,096', 192, 'inference')}"
    assert recommended(replace(PARTS, update_alone=fixed))[0] == f"Fastest: {many}"


def test_a_recommendation_takes_the_fewest_environments_that_are_nearly_as_fast():
    plans = [
        plan_layout.Prediction(layout, devices, threads, envs, threads * envs * devices, sps, {}, "update")
        for layout, devices, threads, envs, sps in [
            ("a0-l0-d1", 1, 2, 48, 1_480.0),
            ("a0-l0-d1", 1, 2, 96, 1_500.0),
            ("a0-l0,1-d32", 64, 4, 48, 60_000.0),
            ("a0-l0,1-d32", 64, 4, 96, 62_000.0),
        ]
    ]
    fastest, thrifty = plan_layout.recommend(plans)
    assert fastest.startswith("Fastest: a0-l0,1-d32 with `--actor-device-ids 0 --learner-device-ids 0 1 ")
    assert "--num-actor-threads 4 --local-num-envs 48`, 60,000 steps per second from 12,288 environments" in fastest
    assert "a0-l0-d1 " in thrifty and "--num-actor-threads 2 --local-num-envs 48`, 1,480 steps" in thrifty


def test_the_parts_of_a_plan_are_measured(monkeypatch, tmp_path, capfd):
    """At sizes that the script takes: the 4 minibatches divide the environments of both threads, not those of one."""

    def run_here(script, command, num_groups):
        learners = command[(first := command.index("--learner-device-ids") + 1) : first + 2]
        run_ranks = run_both if learners == ["0", "1"] else run_alone
        assert run_ranks(monkeypatch, script, *command[2:]) == 0

    monkeypatch.setattr(trials, "run_groups", run_here)
    flags = ("--env-id=CartPole-v1", "--device=cpu", "--local-num-envs=2", "--num-actor-threads=2", "--num-steps=8")
    flags += ("--total-timesteps=1", "--policy-lag=1")
    options = {"layouts": ("a0-l0-d1", "a0-l1,2,3-d1"), "repeats": 1, "out": str(tmp_path), "script_args": flags}
    args = plan_layout.Args("cleanba_impala", **options)
    assert plan_layout.main(args) == 0
    record = json.loads((tmp_path / "plan_layout.json").read_text())
    assert [p["layout"] for p in record["predictions"]] == ["a0-l0-d1"] and record["predictions"][0]["sps"] > 0
    parts = record["parts"]
    assert parts["update_alone"] == parts["update"]  # with a lag a learner takes one thread
    assert all(parts[name] > 0 for name in ("rollout_bytes", "params", "steps"))
    for name in ("rollout", "update", "update_beside"):
        assert [size for size, _ in parts[name]] == [4, 8]
        assert all(seconds > 0 for _, cost in parts[name] for seconds in cost[: 4 if name == "rollout" else 2])
    assert parts["reduction"][0] > 0 and parts["message"] == [*plan_layout.LOOPBACK]
    text = (tmp_path / "table.md").read_text()
    assert f"- {record['advice'][0]}\n" in text and record["advice"][0].startswith("Fastest: a0-l0-d1")
    assert "Left out:\n\n- a0-l1,2,3-d1: --local-num-envs 2: " in text and text in capfd.readouterr().out


@pytest.mark.parametrize("changes", [{"layouts": ("a0",)}, {"repeats": 0}, {"check": ("a0-l1,2,3-d1",)}])
def test_plan_layout_refuses(changes):
    flags = ("--env-id=CartPole-v1", "--device=cpu", "--local-num-envs=8")
    with pytest.raises(UsageError):
        plan_layout.main(plan_layout.Args(**{"script_args": flags, **changes}))
