"""The bench of ``vime align-check --from-record``: a recorded rollout and the trainer; no engine is ever started."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vime.align.bench import Unavailable
from vime.config.load import Loaded
from vime.config.schema import Config
from vime.data.tokenizer import load_tokenizer, tokenizer_digest
from vime.errors import UsageError
from vime.observe import Observer
from vime.record.files import record_files
from vime.record.reader import read
from vime.runs.bench import LiveBench
from vime.runs.sides import LiveEngine
from vime.types import RolloutBatch, Status

OPTION = "--from-record"


@dataclass
class RecordedBench(LiveBench):
    """``vime.align.bench.Bench`` over ``recorded``, which ``recorded_rollout`` read."""

    is_live: bool = False
    wants_engines: bool = False
    recorded: RolloutBatch | None = None

    @classmethod
    def of(
        cls, loaded: Loaded, folder: Path, observer: Observer, stack: ExitStack, template: str, ids: str | None
    ) -> RecordedBench:
        """Reads the record first, so that a bad one ends the walk before anything is started."""
        path, batch = recorded_rollout(loaded.config, template, ids)
        size = f"{len(batch)} samples, {batch.num_tokens} tokens"
        observer.progress.note(f"rollout {batch.rollout_id} of {path}: {size}; checks that need an engine are skipped")
        return cls(loaded, folder, observer, stack, recorded=batch)

    @property
    def engine(self) -> LiveEngine:
        raise Unavailable("the rollout is a recorded one: there is no engine")

    def _first_rollout(self) -> RolloutBatch:
        assert self.recorded is not None
        return self.recorded


def recorded_rollout(config: Config, template: str, ids: str | None = None) -> tuple[Path, RolloutBatch]:
    """The first rollout of ``template`` (of ``ids``), cut to the size of the walk, without what nobody trains on.

    UsageError for files that are not there, are no records or come from another tokenizer, and where nothing is left.
    """
    path = record_files(template, ids, OPTION)[0].path
    batch = read(path, tokenizer_digest=tokenizer_digest(load_tokenizer(config.model.path)))
    rows = [row for row in _few(config, batch) if Status(batch.rows[row]["status"]).is_trainable]
    if not rows:
        raise UsageError(f"{OPTION} {path}: no sample is completed or truncated", "take another rollout with --ids")
    return path, batch.select(rows)


def _few(config: Config, batch: RolloutBatch) -> list[int]:
    """The first groups, and of each the first samples: as many as the walk's own rollout would have."""
    kept: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids_N.tolist()):
        if group in kept or len(kept) < config.rollout.rollout_batch_size:
            kept.setdefault(group, []).append(row)
    return sorted(row for rows in kept.values() for row in rows[: config.rollout.num_samples_per_prompt])
