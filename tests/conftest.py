"""Options, markers and the fixtures that several test files share."""

import gc
import os

import pytest

# Workers of pytest-xdist share the cores out, each with its processes: PyTorch's threads wait by spinning, and two
# programs with a thread on every core each are 10 to 20 times slower. Before PyTorch counts the cores.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    cores, first = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, cores[first % len(cores) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])

import torch
from filelock import FileLock
from scripts import FINISHED, SCRIPTS, run_tiny, run_tool_in_process, start_process, with_long
from sebulba_runs import LAUNCHED, end

# Files that take longest go first: what a worker takes from another at the end should be short.
LONGEST = {f"test_{name}.py" for name in ("off_policy_equality", "on_policy_equality", "resume")}
LONGEST |= {f"test_sebulba_{name}.py" for name in ("runs", "failures", "equality")}


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--all"):
        long = [item for item in items if "long" in item.keywords]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if "long" not in item.keywords]
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True)
def no_restart(monkeypatch):
    """Tests started under torchrun or SLURM must not count as restarted runs."""
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


@pytest.fixture(autouse=True)
def no_old_graphs(request):
    """A CUDA graph of an earlier test that is destroyed in a capture would invalidate it."""
    if "cuda" in request.keywords:
        gc.collect()


@pytest.fixture(autouse=True)
def nothing_runs_on():
    """What a test has launched ends with it."""
    yield
    while LAUNCHED:
        end(LAUNCHED.pop())


@pytest.fixture(scope="session", params=with_long(SCRIPTS))
def script(request):
    """Each training script in turn."""
    return request.param


@pytest.fixture(scope="session")
def finished_run(script, tmp_path_factory):
    """The directory of a tiny run of ``script``, seed 1, of all workers. Copy it before changing it."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "finished"
    with FileLock(f"{folder}-{script}.lock"):
        if not (folder / script / "summary.json").exists():
            run_tiny(script, folder, f"--total-timesteps={FINISHED}", name=script)
    return folder / script


@pytest.fixture
def start():
    """``start_process``, less what is still running at the end of the test."""
    processes = []

    def start(*args, **kwargs):
        processes.append(start_process(*args, **kwargs))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def refusal(monkeypatch, capsys):
    """The one line in which a tool refuses these words, with exit code 2."""

    def refusal(tool, *argv) -> str:
        assert run_tool_in_process(monkeypatch, tool, *argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"{tool.__name__.rpartition('.')[2]}: "), err
        return err

    return refusal
