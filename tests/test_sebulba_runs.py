"""Distributed runs from start to end: records, stops and resumes, launchers, compiled modes, bad input."""

import dataclasses
import importlib
import itertools
import json
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete
from scripts import course, leaves, newest_checkpoint, run, summary, wait_until
from sebulba_runs import DISTRIBUTED, finish, last_line, launch, ranks_of, run_alone, run_both, tiny, wait_for_log

from leanrl import cleanba_ppo
from leanrl.sebulba.actor import ThreadRollout
from leanrl.sebulba.args import flags_digest
from leanrl.sebulba.collectives import RUN, Collectives, sum_in_order
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.pipeline import Pipeline
from leanrl.sebulba.records import Records, Report
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.sebulba.start import FIRST_PORT, NUM_PORTS
from leanrl.sebulba.status import PeerLost
from leanrl.sebulba.supervisor import local_store
from leanrl.sebulba.worker import Worker
from leanrl.support.atari import PROTOCOLS
from leanrl.support.checkpoints import save_checkpoint
from leanrl.support.cli import parse_args
from leanrl.support.errors import UsageError
from leanrl.support.evaluation import atari_protocol, play
from leanrl.support.executables import WARMUP_CALLS, make_executable, untouched
from leanrl.support.optim import Adam, RMSprop
from leanrl.support.run import Run
from leanrl.support.tracking import read_metrics
from leanrl.tools.trials import REPOSITORY

STATS = {
    *("rollout_time", "inference_time", "env_step_time", "device_to_host_time", "params_get_time", "queue_put_time"),
    *("queue_get_time", "update_time", "all_reduce_time"),
    *("policy_lag", "policy_lag_max"),
}

# Of the example in Cleanba's README.
TWO_TASKS = {"SLURM_JOB_ID": "26017", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}


@pytest.fixture
def free_port():
    """Of those that SLURM jobs meet at: no outgoing connection takes it meanwhile."""
    for port in random.sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


# ----------------------------------------------------------------------------------------------------------- RECORDS


