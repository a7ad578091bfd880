"""One-line errors for bad input: what the user typed, and what would be right."""

import dataclasses
import math
import sys


class UsageError(Exception):
    """Bad input. Scripts and tools print it as one line and exit with code 2, before anything is written."""


def flag(name: str) -> str:
    """The command-line form of a field: ``num_envs`` -> ``--num-envs``."""
    return "--" + name.replace("_", "-")


def typed(value) -> str:
    """A field's value as it is typed; several, with spaces between them."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def bad(name: str, value, remedy: str) -> UsageError:
    """The error for field ``name``: ``--num-envs 0: must be at least 1``."""
    return UsageError(f"{flag(name)} {typed(value)}: {remedy}")


def pip_command(group: str, *flags: str) -> str:
    """The command that installs a group of ``requirements/`` for this Python: ``mujoco``, ``envpool``, ``hub`` ..."""
    return " ".join([sys.executable, "-m pip install", *flags, f"-r requirements/requirements-{group}.txt"])


def require_at_least(args, minimum: float, *names: str) -> None:
    """Every named field of ``args`` that is not None must be a finite number >= ``minimum``."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not minimum <= value < math.inf:
            raise bad(name, value, f"must be at least {minimum}" + ", and finite" * (value == math.inf))


def require_positive(args, *names: str) -> None:
    """Every named field of ``args`` that is not None must be a finite number above 0."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise bad(name, value, "must be above 0" + ", and finite" * (value == math.inf))


def require_unit_interval(args, *names: str) -> None:
    """Every named field of ``args`` must lie in [0, 1]."""
    for name in names:
        value = getattr(args, name)
        if not 0.0 <= value <= 1.0:
            raise bad(name, value, "must be between 0 and 1")


def changed_fields(first, second) -> list[str]:
    """Names of the fields in which two dataclass instances of one type differ."""
    return [f.name for f in dataclasses.fields(first) if getattr(first, f.name) != getattr(second, f.name)]
