"""Make the tiny model: a character-level language model that adds two digits and is right about half of the time.

Under a million weights, made on the spot in seconds from nothing but a seed: no download. ``vime.align.tiny_model`` has
the recipe; ``vime align-check --self-test`` makes its models of it too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vime.align import tiny_model
from vime.align.tiny_model import FAMILIES, NUM_STEPS, Recipe
from vime.errors import VimeError

HERE = Path(__file__).resolve().parent


def make_tiny_model(
    path: str | Path, family: str = "qwen3", tied: bool = False, steps: int = NUM_STEPS, seed: int = 0
) -> Path:
    """As ``vime.align.tiny_model.make_tiny_model``, of this recipe."""
    return tiny_model.make_tiny_model(path, Recipe(family, tied, steps, seed))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", nargs="?", type=Path, default=HERE / "model", help="output folder")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="supervised steps; 0: random weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        folder = make_tiny_model(args.path, args.family, args.tied, args.steps, args.seed)
    except VimeError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(f"model ready: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