@pytest.mark.parametrize("script", DISTRIBUTED)
def test_a_run_and_its_records(monkeypatch, capsys, tmp_path, script):
    run_dir = tmp_path / "run"
    flags = tiny(tmp_path, "--total-timesteps=5200", "--save-model", "--snapshot-seconds=0.001")
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)  # a terminal is told what next
        assert run_alone(monkeypatch, script, *flags) == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"{run_dir}: play: ./run.sh evaluate {run_dir}")
    first, *_, last = sorted((run_dir / "snapshots").iterdir())
    assert (first.name, last.name) == ("step_000000000256.pt", "step_000000005120.pt")
    weights = [torch.load(path, weights_only=True)["model"]["agent"] for path in (first, last, run_dir / "model.pt")]
    assert not all(torch.equal(*both) for both in zip(*(x.values() for x in weights[:2]), strict=True))
    assert all(torch.equal(*both) for both in zip(*(x.values() for x in weights[1:]), strict=True))
    assert len(play(run_dir, 1, file=f"snapshots/{first.name}")) == 1
    result = summary(run_dir)
    # Whole rollouts of 2 threads * 8 environments * 16 steps only.
    assert (result["global_step"], result["num_envs"], result["interrupted"]) == (5120, 16, False)
    assert result["optimizer_steps"] == 20 * (8 if script == "cleanba_ppo" else 2)
    (group,) = newest_checkpoint(run_dir)[1]["script"]["optimizer"]["param_groups"]
    assert (group["eps"], group.get("alpha")) == ((1e-5, None) if script == "cleanba_ppo" else (0.01, 0.99))
    assert 50 < result["episodes"] < 500 and 10 < result["episodic_return"] < 200
    rows = read_metrics(run_dir)
    assert [row["global_step"] for row in rows] == list(range(256, 5121, 256))
    assert {key.removeprefix("stats/") for key in rows[-1] if key.startswith("stats/")} == STATS
    assert [row["stats/policy_lag"] for row in rows[1:]] == [float(script == "cleanba_impala")] * 19
    assert all(row["stats/rollout_time"] >= row["stats/inference_time"] > 0 for row in rows)
    assert rows[0]["charts/learning_rate"] == pytest.approx(2.5e-4 if script == "cleanba_ppo" else 6e-4)
    assert rows[-1]["charts/learning_rate"] == pytest.approx(rows[0]["charts/learning_rate"] / 20)
    facts = json.loads((run_dir / "args.json").read_text())
    fields = {field.name for field in dataclasses.fields(importlib.import_module(f"leanrl.{script}").Args)}
    assert set(facts["args"]) == fields and facts["args"]["num_envs"] == 16
    lines = [json.loads(line) for line in (run_dir / "timeline.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 21))
    names = {"actor 0 and learner 0 (rank 0)", "actor thread 0 (rank 0)", "actor thread 1 (rank 0)"}
    for line in lines:
        assert set(line["spans"]) == names
        for spans in line["spans"].values():
            assert all(start <= end for _, start, end in spans)
            assert all(before[2] == after[1] for before, after in itertools.pairwise(spans))
    assert [kind for kind, *_ in lines[0]["spans"]["actor thread 1 (rank 0)"]][1:] == ["wait for parameters", "rollout"]


def test_lags_are_of_all_updates_since_the_last_log_point(monkeypatch, tmp_path):
    """Not of the last alone."""
    flags = tiny(tmp_path, "--total-timesteps=100000", "--log-frequency=4")
    run = Run(parse_args(cleanba_ppo.Args, "cleanba_ppo", flags), cleanba_ppo.__file__, torch.device("cpu"), 100_000)
    layout = Layout((0,), (0,), local_num_envs=8)
    with run:
        kept = Records(run, layout, dict)
        run.start_clock()
        for number, version in enumerate((0, 0, 1, 2, 4, 4, 4, 7), 1):
            pieces = [(layout.pieces_of_learner(0)[0], Header(number, version))]
            kept.add(number, [Report(0.0, 1.0, 2.0, 0.0, pieces, np.zeros((3, 0)))], {}, is_last=False)
    rows = [(row["stats/policy_lag"], row["stats/policy_lag_max"]) for row in read_metrics(tmp_path / "run")]
    assert rows == [(0.75, 1.0), (0.75, 2.0)]


def test_actors_may_take_the_newest_parameters(monkeypatch, tmp_path):
    """On the learner's device; and after a resume."""
    flags = tiny(tmp_path, "--policy-lag=newest", "--total-timesteps=5120")
    assert run_alone(monkeypatch, "cleanba_ppo", *flags) == 0
    assert run_alone(monkeypatch, "cleanba_ppo", "--resume", tmp_path / "run", "--total-timesteps=10240") == 0
    lags = newest_lags(tmp_path / "run")
    assert len(lags) == 40 and lags[0] == lags[20] == 0 and max(lags) > 0  # each start begins with what there is


def test_the_newest_parameters_come_while_the_next_rollout_is_played(monkeypatch, tmp_path):
    """So the one after it is played with them."""
    fill = ThreadRollout.fill_pieces

    def when_they_are_there(self):
        deadline = time.monotonic() + 60
        while self._header.version < self._header.rollout - 1 and self._thread._params.empty():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        fill(self)

    monkeypatch.setattr(ThreadRollout, "fill_pieces", when_they_are_there)
    flags = ["--total-timesteps=1280", "--policy-lag=newest", "--num-actor-threads=1", "--learner-device-ids=1"]
    assert run_both(monkeypatch, "cleanba_impala", *tiny(tmp_path, *flags)) == 0
    assert max(newest_lags(tmp_path / "run")) <= 1


def newest_lags(run_dir):
    """The largest of each update; none is more than 2, which is what a thread's two rollouts allow."""
    rows = read_metrics(run_dir)
    for row in rows:
        assert 0 <= row["stats/policy_lag"] <= row["stats/policy_lag_max"] <= 2
    return [row["stats/policy_lag_max"] for row in rows]


@pytest.mark.parametrize(
    "script, env_id, learning_rate, target",
    [
        *[(script, "CartPole-v1", 0.002, 120) for script in DISTRIBUTED],
        ("cleanba_ppo", "Catch-v0", 0.002, 0.8),
        ("cleanba_impala", "Catch-v0", 0.0006, 0.8),
    ],
)
def test_the_newest_parameters_are_learned_from(monkeypatch, tmp_path, script, env_id, learning_rate, target):
    """A random policy balances CartPole's pole for 22 steps, and catches one ball of five: a return of -0.6."""
    flags = tiny(tmp_path, "--policy-lag=newest", f"--learning-rate={learning_rate}", "--log-frequency=100")
    flags += [f"--env-id={env_id}", "--total-timesteps=400000", f"--target-return={target}"]
    assert run_alone(monkeypatch, script, *flags) == 0
    assert max(newest_lags(tmp_path / "run")) > 0
    assert summary(tmp_path / "run")["episodic_return"] >= target


def test_the_next_rollout_travels_beside_the_update(monkeypatch, tmp_path):
    """It is there before the update ends, in other memory than what is learned from."""
    rollouts_due, addresses = Worker.rollouts_due, set()

    def watched(worker):
        ((_, received),), (shard,) = worker._pipeline._received, worker.shards.values()
        for number in rollouts_due(worker):
            deadline = time.monotonic() + 60
            while number < 10 and received.header[0] != number + 1:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert shard.header[0] == number
            addresses.add((shard.obs.data_ptr(), received.obs.data_ptr()))
            yield number

    monkeypatch.setattr(Worker, "rollouts_due", watched)
    flags = ["--total-timesteps=1280", "--policy-lag=1", "--num-actor-threads=1", "--learner-device-ids=1"]
    assert run_both(monkeypatch, "cleanba_impala", *tiny(tmp_path, *flags, "--evaluate-episodes=1"), rank=1) == 0
    assert len(addresses) == 2 and addresses == {(theirs, ours) for ours, theirs in addresses}
    assert "evaluation/episodic_return" in read_metrics(tmp_path / "run")[-1]


@pytest.mark.parametrize("lag", [0, 1])
def test_what_a_thread_has_filled_is_learned_from(monkeypatch, tmp_path, lag):
    """Where it plays whole shards: no copy."""
    rollouts_due, fill, minibatch = Worker.rollouts_due, ThreadRollout.fill_pieces, cleanba_ppo.Batch.minibatch
    due, filled, read = [0], {}, {}

    def noting_number(self):
        return (due.append(number) or number for number in rollouts_due(self))

    def noting_filled(self):
        fill(self)
        pieces = filled.setdefault(int(self._header.rollout), set())
        pieces.update(piece.obs.data_ptr() for piece, _ in self._pieces)

    def noting_read(self, inds):
        read.setdefault(due[-1], set()).add(self.obs.data_ptr())
        return minibatch(self, inds)

    monkeypatch.setattr(Worker, "rollouts_due", noting_number)
    monkeypatch.setattr(ThreadRollout, "fill_pieces", noting_filled)
    monkeypatch.setattr(cleanba_ppo.Batch, "minibatch", noting_read)
    flags = ["--total-timesteps=1280", f"--policy-lag={lag}", "--num-shards=4"]
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, *flags)) == 0
    read.pop(0)  # of the warm-up
    assert read == filled and {len(pieces) for pieces in read.values()} == {4} and len(read) == 5


