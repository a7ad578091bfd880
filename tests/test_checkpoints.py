"""Checkpoint files survive kills, full disks and foreign content."""

import pickle
import random
import resource

import numpy as np
import pytest
import torch

from leanrl.support import checkpoints
from leanrl.support.checkpoints import list_checkpoints, load_checkpoint, load_last_checkpoint, save_checkpoint
from leanrl.support.errors import UsageError
from leanrl.support.run import rng_state, set_rng_state

IDENTITY = {"script": "ppo", "env_id": "Hopper-v5"}


def save(folder, step, identity=IDENTITY):
    return save_checkpoint(folder, step, identity, {"weights": torch.full((50,), float(step)), "name": "x"})


def test_a_checkpoint_of_another_version_is_refused_in_one_line(tmp_path):
    torch.save({"format": "leanrl-checkpoint-2", **IDENTITY, "global_step": 5, "state": {}}, tmp_path / "old.pt")
    with pytest.raises(UsageError, match=r"old\.pt: was written by another version of LeanRL; resume"):
        load_checkpoint(tmp_path / "old.pt", IDENTITY)


def test_the_step_to_resume_at_and_copies_under_other_names(tmp_path):
    assert load_last_checkpoint(tmp_path / "checkpoints", IDENTITY) is None
    assert checkpoints.resumed_step(tmp_path) == checkpoints.resumed_step(None) == 0
    best = save(tmp_path / "checkpoints", 10).rename(tmp_path / "checkpoints" / "step_best.pt")
    assert checkpoints.resumed_step(tmp_path) == 0
    save(tmp_path / "checkpoints", 20)
    assert checkpoints.resumed_step(str(tmp_path)) == 20
    assert load_last_checkpoint(tmp_path / "checkpoints", IDENTITY)[0] == 20
    assert best.exists()


def test_a_failing_write_leaves_the_old_file(tmp_path):
    path = save(tmp_path, 10)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # what a full disk does
    try:
        with pytest.raises((OSError, RuntimeError)):
            save(tmp_path, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_puts_a_new_file_in_place_of_the_old(tmp_path):
    """Whoever opened the old one reads it to its end: the new one is not written into it, bit by bit."""
    path = save(tmp_path, 10)
    before = path.read_bytes()
    with open(path, "rb") as old:
        save(tmp_path, 10, {**IDENTITY, "more": "x" * 1000})
        assert old.read() == before
    assert len(path.read_bytes()) > len(before)


def test_leftovers_of_a_kill_are_ignored_and_removed(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "step_000000000020.pt.tmp").write_bytes(b"half written")
    assert load_last_checkpoint(tmp_path, IDENTITY)[0] == 10
    save(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000000010.pt", "step_000000000030.pt"]


def test_truncated_anywhere_is_refused_and_the_one_before_is_used(tmp_path, capsys):
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    content = newest.read_bytes()
    sizes = sorted({*range(0, len(content), 97), 1, len(content) - 1})
    for size in sizes:
        newest.write_bytes(content[:size])
        with pytest.raises(UsageError, match=newest.name):
            load_checkpoint(newest, IDENTITY)
        step, state = load_last_checkpoint(tmp_path, IDENTITY)
        assert step == 10 and (state["weights"] == 10).all()
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == len(sizes) and all(newest.name in line for line in warnings)


def test_a_flipped_bit_is_refused_or_harmless(tmp_path):
    path = save(tmp_path, 10)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 41):
        path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        try:
            step, state = load_checkpoint(path, IDENTITY)
        except UsageError:
            refused += 1
        else:
            assert step == 10 and (state["weights"] == 10).all()
    assert refused > 0


class Intruder:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


HEADER = {"format": checkpoints.FORMAT, **IDENTITY}
WRITERS = {
    "pickle": lambda path, intruder: path.write_bytes(pickle.dumps(intruder)),
    "torch": lambda path, intruder: torch.save({**HEADER, "global_step": 10, "state": intruder}, path),
    "text": lambda path, _: path.write_text("not a checkpoint\n" * 100),
    "other dict": lambda path, _: torch.save({"model": torch.zeros(3)}, path),
    "no state": lambda path, _: torch.save(HEADER, path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_foreign_files_are_refused_and_never_run(tmp_path, write):
    path, trap = tmp_path / "step_000000000010.pt", tmp_path / "trap"
    write(path, Intruder(trap))
    with pytest.raises(UsageError, match=path.name):
        load_checkpoint(path, IDENTITY)
    with pytest.raises(UsageError, match="--resume"):
        load_last_checkpoint(tmp_path, IDENTITY)
    assert not trap.exists()


@pytest.mark.parametrize("other", [{"script": "sac"}, {"env_id": "Ant-v5"}])
def test_checkpoints_of_another_run_are_refused(tmp_path, other):
    path = save(tmp_path, 10, {**IDENTITY, **other})
    (name, value), *_ = other.items()
    with pytest.raises(UsageError, match=f"{name} {value}, not {IDENTITY[name]}"):
        load_checkpoint(path, IDENTITY)


def test_what_a_resume_passed_over_does_not_push_out_what_it_saves(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 40).write_bytes(b"")
    assert load_last_checkpoint(tmp_path, IDENTITY)[0] == 10
    save(tmp_path, 20)
    save(tmp_path, 30)
    assert [load_checkpoint(path, IDENTITY)[0] for path in list_checkpoints(tmp_path)] == [30, 20]


def draw(device):
    numbers = [random.random(), random.gauss(0, 1), np.random.standard_normal(), torch.randn(5).tolist()]
    return numbers + [torch.randn(5, device=device).tolist(), np.random.permutation(20).tolist()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_random_generators_continue_exactly(tmp_path, device):
    device = torch.device(device)
    random.gauss(0, 1), np.random.standard_normal()  # each keeps a second number back, which is part of the state
    path = save_checkpoint(tmp_path, 1, IDENTITY, rng_state(device))
    expected = draw(device)
    assert draw(device) != expected
    set_rng_state(load_checkpoint(path, IDENTITY)[1], device)
    assert draw(device) == expected
