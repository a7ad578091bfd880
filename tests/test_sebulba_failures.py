"""A run whose part dies, fails or hangs ends at once, with that part's name; real processes and signals."""

import json
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from scripts import summary, wait_until
from sebulba_runs import ALONE, DISTRIBUTED, alive, finish, last_line, launch, needs_gpus, ranks_of, tiny, wait_for_log

from leanrl.sebulba import collectives
from leanrl.sebulba.collectives import RUN, last_of_all, waiting_for
from leanrl.sebulba.layout import Layout
from leanrl.sebulba.status import STATUS_FD, UNDER_WAY, PeerLost, Status
from leanrl.sebulba.supervisor import Child, Supervisor, local_store
from leanrl.support.signals import StopRequest

LAYOUT = ["--actor-device-ids", 0, "--learner-device-ids", 1, 2]
SMALL_LAYOUT = ["--actor-device-ids", 0, "--learner-device-ids", 1]
NAMES = ["actor 0 (rank 0)", "learner 0 (rank 1)", "learner 1 (rank 2)"]
FOREVER = "--total-timesteps=1000000000"


@pytest.fixture
def endless(tmp_path):
    """Starts a run that has logged, and gives its launcher and its ranks' processes."""

    def start(script, *flags):
        process = launch(script, *tiny(tmp_path, FOREVER, *LAYOUT, *flags))
        wait_for_log(tmp_path / "run", process)
        return process, ranks_of(process)

    return start


@pytest.mark.parametrize(
    "script, victim, flags",
    [
        ("cleanba_ppo", 2, []),
        ("cleanba_impala", 1, ["--policy-lag=newest"]),
        pytest.param("cleanba_ppo", 1, ["--device=cuda", *SMALL_LAYOUT], marks=[pytest.mark.cuda, needs_gpus(2)]),
        *[pytest.param(script, victim, [], marks=pytest.mark.long) for script in DISTRIBUTED for victim in range(3)],
    ],
)
def test_kill_9_ends_the_run(endless, script, victim, flags):
    launcher, ranks = endless(script, *flags)
    ranks[victim].kill()
    code, out = finish(launcher, 30)
    assert (code, last_line(out)) == (1, f"{NAMES[victim]} killed by signal 9")
    assert not alive(ranks)


def test_a_stopped_launcher_goes_on_and_a_stopped_process_is_a_stall(endless):
    """The launcher as after Ctrl-Z and fg: it has heard of nobody for longer than the timeout; all are there."""
    launcher, ranks = endless("cleanba_impala", "--timeout=4")
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(4.5)
    launcher.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert launcher.poll() is None and len(alive(ranks)) == 3
    ranks[2].send_signal(signal.SIGSTOP)
    code, out = finish(launcher, 30)
    assert code == 1 and last_line(out).startswith("learner 1 (rank 2) has not answered for ")
    assert not alive(ranks)


@pytest.mark.cuda
@needs_gpus(2)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_stopped_process_of_a_gpu_is_named(endless, lag):
    """By its silence or, where NCCL's watchdog ends the one that waits for it first, by what it had come to."""
    launcher, ranks = endless("cleanba_impala", "--device=cuda", "--timeout=10", f"--policy-lag={lag}", *SMALL_LAYOUT)
    ranks[1].send_signal(signal.SIGSTOP)
    code, out = finish(launcher)
    assert code == 1 and not alive(ranks)
    assert re.search(r"learner 0 \(rank 1\) (has not answered for|had only reached) ", last_line(out))


@pytest.mark.parametrize(
    "told, limits, expected",
    [
        (json.dumps(UNDER_WAY) + "\n", (60, 1), r"\d s"),  # however short the timeout
        ("", (2, 1), r"([2-9]|\d\d+) s at start-up; see --start-timeout"),  # a limit of its own
    ],
)
def test_silence_is_told(capfd, told, limits, expected):
    silent = f"import os, time; os.write(int(os.environ['{STATUS_FD}']), {told.encode()}); time.sleep(600)"
    child = Child("learner 7 (rank 9)", [sys.executable, "-c", silent], dict(os.environ))
    assert Supervisor([child], *limits).run() == 1
    assert re.fullmatch(rf"learner 7 \(rank 9\) has not answered for {expected}\n", capfd.readouterr().err)


STALL = "learner 7 (rank 9): waited 2 s for a rollout"