@pytest.mark.cuda
def test_captured_graphs_read_where_they_were_captured(monkeypatch, tmp_path):
    rollouts_due, addresses = Worker.rollouts_due, set()

    def watched(worker):
        for number in rollouts_due(worker):
            addresses.add(tuple(rollout.obs.data_ptr() for rollout in worker.shards.values()))
            assert all(rollout.rewards.sum() > 0 for rollout in worker.shards.values())
            yield number

    monkeypatch.setattr(Worker, "rollouts_due", watched)
    flags = ["--device=cuda", "--cudagraphs", "--total-timesteps=1280", "--num-shards=2"]
    assert run_alone(monkeypatch, "cleanba_impala", *tiny(tmp_path, *flags)) == 0
    assert len(addresses) == 1


def test_a_trained_agent_is_evaluated(monkeypatch, tmp_path):
    flags = tiny(tmp_path, "--total-timesteps=40960", "--evaluate-episodes=10")
    assert run_alone(monkeypatch, "cleanba_impala", *flags) == 0
    score = np.mean(play(tmp_path / "run", episodes=10))
    assert score > 60  # a random policy has 22 on average
    assert read_metrics(tmp_path / "run")[-1] == {"global_step": 40960, "evaluation/episodic_return": score}


def test_signals_end_the_final_evaluation(monkeypatch, tmp_path):
    usual, during = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr("leanrl.support.run.play", lambda *_: during.append(signal.getsignal(signal.SIGTERM)) or [0.0])
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, "--total-timesteps=512", "--evaluate-episodes=1")) == 0
    assert during == [usual]


def test_a_saved_agent_plays_its_likeliest_actions():
    torch.manual_seed(0)
    agent, obs = cleanba_ppo.VectorAgent(4, 3), torch.randn(100, 4)
    torch.nn.init.normal_(agent.actor[-1].weight)
    spaces = {"single_observation_space": Box(-1, 1, (4,)), "single_action_space": Discrete(3)}
    policy = cleanba_ppo.load_policy({"agent": agent.state_dict(), "network": {}}, SimpleNamespace(**spaces))
    likeliest = agent(obs)[0].argmax(1)
    assert policy(obs.numpy()).tolist() == likeliest.tolist() and len(likeliest.unique()) > 1


