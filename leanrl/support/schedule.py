"""How many updates an off-policy run does after each step of its environments."""

import math
from fractions import Fraction


class UpdateSchedule:
    """``updates_per_step`` updates per environment step, from step ``starts`` on.

    Counted in whole numbers: 1.4 means exactly 7 updates every 5 steps, however long the run.

    Args:
        num_envs: environments stepped together, which is how many steps pass at once.
        starts: environment steps before the first update.
        updates_per_step: may be below 1 (an update every few steps) or above.
    """

    def __init__(self, num_envs: int, starts: int, updates_per_step: float) -> None:
        self.num_envs = num_envs
        self.starts = starts
        # From the digits as typed: the float 1.4 is a little less than 7 / 5.
        self.updates, self.steps = Fraction(str(updates_per_step)).as_integer_ratio()

    def due(self, global_step: int) -> int:
        """The number of updates due after ``global_step`` environment steps."""
        return self.owed(global_step) - self.owed(global_step - self.num_envs)

    def begins(self, global_step: int) -> bool:
        """Whether the first update of the run is due at this step."""
        return self.owed(global_step) > 0 == self.owed(global_step - self.num_envs)

    def patterns(self, *frequencies: int) -> set[tuple[tuple[bool, ...], ...]]:
        """Every sequence of updates that can fall between two steps.

        Args:
            frequencies: periods, in updates, of what only some updates do (such as training the actor).

        Returns:
            sequences with one tuple per update: for each frequency, whether its work is due.
        """
        mean = Fraction(self.num_envs * self.updates, self.steps)
        # The first step to reach ``starts`` owes no update, or fewer than usual if it goes beyond.
        first = max(1, math.ceil(self.starts / self.num_envs)) * self.num_envs
        counts = {0, self.due(first), math.floor(mean), math.ceil(mean)}
        period = math.lcm(*frequencies)
        flags = [tuple(n % frequency == 0 for frequency in frequencies) for n in range(period + max(counts))]
        return {tuple(flags[start : start + n]) for n in counts for start in range(period)}

    def owed(self, global_step: int) -> int:
        """Updates from the start of the run to ``global_step`` environment steps."""
        return max(0, global_step - self.starts) * self.updates // self.steps
