"""One-line errors for bad input: what the user typed, and what would work."""

import math
import sys
from collections.abc import Callable, Iterable


class UsageError(Exception):
    """Bad input: scripts and tools print it as one line and exit with code 2. Raise it before training if possible."""


def flag(name: str) -> str:
    """The command-line form of a field: ``num_envs`` -> ``--num-envs``."""
    return "--" + name.replace("_", "-")


def typed(value) -> str:
    """A field's value as typed on the command line, items separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def bad(name: str, value, problem: str) -> UsageError:
    """The error for field ``name``: ``--num-envs 0: must be at least 1``."""
    return UsageError(f"{flag(name)} {typed(value)}: {problem}")


def pip_command(group: str, *flags: str) -> str:
    """The command that installs a group of ``requirements/`` for this Python: ``mujoco``, ``envpool``, ``hub`` ..."""
    return " ".join([sys.executable, "-m pip install", *flags, f"-r requirements/requirements-{group}.txt"])


def require_at_least(args, minimum: float, *names: str) -> None:
    """Every named field of ``args`` that is not None must be a finite number >= ``minimum``."""
    _require(args, names, lambda value: minimum <= value < math.inf, f"must be at least {minimum}")


def require_positive(args, *names: str) -> None:
    """Every named field of ``args`` that is not None must be a finite number above 0."""
    _require(args, names, lambda value: 0 < value < math.inf, "must be above 0")


def require_unit_interval(args, *names: str) -> None:
    """Every named field of ``args`` must be None or in [0, 1]."""
    _require(args, names, lambda value: 0 <= value <= 1, "must be between 0 and 1")


def _require(args, names: Iterable[str], holds: Callable[[float], bool], problem: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and not holds(value):
            raise bad(name, value, problem + ", and finite" * (value == math.inf))