@pytest.mark.parametrize(
    "answer, code, said",
    [
        # Of a child that a signal does not end, and that has not come to its own end yet.
        (f"""os.write(fd, b'{{"kind": "stall", "message": "{STALL}"}}\\n')""", 1, f"{STALL}\n"),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(2)", 2, ""),  # bad input, which it has told itself
    ],
)
def test_a_signal_is_passed_on_and_the_answer_heard(capfd, answer, code, said):
    signalled = f"""
import os, signal, sys, time
fd = int(os.environ["{STATUS_FD}"])
signal.signal(signal.SIGTERM, lambda *_: {answer})
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    child = Child("learner 7 (rank 9)", [sys.executable, "-c", signalled], dict(os.environ))
    assert Supervisor([child], start_timeout=60, timeout=60).run() == code
    assert capfd.readouterr().err == said


def test_ctrl_c_before_the_run_has_begun_is_quiet(tmp_path):
    launcher = launch("cleanba_ppo", *tiny(tmp_path, FOREVER, *LAYOUT))
    wait_until(lambda: len(psutil.Process(launcher.pid).children()) >= 3, launcher, 60)
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher) == (130, "")


def patched(folder, code):
    """Variables that make every Python of a run execute ``code`` before the script."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


# One rank imports for long, and gives no sign of life while it warms up: this sleep keeps the interpreter to itself.
LATE = """
import ctypes, os
if os.environ.get("RANK") == "1":
    sleep = ctypes.PyDLL(None).sleep
    sleep(5)
    from leanrl.sebulba.worker import Worker
    warmup = Worker.warmup
    Worker.warmup = lambda self: sleep(5) or warmup(self)
"""


def test_a_start_may_take_longer_than_the_timeout(tmp_path):
    flags = tiny(tmp_path, "--total-timesteps=2560", *SMALL_LAYOUT, "--timeout=3")
    code, out = finish(launch("cleanba_ppo", *flags, environ=patched(tmp_path, LATE)), 240)
    assert code == 0 and summary(tmp_path / "run")["global_step"] == 2560, out


def test_a_warm_up_that_takes_too_long_ends_the_run(tmp_path):
    """Where nobody else would: without a supervisor, and without peers that wait."""
    hang = "import time; from leanrl.sebulba import status; from leanrl.support import devices; "
    hang += "devices.one_thread = lambda: time.sleep(600); status.GRACE_SECONDS = 2"
    process = launch("cleanba_ppo", *tiny(tmp_path, "--start-timeout=1"), environ=ALONE | patched(tmp_path, hang))
    code, out = finish(process)
    assert code == 1 and "Traceback" not in out
    assert last_line(out) == "actor 0 and learner 0 (rank 0): its warm-up takes longer than --start-timeout 1 s"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_without_a_supervisor_ends_when_its_peer_does(tmp_path, number):
    """As under torchrun, or if the peer's supervisor is another: at its next message, or after --timeout."""
    store = local_store()
    environ = {**ALONE, "WORLD_SIZE": "2", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    flags = tiny(tmp_path, FOREVER, *SMALL_LAYOUT, "--timeout=5")
    peer, lead = (launch("cleanba_ppo", *flags, environ={**environ, "RANK": rank}) for rank in "01")
    wait_for_log(tmp_path / "run", lead)
    peer.send_signal(number)
    code, out = finish(lead, 60)
    assert code == 1 and last_line(out).startswith("learner 0 (rank 1): lost actor 0 (rank 0), ")


# As NCCL's watchdog does with a process that has waited for too long.
ABORT = """
import os, resource, threading, time
from leanrl.sebulba.pipeline import Pipeline
exchange = Pipeline.exchange

def broken(self, number, stop):
    if number == 5 and self.member.rank == 0:
        self.threads[0].take = lambda: time.sleep(600)
    if number == 5 and self.member.rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.Timer(2, os.abort).start()
    return exchange(self, number, stop)

Pipeline.exchange = broken
"""


def test_an_abort_tells_who_was_waited_for(tmp_path):
    process = launch("cleanba_ppo", *tiny(tmp_path, FOREVER, *SMALL_LAYOUT), environ=patched(tmp_path, ABORT))
    code, out = finish(process)
    expected = "learner 0 (rank 1) killed by signal 6; actor 0 (rank 0) had only reached playing rollout 5"
    assert (code, last_line(out)) == (1, expected)


def test_those_that_are_behind_are_named(monkeypatch):
    """Of this run only, and of a hundred not all."""
    layout, store = Layout((0,), (1,), num_groups=3), local_store()
    environ = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), RUN: "mine"}
    assert last_of_all(layout, environ) == ""
    mine, other = (dist.PrefixStore(f"{run}, attempt 0", store) for run in ("mine", "other"))
    other.set("phase 0", "1 0")
    for rank, progress in enumerate(("12 0", "12 1", "9 4", "9 4", "12 0")):
        mine.set(f"phase {rank}", progress)
    names = "actor 1 (rank 2) and learner 1 (rank 3)"
    assert last_of_all(layout, environ) == f"{names} had only reached parameters of update 9"
    for rank in (0, 1, 4):
        mine.set(f"phase {rank}", "9 4")
    assert last_of_all(layout, environ) == ""
    mine.set("phase 5", "10 0")
    assert "learner 0 (rank 1) and actor 1 (rank 2) and 2 more had" in last_of_all(layout, environ)
    monkeypatch.setattr(collectives, "STORE_SECONDS", 0.1)
    assert last_of_all(layout, {**environ, "MASTER_PORT": "1"}) == ""


