"""Checkpoint files: written atomically, the last two kept, damaged or foreign ones refused."""

import os
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch

from leanrl.support.errors import UsageError

FORMAT = "leanrl-checkpoint-5"


@contextmanager
def open_atomically(path: Path):
    """A binary file to write. If the process or machine dies, ``path`` is the old file or the complete new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_atomically(obj, path: Path) -> None:
    """``torch.save``, atomically."""
    with open_atomically(path) as file:
        torch.save(obj, file)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files in ``folder``, newest first; files with other names are ignored."""
    return sorted(folder.glob(f"step_{'[0-9]' * 12}.pt"), reverse=True)


def resumed_step(run_dir: str | None) -> int:
    """Environment steps of the newest checkpoint in a run directory; 0 if there is nothing to resume."""
    paths = list_checkpoints(Path(run_dir) / "checkpoints") if run_dir is not None else []
    return int(paths[0].stem.removeprefix("step_")) if paths else 0


def save_checkpoint(folder: Path, global_step: int, identity: dict, state: dict) -> Path:
    """Writes ``state`` as the checkpoint of ``global_step`` and deletes all but the last two up to it.

    Later ones are deleted too: the run found them unreadable when it resumed. So are half-written files left by a kill.

    Args:
        folder: the run's ``checkpoints/``; made if missing.
        global_step: environment steps.
        identity: what must match on loading (script, env_id).
        state: tensors, numbers, strings, and lists, tuples and dicts of them (what ``weights_only`` loads).
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{global_step:012d}.pt"
    save_atomically({"format": FORMAT, **identity, "global_step": global_step, "state": state}, path)
    kept = [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint <= path][:2]
    for file in {*list_checkpoints(folder), *folder.glob("step_*.pt.tmp")} - {*kept}:
        file.unlink()
    return path


def load_checkpoint(path: Path, identity: dict) -> tuple[int, dict]:
    """Reads one checkpoint: ``(global_step, state)``, tensors on the CPU.

    Raises:
        UsageError: the file is damaged, empty, not a checkpoint, or of another format, script or environment.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not verify the checksums that torch.save writes
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"checksum of {damaged} does not match")
        # Memory-mapped, so that a replay is read while it is copied and never held in memory twice.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = {key: content[key] for key in ("format", *identity)}
        loaded = content["global_step"], content["state"]
    except Exception as error:  # torch.load raises almost anything on damaged input
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise UsageError(f"{path}: damaged or not a checkpoint ({reason})") from None
    if found["format"] != FORMAT:
        raise UsageError(f"{path}: was written by another version of LeanRL; resume the run with that one")
    for key, expected in identity.items():
        if found[key] != expected:
            raise UsageError(f"{path}: belongs to {key} {found[key]}, not {expected}")
    return loaded


def load_last_checkpoint(folder: Path, identity: dict) -> tuple[int, dict] | None:
    """The newest readable checkpoint, or None if none has been written yet.

    Unreadable ones are reported on stderr and skipped.

    Raises:
        UsageError: there are checkpoints, but none is readable.
    """
    errors = []
    for path in list_checkpoints(folder):
        try:
            loaded = load_checkpoint(path, identity)
            for error in errors:
                print(f"warning: {error}; using {path.name} instead", file=sys.stderr)
            return loaded
        except UsageError as error:
            errors.append(str(error))
    if errors:
        raise UsageError(f"--resume {folder.parent}: no readable checkpoint; {errors[0]}")
    return None
