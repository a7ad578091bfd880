"""The parts of the actor-learner system, each by itself: layouts, schedules, noise, rollouts, reports, sums."""

import pickle
import subprocess
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from sebulba_runs import ALONE

import leanrl.cleanba_ppo as ppo
import leanrl.sebulba.args
import leanrl.sebulba.collectives as collectives
from leanrl.sebulba import randomness, supervisor
from leanrl.sebulba.actor import ActingAgent, ActorThread
from leanrl.sebulba.args import SebulbaArgs, pool_threads
from leanrl.sebulba.collectives import RUN, sum_in_order
from leanrl.sebulba.environments import make_pool
from leanrl.sebulba.layout import Layout, parse_layout
from leanrl.sebulba.mailbox import Mailbox, Stalled, Stopped
from leanrl.sebulba.pipeline import version_for
from leanrl.sebulba.randomness import INCREMENT, _mix, action_noise, shard_generator
from leanrl.sebulba.records import Report, checksum, ended_episodes, returns_and_lengths
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.sebulba.start import first_host, resolve_start, slurm_task
from leanrl.support.envs import require_learnable
from leanrl.support.errors import UsageError
from leanrl.support.normalization import RunningMoments

# ------------------------------------------------------------------------------------------------------------ LAYOUT

# (layout, actor threads, environments of each) with 96 environments in all.
LAYOUTS = [
    *[(text, 2, 48) for text in ["a0-l0-d1", "a0-l0,1-d1", "a0-l1,0-d1", "a0-l1,2,3-d1", "a0-l1,2,3,4,5,6-d1"]],
    *[("a0-l1,2-d1", 1, 96), ("a0,1-l2,3-d1", 3, 16), ("a0-l0-d2", 2, 24), ("a0-l1,2-d3", 4, 8)],
    *[("a2,0-l0,5-d2", 3, 8), ("a0,1-l2,1-d2", 2, 12)],
]


def layout_of(text, threads, envs, shards=None):
    actors, learners, groups = parse_layout(text)
    return Layout(actors, learners, groups, threads, envs, shards)


@pytest.mark.parametrize("text, threads, envs", LAYOUTS)
@pytest.mark.parametrize("shards", [None, 12])
def test_every_environment_has_one_thread_and_one_learner(text, threads, envs, shards):
    layout = layout_of(text, threads, envs, shards)
    assert layout.num_envs == 96
    played = [e for a in range(layout.num_actors) for t in range(threads) for e in layout.thread_envs(a, t)]
    assert played == list(range(96))
    for role in ("actor", "learner"):  # numbers rise with the rank, by which a collective orders what it returns
        numbers = [getattr(part, role) for part in layout.members]
        assert [n for n in numbers if n is not None] == list(range(getattr(layout, f"num_{role}s")))
    served = [s for learner in range(layout.num_learners) for s in layout.shards_of(learner)]
    assert served == list(range(layout.num_shards))
    for learner in range(layout.num_learners):
        pieces = layout.pieces_of_learner(learner)
        envs_of_learner = [e for piece in pieces for e in piece.envs]
        assert envs_of_learner == [e for shard in layout.shards_of(learner) for e in layout.shard_envs(shard)]
        for piece in pieces:
            assert set(piece.envs) <= set(layout.thread_envs(piece.actor, piece.thread))
            assert set(piece.envs) <= set(layout.shard_envs(piece.shard))
            # A learner is fed by the actors of its own group only.
            assert layout.actor(piece.actor).group == layout.learner(learner).group
    sent = [p for a in range(layout.num_actors) for t in range(threads) for p in layout.pieces_of_thread(a, t)]
    assert sent == [p for learner in range(layout.num_learners) for p in layout.pieces_of_learner(learner)]


def test_a_shard_has_the_same_environments_in_every_layout():
    shards = [[layout_of(*words, 12).shard_envs(s) for s in range(12)] for words in LAYOUTS]
    assert all(one == shards[0] for one in shards)