class Echo(gym.Env):
    """Rewards an action that repeats the cue; a part of the observation that is whole numbers, and one that is not."""

    observation_space = gym.spaces.Dict({"cue": Discrete(3), "noise": Box(-1, 1, (2,), np.float32)})
    action_space = Discrete(3)

    def _observe(self) -> dict:
        self._cue = int(self.np_random.integers(3))
        return {"cue": self._cue, "noise": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        reward = float(action == self._cue)
        return self._observe(), reward, False, False, {}


@pytest.mark.parametrize("script", DISTRIBUTED)
def test_any_environment_of_gymnasiums_is_learned_and_played(monkeypatch, tmp_path, script):
    """Also where EnvPool is not installed."""
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.setitem(gym.registry, "LeanRLEcho-v0", EnvSpec("LeanRLEcho-v0", Echo, max_episode_steps=10))
    flags = ["--env-backend=gymnasium", "--env-id=LeanRLEcho-v0", "--learning-rate=0.003"]
    flags = tiny(tmp_path, *flags, "--total-timesteps=25600", "--evaluate-episodes=20")
    assert run_alone(monkeypatch, script, *flags) == 0
    assert summary(tmp_path / "run")["episodes"] == 16 * (25600 // 16 // 11)  # of 10 steps, and one that resets
    assert read_metrics(tmp_path / "run")[-1]["evaluation/episodic_return"] > 6  # by chance: 3.3


class Reach(gym.Env):
    """The action is to be the cue, which lies around 5,000 and comes with what is always the same."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def _observe(self) -> np.ndarray:
        self._cue = self.np_random.uniform(-1, 1)
        return np.array([5000 + 100 * self._cue, 7.0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        assert action.shape == (1,) and abs(action[0]) <= 1
        reward = -100 * float(action[0] - self._cue) ** 2
        return self._observe(), reward, False, False, {}


def test_continuous_actions_are_learned_resumed_and_played(monkeypatch, tmp_path):
    """What observations and rewards are normalised with is saved, and goes on with the next start."""
    monkeypatch.setitem(gym.registry, "LeanRLReach-v0", EnvSpec("LeanRLReach-v0", Reach, max_episode_steps=10))
    flags = ["--env-backend=gymnasium", "--env-id=LeanRLReach-v0", "--learning-rate=0.003", "--gamma=0"]
    flags += ["--update-epochs=10", "--clip-coef=0.2", "--ent-coef=0", "--num-shards=2", "--save-model"]
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, *flags, "--total-timesteps=6400")) == 0
    first = newest_checkpoint(tmp_path / "run")[1]["script"]["agent"]
    assert run_alone(monkeypatch, "cleanba_ppo", "--resume", tmp_path / "run", "--total-timesteps=12800") == 0
    agent = newest_checkpoint(tmp_path / "run")[1]["script"]["agent"]
    returns = play(tmp_path / "run", episodes=20)
    assert returns == play(tmp_path / "run", episodes=20)
    # 16 environments of 400 steps each time, of which every eleventh only resets.
    for number, moments in ((1, first), (2, agent)):
        assert moments["obs_moments.count"] == moments["return_moments.count"] == number * 16 * (400 - 36)
    assert agent["obs_moments.mean"].tolist() == pytest.approx([5000, 7], abs=5)
    assert agent["obs_moments.var"].tolist() == pytest.approx([100**2 / 3, 0], rel=0.1, abs=1e-6)
    assert agent["return_moments.var"] > 1000 > 1 > agent["actor_logstd"].exp()
    assert np.mean(returns) > -100  # standing still: -333


@pytest.mark.parametrize("protocol", ["cleanba", "cleanrl"])
def test_an_atari_agent_is_evaluated_by_its_own_protocol(protocol):
    args = {"env_id": "Breakout-v5", "protocol": protocol}
    assert atari_protocol(cleanba_ppo, args) is PROTOCOLS[protocol]
    assert atari_protocol(cleanba_ppo, {**args, "env_id": "Catch-v0"}) is None
    assert atari_protocol(cleanba_ppo, {**args, "env_backend": "gymnasium"}) is None


# -------------------------------------------------------------------------------------------------- STOPS AND RESUMES


def last_step(run_dir):
    return summary(run_dir)["global_step"]


def at_rollout(monkeypatch, number, act):
    """Calls ``act`` when this process comes to a rollout."""
    exchange = Pipeline.exchange

    def watched(self, due, stop):
        if due == number:
            act()
        return exchange(self, due, stop)

    monkeypatch.setattr(Pipeline, "exchange", watched)


def test_signals_stop_all_ranks_and_resume_continues(monkeypatch, tmp_path):
    """The signal reaches a learner that does not lead."""

    def signal_later(process):
        at_rollout(monkeypatch, 3, lambda: process.send_signal(signal.SIGUSR1))

    flags = tiny(tmp_path, "--learner-device-ids", 0, 1, "--total-timesteps=1000000", "--checkpoint-every=100000000")
    assert run_both(monkeypatch, "cleanba_ppo", *flags, meanwhile=signal_later) == 0
    result = summary(tmp_path / "run")
    step = result["global_step"]
    assert result["interrupted"] and step < 1_000_000
    assert newest_checkpoint(tmp_path / "run")[0] == step == read_metrics(tmp_path / "run")[-1]["global_step"]
    flags = ["--resume", tmp_path / "run", f"--total-timesteps={step + 1024}"]
    assert run_both(monkeypatch, "cleanba_ppo", *flags) == 0
    assert [row["global_step"] for row in read_metrics(tmp_path / "run")] == list(range(256, step + 1025, 256))
    result = summary(tmp_path / "run")
    assert result["optimizer_steps"] == result["global_step"] // 256 * 8 and not result["interrupted"]
    rates = [row["charts/learning_rate"] for row in read_metrics(tmp_path / "run")]
    assert rates[-1] == pytest.approx(2.5e-4 * 256 / (step + 1024))


def test_a_signal_to_an_actor_stops_all(monkeypatch, tmp_path):
    at_rollout(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    flags = tiny(tmp_path, "--learner-device-ids", 1, "--total-timesteps=1000000")
    assert run_both(monkeypatch, "cleanba_ppo", *flags) == 0
    assert summary(tmp_path / "run")["interrupted"] and last_step(tmp_path / "run") < 1_000_000


def test_a_stop_finishes_the_update_and_no_more(monkeypatch, tmp_path):
    rollouts_due, finish_run, asked = Worker.rollouts_due, Run.finish, []

    def watched(self):
        for number in rollouts_due(self):
            if number == 5:
                signal.raise_signal(signal.SIGUSR1)
            asked.append(number)
            yield number

    def finish(self, state):
        # What is saved now may take longer than a thread would wait for its next parameters.
        assert not any("actor thread" in thread.name for thread in threading.enumerate())
        return finish_run(self, state)

    monkeypatch.setattr(Run, "finish", finish)
    monkeypatch.setattr(Worker, "rollouts_due", watched)
    flags = tiny(tmp_path, "--total-timesteps=25600", "--log-frequency=2")
    assert run_alone(monkeypatch, "cleanba_impala", *flags) == 0
    assert asked == [1, 2, 3, 4, 5] and summary(tmp_path / "run")["interrupted"]
    assert last_step(tmp_path / "run") == newest_checkpoint(tmp_path / "run")[0] == 5 * 256
    assert [row["global_step"] for row in read_metrics(tmp_path / "run")] == [2 * 256, 4 * 256, 5 * 256]


def test_a_rank_that_is_interrupted_ends_quietly(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(Worker, "publish", Mock(side_effect=KeyboardInterrupt))
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, "--total-timesteps=256")) == 130
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("loss", ["policy_loss", "approx_kl"])
def test_what_has_diverged_is_not_checkpointed(monkeypatch, capsys, tmp_path, loss):
    """However seldom log points come."""
    publish = Worker.publish

    def diverging(self, losses, optimizer_steps):
        publish(self, losses._replace(**{loss: losses[0] * (np.nan if self._number == 3 else 1)}), optimizer_steps)

    monkeypatch.setattr(Worker, "publish", diverging)
    flags = tiny(tmp_path, "--total-timesteps=25600", "--log-frequency=100", "--checkpoint-every=256")
    assert run_alone(monkeypatch, "cleanba_ppo", *flags) == 1
    err = capsys.readouterr().err
    assert f"training diverged: losses/{loss} is nan at step 768" in err and "--checkpoint-every" not in err
    assert newest_checkpoint(tmp_path / "run")[0] == 512


def test_a_checkpoint_that_does_not_fit_is_refused(monkeypatch, capsys, tmp_path):
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, "--total-timesteps=512")) == 0
    step, state = newest_checkpoint(tmp_path / "run")
    state["script"]["agent"]["actor.0.weight"] = torch.zeros(3, 3)
    identity = {"script": "cleanba_ppo", "env_id": "CartPole-v1"}
    save_checkpoint(tmp_path / "run" / "checkpoints", step, identity, state)
    capsys.readouterr()
    assert run_alone(monkeypatch, "cleanba_ppo", "--resume", tmp_path / "run", "--total-timesteps=1024") == 2
    err = capsys.readouterr().err
    assert re.match(r"cleanba_ppo.py: --resume .*: its checkpoint does not fit \(size mismatch for actor.0", err)
    assert err.count("\n") == 1


def test_resuming_with_other_groups_is_refused(monkeypatch, capsys, tmp_path):
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, "--total-timesteps=512")) == 0
    capsys.readouterr()
    flags = ["--resume", tmp_path / "run", "--total-timesteps=2048"]
    assert run_alone(monkeypatch, "cleanba_ppo", *flags, WORLD_SIZE="2") == 2
    reason = "was started with 16 environments in all, this start has 32; start the same number of groups as then"
    assert capsys.readouterr().err == f"cleanba_ppo.py: --resume {tmp_path / 'run'}: {reason}\n"


def test_two_runs_at_one_port_do_not_mix(tmp_path, free_port):
    """Of one SLURM step, two groups each: the first to come ends right, the other is refused, in whatever order."""

    def group(seed: str, number: str):
        flags = tiny(tmp_path / seed, "--distributed", "--total-timesteps=5120", f"--seed={seed}")
        return launch("cleanba_impala", *flags, environ={**TWO_TASKS, "MASTER_PORT": free_port, "SLURM_PROCID": number})

    lead = group("1", "0")
    with socket.socket() as probe:
        wait_until(lambda: probe.connect_ex(("127.0.0.1", int(free_port))) == 0, lead, 60)
    for number in "10":
        code, out = finish(group("2", number))
        assert code == 2 and f"MASTER_PORT {free_port}: another run meets at" in last_line(out), out
    assert [finish(process)[0] for process in (group("1", "1"), lead)] == [0, 0]
    assert last_step(tmp_path / "1" / "run") == 5120


def test_a_group_that_never_comes_is_not_waited_for_long(monkeypatch, free_port):
    """Its lead may have refused a flag that is bad for it alone."""
    with pytest.raises(PeerLost, match=f"did not all come to 127.0.0.1:{free_port} within --start-timeout 1 s"):
        meets(monkeypatch, 1, free_port, seconds=1)


def meets(monkeypatch, rank: int, port: int, seconds: int = 20) -> None:
    """Sends rank ``rank`` of two to the port, as a process of the run "mine"."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, RUN: "mine"}.items():
        monkeypatch.setenv(name, str(value))
    layout = Layout((0,), (0,), num_groups=2)
    Collectives(layout, layout.members[rank], torch.device("cpu"), cleanba_ppo.Args(start_timeout=seconds))


def test_another_run_at_the_port_is_refused_by_name(monkeypatch):
    store = local_store()
    with pytest.raises(UsageError, match=f"^MASTER_PORT {store.port}: .* or another program listens there"):
        meets(monkeypatch, 0, store.port)
    ours = f"mine with flags {flags_digest(cleanba_ppo.Args(start_timeout=20))}"
    for theirs in ("theirs with flags 0123abcd", "mine with flags 0123abcd"):
        store.set("leanrl run", theirs)
        words = f"{theirs} .*, while this process is of {ours}; give each run its own port"
        with pytest.raises(UsageError, match=f"^MASTER_PORT {store.port}: .*: {words}"):
            meets(monkeypatch, 1, store.port)
    # The same command once more, by mistake.
    store.set("leanrl run", ours)
    dist.PrefixStore("mine, attempt 0", store).add("rank 1", 1)
    with pytest.raises(UsageError, match=f"^MASTER_PORT {store.port}: .* calls itself {ours} and has a rank 1"):
        meets(monkeypatch, 1, store.port)


def test_a_local_store_listens_on_loopback_only():
    store = local_store()
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    listening = [
        local
        for table in ("tcp", "tcp6")
        for _, local, _, state, *_ in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:])
        if state == "0A" and local.endswith(f":{store.port:04X}")
    ]
    assert store.get("key") == b"value" and listening == [f"0100007F:{store.port:04X}"]


