"""What CUDA graphs must do that no result tells of; `./run.sh gpu` begins with this file."""

import json
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from scripts import newest_checkpoint
from sebulba_runs import run_alone, tiny

from leanrl.sebulba import worker
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.records import TIMELINE_FILE
from leanrl.support.executables import CUDAGRAPH_WARMUP, WARMUP_CALLS
from leanrl.support.onegraph import OneGraph


class Scene:
    """A step for OneGraph whose training takes long: an actor of one number, which an update raises by 1."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self.actor, self.obs = torch.zeros(1, device=device), torch.zeros(4, device=device)
        self.large = torch.randn(4096, 4096, device=device)
        self.product = torch.empty_like(self.large)
        self.advance = OneGraph(
            self.obs.copy_, lambda *turn: partial(self.update, *turn), lambda: self.actor + 2 * self.obs, device
        )
        self.timestep = torch.zeros(4).pin_memory()

    def update(self, with_actor: bool) -> None:
        for _ in range(20):
            torch.mm(self.large, self.large, out=self.product)
        if with_actor:
            self.actor.add_(1.0)


@pytest.mark.cuda
def test_the_host_waits_for_the_actions_and_for_no_training_that_they_do_not_need() -> None:
    scene = Scene()
    num_actor_updates, went_on = 0, []
    for i in range(4 * WARMUP_CALLS):
        turns = (((False,),), ((True,),), ((True,), (False,)), ())[i % 4]
        num_actor_updates += sum(with_actor for (with_actor,) in turns)
        scene.timestep.fill_(float(i))
        assert scene.advance(scene.timestep, turns).tolist() == [num_actor_updates + 2.0 * i] * 4
        if i >= 4 * (CUDAGRAPH_WARMUP + 1) and turns[-1:] == ((False,),):
            went_on.append(not torch.cuda.current_stream().query())
        torch.cuda.synchronize()
    assert went_on and all(went_on), "nothing runs while the environments step"


@pytest.mark.cuda
def test_a_graph_is_captured_while_another_thread_works_on_the_device() -> None:
    scene, stop, errors = Scene(), threading.Event(), []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.wait(1e-3):
                    torch.ones(100, device="cuda").sum().item()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for i in range(WARMUP_CALLS):
            scene.timestep.fill_(float(i))
            assert scene.advance(scene.timestep, ()).tolist() == [2.0 * i] * 4
    finally:
        stop.set()
        thread.join()
    assert not errors


class OneRank(Collectives):
    """Sums and gathers over a process group of one rank, which a run of one process otherwise does without."""

    def __init__(self, layout, part, device: torch.device, args) -> None:
        super().__init__(layout, part, device, args)
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        self._store = dist.HashStore()
        dist.init_process_group(backend, store=self._store, rank=0, world_size=1, device_id=device_id)
        self._learners = dist.group.WORLD


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_actor_threads_play_beside_a_learner_that_sums_over_a_process_group(device, tmp_path, monkeypatch) -> None:
    """On a GPU each thread replays graphs of its own; all as in a run that is eager and sums nothing."""
    sums, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, group=None: (sums.append(len(x)), all_reduce(x, group=group)))
    flags = tiny(tmp_path, f"--device={device}", "--policy-lag=1", "--num-steps=32", "--total-timesteps=15360")
    assert run_alone(monkeypatch, "cleanba_ppo", *flags, "--run-name=eager") == 0
    monkeypatch.setattr(worker, "Collectives", OneRank)
    graphs = ["--cudagraphs"] if device == "cuda" else []
    assert run_alone(monkeypatch, "cleanba_ppo", *flags, *graphs, "--run-name=graphs") == 0
    # Thirty updates of eight gradients each; and a barrier.
    assert len(sums) == 30 * 8 + 1 and min(sums[1:]) > 1000

    (_, plain), (_, ours) = (newest_checkpoint(tmp_path / name) for name in ("eager", "graphs"))
    assert plain["run"]["last_returns"] == ours["run"]["last_returns"]
    for name, expected in plain["script"]["agent"].items():
        error = (ours["script"]["agent"][name] - expected).norm() / (expected.norm() + 1e-6)
        assert error < 1e-3, name

    lines = (tmp_path / "graphs" / TIMELINE_FILE).read_text().splitlines()
    spans = [span for line in lines for part in json.loads(line)["spans"].values() for span in part]
    updates = [(start, end) for what, start, end in spans if what == "update"]
    rollouts = [(start, end) for what, start, end in spans if what == "rollout"]
    beside = sum(any(start < end_ and start_ < end for start_, end_ in rollouts) for start, end in updates)
    assert beside > len(updates) // 2