@pytest.mark.parametrize(
    "text, threads, envs, shards, flag",
    [
        ("a0-l1,1-d1", 1, 8, None, "--learner-device-ids 1 1: "),
        ("a0,0-l1-d1", 1, 8, None, "--actor-device-ids 0 0: "),
        ("a0-l1,2-d1", 1, 8, 3, "--num-shards 3: "),
        ("a0-l1,2-d1", 1, 7, None, "--local-num-envs 7: "),
        ("a0-l0,1,2,3,4-d1", 2, 48, None, "--local-num-envs 48: "),
    ],
)
def test_layouts_that_cannot_be(text, threads, envs, shards, flag):
    with pytest.raises(UsageError, match=f"^{flag}") as error:
        layout_of(text, threads, envs, shards)
    if "multiple of" in (message := str(error.value)) and flag.startswith("--local"):
        layout_of(text, threads, int(message.rsplit(" ", 1)[1]), shards)  # the remedy works


@pytest.mark.parametrize("text", ["", "a0", "a0-l1", "a-l0-d1", "a0-l0-d0", "a0,-l0-d1", "a0-l0-d1 "])
def test_what_is_no_layout(text):
    with pytest.raises(UsageError, match="not a layout"):
        parse_layout(text)


# ------------------------------------------------------------------------------------------------------------- SLURM

TASK = {"SLURM_JOB_ID": "26017", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


def test_a_slurm_task_knows_its_place():
    step = "SLURM step 26017.0 on localhost"
    assert slurm_task(TASK) == (1, 2, 2, step, "localhost", 20_000 + 26017 % 12_000)
    assert slurm_task({**TASK, "MASTER_ADDR": "other", "MASTER_PORT": "5"}) == (1, 2, 2, step, "other", 5)
    for words, tasks_here in (("1(x2)", 1), ("12", 12), ("3(x2),2", 3)):
        assert slurm_task({**TASK, "SLURM_STEP_TASKS_PER_NODE": words}).tasks_here == tasks_here
    # Two tasks on one host, or one on each of two: neither is what places a task.
    assert slurm_task({**TASK, "SLURM_LOCALID": "7", "SLURM_STEP_NUM_NODES": "9"}) == slurm_task(TASK)


def test_steps_of_one_job_meet_apart():
    steps = [slurm_task({**TASK, "SLURM_JOB_ID": job, "SLURM_STEP_ID": str(i)}) for job in "12" for i in range(100)]
    assert len({step.port for step in steps}) == len({step.step for step in steps}) == 200


@pytest.mark.parametrize("name, value", [("SLURM_PROCID", None), ("SLURM_NTASKS", "x"), ("SLURM_PROCID", "2")])
def test_slurm_variables_that_make_no_sense(name, value):
    environ = {k: v for k, v in {**TASK, name: value}.items() if v is not None}
    with pytest.raises(UsageError, match=f"--distributed: .*{name if value != 'x' else 'SLURM'}"):
        slurm_task(environ)


HOSTS = {"localhost": "localhost", "gpu07,gpu08": "gpu07", "gpu[07-09,12],login": "gpu07"}
HOSTS |= {"gpu[7,9]": "gpu7", "a[01-02]-b,c": "a01-b"}


@pytest.mark.parametrize("nodelist, host", HOSTS.items())
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "text, cores, on_node, local, expected",
    [
        ("a0-l0-d1", 96, None, None, 48),
        ("a0-l0-d128", 96, None, 8, 6),  # under torchrun
        ("a0-l0-d8", 96, 96, 8, 6),  # SLURM's tasks, each of which may run anywhere
        ("a0-l0-d8", 12, 96, 8, 6),  # or only on cores of its own
        ("a0-l0-d8", 12, None, 8, 1),
        ("a0-l1,2,3-d4", 96, None, 8, 24),  # two of its groups here
        ("a0,1-l2-d1", 3, None, 3, 1),
    ],
)
def test_pools_share_the_cores_of_a_machine(monkeypatch, text, cores, on_node, local, expected):
    for name, value in (("SLURM_CPUS_ON_NODE", on_node), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, str(value)) if value is not None else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(leanrl.sebulba.args, "available_cores", lambda: cores)
    layout = layout_of(text, 2, 48)
    assert pool_threads(SebulbaArgs(), layout) == expected and pool_threads(SebulbaArgs(env_threads=5), layout) == 5