@pytest.mark.parametrize("script", DISTRIBUTED)
def test_resume_restores_all(monkeypatch, capsys, tmp_path, script):
    firsts, observe = {}, ThreadRollout.observe

    def noting(self, step, obs):
        if step == 0:
            firsts.setdefault(self.steps.start // 16, {})[self._thread.name] = obs.copy()
        return observe(self, step, obs)

    monkeypatch.setattr(ThreadRollout, "observe", noting)
    flags = tiny(tmp_path, "--total-timesteps=2560")
    assert run_alone(monkeypatch, script, *flags) == 0
    before = newest_checkpoint(tmp_path / "run")[1]
    rows = course(tmp_path / "run")
    assert run_alone(monkeypatch, script, *flags) == 2  # it exists
    capsys.readouterr()
    assert run_alone(monkeypatch, script, "--resume", tmp_path / "run", "--learner-device-ids", 0, 1) == 2
    reason = "--learner-device-ids 0 1: cannot change on --resume; the run was started with 0"
    assert capsys.readouterr().err == f"{script}.py: {reason}\n"
    assert run_alone(monkeypatch, script, "--resume", tmp_path / "run") == 0
    after = newest_checkpoint(tmp_path / "run")[1]
    assert course(tmp_path / "run") == rows
    assert leaves(before["script"]) == leaves(after["script"])
    # A timeline that is damaged where the run will write it again anyway.
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with open(tmp_path / "run" / "timeline.jsonl", "a") as file:
        file.write('garbage}\n{"torn')
    # The schedule goes on: rollout 11 from parameters 10, whatever the lag.
    assert run_alone(monkeypatch, script, "--resume", tmp_path / "run", "--total-timesteps=5120") == 0
    # Other episodes than those of the first start, and the same ones after each resume.
    assert len(np.unique(np.concatenate([*firsts[1].values(), *firsts[11].values()]), axis=0)) == 2 * 16
    assert run_alone(monkeypatch, script, "--resume", copy, "--total-timesteps=5120") == 0
    ours, theirs = (newest_checkpoint(run_dir) for run_dir in (tmp_path / "run", copy))
    assert ours[0] == theirs[0] == 5120 and leaves(ours[1]["script"]) == leaves(theirs[1]["script"])
    lags = [row["stats/policy_lag"] for row in read_metrics(tmp_path / "run")]
    assert lags == [0.0] * 20 if script == "cleanba_ppo" else lags == [0.0, *[1.0] * 9, 0.0, *[1.0] * 9]
    assert len((tmp_path / "run" / "timeline.jsonl").read_text().splitlines()) == 20


def test_stops_on_a_return_and_on_time(monkeypatch, tmp_path):
    flags = ["--total-timesteps=100000000", "--log-frequency=100000", "--checkpoint-every=None"]
    assert run_alone(monkeypatch, "cleanba_impala", *tiny(tmp_path / "return", *flags, "--target-return=40")) == 0
    result = summary(tmp_path / "return" / "run")
    assert result["episodes"] >= 100
    assert result["episodic_return"] > 35 and not result["interrupted"] and result["global_step"] < 1_000_000
    (row,) = read_metrics(tmp_path / "return" / "run")  # a log point at the end has all that ended since the last
    assert (row["global_step"], row["charts/episodes"]) == (result["global_step"], result["episodes"])
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path / "time", *flags, "--max-seconds=2")) == 0
    result = summary(tmp_path / "time" / "run")
    assert 2 <= newest_checkpoint(tmp_path / "time" / "run")[1]["run"]["training_seconds"] <= result["wall_seconds"]
    assert result["global_step"] > 0 and not result["interrupted"]
    assert [row["global_step"] for row in read_metrics(tmp_path / "time" / "run")] == [result["global_step"]]
    assert run_alone(monkeypatch, "cleanba_ppo", "--resume", tmp_path / "time" / "run", "--max-seconds=3") == 0
    assert newest_checkpoint(tmp_path / "time" / "run")[1]["run"]["training_seconds"] >= 3
    assert summary(tmp_path / "time" / "run")["global_step"] > result["global_step"]
    assert not summary(tmp_path / "time" / "run")["interrupted"]


