"""PPO's one-graph rung computes what its sibling does: on a CPU with graphs of recorded operations, and on a GPU."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from scripts import course, leaves, newest_checkpoint, run, start_process, summary, tiny
from test_ppo_atari import SmallNetwork, catch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import leanrl.ppo_atari_envpool_onegraph as onegraph
import leanrl.ppo_atari_envpool_torchcompile as sibling
from leanrl.support.evaluation import play
from leanrl.tools.gpu_equality import last_parameters

NAMES = {"onegraph": "ppo_atari_envpool_onegraph", "sibling": "ppo_atari_envpool_torchcompile"}


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
                self.before.append((value, value.clone()))
        result = operation(*args, **kwargs)
        self.operations.append((operation, args, kwargs, result))
        return result

    def undo(self) -> None:
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    def replay(self) -> None:
        for operation, args, kwargs, result in self.operations:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


class NoStream:
    device = None

    def __init__(self, device=None) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass


@pytest.fixture
def recorded_graphs(monkeypatch) -> list[RecordedGraph]:
    """``--cudagraphs`` works on a CPU; returns what was captured."""
    captured = []

    @contextmanager
    def capture(graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        captured.append(graph)
        with graph:
            yield
        graph.undo()

    cuda = {"Stream": NoStream, "CUDAGraph": RecordedGraph, "graph": capture, "current_stream": NoStream}
    for name, fake in (cuda | {"stream": lambda stream: nullcontext()}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(onegraph, "pinned_like", torch.empty_like)
    monkeypatch.setattr(sibling, "resolve_device", lambda args: torch.device("cpu"))
    return captured


@pytest.fixture
def on_catch(monkeypatch) -> None:
    """The scripts play Catch with a small network; all else is theirs."""
    monkeypatch.setattr(sibling, "Agent", type("SmallAgent", (SmallNetwork, sibling.Agent), {}))
    monkeypatch.setattr(sibling, "make_atari_envs", catch)


CATCH = ["--env-id=Catch-v0", "--num-threads=1", "--num-steps=32", "--learning-rate=0.001"]


@pytest.mark.parametrize(
    ("flags", "least", "most"), [([], 128, 128), (["--num-env-groups=2", "--target-kl=1e-4"], 32, 127)]
)
def test_two_graphs_make_the_siblings_run_bit_for_bit(flags, least, most, recorded_graphs, on_catch, tmp_path) -> None:
    flags = [*CATCH, *flags, "--total-timesteps=2048", f"--runs-dir={tmp_path}"]
    assert run(NAMES["onegraph"], *flags, "--cudagraphs", "--run-name=onegraph") == 0
    assert len(recorded_graphs) == 2
    assert run(NAMES["sibling"], *flags, "--run-name=sibling") == 0
    assert_same_run(tmp_path)
    # A KL divergence too large ends an update's epochs, after the first one at the soonest.
    assert least <= summary(tmp_path / "onegraph")["optimizer_steps"] <= most


def assert_same_run(folder) -> None:
    (step, ours), (other_step, theirs) = (newest_checkpoint(folder / name) for name in NAMES)
    assert step == other_step and ours["run"]["optimizer_steps"] == theirs["run"]["optimizer_steps"]
    assert leaves(ours["script"]) == leaves(theirs["script"])
    assert leaves(ours["rng"]) == leaves(theirs["rng"])
    assert course(folder / "onegraph") == course(folder / "sibling")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compile"])
def test_on_a_cpu_it_is_the_sibling_bit_for_bit(compiled, tmp_path) -> None:
    flags = [*tiny(NAMES["sibling"]), "--total-timesteps=192", "--save-model", f"--runs-dir={tmp_path}"]
    for name, script in NAMES.items():
        if compiled:  # in a process of its own: compilation sets switches of the whole process
            words = [*flags, "--compile", f"--run-name={name}"]
            assert start_process(script, *words).wait(timeout=300) == 0
        else:
            assert run(script, *flags, f"--run-name={name}") == 0
    assert_same_run(tmp_path)
    if not compiled:
        assert play(tmp_path / "onegraph", episodes=1) == play(tmp_path / "sibling", episodes=1)


# ----------------------------------------------------------------------------------------------------------- ON A GPU


@pytest.mark.cuda
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_graphs_train_as_the_eager_sibling(compiled, groups, on_catch, tmp_path) -> None:
    """The same games and, but for rounding, parameters over 8 rollouts of 16 updates, from the same random numbers."""
    flags = [*CATCH, "--device=cuda", "--total-timesteps=2048", f"--num-env-groups={groups}", f"--runs-dir={tmp_path}"]
    # Small steps: rounding must not grow into another action.
    flags += ["--learning-rate=1e-5", "--checkpoint-every=1024"]
    levers = ["--cudagraphs", *(["--compile"] if compiled else [])]
    for name, script in NAMES.items():
        assert run(script, *flags, *(levers if name == "onegraph" else []), f"--run-name={name}") == 0
    (_, ours), (_, theirs) = (newest_checkpoint(tmp_path / name) for name in NAMES)
    assert ours["run"]["optimizer_steps"] == theirs["run"]["optimizer_steps"] == 128
    assert leaves(ours["rng"]) == leaves(theirs["rng"])
    assert ours["run"]["last_returns"] == theirs["run"]["last_returns"]
    (before, after), (_, params) = (last_parameters(tmp_path / name) for name in ("sibling", "onegraph"))
    assert (params - after).norm() < 0.05 * (after - before).norm()


@pytest.mark.cuda
def test_frames_arrive_as_the_emulator_made_them(tmp_path) -> None:
    """On Breakout's frames, with the real network: in an update of one epoch ratios are 1 where nothing is stale."""
    flags = [*tiny(NAMES["sibling"]), "--device=cuda", "--num-minibatches=1", "--total-timesteps=256"]
    words = [*flags, "--compile", "--cudagraphs", f"--runs-dir={tmp_path}", "--run-name=run"]
    assert start_process(NAMES["onegraph"], *words).wait(timeout=300) == 0
    rows = course(tmp_path / "run")
    assert len(rows) == 4
    for row in rows:
        assert row["losses/clipfrac"] == 0.0 and abs(row["losses/approx_kl"]) < 1e-5