def test_a_task_tells_its_processes_who_else_is_here(monkeypatch):
    """So that the pools of eight groups on one machine do not each take all its cores."""
    task, children = {"SLURM_PROCID": "3", "SLURM_NTASKS": "128", "SLURM_STEP_TASKS_PER_NODE": "8(x16)"}, []
    for name, value in {**TASK, **task, "SLURM_CPUS_ON_NODE": "96"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervisor, "Supervisor", lambda theirs, *args: children.extend(theirs) or Mock(run=int))
    start = resolve_start(ppo.Args(env_id="CartPole-v1", distributed=True, device="cpu", run_name="mine"))
    supervisor.supervise(start, ppo.__file__)
    (child,) = children
    told = [child.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", RUN)]
    assert told == ["3", "0", "128", "8", f"{slurm_task({**TASK, **task}).step}, run mine"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told[3])
    monkeypatch.setattr(leanrl.sebulba.args, "available_cores", lambda: 96)
    assert pool_threads(start.args, start.layout) == 6


def test_images_need_their_channels_first():
    spaces = {"single_observation_space": Box(0, 255, (96, 96, 3), np.uint8), "single_action_space": Discrete(2)}
    with pytest.raises(UsageError, match=r"--env-id Film-v0: has images of shape \(96, 96, 3\); this script needs"):
        require_learnable(Mock(**spaces), "Film-v0")


# ---------------------------------------------------------------------------------------------------------- SCHEDULE


def test_the_lag_schedule():
    rollouts = range(1, 7)
    assert [version_for(r, 0) for r in rollouts] == [0, 1, 2, 3, 4, 5]
    assert [version_for(r, 1) for r in rollouts] == [0, 0, 1, 2, 3, 4]
    assert [version_for(r, 2) for r in rollouts] == [0, 0, 0, 1, 2, 3]
    # Resumed after 10 updates: nothing older is there.
    assert [version_for(r, 1, 10) for r in (11, 12, 13)] == [10, 10, 11]


def playing_threads(monkeypatch, policy_lag, num_threads, total_timesteps):
    """Actor threads whose rollouts hold the only parameter of their agents, and the list of their errors."""
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    sizes = {"local_num_envs": 1, "num_steps": 1, "num_actor_threads": num_threads, "total_timesteps": total_timesteps}
    start = resolve_start(ppo.Args(env_id="CartPole-v1", policy_lag=policy_lag, timeout=20, **sizes))
    threads, errors = [], []

    def play(thread):
        for rollout in thread.rollouts():
            rollout.choices[:] = thread.agent(torch.ones(1))

    for i in range(num_threads):
        agent = ActingAgent(torch.nn.Linear(1, 1, bias=False), "none")
        agent.load(torch.zeros(1))
        threads.append(ActorThread(start, i, agent, 0, lambda *error: errors.append(error)))
        threads[i].start(play)
    return threads, errors


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_threads_get_exactly_the_version_that_is_due(monkeypatch, lag):
    """Two threads and a learner, as fast as they can: the schedule alone keeps versions apart."""
    threads, errors = playing_threads(monkeypatch, lag, num_threads=2, total_timesteps=600)
    for update in range(1, 301):
        for thread in threads:
            (rollout,) = thread.take()
            assert rollout.values[-1] == rollout.header[1] == version_for(update, lag)
            thread.give_back([rollout])
        for thread in threads:
            thread.put_params(update, torch.full((1,), float(update)))
    for thread in threads:
        thread.join(20)
    assert not errors


def test_threads_take_the_newest_version_that_is_there(monkeypatch):
    """And play on where there is none."""
    (thread,), errors = playing_threads(monkeypatch, "newest", num_threads=1, total_timesteps=4)
    taken = [thread.take() for _ in range(2)]
    assert [(rollout.values[-1], *rollout.header[:2].tolist()) for (rollout,) in taken] == [(0, 1, 0), (0, 2, 0)]
    for version in (1, 2):
        thread.put_params(version, torch.full((1,), float(version)))
    for number, pieces in zip((3, 4), taken, strict=True):
        thread.give_back(pieces)
        (rollout,) = thread.take()
        assert (rollout.values[-1], *rollout.header[:2].tolist()) == (2, number, 2)
    thread.join(20)
    assert not errors


def test_waits_end_with_a_stall_or_a_stop():
    mailbox = Mailbox(0.05)
    with pytest.raises(Stalled, match=r"waited 0\.05 s for a thing"):
        mailbox.get("a thing")
    mailbox = Mailbox(20)
    threading.Timer(0.05, mailbox.close).start()
    with pytest.raises(Stopped):
        mailbox.get("a thing")


def test_a_suspended_process_is_no_stall():
    """As by SLURM, for longer than the time limit."""
    waits = "import subprocess, threading; from leanrl.sebulba.mailbox import Mailbox; mailbox = Mailbox(2); "
    waits += "threading.Timer(3.5, mailbox.put, [0]).start(); subprocess.Popen(['sh', '-c', 'sleep 0.5; kill -STOP "
    waits += "$PPID; sleep 2.5; kill -CONT $PPID']); mailbox.get('a thing')"
    assert subprocess.call([sys.executable, "-c", waits], timeout=60) == 0


# -------------------------------------------------------------------------------------------------------- RANDOMNESS

THREE = Discrete(3)


def noise(seed, envs, iteration, space=THREE, num_steps=16):
    steps = range(num_steps * iteration, num_steps * (iteration + 1))
    return action_noise(seed, envs, steps, space, torch.device("cpu")).numpy()


def test_noise_depends_on_seed_environment_and_step_alone():
    whole = noise(1, range(8), 4)
    assert np.array_equal(whole[8:, 5:6], noise(1, range(5, 6), 9, num_steps=8))
    columns = [whole[:, i] for i in range(8)] + [noise(1, range(1), i)[:, 0] for i in (3, 5)]
    columns += [noise(2, range(1), 4)[:, 0]]
    # No two share a number: streams are disjoint over environments, iterations and seeds.
    assert len(np.unique(np.stack(columns))) == len(columns) * 16 * 3


@pytest.mark.parametrize("space", [Discrete(5), Box(-1, 1, (5,))], ids=["discrete", "continuous"])
def test_noise_is_the_same_wherever_its_row_is_in_a_batch(space):
    whole = noise(1, range(200), 1, space)
    for first in range(0, 199, 7):
        for last in range(first + 1, 201, 13):
            assert np.array_equal(whole[:, first:last], noise(1, range(first, last), 1, space))


@pytest.mark.parametrize("bits", [0, -1])
@pytest.mark.parametrize("space", [Discrete(5), Box(-1, 1, (5,))], ids=["discrete", "continuous"])
def test_noise_is_finite_for_the_first_and_last_number(monkeypatch, space, bits):
    monkeypatch.setattr(randomness, "random_bits", lambda seed, draws: torch.full_like(draws, bits))
    assert np.isfinite(noise(1, range(2), 1, space)).all()


def test_random_bits_are_splitmix64s():
    """Those that follow from the state 1234567, as published with the generator."""
    states = torch.tensor(1234567) + INCREMENT * torch.arange(1, 4)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423 - 2**64]
    assert _mix(states).tolist() == expected


