"""Faults of ``debug.inject`` that stand before everything else: said aloud, and the checkpoint's planted in a copy."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vime.align.faults import FAULTS
from vime.align.planting import pretrained_copy
from vime.config.load import Loaded
from vime.data.tokenizer import load_tokenizer
from vime.errors import UsageError
from vime.log import Progress


@contextmanager
def planted(loaded: Loaded, folder: Path, say: Progress) -> Iterator[Loaded]:
    """The configuration that the run really has; a copy of the checkpoint lies in ``folder`` while it lasts.

    UsageError for a name that is no fault, or a model that has no place for it.
    """
    config = loaded.config
    if unknown := [name for name in config.debug.inject if name not in FAULTS]:
        raise UsageError(f"debug.inject: {unknown[0]!r} is no fault", f"known: {', '.join(FAULTS)}")
    for name in config.debug.inject:
        say.warn(f"PLANTED FAULT {name} (debug.inject): {FAULTS[name].description}")
    if "base-model" not in config.debug.inject:
        yield loaded
        return
    path = config.model.path
    with pretrained_copy(path, load_tokenizer(path), folder) as copy:
        model = config.model.model_copy(update={"path": copy})
        yield replace(loaded, config=config.model_copy(update={"model": model}))


def without(loaded: Loaded, faults: Collection[str]) -> Loaded:
    """The configuration with ``faults`` left to whoever plants them in the live parts."""
    kept = [name for name in loaded.config.debug.inject if name not in faults]
    debug = loaded.config.debug.model_copy(update={"inject": kept})
    return replace(loaded, config=loaded.config.model_copy(update={"debug": debug}))