# In the hundredth step of the second actor thread.
FAULT = """
from leanrl.sebulba.actor import ThreadRollout
record = ThreadRollout.record

def broken(self, step, *told):
    if self.steps[step] == 99 and self._thread.env_indices.start == 8:
        raise ValueError("the emulator is out of order")
    record(self, step, *told)

ThreadRollout.record = broken
"""


def test_an_error_in_an_actor_thread_ends_the_run(tmp_path):
    """Also where the main thread waits in a collective at that moment."""
    process = launch("cleanba_impala", *tiny(tmp_path, FOREVER, *SMALL_LAYOUT), environ=patched(tmp_path, FAULT))
    code, out = finish(process)
    assert code == 1 and "Traceback" in out
    assert last_line(out) == "actor thread 1 (rank 0): ValueError: the emulator is out of order"


def test_a_run_is_closed_after_an_error_in_an_actor_thread(tmp_path):
    """Without a supervisor, which would not let it take long."""
    note = "import leanrl.support.tracking as tracking; tracking.Tracker.close = lambda self, failed: print('closed')"
    environ = ALONE | patched(tmp_path, f"{FAULT}\n{note}\n")
    code, out = finish(launch("cleanba_impala", *tiny(tmp_path, FOREVER), environ=environ))
    assert code == 1 and "closed" in out.splitlines()
    assert "actor thread 1 (rank 0): ValueError: the emulator is out of order" in out.splitlines()


def test_a_reason_is_one_line_of_a_pipe_whatever_it_holds(monkeypatch):
    told, ours = os.pipe()
    status = Status("learner 7 (rank 9)")
    monkeypatch.setattr(status, "_fd", ours)
    status.fail(ValueError("\0\x1b" * 500 + "\ud83d half of a pair " + '"\\\U0001f600' * 1000))
    line = os.read(told, 65536)
    os.close(told)
    os.close(ours)
    assert len(line) <= 4096 and line.endswith(b"\n")
    assert json.loads(line)["message"].startswith('learner 7 (rank 9): ValueError: half of a pair "\\\U0001f600"')


def test_a_process_that_answers_after_all_is_no_mystery():
    child = Child("learner 7 (rank 9)", [], {}, process=SimpleNamespace(poll=lambda: None), last_heard=time.monotonic())
    assert Supervisor([child], start_timeout=60, timeout=60)._explain() == "a process did not answer in time"


def test_a_lost_peer_is_told_with_the_whole_reason():
    nccl = "[../a.cpp:12] NCCL error\nLast error:\nsocket closed by remote peer"
    for error, reason in ((nccl, "NCCL error Last error: socket closed by remote peer"), ("", "RuntimeError")):
        with pytest.raises(PeerLost) as lost, waiting_for("learner 7"):
            raise RuntimeError(error)
        assert str(lost.value) == f"lost learner 7 ({reason})" and isinstance(lost.value.__cause__, RuntimeError)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_only_a_second_ctrl_c_interrupts(first):
    with StopRequest(quiet=True) as stop:
        signal.raise_signal(first)
        if first != signal.SIGINT:
            signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ranks_do_not_outlive_their_launcher(endless):
    launcher, ranks = endless("cleanba_ppo", *SMALL_LAYOUT)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while alive(ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