def test_gumbel_noise_samples_the_softmax():
    out = noise(3, range(2), 1, num_steps=20_000)
    logits = np.array([0.0, 1.0, -1.0])
    counts = np.bincount((out + logits).argmax(-1).ravel(), minlength=3) / 40_000
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(counts - expected).max() < 5 * np.sqrt(0.25 / 40_000)
    # All of the distribution: probabilities of what is drawn are uniform (Kolmogorov and Smirnov's distance).
    drawn = np.sort(np.exp(-np.exp(-out.astype(np.float64))).ravel())
    assert np.abs(drawn - (np.arange(len(drawn)) + 0.5) / len(drawn)).max() < 2 / np.sqrt(len(drawn))


def test_noise_of_continuous_actions_is_normal():
    out = noise(3, range(2), 1, Box(-1, 1, (3,)), num_steps=20_000)
    drawn = np.sort(torch.special.ndtr(torch.from_numpy(out).double()).flatten().numpy())
    assert np.abs(drawn - (np.arange(len(drawn)) + 0.5) / len(drawn)).max() < 2 / np.sqrt(len(drawn))
    # The numbers of an action, neighbours in time and environments do not go together.
    for one, other in ((out[..., 0], out[..., 1]), (out[1:], out[:-1]), (out[:, 0], out[:, 1])):
        assert abs((one * other).mean()) < 5 / np.sqrt(one.size)