# ---------------------------------------------------------------------------------------------------------- LAUNCHERS


@pytest.mark.long
def test_torchrun_restarts_from_the_checkpoint(tmp_path, free_port):
    flags = tiny(tmp_path, "--learner-device-ids", 0, 1, "--total-timesteps=200000", "--checkpoint-every=2560")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    process = launch("cleanba_impala", *flags, prefix=(*torchrun, f"--master-port={free_port}"))
    wait_for_log(tmp_path / "run", process, points=30)
    ranks_of(process)[1].kill()
    code, out = finish(process)
    assert code == 0 and last_step(tmp_path / "run") == 199_936, out
    steps = [row["global_step"] for row in read_metrics(tmp_path / "run")]
    assert steps == list(range(256, 199_937, 256))
    assert summary(tmp_path / "run")["optimizer_steps"] == 2 * len(steps)


@pytest.mark.long
def test_cleanbas_two_terminals(tmp_path):
    """Its README's d2 example, word for word: 2 tasks of an actor and three learners."""
    flags = ["--distributed", "--actor-device-ids", 0, "--learner-device-ids", 1, 2, 3, "--device=cpu"]
    flags += ["--env-id=CartPole-v1", "--total-timesteps=50000", f"--runs-dir={tmp_path}", "--run-name=run"]
    tasks = [launch("cleanba_ppo", *map(str, flags), environ={**TWO_TASKS, "SLURM_PROCID": str(i)}) for i in (0, 1)]
    for task in tasks:
        code, out = finish(task, 240)
        assert code == 0, out
    assert summary(tmp_path / "run")["num_envs"] == 2 * 2 * 48


@pytest.mark.long
@pytest.mark.parametrize("learners", ["0", "0 1", "1 2", "1 2 3", "1 2 3 4", "1 2 3 4 5 6"])
def test_layouts_of_cleanbas_readme(tmp_path, learners):
    flags = ["--actor-device-ids", "0", "--learner-device-ids", *learners.split(), "--device=cpu", "--compile"]
    flags += ["--env-id=CartPole-v1", "--total-timesteps=50000", f"--runs-dir={tmp_path}", "--run-name=run"]
    code, out = finish(launch("cleanba_ppo", *flags), 900)
    assert code == 0 and last_step(tmp_path / "run") == 49_152, out


# ----------------------------------------------------------------------------------------------------------- COMPILED


