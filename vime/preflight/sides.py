"""The two sides that ``vime align-check --bisect`` compares."""

from __future__ import annotations

from vime.errors import UsageError

TRAINER, ENGINE, HF = SIDES = ("trainer", "engine", "hf")
"""hf: the model folder through transformers, in float32."""


def two_sides(of: str | None, against: str | None) -> tuple[str, str]:
    """The engine against the trainer, where nothing else is asked for. UsageError for what is none, or the same."""
    for option, side in (("--of", of), ("--against", against)):
        if side is not None and side not in SIDES:
            raise UsageError(f"{option} {side}: is no side", f"known: {', '.join(SIDES)}")
    one = of or (ENGINE if against != ENGINE else TRAINER)
    other = against or (TRAINER if one != TRAINER else ENGINE)
    if one == other:
        raise UsageError(f"--of {one} --against {other}: are one side", "name two of them")
    return one, other