def test_permutations_depend_on_seed_shard_and_iteration_alone():
    keys = (1, 2, 3), (1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)
    drawn = [shard_generator(*key).permutation(100) for key in keys]
    assert np.array_equal(drawn[0], drawn[1]) and len(np.unique(drawn, axis=0)) == 4


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
def test_pools_of_one_run_are_slices_of_one_big_pool(backend):
    """Environment k plays the same wherever it is, and no two play alike."""

    def play(envs, **options):
        pool = make_pool("CartPole-v1", envs, 1, "cleanba", backend, **options)
        obs = [pool.reset()[0]]
        for _ in range(30):
            obs.append(pool.step(np.ones(pool.num_envs, np.int64))[0])
        pool.close()
        return np.stack(obs)

    whole = play(range(6), num_threads=2)
    assert np.array_equal(whole[:, 2:5], play(range(2, 5)))
    assert len(np.unique(whole[0], axis=0)) == 6
    resumed = play(range(6), start=64)
    assert len(np.unique(np.concatenate([whole[0], resumed[0]]), axis=0)) == 12


# ----------------------------------------------------------------------------------------------------------- ROLLOUT


CPU, NUMBERS, TIMES = torch.device("cpu"), Box(-1, 1, (1,)), (0.0,) * 4


@pytest.mark.parametrize("space", [Discrete(256), Box(-1, 1, (7,))], ids=["discrete", "continuous"])
def test_a_rollout_is_one_message(space):
    a, b = (Rollout.allocate(Box(0, 255, (4, 6, 2), np.uint8), space, 5, 3, CPU) for _ in range(2))
    generator, written = torch.Generator().manual_seed(0), []
    for field in [a.header, *a.columns()]:
        limit = 2 if field.dtype == torch.bool else 256
        written.append(torch.randint(limit, field.shape, generator=generator).to(field.dtype))
        field.copy_(written[-1])
    b.buffer.copy_(a.buffer)
    for ours, theirs in zip(written, [b.header, *b.columns()], strict=True):
        assert torch.equal(ours, theirs)
        assert theirs.data_ptr() % 64 == b.buffer.data_ptr() % 64
    assert a.obs.shape == (6, 3, 4, 6, 2) and a.actions.shape == (5, 3, *space.shape)
    assert a.obs[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shards", [None, 12])
def test_episodes_are_told_by_step_and_environment(shards):
    """Whichever learner they ended at."""
    layout, reports = layout_of("a0-l1,2,3-d1", 2, 48, shards), []
    ended = [(4, 95, 1.5), (0, 40, 2.5), (4, 3, 3.5), (1, 64, 4.5), (1, 31, 5.5)]
    for learner in range(3):
        rollouts = {}
        for shard in layout.shards_of(learner):
            rollouts[shard] = rollout = Rollout.allocate(NUMBERS, Discrete(2), 5, layout.shard_size, CPU)
            rollout.returns.fill_(torch.nan)
            for step, env, total in ended:
                if env in (envs := layout.shard_envs(shard)):
                    rollout.returns[step, env - envs.start] = total
                    rollout.lengths[step, env - envs.start] = env
        reports.append(Report(*TIMES, [], ended_episodes(layout, rollouts)))
    assert returns_and_lengths(reports) == ([2.5, 5.5, 4.5, 3.5, 1.5], [40, 31, 64, 3, 95])


def test_moments_of_parts_are_those_of_the_whole():
    """However far from 0, and less what does not count."""
    moments, generator = RunningMoments((3,), count=0.0), torch.Generator().manual_seed(0)
    seen = []
    for _ in range(4):
        batch = 1e4 + torch.randn(5, 8, 3, generator=generator)
        weights = (torch.rand(5, 8, generator=generator) > 0.2).float()
        seen.append(batch[weights > 0])
        moments.add(sum_in_order(moments.sums(batch[:, i : i + 2], weights[:, i : i + 2]) for i in range(0, 8, 2)))
    whole = torch.cat(seen).double()
    assert moments.count.item() == len(whole)
    torch.testing.assert_close(moments.mean, whole.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.var, whole.var(0, correction=0), rtol=1e-6, atol=0)
    x = whole[:7].float()
    expected = ((x - moments.mean) / (moments.var + 1e-8).sqrt()).clamp(-10, 10)
    torch.testing.assert_close(moments(x), expected.float())
    assert moments(x + 1e6).eq(10).all() and moments(x).dtype == torch.float32


class OneOfMany:
    """Stands for torch.distributed in one process: what it is told, all others tell, too."""

    def __init__(self, monkeypatch) -> None:
        self.groups, self.received = [], 0
        monkeypatch.setattr(collectives, "_rendezvous", lambda *args: collectives.dist.HashStore())
        for name in ("init_process_group", "new_group", "all_gather", "all_reduce", "gather_object"):
            monkeypatch.setattr(collectives.dist, name, getattr(self, name))

    def init_process_group(self, *args, world_size, **kwargs) -> None:
        self.world_size = world_size

    def new_group(self, ranks=None, timeout=None) -> int:
        self.groups.append(len(ranks or range(self.world_size)))
        return len(self.groups)

    def all_gather(self, tensors, tensor, group) -> None:
        assert len(tensors) == self.groups[group - 1]
        self.received += sum(told.copy_(tensor).nbytes for told in tensors)

    def all_reduce(self, tensor, group) -> None:
        tensor.mul_(self.groups[group - 1])

    def gather_object(self, told, everyone, rank, group) -> None:
        if everyone is not None:
            everyone[:] = [told] * self.groups[group - 1]
            self.received += len(everyone) * len(pickle.dumps(told))


@pytest.mark.parametrize("text, groups", [("a0-l0-d128", [128]), ("a0-l1,2,3-d32", [128, 96])])
@pytest.mark.parametrize("learner", [0, 40])
def test_what_128_devices_tell_each_other(monkeypatch, text, groups, learner):
    """No process makes many groups, and reports are small: large ones took longer than some updates."""
    layout, world, sent = layout_of(text, 2, 48), OneOfMany(monkeypatch), []
    ours = collectives.Collectives(layout, layout.learner(learner), CPU, SebulbaArgs())
    (shard,) = layout.shards_of(learner)
    rollout = Rollout.allocate(NUMBERS, Discrete(2), 128, layout.shard_size, CPU)
    rollout.returns.fill_(torch.nan)
    rollout.returns[::16, ::4] = 1.0  # an episode ends every 64 steps
    pieces = [(piece, Header(1)) for piece in layout.pieces_of_learner(learner)]
    monkeypatch.setattr(ours, "start", lambda sends, *args: sent.extend(rank for rank, _ in sends) or [])
    assert ours.gather_ints((False, 7)) == [[0, 7]] * layout.num_learners
    assert ours.sum_over_shards([torch.ones(3)]).tolist() == [layout.num_learners] * 3
    reports = ours.gather_reports(Report(*TIMES, pieces, ended_episodes(layout, {shard: rollout})))
    ours.pass_params(torch.zeros(10))
    assert world.groups == groups
    if learner == 0:
        episodes, _ = returns_and_lengths(reports)
        assert len(episodes) == layout.num_learners * 8 * layout.shard_size // 4 and world.received < 1e6
    else:
        assert reports == [] and world.received <= 16 * layout.num_learners
    assert sent == ([0] if text == "a0-l1,2,3-d32" and learner == 0 else [])


def test_the_checksum_sees_every_bit():
    params = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sums = {checksum(params)}
    for i in (0, 500, 999):
        changed = params.clone()
        changed.view(torch.int32)[i] ^= 1
        sums.add(checksum(changed))
    swapped = params.clone()
    swapped[[3, 4]] = params[[4, 3]]
    assert len(sums | {checksum(swapped)}) == 5 and checksum(params.clone()) in sums
