"""The same curve on any layout, bit for bit, and a comparison that notices when it is not."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from scripts import course, newest_checkpoint, summary
from sebulba_runs import DISTRIBUTED, needs_gpus, run_alone, run_both, tiny
from torch.utils._pytree import tree_flatten_with_path

import leanrl.cleanba_ppo as ppo
import leanrl.sebulba.actor as actor
import leanrl.sebulba.collectives as collectives
import leanrl.support.envs as envs
from leanrl.sebulba.worker import Worker
from leanrl.support.optim import RMSprop
from leanrl.support.tracking import read_metrics
from leanrl.tools import trials
from leanrl.tools.reproduce import Args, Case, command, difference, fingerprint, run_case

UPDATES = 20
TASKS = [*[(script, "CartPole-v1") for script in DISTRIBUTED], ("cleanba_ppo", "Pendulum-v1")]
ARGS = Args(num_envs=16, num_shards=4, num_steps=16, updates=UPDATES)


def run_here(monkeypatch, folder, run, args=ARGS, run_ranks=run_alone):
    """``run_case`` of a layout of one process, without the start of two, or of two with ``run_both``."""
    assert run_ranks(monkeypatch, run.script, *command(run, args, folder)[2:]) == 0
    leaves, _ = tree_flatten_with_path(newest_checkpoint(folder / run.name)[1]["script"])
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


# The first one's learners are listed in another order than their ranks'.
LAYOUTS = [
    ("cleanba_ppo", 0, "a0-l1,0-d1", {}),
    ("cleanba_impala", 1, "a0-l1,2-d1", {}),
    ("cleanba_impala", 0, "a0-l1-d1", {"env_backend": "gymnasium"}),
    ("cleanba_ppo", 0, "a0-l1,2-d1", {"env_id": "Pendulum-v1"}),
]


@pytest.mark.parametrize("script, lag, layout, changes", LAYOUTS)
def test_layouts_learn_the_same(monkeypatch, tmp_path, script, lag, layout, changes):
    args = replace(ARGS, **changes)
    alone = run_here(monkeypatch, tmp_path, Case(script, "a0-l0-d1", lag, True, UPDATES), args)
    assert summary(tmp_path / Case(script, "a0-l0-d1", lag, True, UPDATES).name)["optimizer_steps"] >= 2 * UPDATES
    run = Case(script, layout, lag, True, UPDATES)
    in_this_process = layout == "a0-l1,0-d1"
    ours = run_here(monkeypatch, tmp_path, run, args, run_both) if in_this_process else run_case(run, args, tmp_path)
    assert fingerprint(ours) == fingerprint(alone)
    # Of ten updates each; before the first rollouts there were fewer updates to lag behind.
    first, *lags = [row["stats/policy_lag"] for row in read_metrics(tmp_path / run.name)]
    assert first == pytest.approx(lag - lag * (lag + 1) / 2 / 10) and set(lags) == {float(lag)}


def test_two_steps_of_a_job_run_side_by_side(monkeypatch, tmp_path):
    """On one host, of two groups each: both learn what one group alone does."""
    steps, environ, job = iter("01"), trials.child_environ, random.randrange(10**6)
    monkeypatch.setattr(trials, "child_environ", lambda: {**environ(), "SLURM_STEP_ID": next(steps)})
    monkeypatch.setattr(trials.random, "randrange", lambda limit: job)
    runs = [Case("cleanba_impala", layout, 1, True, UPDATES) for layout in ("a0-l0-d1", "a0-l0-d2")]
    cases = [replace(ARGS, seed=seed) for seed in (1, 2)]
    alone = [fingerprint(run_here(monkeypatch, tmp_path / f"{args.seed}", runs[0], args)) for args in cases]
    with ThreadPoolExecutor() as pool:
        together = pool.map(lambda args: fingerprint(run_case(runs[1], args, tmp_path / f"{args.seed}")), cases)
    assert alone == [*together] and alone[0] != alone[1]


GPUS = {"a0-l1-d1": 2, "a0-l0,1-d1": 2, "a0-l0-d2": 2, "a0-l1,2-d1": 3}


@pytest.mark.parametrize("script, lag", [("cleanba_ppo", 0), ("cleanba_impala", 1)])
@pytest.mark.parametrize("layout", [pytest.param(text, marks=needs_gpus(n)) for text, n in GPUS.items()])
@pytest.mark.cuda
def test_layouts_of_gpus_learn_the_same(tmp_path, script, lag, layout):
    args = replace(ARGS, device="cuda")
    runs = [Case(script, text, lag, True, UPDATES) for text in ("a0-l0-d1", layout)]
    alone, ours = (fingerprint(run_case(run, args, tmp_path)) for run in runs)
    assert ours == alone


@pytest.mark.long
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("script, env_id", TASKS)
def test_every_layout_learns_the_same(tmp_path, script, env_id, lag):
    layouts = ("a0-l0-d1", "a0-l0,1-d1", "a0-l1-d1", "a0-l1,2-d1", "a0-l1,2,3,4-d1", "a0-l0-d2", "a0,1-l2,1-d1")
    args = replace(ARGS, env_id=env_id)
    prints = [fingerprint(run_case(Case(script, layout, lag, True, UPDATES), args, tmp_path)) for layout in layouts]
    assert len(set(prints)) == 1
    ones = [run_case(Case(script, layout, lag, False, 1), args, tmp_path) for layout in layouts]
    assert max(difference(ones[0], one) for one in ones) < 1e-5


def test_one_layout_repeats_itself_and_another_seed_does_not(monkeypatch, tmp_path):
    runs = [Case("cleanba_impala", "a0-l0-d1", 1, exact, UPDATES, n) for n in (0, 1) for exact in (True, False)]
    prints = [fingerprint(run_here(monkeypatch, tmp_path, run)) for run in runs]
    assert prints[:2] == prints[2:]
    monkeypatch.setattr(ARGS, "seed", 2)
    other = run_here(monkeypatch, tmp_path, Case("cleanba_impala", "a0-l0-d1", 1, True, UPDATES, 2))
    assert fingerprint(other) not in prints


def seed_off(monkeypatch):
    """Threads forget that they are not the first."""
    seeds = envs.env_seeds
    monkeypatch.setattr(envs, "env_seeds", lambda seed, n, first, start: seeds(seed, n, 0, start))


def noise_off(monkeypatch):
    """One environment draws the noise of another."""
    draw = ppo.action_noise

    def noise(seed, envs, *rest):
        return draw(seed, range(envs.start + 1, envs.stop + 1), *rest)

    monkeypatch.setattr(ppo, "action_noise", noise)


def reduction_off(monkeypatch):
    """Sums in another order."""
    in_order = collectives.sum_in_order
    monkeypatch.setattr(collectives, "sum_in_order", lambda vectors: in_order(list(vectors)[::-1]))


@pytest.mark.parametrize("fault", [seed_off, noise_off, reduction_off])
def test_the_comparison_notices(monkeypatch, tmp_path, fault):
    run = Case("cleanba_ppo", "a0-l0-d1", 0, True, UPDATES)
    right = run_here(monkeypatch, tmp_path / "right", run)
    fault(monkeypatch)
    assert fingerprint(run_here(monkeypatch, tmp_path / "wrong", run)) != fingerprint(right)


@pytest.mark.cuda
def test_exact_reduction_forbids_kernels_that_vary(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    flags = ["--device=cuda", "--exact-reduction", "--num-shards=2", "--total-timesteps=512"]
    assert run_alone(monkeypatch, "cleanba_impala", *tiny(tmp_path, *flags)) == 0
    assert torch.backends.cudnn.deterministic


@pytest.mark.parametrize("lag", [0, 1])
def test_a_wrong_lag_ends_the_run(monkeypatch, tmp_path, capsys, lag):
    """Actors that take a version too old, as "the latest there is" may be; the learner notices."""
    begin = actor.ThreadRollout.__init__

    def begin_late(self, thread, pieces, header):
        late = header.rollout == 5 if lag else header.version > 0
        begin(self, thread, pieces, header._replace(version=header.version - late))

    monkeypatch.setattr(actor.ThreadRollout, "__init__", begin_late)
    flags = ["--total-timesteps=4096", f"--policy-lag={lag}", "--num-actor-threads=1", "--timeout=20"]
    assert run_alone(monkeypatch, "cleanba_impala", *tiny(tmp_path, *flags)) == 1
    number, came, wanted = (2, 0, 1) if lag == 0 else (5, 2, 3)
    expected = f"delivered rollout {number} of parameters {came}, but rollout {number} of parameters {wanted} was due"
    assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("script, env_id", TASKS)
def test_acting_follows_the_learner(monkeypatch, tmp_path, script, env_id):
    """With lag 0, actors tell the probabilities and values of the parameters that the learner begins with."""
    rollouts_due, errors = Worker.rollouts_due, []

    @torch.no_grad()
    def compare(worker):
        for rollout in worker.shards.values():
            policy, _ = worker._agent(rollout.obs[:-1].flatten(0, 1))
            logprobs = ppo.distribution(policy).log_prob(rollout.actions.flatten(0, 1))
            errors.append((logprobs - rollout.logprobs.flatten()).abs().max().item())
            known = slice(-1 if script == "cleanba_impala" else None)  # of the last row only PPO needs the values
            values = worker._agent(rollout.obs[known].flatten(0, 1))[1]
            torch.testing.assert_close(rollout.values[known].flatten(), values, rtol=1e-5, atol=1e-5)

    monkeypatch.setattr(Worker, "rollouts_due", lambda self: (compare(self) or n for n in rollouts_due(self)))
    flags = ["--total-timesteps=5120", "--policy-lag=0", "--num-shards=2", "--learning-rate=0.01"]
    if script == "cleanba_ppo":
        flags += ["--num-minibatches=1", "--update-epochs=1"]
    assert run_alone(monkeypatch, script, *tiny(tmp_path, *flags, f"--env-id={env_id}")) == 0
    assert len(errors) == 40 and max(errors) < 1e-5
    assert all(abs(row.get("losses/approx_kl", 0.0)) < 1e-6 for row in read_metrics(tmp_path / "run"))


def test_actors_have_one_thread_of_pytorch_and_learners_theirs(monkeypatch, tmp_path):
    """From the first operation on: what an actor started once would disturb the learner's threads for good."""
    watched = {"load": actor.ActingAgent, "observe": actor.ThreadRollout, "publish": Worker}
    numbers = {name: set() for name in watched}

    def noting(name, function):
        return lambda *args, **kwargs: numbers[name].add(torch.get_num_threads()) or function(*args, **kwargs)

    for name, owner in watched.items():
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    before = torch.get_num_threads()
    try:
        assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, "--total-timesteps=1024", "--num-threads=2")) == 0
    finally:
        torch.set_num_threads(before)
    assert numbers == {"load": {1}, "observe": {1}, "publish": {2}}