def random_rollout(action_space, device):
    generator = torch.Generator().manual_seed(0)
    rollout = Rollout.allocate(Box(-1, 1, (4,)), action_space, 16, 8, torch.device("cpu"))
    for column, scale in ((rollout.obs, 1), (rollout.logprobs, 0.1), (rollout.values, 1), (rollout.rewards, 1)):
        column.copy_(scale * torch.randn(column.shape, generator=generator))
    rollout.logprobs.sub_(0.7 if isinstance(action_space, Discrete) else 2.5)
    rollout.actions.copy_(torch.randint(2, rollout.actions.shape, generator=generator))
    for flag in (rollout.terminations, rollout.resets, rollout.dones):
        flag.copy_(torch.rand(flag.shape, generator=generator) < 0.1)
    rollout.dones.logical_or_(rollout.terminations)
    return Rollout(*(tensor.to(device) for tensor in rollout))


MODES = [pytest.param(dict(compile=True), "cpu")]
MODES += [pytest.param(dict(compile=c, cudagraphs=True), "cuda", marks=pytest.mark.cuda) for c in (False, True)]


@pytest.mark.parametrize(
    "script, action_space",
    [
        *[(script, Discrete(2)) for script in DISTRIBUTED],
        pytest.param("cleanba_ppo", Box(-1, 1, (2,)), marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("mode, device", MODES)
def test_compiled_updates_equal_eager_ones(script, action_space, mode, device):
    """Hundreds of gradient steps, from a warm-up that left no trace; and what is acted with afterwards."""
    module, device, outcomes = importlib.import_module(f"leanrl.{script}"), torch.device(device), []
    for switches in ({}, mode):
        args = module.Args(num_steps=16, total_timesteps=100 * 128, num_minibatches=2, num_envs=8, **switches)
        torch.manual_seed(0)
        agent = module.make_agent(Box(-1, 1, (4,)), action_space, args).to(device)
        rollout = random_rollout(action_space, device)
        act = make_executable(module.make_act(agent, args), device, args.compile, args.cudagraphs)
        start = deepcopy(agent.state_dict())
        optimizer = (Adam if script == "cleanba_ppo" else RMSprop)(agent.parameters(), lr=args.learning_rate)
        if script == "cleanba_ppo":
            batch = module.Batch.of(rollout)
            gradients, step = module.make_update(agent, optimizer, [batch], args)
            module.fill_targets(batch, rollout, args)
            rows = torch.arange(128, device=device)
            train = partial(module.train_epoch, [rows], args=args)
        else:
            gradients, step = module.make_update(agent, optimizer, [rollout], args)
            train = partial(module.train, torch.arange(8, device=device).view(2, 1, -1))
        *gradients, step = (make_executable(fn, device, args.compile, args.cudagraphs) for fn in (*gradients, step))
        train = partial(train, gradients=gradients, step=step, sum_over_shards=sum_in_order)
        with untouched([agent.state_dict(), optimizer.state_dict()], device):
            for _ in range(WARMUP_CALLS):
                train()
        assert leaves(agent.state_dict()) == leaves(start) and optimizer.num_steps.unique().item() == 0
        losses = torch.stack([train().cpu() for _ in range(150)])
        assert optimizer.num_steps.unique().item() == 300
        noise = torch.linspace(-1, 1, 16, device=device).view(8, 2)
        for _ in range(WARMUP_CALLS):
            acted = act(rollout.obs[0], noise)
        outcomes.append((losses, [acted.cpu(), *(p.detach().cpu() for p in agent.parameters())]))
        assert any((agent.state_dict()[name] - x).abs().max() > 1e-2 for name, x in start.items())
    (losses, params), (their_losses, their_params) = outcomes
    torch.testing.assert_close(params, their_params, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(losses, their_losses, rtol=1e-2, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("script", DISTRIBUTED)
def test_compiled_runs_learn(tmp_path, script):
    flags = tiny(tmp_path, "--learner-device-ids", 0, 1, "--total-timesteps=100000", "--num-actor-threads=1")
    code, out = finish(launch(script, *flags, "--compile"), 900)
    assert code == 0 and summary(tmp_path / "run")["episodic_return"] > 40, out


# ---------------------------------------------------------------------------------------------------------- BAD INPUT

BAD = [
    *[[flag, "0"] for flag in ("--local-num-envs", "--num-actor-threads", "--num-shards", "--num-steps")],
    *[[flag, "0"] for flag in ("--num-minibatches", "--log-frequency", "--env-threads", "--total-timesteps")],
    *[[flag, "0.0"] for flag in ("--timeout", "--learning-rate", "--max-grad-norm", "--max-seconds")],
    *[[flag, "0"] for flag in ("--gradient-accumulation-steps", "--evaluate-episodes", "--hiddens")],
    *[["--checksum-frequency", "0"], ["--snapshot-seconds", "0.0"]],
    *[["--gamma", value] for value in ("1.5", "nan")],
    *[["--target-return", value] for value in ("nan", "inf")],
    *[["--device", name] for name in ("cuda:1", "nonsense")],
    *[["--policy-lag", "-1"], ["--timeout", "1.9"], ["--start-timeout", "0.5"], ["--total-timesteps", "255"]],
    *[["--num-minibatches", "7"], ["--num-shards", "3"]],  # of 16 environments
    *[["--learner-device-ids", "1", "1"], ["--actor-device-ids", "-1"], ["--torso", "impala"], ["--seed", str(2**32)]],
    ["--env-id", "CartPol-v1"],
]


@pytest.mark.parametrize("script", DISTRIBUTED)
@pytest.mark.parametrize("flags", BAD, ids=" ".join)
def test_bad_values_are_one_line_and_nothing_is_written(monkeypatch, capsys, tmp_path, script, flags):
    """By a launcher; and, of the other script, by the only rank of a layout, as torchrun starts it without one."""
    launched = script == "cleanba_ppo" or "device-ids" in flags[0]
    start = run if launched else partial(run_alone, monkeypatch)
    assert start(script, *tiny(tmp_path / "runs"), *flags) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"{script}.py: {' '.join(flags)}: ") and err.count("\n") == 1 and out == "", err
    assert not (tmp_path / "runs").exists()


MORE_BAD = {
    "--cudagraphs": "--cudagraphs needs a CUDA device",
    "--capture-video": "--capture-video: ",
    "--distributed": "--distributed: SLURM_JOB_ID is not set",
    "--exact-reduction": "use --num-shards 2",
    "--exact-reduction --num-shards=2 --policy-lag=newest": "--policy-lag newest: makes every run different",
    "--env-backend=gymnasium --env-id=Catch-v0": "--env-id Catch-v0: is not a Gymnasium environment",
    "--env-backend=gymnasium --env-id=FrozenLake-v1": "--env-id FrozenLake-v1: has observations of Discrete(16)",
    "--num-minibatches=3 --gradient-accumulation-steps=2": "--num-minibatches 3: times --gradient-accumulation",
    "--env-id=Pendulum-v1": "--env-id Pendulum-v1: has continuous actions",  # bad for IMPALA alone
    "--env-id=Pendulum-v1 --torso=nature": "--env-id Pendulum-v1: has continuous actions",
}


@pytest.mark.parametrize("flags, words", MORE_BAD.items())
def test_more_bad_input(capsys, tmp_path, monkeypatch, flags, words):
    for name in ("SLURM_JOB_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    script = "cleanba_impala" if flags == "--env-id=Pendulum-v1" else "cleanba_ppo"
    assert run(script, *tiny(tmp_path / "runs"), *flags.split()) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_ranks_that_do_not_fit_the_layout(capsys, tmp_path, monkeypatch):
    start = partial(run_alone, monkeypatch, "cleanba_ppo", *tiny(tmp_path), WORLD_SIZE="3")
    assert start("--learner-device-ids", "0", "1") == 2
    assert "3 processes were started, but this layout needs 2 per group" in capsys.readouterr().err
    assert start("--actor-device-ids", "--learner-device-ids") == 2
    assert "--actor-device-ids : needs at least one device" in capsys.readouterr().err


def test_a_launcher_refuses_in_one_line(tmp_path):
    """What a process of the run finds out is told once, too."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text("{}")
    code, out = finish(launch("cleanba_ppo", *tiny(tmp_path, "--learner-device-ids", 1, 2)))
    assert code == 2 and out.count("\n") == 1
    assert re.match(r"cleanba_ppo.py: --run-name run: .* exists; continue it with --resume", last_line(out))
    # What all of them would find out is told by none of them.
    code, out = finish(launch("cleanba_ppo", *tiny(tmp_path, "--learner-device-ids", 1, 2, "--seed", 2**32)))
    assert (code, out) == (2, "cleanba_ppo.py: --seed 4294967296: must be between 0 and 2**32 - 1\n")


PRESETS = [("most_frames", 10, 768, 64), ("best_convergence", 6, 192, 128)]


@pytest.mark.parametrize("name, num_threads, num_envs, num_steps", PRESETS)
def test_presets_are_sebulbas_numbers(name, num_threads, num_envs, num_steps):
    """Its tpu-v4-max-fps and tpu-v4-max-convergence, where a batch size is that of one learner of three."""
    module = importlib.import_module("leanrl.cleanba_ppo")
    words = (REPOSITORY / "leanrl" / "sebulba" / "presets" / name).read_text().split()
    args = parse_args(module.Args, "cleanba_ppo", words)
    module.validate(args)
    layout = Layout.of(args)
    module.validate_shards(args, layout)
    assert (len(layout.members), layout.num_learners) == (4, 3) and layout.num_envs == num_threads * num_envs
    assert (args.num_actor_threads, args.local_num_envs, args.num_steps) == (num_threads, num_envs, num_steps)
    assert (args.learning_rate, args.num_minibatches, args.update_epochs) == (1e-3, 16, 2)
    assert (args.protocol, args.env_id, args.total_timesteps) == ("cleanrl", "Breakout-v5", 100_000_000)
    assert args.checkpoint_every >= 10 * layout.num_envs * args.num_steps  # else checkpoints take longer than updates


@pytest.mark.parametrize("script", DISTRIBUTED)
def test_environments_of_cleanbas_readme_fit(script):
    """120 of each thread, in every layout that it names."""
    module = importlib.import_module(f"leanrl.{script}")
    for learners in ((0,), (0, 1), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)):
        args = module.Args(learner_device_ids=learners, local_num_envs=120)
        module.validate_shards(args, Layout.of(args))


@pytest.mark.parametrize("script", DISTRIBUTED)
def test_help_names_cleanbas_flags(capsys, script):
    assert run(script, "--help") == 0
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    names = "env_id total_timesteps learning_rate local_num_envs num_actor_threads num_steps anneal_lr gamma "
    names += "num_minibatches gradient_accumulation_steps ent_coef vf_coef max_grad_norm channels "
    names += "actor_device_ids learner_device_ids distributed track save_model log_frequency"
    assert flags >= {"--" + name.replace("_", "-") for name in names.split()}
