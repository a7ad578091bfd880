"""Versions of the parameters, from the learner to the actor threads of one device."""

import torch

from leanrl.sebulba.mailbox import Closable
from leanrl.support.devices import synchronize_stream


def version_for(rollout: int, policy_lag: int, first_version: int = 0) -> int:
    """The parameters that produce a rollout: those after ``rollout - 1 - policy_lag`` updates.

    Args:
        rollout: from 1 on.
        first_version: what there was at the start (after a resume, the updates before it).
    """
    return max(first_version, rollout - 1 - policy_lag)


class ParamsSource(Closable):
    """The last ``policy_lag + 1`` versions of the parameters, one flat vector each.

    As many are enough: version v + 1 is published after every thread has delivered rollout v + 1, so whatever a thread
    still copies is at most ``policy_lag`` behind.

    Args:
        params: flat vector [P] of version ``version``, which is copied.
        policy_lag: how many versions behind the newest may be asked for.
        timeout: seconds after which a wait is a stall.
    """

    def __init__(self, params: torch.Tensor, version: int, policy_lag: int, timeout: float) -> None:
        super().__init__(timeout)
        self._slots = [params.clone() for _ in range(policy_lag + 1)]
        self._versions: list[int | None] = [None] * (policy_lag + 1)
        self._versions[version % len(self._slots)] = version
        self._newest = version

    def publish(self, version: int, params: torch.Tensor) -> None:
        """Makes ``params`` [P], which is copied, available as ``version``, which must be the newest plus 1."""
        with self._changed:
            if version != self._newest + 1:
                raise RuntimeError(f"parameters {version} published after {self._newest}")
            slot = version % len(self._slots)
            self._slots[slot].copy_(params)
            synchronize_stream(params.device)  # the threads that copy it work on others
            self._versions[slot] = self._newest = version
            self._changed.notify_all()

    def fetch(self, version: int, out: torch.Tensor) -> None:
        """Copies ``version`` into ``out`` [P], in place, as soon as it is there.

        Raises:
            Stopped: the source is closed.
            Stalled: it did not come in time.
            RuntimeError: it has been overwritten, which the schedule of rollouts rules out.
        """
        with self._changed:
            self._wait_for(lambda: self._newest >= version, f"parameters {version} of the learner")
            slot = version % len(self._slots)
            if self._versions[slot] != version:
                raise RuntimeError(f"parameters {version} are gone, the newest are {self._newest}")
            out.copy_(self._slots[slot])
