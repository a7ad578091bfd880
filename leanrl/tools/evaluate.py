"""Plays saved models: whole episodes with the final policy of a training run.

A run saves its model if it is trained with --save-model. The same seed gives the same returns. A model trained on
EnvPool is played there, except that MuJoCo with --capture-video is played in Gymnasium. Actions are the mean or best
ones; on Atari 1 in 100 is random, since a game repeats itself exactly, and the same best moves can go on forever. The
return of an Atari game is the score of the whole game, over all lives.

    python -m leanrl.tools.evaluate runs/Hopper-v5__ppo_continuous_action__1__1700000000
    python -m leanrl.tools.evaluate runs/* --episodes 100 --seed 7
    python -m leanrl.tools.evaluate runs/my_run --episodes 1 --capture-video
    python -m leanrl.tools.evaluate runs/my_breakout_run --episodes 30 --sticky

A summary is printed; the returns go to RUN_DIR/evaluation.json.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from leanrl.support.cli import read_args_json
from leanrl.support.errors import UsageError, require_at_least
from leanrl.support.evaluation import play
from leanrl.support.run import machine_facts, write_json_atomically
from leanrl.tools.common import markdown_table, mean_std, run_tool


@dataclass
class Args:
    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """run directories that hold a model.pt"""
    episodes: int = 10
    """episodes of each model"""
    seed: int = 0
    """seed of the evaluation environments, which no training environment uses"""
    capture_video: bool = False
    """write the first episode of each model as mp4 into its run directory"""
    sticky: bool = False
    """Atari: sticky actions, which repeat the last one with probability 0.25"""


def main(args: Args) -> int:
    """Evaluates one model after the other; returns 0 if all could be played, 2 if any could not."""
    require_at_least(args, 1, "episodes")
    require_at_least(args, 0, "seed")
    if not args.run_dirs:
        raise UsageError("name at least one run directory")
    # Two threads would mostly wait for each other on small vectors, and on images take a core from the emulator.
    torch.set_num_threads(1)
    rows, failures = [], 0
    kind = f"evaluation{'_sticky' if args.sticky else ''}_seed{args.seed}"
    for run_dir in args.run_dirs:
        video = run_dir / "videos" / f"{kind}.mp4" if args.capture_video else None
        try:
            run = read_args_json(run_dir)
            returns = play(run_dir, args.episodes, args.seed, video, args.sticky)
            evaluation = {
                "script": run["script"],
                "env_id": run["args"]["env_id"],
                "seed": args.seed,
                "sticky": args.sticky,
                "episodes": args.episodes,
                "returns": returns,
                "video": str(video.relative_to(run_dir)) if video else None,
                "machine": machine_facts(torch.device("cpu")),
            }
            write_json_atomically(run_dir / "evaluation.json", evaluation)
        except (UsageError, OSError) as error:
            # A run without a model must not cost the results of the others.
            print(f"evaluate: {error}", file=sys.stderr)
            failures += 1
            continue
        row = [run_dir.resolve().name, evaluation["env_id"], f"{len(returns)}", mean_std(returns)]
        rows.append([*row, f"{min(returns):,.1f}", f"{max(returns):,.1f}"])
        if video:
            print(f"video: {video}")
    if rows:
        print(markdown_table(("run", "environment", "episodes", "return, mean ± std", "min", "max"), rows))
    return 2 if failures else 0


if __name__ == "__main__":
    run_tool(main, Args)