@pytest.mark.parametrize("script", DISTRIBUTED)
def test_accumulated_gradients_are_the_whole_ones(monkeypatch, tmp_path, script):
    """Up to the order of sums, where parts are not normalised by themselves."""
    flags = ["--total-timesteps=256", *(["--no-norm-adv"] if script == "cleanba_ppo" else [])]
    states, losses = [], []
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        more = [f"--gradient-accumulation-steps={parts}", "--policy-lag=0"]
        assert run_alone(monkeypatch, script, *tiny(folder, *flags, *more)) == 0
        states.append(newest_checkpoint(folder / "run")[1]["script"]["agent"])
        losses.append({key: value for key, value in course(folder / "run")[-1].items() if key.startswith("losses/")})
    assert summary(folder / "run")["optimizer_steps"] == (8 if script == "cleanba_ppo" else 2)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)
    for ours, theirs in zip(*(state.values() for state in states), strict=True):
        # Adam's steps were up to 2e-3; where a gradient is nearly 0, its last bits decide a part of them.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_environments_and_noise_are_disjoint(monkeypatch, tmp_path):
    """Over threads: no two environments of a run see the same, or draw the same."""
    seen, drawn = [], []
    observe, draw = actor.ThreadRollout.observe, ppo.action_noise

    def watch(self, step, obs):
        if step == 0:
            seen.append(obs.copy())
        return observe(self, step, obs)

    monkeypatch.setattr(actor.ThreadRollout, "observe", watch)
    monkeypatch.setattr(ppo, "action_noise", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    assert run_alone(monkeypatch, "cleanba_ppo", *tiny(tmp_path, "--total-timesteps=512", "--num-actor-threads=4")) == 0
    first, noise = np.concatenate(seen), np.concatenate(drawn, 1)
    assert len(np.unique(first, axis=0)) == 32 and noise.shape[1] == 32
    assert all(not np.array_equal(noise[:, i], noise[:, j]) for i, j in itertools.combinations(range(32), 2))


def test_replicas_that_differ_end_the_run(monkeypatch, tmp_path, capsys):
    step = RMSprop.step

    def broken(self):
        step(self)
        if self.num_steps[0] > 10:
            self.params[1].data[7] += 1e-6

    monkeypatch.setattr(RMSprop, "step", broken)  # in this process, of rank 1, alone
    flags = tiny(tmp_path, "--learner-device-ids", 0, 1, "--total-timesteps=5120", "--checksum-frequency=5")
    assert run_both(monkeypatch, "cleanba_impala", *flags, rank=1) == 1
    assert "actor 0 and learner 0 (rank 0) differ after update 10" in capsys.readouterr().err.splitlines()[-1]
