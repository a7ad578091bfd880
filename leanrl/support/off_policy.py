"""What the off-policy scripts share: validation, checkpoints, resuming and the names of losses."""

from copy import deepcopy
from typing import NamedTuple

import torch
from gymnasium.vector import VectorEnv

from leanrl.support.envs import save_envs
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.errors import bad, require_at_least, require_positive, require_unit_interval
from leanrl.support.replay import Replay
from leanrl.support.run import Run
from leanrl.support.schedule import UpdateSchedule


def require_off_policy(args) -> None:
    """UsageError on the first argument that cannot work, among those that all off-policy scripts share."""
    require_at_least(args, 1, "total_timesteps", "num_envs", "buffer_size", "batch_size")
    require_at_least(args, 1, "num_threads", "log_every", "checkpoint_every")
    require_at_least(args, 0, "seed", "learning_starts")
    require_positive(args, "updates_per_step", "max_seconds", "snapshot_seconds")
    require_unit_interval(args, "gamma", "tau")
    if args.total_timesteps < args.num_envs:
        raise bad("total_timesteps", args.total_timesteps, f"is less than one step of {args.num_envs} environments")
    if args.buffer_size < args.num_envs:
        raise bad("buffer_size", args.buffer_size, f"does not hold one step of {args.num_envs} environments")
    total_steps = args.total_timesteps // args.num_envs * args.num_envs
    if not UpdateSchedule(args.num_envs, args.learning_starts, args.updates_per_step).owed(total_steps):
        raise bad("learning_starts", args.learning_starts, f"no update in {total_steps} steps; lower it or add steps")


class OffPolicyState:
    """What a script puts into checkpoints: what is trained, the replay, and the environments if they can be saved.

    Args:
        args: the script's arguments.
        replay, envs, episodes: of the run.
        parts: tensors, or objects with ``state_dict`` and ``load_state_dict`` (modules, optimisers), by name.
    """

    def __init__(self, args, replay: Replay, envs: VectorEnv, episodes: EpisodeStatistics, **parts) -> None:
        self._args = args
        self._replay, self._envs, self._episodes = replay, envs, episodes
        self._parts = parts

    def state_dict(self) -> dict:
        """Everything, to be saved before training continues; ``replay`` is None with ``--no-checkpoint-replay``."""
        parts = {name: _content(part) for name, part in self._parts.items()}
        replay = self._replay.state_dict() if self._args.checkpoint_replay else None
        return {**parts, "replay": replay, "envs": save_envs(self._envs, self._episodes)}

    def tensors(self) -> list:
        """The tensors and state dicts that a training step changes in place."""
        # Of the replay only the counters: warm-up steps are resets, which are not kept.
        return [*map(_content, self._parts.values()), self._replay.cursor, self._replay.size]

    def resume(self, run: Run) -> UpdateSchedule:
        """Restores a resumed run's checkpoint in place, and returns the schedule of updates.

        The environments are left to ``start_envs``. Without a saved replay, a new one is filled before the next update.
        """
        args = self._args
        learning_starts = args.learning_starts
        if run.resumed is not None:
            replay = run.resumed.pop("replay")
            # Copied: optimisers keep these tensors, each of which would keep the whole file mapped, replay included.
            saved = run.resumed = deepcopy(run.resumed)
            for name, part in self._parts.items():
                if isinstance(part, torch.Tensor):
                    part.detach().copy_(saved[name])
                else:
                    part.load_state_dict(saved[name])
            if replay is not None:
                self._replay.load_state_dict(replay)
            else:
                # num_envs: the first step may only reset the environments, and would leave nothing to sample.
                learning_starts = run.global_step + max(args.learning_starts, args.batch_size, args.num_envs)
        return UpdateSchedule(args.num_envs, learning_starts, args.updates_per_step)


def _content(part) -> torch.Tensor | dict:
    return part.detach() if isinstance(part, torch.Tensor) else part.state_dict()


def named_losses(run: Run, losses: NamedTuple) -> dict[str, float]:
    """A script's ``Losses`` for a log point; empty before the first update.

    Two critics' qf_loss [2] becomes qf1_loss and qf2_loss.
    """
    if not run.optimizer_steps:
        return {}
    named = {}
    for name, values in losses._asdict().items():
        for i, value in enumerate(values.tolist(), start=1):
            named["losses/" + (name if len(values) == 1 else name.replace("qf", f"qf{i}"))] = value
    return named
