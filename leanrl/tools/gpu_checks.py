"""What graphs on this GPU must do, each check small and by itself: ``leanrl.tools.gpu`` and the tests run them.

python -m leanrl.tools.gpu_checks CHECKS.json        # writes [{"check", "passed", "detail"}, ...]
"""

import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from tensordict.nn import CudaGraphModule

import leanrl.cleanba_ppo as cleanba_ppo
from leanrl.sebulba import worker
from leanrl.sebulba.collectives import Collectives
from leanrl.sebulba.layout import Layout, Part
from leanrl.sebulba.learner import TIMELINE_FILE
from leanrl.support.checkpoints import load_checkpoint
from leanrl.support.executables import CUDAGRAPH_WARMUP, WARMUP_CALLS, CompiledStep, untouched
from leanrl.support.onegraph import OneGraph
from leanrl.support.optim import Adam, FlatAdam

CHECKS: list[Callable[[torch.device], None]] = []
"""Each takes the device and raises where it finds something wrong; its docstring is its name."""


def check(fn: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CHECKS.append(fn)
    return fn


def graphed(fn: Callable, device: torch.device) -> CudaGraphModule:
    return CudaGraphModule(fn, warmup=CUDAGRAPH_WARMUP, device=device)


def require(condition: bool, complaint: str) -> None:
    if not condition:
        raise AssertionError(complaint)


@check
def samples(device: torch.device) -> None:
    """replays draw new samples, those that eager calls draw"""
    draw = graphed(lambda: torch.rand(4, device=device), device)
    drawn = torch.stack([draw() for _ in range(WARMUP_CALLS + 5)])
    require(len(drawn.unique(dim=0)) == len(drawn), "samples repeat")
    torch.manual_seed(1)
    replayed = torch.stack([draw() for _ in range(5)])
    torch.manual_seed(1)
    eager = torch.stack([torch.rand(4, device=device) for _ in range(5)])
    require(torch.equal(replayed, eager), "other samples than eager calls draw from the same seed")


@check
def learning_rate(device: torch.device) -> None:
    """a new learning rate reaches graphs, compiled ones too"""
    for compiled in (False, True):
        optimizer = FlatAdam(nn.Linear(3, 5).to(device), lr=1e-3, eps=1e-8)
        grad = torch.randn_like(optimizer.params)

        def fn(optimizer: FlatAdam = optimizer, grad: torch.Tensor = grad) -> None:
            optimizer.step(grad)

        step = graphed(CompiledStep(fn, device) if compiled else fn, device)
        for lr in (1e-3,) * WARMUP_CALLS + (0.0, 1e-2):
            optimizer.lr.fill_(lr)
            before = optimizer.params.clone()
            step()
            moved = (optimizer.params - before).abs().max().item()
            require(0.5 * lr <= moved <= 2 * lr, f"compiled {compiled}: a rate of {lr} moved parameters by {moved}")


@check
def compiled_graph(device: torch.device) -> None:
    """compile and cudagraphs together train as eager does"""
    torch.manual_seed(0)
    x, y = torch.randn(64, 8, device=device), torch.randn(64, 1, device=device)

    def trained(wrap: Callable[[Callable], Callable]) -> torch.Tensor:
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
        optimizer = Adam(network.parameters(), lr=1e-2, eps=1e-5)

        def fn() -> None:
            noisy = x + 0.1 * torch.randn_like(x)
            ((network(noisy) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = wrap(fn)
        torch.manual_seed(2)
        with torch.enable_grad():
            for _ in range(50):
                step()
        return torch.nn.utils.parameters_to_vector(network.parameters())

    eager = trained(lambda fn: fn)
    for compiled in (False, True):
        params = trained(lambda fn, compiled=compiled: graphed(CompiledStep(fn, device) if compiled else fn, device))
        error = ((params - eager).norm() / eager.norm()).item()
        require(error < 1e-3, f"compiled {compiled}: parameters are off by {error:.1e}")


@check
def warm_up(device: torch.device) -> None:
    """a warm-up leaves no trace: tensors, addresses, random numbers"""
    x = torch.zeros(3, device=device)
    step = graphed(lambda: x.add_(torch.rand(3, device=device)), device)
    torch.manual_seed(3)
    address = x.data_ptr()
    with untouched([x], device):
        for _ in range(WARMUP_CALLS):
            step()
    require(x.data_ptr() == address and not x.any().item(), "the tensor is not what it was")
    step()
    torch.manual_seed(3)
    require(torch.equal(x, torch.rand(3, device=device)), "the random numbers are not where they were")


class Scene:
    """A step for OneGraph whose training takes long: an actor of one number, which an update raises by 1."""

    def __init__(self, device: torch.device) -> None:
        self.actor, self.obs = torch.zeros(1, device=device), torch.zeros(4, device=device)
        large = torch.randn(4096, 4096, device=device)
        product = torch.empty_like(large)

        def update(with_actor: bool) -> None:
            for _ in range(20):
                torch.mm(large, large, out=product)
            if with_actor:
                self.actor.add_(1.0)

        def updates(with_actor: bool) -> Callable:
            return partial(update, with_actor)

        self.advance = OneGraph(self.obs.copy_, updates, lambda: self.actor + 2 * self.obs, device)
        self.timestep = torch.zeros(4).pin_memory()


@check
def actions(device: torch.device) -> None:
    """one graph: the host waits for the actions, never for less, and not for training that they do not need"""
    scene = Scene(device)
    stream = torch.cuda.current_stream(device)
    num_actor_updates, went_on = 0, []
    for i in range(4 * WARMUP_CALLS):
        turns = (((False,),), ((True,),), ((True,), (False,)), ())[i % 4]
        num_actor_updates += sum(with_actor for (with_actor,) in turns)
        scene.timestep.fill_(float(i))
        acted = scene.advance(scene.timestep, turns)
        expected = num_actor_updates + 2.0 * i
        require(bool((acted == expected).all()), f"call {i}: actions {acted.tolist()}, not {expected}")
        if i >= 4 * (CUDAGRAPH_WARMUP + 1) and turns[-1:] == ((False,),):
            went_on.append(not stream.query())
        torch.cuda.synchronize(device)
    require(all(went_on), "the host waited for the whole graph: nothing runs while the environments step")


@check
def threads(device: torch.device) -> None:
    """one graph: captured while another thread works on the device"""
    scene, stop, errors = Scene(device), threading.Event(), []

    def work() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                while not stop.is_set():
                    torch.ones(100, device=device).sum().item()
                    time.sleep(1e-3)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for i in range(WARMUP_CALLS):
            scene.timestep.fill_(float(i))
            require(bool((scene.advance(scene.timestep, ()) == 2.0 * i).all()), "wrong actions")
    finally:
        stop.set()
        thread.join()
    require(not errors, f"the other thread failed: {errors}")


class OneRank(Collectives):
    """Sums and gathers over a process group of one rank, which a run of one process otherwise does without."""

    def __init__(self, layout: Layout, part: Part, device: torch.device, args) -> None:
        super().__init__(layout, part, device, args)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=device if on_gpu else None,
        )
        self._alone, self._learners = False, dist.group.WORLD


def actor_learner_run(device: torch.device, cudagraphs: bool, collectives: type[Collectives], run_dir: Path) -> dict:
    """Runs cleanba_ppo's only rank in this process: two actor threads, a rollout ahead of the learner.

    Returns:
        what its last checkpoint holds.
    """
    args = cleanba_ppo.Args(
        env_id="CartPole-v1",
        device=device.type,
        cudagraphs=cudagraphs,
        policy_lag=1,
        local_num_envs=8,
        env_threads=1,
        num_steps=32,
        num_minibatches=2,
        total_timesteps=30 * 2 * 8 * 32,
        runs_dir=str(run_dir.parent),
        run_name=run_dir.name,
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with (
        mock.patch.dict(os.environ, alone),
        mock.patch.object(worker, "Collectives", collectives),
        mock.patch.object(os, "_exit", sys.exit),  # a rank ends its process; here others go on
    ):
        try:
            cleanba_ppo.main(args)
        except SystemExit as end:
            require(not end.code, "the run failed")
    if json.loads((run_dir / "summary.json").read_text())["interrupted"]:
        raise KeyboardInterrupt  # it took the signal that was meant for this process
    (*_, newest) = sorted((run_dir / "checkpoints").iterdir())
    return load_checkpoint(newest, {})[1]


@check
def actor_threads(device: torch.device) -> None:
    """actor threads replay graphs of their own while the learner trains and sums over NCCL, as eagerly without NCCL"""
    with tempfile.TemporaryDirectory() as folder:
        eager, graphed_run = Path(folder) / "eager", Path(folder) / "graphed"
        plain = actor_learner_run(device, False, Collectives, eager)
        ours = actor_learner_run(device, device.type == "cuda", OneRank, graphed_run)
        spans = [
            span
            for line in (graphed_run / TIMELINE_FILE).read_text().splitlines()
            for part in json.loads(line)["spans"].values()
            for span in part
        ]
    require(plain["run"]["last_returns"] == ours["run"]["last_returns"], "other episodes")
    for name, theirs in plain["script"]["agent"].items():
        error = ((ours["script"]["agent"][name] - theirs).norm() / (theirs.norm() + 1e-6)).item()
        require(error < 1e-3, f"{name} is off by {error:.1e}")
    updates = [(start, end) for what, start, end in spans if what == "update"]
    rollouts = [(start, end) for what, start, end in spans if what == "rollout"]
    beside = sum(any(start < end_ and start_ < end for start_, end_ in rollouts) for start, end in updates)
    require(beside > len(updates) // 2, f"the actors played beside {beside} of {len(updates)} updates only")


def works(device: torch.device) -> bool:
    """Whether a device still computes: after some errors, as an illegal address, it does not in their process."""
    try:
        torch.cuda.synchronize(device)
        return torch.ones(1, device=device).item() == 1.0
    except Exception:
        return False


@torch.no_grad()
def main(path: Path) -> None:
    """Runs every check and writes after each what is known so far."""
    device = torch.device("cuda", 0)
    results = []
    for fn in CHECKS:
        gc.collect()  # the last check's graphs: one that is destroyed in a capture invalidates it
        start = time.perf_counter()
        try:
            fn(device)
            passed, detail = True, f"{time.perf_counter() - start:.1f} s"
        except (Exception, SystemExit) as error:  # whatever goes wrong on a machine is a finding
            traceback.print_exc()
            passed, detail = False, " ".join(f"{type(error).__name__}: {error}".split())[:200]
        results.append({"check": fn.__doc__, "passed": passed, "detail": detail})
        path.write_text(json.dumps(results))
        if not passed and not works(device):
            print("the device does no more work for this process: the checks after this one are not run")
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # Python's own end could abort over a process group's threads, after everything is reported
