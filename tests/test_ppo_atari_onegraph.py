"""PPO's --one-graph computes what the eager variant does: on a CPU with graphs of recorded operations, and on a GPU."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from scripts import course, leaves, newest_checkpoint, run, start_process, summary, tiny
from test_atari_runs import play_catch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import leanrl.ppo_atari_envpool_torchcompile as fast
from leanrl.support.checkpoints import list_checkpoints, load_checkpoint

SCRIPT = "ppo_atari_envpool_torchcompile"
MODES = {"graph": ["--one-graph"], "eager": []}


class RecordedGraph(TorchDispatchMode):
    """A CPU's stand-in for a CUDA graph: the same operations again, on the tensors of the capture.

    As of a graph's, nothing is done by the capture, and what Python did in it is not done again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.before = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a capture cannot read a number"
        for argument, value in zip(operation._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(tensor, tensor.clone()) for tensor in tree_leaves(value)]
        result = operation(*args, **kwargs)
        self.operations.append((operation, args, kwargs, result))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, result in self.operations:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if old is not None and old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


def no_stream(device=None) -> SimpleNamespace:
    return SimpleNamespace(device=device, wait_stream=lambda other: None)


@pytest.fixture
def recorded_graphs(monkeypatch) -> list[RecordedGraph]:
    """``--one-graph`` works on a CPU; returns what was captured."""
    captured = []

    @contextmanager
    def capture(graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        captured.append(graph)
        with graph:
            yield
        graph.undo()

    def resolve_device(args) -> torch.device:
        args.cudagraphs = args.one_graph
        return torch.device("cpu")

    cuda = {"Stream": no_stream, "CUDAGraph": RecordedGraph, "graph": capture, "current_stream": no_stream}
    for name, fake in (cuda | {"stream": lambda stream: nullcontext()}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fast, "pinned_like", torch.empty_like)
    monkeypatch.setattr(fast, "resolve_device", resolve_device)
    return captured


@pytest.fixture
def on_catch(monkeypatch) -> None:
    play_catch(monkeypatch, SCRIPT)


CATCH = ["--env-id=Catch-v0", "--num-threads=1", "--num-steps=32", "--learning-rate=0.001"]


@pytest.mark.parametrize(
    ("flags", "least", "most"), [([], 128, 128), (["--num-env-groups=2", "--target-kl=1e-4"], 32, 127)]
)
def test_two_graphs_make_the_eager_run_bit_for_bit(flags, least, most, recorded_graphs, on_catch, tmp_path) -> None:
    flags = [*CATCH, *flags, "--total-timesteps=2048", f"--runs-dir={tmp_path}"]
    for name, mode in MODES.items():
        assert run(SCRIPT, *flags, *mode, f"--run-name={name}") == 0
    assert len(recorded_graphs) == 2
    # A KL divergence too large ends an update's epochs, after the first one at the soonest.
    assert least <= summary(tmp_path / "graph")["optimizer_steps"] <= most
    (step, ours), (other_step, theirs) = (newest_checkpoint(tmp_path / name) for name in MODES)
    assert step == other_step and ours["run"]["optimizer_steps"] == theirs["run"]["optimizer_steps"]
    assert leaves(ours["script"]) == leaves(theirs["script"])
    assert leaves(ours["rng"]) == leaves(theirs["rng"])
    assert course(tmp_path / "graph") == course(tmp_path / "eager")


# ----------------------------------------------------------------------------------------------------------- ON A GPU


def last_parameters(run_dir) -> list[torch.Tensor]:
    """Of the last two checkpoints, the older first, one vector each."""
    states = [load_checkpoint(path, {})[1]["script"] for path in reversed(list_checkpoints(run_dir / "checkpoints"))]
    return [torch.cat([x.flatten() for x in state["agent"].values()]) for state in states]


@pytest.mark.cuda
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_graphs_train_as_the_eager_variant(compiled, groups, on_catch, tmp_path) -> None:
    """The same games and, but for rounding, parameters over 8 rollouts of 16 updates, from the same random numbers."""
    flags = [*CATCH, "--device=cuda", "--total-timesteps=2048", f"--num-env-groups={groups}", f"--runs-dir={tmp_path}"]
    # Small steps: rounding must not grow into another action.
    flags += ["--learning-rate=1e-5", "--checkpoint-every=1024"]
    for name, mode in MODES.items():
        mode = [*mode, "--compile"] if mode and compiled else mode
        assert run(SCRIPT, *flags, *mode, f"--run-name={name}") == 0
    (_, ours), (_, theirs) = (newest_checkpoint(tmp_path / name) for name in MODES)
    assert ours["run"]["optimizer_steps"] == theirs["run"]["optimizer_steps"] == 128
    assert leaves(ours["rng"]) == leaves(theirs["rng"])
    assert ours["run"]["last_returns"] == theirs["run"]["last_returns"]
    (before, after), (_, params) = (last_parameters(tmp_path / name) for name in ("eager", "graph"))
    assert (params - after).norm() < 0.05 * (after - before).norm()


@pytest.mark.cuda
def test_frames_arrive_as_the_emulator_made_them(tmp_path) -> None:
    """On Breakout's frames, with the real network: in an update of one epoch ratios are 1 where nothing is stale."""
    flags = [*tiny(SCRIPT), "--device=cuda", "--num-minibatches=1", "--total-timesteps=256"]
    words = [*flags, "--compile", "--one-graph", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert start_process(SCRIPT, *words).wait(timeout=300) == 0
    rows = course(tmp_path / "run")
    assert len(rows) == 4
    for row in rows:
        assert row["losses/clipfrac"] == 0.0 and abs(row["losses/approx_kl"]) < 1e-5
