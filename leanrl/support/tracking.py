"""Where metrics go: ``metrics.jsonl``, TensorBoard and, with ``--track``, Weights & Biases."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

from leanrl.support.checkpoints import open_atomically

METRICS_FILE = "metrics.jsonl"


def read_metrics(run_dir: Path, file: str = METRICS_FILE) -> list[dict]:
    """A run's log points, oldest first, up to a line cut short by a kill; ``file`` may be another JSONL file."""
    rows = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (Path(run_dir) / file).read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def cut_metrics(run_dir: Path, global_step: int, file: str = METRICS_FILE) -> None:
    """Drops log points after ``global_step``, which a resumed run writes again."""
    rows = [row for row in read_metrics(run_dir, file) if row["global_step"] <= global_step]
    with open_atomically(run_dir / file) as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())


class Tracker:
    """Writes each log point to every place it belongs.

    Args:
        run_dir: the run directory, which exists.
        args: the run's, which W&B shows; ``track``, ``wandb_project_name`` and ``wandb_entity`` are used here.
        global_step: environment step at which the run starts or resumes.
    """

    def __init__(self, run_dir: Path, args, global_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes 0.3 s, which --help does not need

        cut_metrics(run_dir, global_step)
        self._file = open(run_dir / METRICS_FILE, "a", buffering=1)
        self._tensorboard = SummaryWriter(str(run_dir), purge_step=global_step + 1)
        self._wandb = _start_wandb(run_dir, args) if args.track else None

    def log(self, global_step: int, metrics: dict[str, float]) -> None:
        """Writes one log point; NaN and infinity become null in ``metrics.jsonl``, to keep it valid JSON."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"global_step": global_step, **finite}) + "\n")
        for key, value in metrics.items():
            self._tensorboard.add_scalar(key, value, global_step)
        if self._wandb is not None:
            self._wandb.log({"global_step": global_step, **metrics})

    def close(self, failed: bool = False) -> None:
        """Ends the log; W&B also shows whether the run ``failed``."""
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))


def _start_wandb(run_dir: Path, args):
    import wandb

    # Without a key, wandb.init would prompt for one. `wandb sync` uploads an offline run later.
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "dir": str(run_dir)}
    resume = "allow" if mode == "online" else None
    run_id = run_dir.name.translate(dict.fromkeys(map(ord, ":;,#?/'"), "-"))  # W&B refuses these
    return wandb.init(**where, name=run_dir.name, id=run_id, resume=resume, config=vars(args), mode=mode)
