"""Where metrics go: ``metrics.jsonl``, TensorBoard and, with ``--track``, Weights & Biases."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from leanrl.support.checkpoints import open_atomically

METRICS_FILE = "metrics.jsonl"


def read_metrics(run_dir: Path, file: str = METRICS_FILE) -> list[dict]:
    """The log points of a run, oldest first, up to a line torn by a kill; ``file`` may be another record like them."""
    rows = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (Path(run_dir) / file).read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def cut_metrics(run_dir: Path, global_step: int, file: str = METRICS_FILE) -> None:
    """Drops the log points after ``global_step``, which a resumed run will write again."""
    rows = [row for row in read_metrics(run_dir, file) if row["global_step"] <= global_step]
    with open_atomically(run_dir / file) as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())


class Tracker:
    """Writes each log point everywhere it belongs.

    Args:
        run_dir: the run directory, which exists.
        args: of the run, which W&B shows; ``track``, ``wandb_project_name`` and ``wandb_entity`` are read.
        global_step: environment steps at which the run starts, or goes on.
    """

    def __init__(self, run_dir: Path, args, global_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 0.3 s that --help need not wait for

        cut_metrics(run_dir, global_step)
        self._file = open(run_dir / METRICS_FILE, "a", buffering=1)
        self._tensorboard = SummaryWriter(str(run_dir), purge_step=global_step + 1)
        self._wandb = _start_wandb(run_dir, args) if args.track else None

    def log(self, global_step: int, metrics: dict[str, float]) -> None:
        """Writes one log point; a NaN or infinity becomes null in ``metrics.jsonl``, which stays valid JSON."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"global_step": global_step, **finite}) + "\n")
        for key, value in metrics.items():
            self._tensorboard.add_scalar(key, value, global_step)
        if self._wandb is not None:
            self._wandb.log({"global_step": global_step, **metrics})

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(run_dir: Path, args):
    import wandb

    # Without a key wandb.init would ask for one on the terminal; an offline run is synchronised later by `wandb sync`.
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    return wandb.init(
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        name=run_dir.name,
        id=run_dir.name,
        resume="allow" if mode == "online" else None,
        dir=str(run_dir),
        config=vars(args),
        mode=mode,
    )
