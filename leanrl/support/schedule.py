"""How many updates an off-policy run owes after each step of its environments."""

import math


class UpdateSchedule:
    """``updates_per_step`` updates for each step of one environment, from step ``starts`` on.

    Args:
        num_envs: environments stepped together, so steps that pass at once.
        starts: environment steps before the first update.
        updates_per_step: may be below 1 (an update every so many steps) or above.
    """

    def __init__(self, num_envs: int, starts: int, updates_per_step: float) -> None:
        self.num_envs = num_envs
        self.starts = starts
        self.updates_per_step = updates_per_step

    def due(self, global_step: int) -> int:
        """Updates to take now that ``global_step`` environment steps are done."""
        return self.owed(global_step) - self.owed(global_step - self.num_envs)

    def begins(self, global_step: int) -> bool:
        """Whether the first of all updates falls due with this step."""
        return self.owed(global_step) > 0 == self.owed(global_step - self.num_envs)

    def patterns(self, policy_frequency: int) -> set[tuple[bool, ...]]:
        """Every sequence of updates that can fall between two steps, each element telling whether it trains the actor.

        Args:
            policy_frequency: every so many updates train the actor.
        """
        mean = self.num_envs * self.updates_per_step
        # The step that reaches ``starts`` owes nothing, or a part where it goes beyond.
        first = max(1, math.ceil(self.starts / self.num_envs)) * self.num_envs
        counts = {0, self.due(first), math.floor(mean + 1e-9), math.ceil(mean - 1e-9)}
        flags = [n % policy_frequency == 0 for n in range(1, 2 * policy_frequency + max(counts))]
        return {tuple(flags[start : start + n]) for n in counts for start in range(policy_frequency)}

    def owed(self, global_step: int) -> int:
        """Updates from the start of the run to ``global_step`` environment steps."""
        # 1e-9: 30 * 0.1 must be 3 updates, and 0.7 / 0.1 steps 7, whichever way their floats fall.
        return math.floor(max(0, global_step - self.starts) * self.updates_per_step + 1e-9)
