"""--one-graph: what a step does and waits for, and that it computes what the eager variant computes."""

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from scripts import newest_checkpoint, start_process, tiny

from leanrl.support import executables, onegraph
from leanrl.support.executables import CUDAGRAPH_WARMUP, make_executable
from leanrl.support.onegraph import OneGraph

SCRIPTS = ["sac_continuous_action", "td3_continuous_action", "fast_sac"]


# ----------------------------------------------------------------------------------------------------------- ON A CPU


class FakeStream:
    """Does nothing; writes down what waits for what, and for which of the works that were done before."""

    device = None

    def __init__(self, log: list, priority: int = 0):
        self.log, self.priority = log, priority

    def wait_stream(self, stream) -> None:
        pass

    def record_event(self) -> int:
        return len(self.log)

    def wait_event(self, event: int) -> None:
        assert self.priority == -1, "acting goes before the critics' updates"
        self.log.append(("act waits for", self.log[:event][-1]))


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA's streams and graphs for a machine without: a capture runs its work once, a replay is written down."""
    log = []

    @contextmanager
    def capture(graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled(), "a graph that is destroyed in a capture invalidates it"
        start = len(log)
        yield
        graph.work = log[start:]
        del log[start:]  # captured work is not done

    class FakeGraph:
        def replay(self) -> None:
            log.extend(self.work)

    fakes = SimpleNamespace(
        Stream=lambda device, priority=0: FakeStream(log, priority),
        Event=lambda external: SimpleNamespace(
            record=lambda stream: log.append("acted"), synchronize=lambda: log.append("host waits")
        ),
        CUDAGraph=FakeGraph,
        graph=capture,
        stream=lambda stream: nullcontext(),
        current_stream=lambda device: FakeStream(log),
    )
    fake_torch = SimpleNamespace(cuda=fakes, empty=torch.empty, Tensor=torch.Tensor, device=torch.device)
    fake_torch.empty_like = lambda x, device, pin_memory: torch.empty_like(x)
    for module in (onegraph, executables):
        monkeypatch.setattr(module, "torch", fake_torch)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    yield log
    assert gc.isenabled()


@pytest.mark.parametrize("trains_actor", [(), (False,), (True,), (False, True, False, False), (True, False, True)])
def test_every_call_is_one_step_and_acting_waits_for_the_actor_alone(trains_actor, fake_cuda):
    log, turns = fake_cuda, tuple((flag, True) for flag in trains_actor)
    ready_after = "update True" if any(trains_actor) else "observe"

    def updates(with_actor: bool, with_targets: bool):
        return lambda: log.append(f"update {with_actor}")

    def act() -> torch.Tensor:
        log.append("act")
        return torch.zeros(2)

    advance = OneGraph(lambda timestep: log.append("observe"), updates, act, torch.device("cpu"))
    timestep = torch.zeros(1, 3)
    for _ in range(CUDAGRAPH_WARMUP + 3):
        log.clear()
        advance(timestep, turns)
        work = ["observe", *(f"update {flag}" for flag in trains_actor), ("act waits for", ready_after)]
        assert log == [*work, "act", "acted", "host waits"]
    with pytest.raises(ValueError, match="the tensor of the first call"):
        advance(timestep.clone(), turns)


def test_memory_that_is_not_pinned_is_refused(fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    advance = OneGraph(lambda timestep: None, None, lambda: torch.zeros(2), torch.device("cpu"))
    with pytest.raises(ValueError, match="pinned"):
        advance(torch.zeros(1, 3), ())


def test_a_captured_step_sees_the_arguments_of_every_call(fake_cuda):
    """Copied to where the graph reads them; an urgent step is captured on a stream that goes first."""
    seen, log = [], fake_cuda

    def act(obs: torch.Tensor, noise: torch.Tensor) -> None:
        log.append(lambda: seen.append((obs.item(), noise.item())))

    step = make_executable(act, torch.device("cpu"), compile=False, cudagraphs=True, urgent=True)
    assert step._stream.priority == executables.URGENT
    for call in range(CUDAGRAPH_WARMUP + 3):
        log.clear()
        step(torch.tensor(call), torch.tensor(-call))
        for work in log:
            work()
        assert seen[-1] == (call, -call)


# ----------------------------------------------------------------------------------------------------------- ON A GPU


@pytest.mark.cuda
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_graphs_compute_what_the_eager_variant_computes(script, compiled, num_envs, tmp_path):
    """The same actions, transitions and parameters over a hundred updates, one or four of them between two steps."""
    flags = [*tiny(f"{script}_torchcompile"), f"--runs-dir={tmp_path}", f"--num-envs={num_envs}", "--device=cuda"]
    # Pendulum's motion is smooth: what rounding does to an action stays as small.
    flags += ["--env-id=Pendulum-v1", "--updates-per-step=1", "--total-timesteps=148", "--log-every=20"]
    modes = {"eager": [], "graph": ["--one-graph", *(["--compile"] if compiled else [])]}
    for name, mode in modes.items():
        words = [*flags, *mode, f"--run-name={name}"]
        assert start_process(f"{script}_torchcompile", *words).wait(timeout=300) == 0
    (_, theirs), (_, ours) = (newest_checkpoint(tmp_path / name) for name in modes)
    assert ours["run"]["optimizer_steps"] == theirs["run"]["optimizer_steps"] == 100
    ours, theirs = ours["script"], theirs["script"]
    # What the environments were given to do: none of it stale.
    assert_near(ours["replay"]["rows"], theirs["replay"]["rows"], tolerance=1e-2 if compiled else 1e-4)
    for part in ("actor", "critics"):
        for name, parameter in ours[part].items():
            assert_near(parameter, theirs[part][name], tolerance=1e-2 if compiled else 1e-4)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    error = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
    assert error < tolerance, f"off by {error:.1e}"
