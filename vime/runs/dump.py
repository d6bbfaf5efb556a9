"""``vime dump-weights``: views of the weights taken from live parts, written whole or not at all, and compared."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vime.backends.megatron.manifest import is_checkpoint
from vime.config.load import Loaded
from vime.config.schema import Config
from vime.errors import UsageError
from vime.log import Phase, Progress
from vime.models import ModelSpec, load_spec
from vime.runs.dump_parts import MEGABYTE, Job, Live
from vime.runs.ending import ends_in_order
from vime.types import TensorEntry
from vime.weights.checkpoint import read_specs
from vime.weights.compare import Read, WeightDiff, diff
from vime.weights.dump import (
    copy_beside,
    held_alone,
    put_in_place,
    require_absent,
    require_room,
    unfinished,
    writing_folder,
)
from vime.weights.files import chosen, copy_missing, folder_entries, folder_tensors, listed
from vime.weights.manifest_file import SUFFIX, VIEWS, Dump, TensorRecord, write_dump
from vime.weights.shards import Shards
from vime.weights.shm import num_bytes


@dataclass(frozen=True)
class Asked:
    """What to dump.

    views         of ``VIEWS``, any number
    out           folder of the manifests, and of a folder of tensors for each view
    layer, match  keep only that layer; only names that the regular expression finds something in
    checkpoint    the folder of the view ``checkpoint``, and what the trainer starts from; None: model.path
    copy_missing  Hugging Face folder whose tensors are copied where a view never had them
    """

    views: tuple[str, ...]
    out: Path
    digests_only: bool = False
    layer: int | None = None
    match: str | None = None
    checkpoint: Path | None = None
    copy_missing: Path | None = None

    @property
    def selection(self) -> str:
        parts = [f"layer {self.layer}"] if self.layer is not None else []
        return ", ".join([*parts, *([f"names that match {self.match!r}"] if self.match else [])])


@dataclass(frozen=True)
class Dumped:
    """What was dumped, in the order of the views, and each compared with the first. seconds, sizes: by view."""

    out: Path
    dumps: dict[str, Dump]
    diffs: tuple[WeightDiff, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        return all(found.is_equal for found in self.diffs)

    @property
    def summary(self) -> str:
        """``checkpoint = trainer = engine-received = engine-held: 47/47 tensors``."""
        names = list(self.dumps)
        num = len(self.dumps[names[0]].tensors)
        if len(names) == 1:
            return f"{names[0]}: {num} tensors; nothing to compare them with"
        if self.is_equal and any(found.num_untested for found in self.diffs):
            return "; ".join(found.summary for found in self.diffs)
        if self.is_equal:
            return f"{' = '.join(names)}: {num}/{num} tensors bitwise equal"
        return "; ".join(found.summary for found in self.diffs if not found.is_equal)

    def rows(self) -> list[tuple[str, ...]]:
        """view, tensors, MB, version, seconds, MB/s, against the first view."""
        against = {found.b.origin: found for found in self.diffs}
        rows: list[tuple[str, ...]] = []
        for view, dump in self.dumps.items():
            size, seconds = dump.num_bytes / MEGABYTE, self.seconds[view]
            found = against.get(view)
            word = "-" if found is None else "equal" if found.is_equal else f"{len(found.findings)} differences"
            equal = "" if found is None else f" {found.num_equal}/{len(found.tensors)}"
            rate = f"{size / seconds:.0f}" if seconds else "-"
            buffers = str(len(dump.buffers)) if dump.buffers else "-"
            numbers = (str(len(dump.tensors)), buffers, f"{size:.1f}", f"{seconds:.2f}", rate)
            rows.append((view, *numbers, f"{word}{equal}"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "command": "dump-weights",
            "out": str(self.out),
            "summary": self.summary,
            "is_equal": self.is_equal,
            "views": {
                view: {
                    "manifest": str(manifest_path(self.out, view)),
                    "tensors": None if dump.folder is None else str(dump.folder),
                    "num_tensors": len(dump.tensors),
                    "num_buffers": len(dump.buffers),
                    "num_bytes": dump.num_bytes,
                    "seconds": self.seconds[view],
                }
                for view, dump in self.dumps.items()
            },
            "diffs": [found.as_dict() for found in self.diffs],
        }


def manifest_path(out: Path, view: str) -> Path:
    return out / f"{view}{SUFFIX}"


def dump_weights(*, loaded: Loaded, console: Progress, asked: Asked) -> Dumped:
    """Take every view that is asked for in one start, and compare them. UsageError before anything is started."""
    with console, ends_in_order():
        ordered = replace(asked, views=tuple(view for view in VIEWS if view in asked.views))
        return _Taking(ordered, loaded.config, console).run()


@dataclass
class _Taking:
    asked: Asked
    run_config: Config
    say: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    # ------------------------------------------------------------ what is asked for

    @cached_property
    def is_distributed(self) -> bool:
        """The checkpoint is one of a run, in Megatron's format: the trainer reads it."""
        return self.asked.checkpoint is not None and is_checkpoint(self.asked.checkpoint)

    @cached_property
    def needs_trainer(self) -> bool:
        return "trainer" in self.asked.views or self.is_distributed

    @cached_property
    def needs_engine(self) -> bool:
        return any(view.startswith("engine-") for view in self.asked.views)

    @cached_property
    def folder(self) -> Path:
        """The Hugging Face folder of the checkpoint."""
        is_plain = self.asked.checkpoint is not None and not self.is_distributed
        return self.asked.checkpoint if is_plain and self.asked.checkpoint else Path(self.run_config.model.path)

    @cached_property
    def config(self) -> Config:
        """The run's, of which only what is needed is started: one engine, no reference, nothing colocated."""
        c = self.run_config
        if self.needs_engine and c.rollout.engines:
            raise UsageError(
                f"rollout.engines = {c.rollout.engines}: weights of servers that are not vime's own cannot be read",
                "leave rollout.engines out, or dump only --from checkpoint --from trainer",
            )
        debug = {"rollout_only": not self.needs_trainer, "train_only": not self.needs_engine}
        sections = {
            "model": {"path": str(self.folder)},
            "run": {"num_rollouts": max(1, c.run.num_rollouts)},
            "rollout": {"num_engines": 1},
            "algo": {"log_ref": False, "kl_coef": 0.0},
            "cluster": {"colocate": False},
            "debug": debug | {"load_rollout_data": None, "save_rollout_data": None},
            "weights": {"verify": "off"},  # the dumps are what is compared
        }
        return c.model_copy(update={name: getattr(c, name).model_copy(update=own) for name, own in sections.items()})

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.folder)

    @cached_property
    def of_model(self) -> list[TensorEntry]:
        """What trainer and engine have, as far as it is asked for."""
        dtype = self.config.model.dtype
        entries = [TensorEntry(name, shape, dtype) for name, shape in self.spec.tensors().items()]
        return chosen(entries, self.asked.layer, self.asked.match)

    @cached_property
    def of_folder(self) -> list[TensorEntry]:
        """What the checkpoint has, in the dtype of the run."""
        return chosen(folder_entries(self.folder, self.config.model.dtype), self.asked.layer, self.asked.match)

    # ------------------------------------------------------------ one view after the other

    def run(self) -> Dumped:
        asked = self.asked
        self._check_folders()
        entries = {view: self._entries(view) for view in asked.views}
        copied = {view: self._missing(view) for view in asked.views}
        if not asked.digests_only:
            require_room(asked.out, sum(num_bytes(e) for view in asked.views for e in (*entries[view], *copied[view])))
        self._require_absent()
        _make(asked.out)
        with held_alone(asked.out):
            self._require_absent()
            for view in VIEWS:  # what was interrupted left
                shutil.rmtree(unfinished(asked.out / view), ignore_errors=True)
            dumps = self._taken(entries, copied)
        diffs = [diff(dumps[a], dumps[b], *self._readers(a, b)) for a, b in _pairs(dumps)]
        return Dumped(asked.out, dumps, tuple(diffs), self.seconds)

    def _targets(self) -> list[Path]:
        return [p for view in self.asked.views for p in (manifest_path(self.asked.out, view), self.asked.out / view)]

    def _require_absent(self) -> None:
        for path in self._targets():
            require_absent(path)

    def _taken(
        self, entries: Mapping[str, list[TensorEntry]], copied: Mapping[str, list[TensorEntry]]
    ) -> dict[str, Dump]:
        """Every view under its name on the disk, or none. By view: tensors to take, tensors to copy beside them."""
        asked = self.asked
        dumps: dict[str, Dump] = {}
        with ExitStack() as stack:
            folders = {view: stack.enter_context(_made(asked.out / view, asked.digests_only)) for view in asked.views}
            jobs = {view: Job(entries[view], folders[view], Phase(view)) for view in asked.views}
            live = self._started(stack, jobs)
            for view in asked.views:
                dumps[view] = self._take(view, jobs[view], copied[view], live)
        try:
            for view, dump in dumps.items():
                write_dump(manifest_path(asked.out, view), dump)
        except BaseException:
            for path in self._targets():  # none was there before
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise
        return dumps

    def _check_folders(self) -> None:
        given, origin = self.asked.checkpoint, self.asked.copy_missing
        if given is not None and not self.is_distributed and not (given / "config.json").is_file():
            raise UsageError(
                f"--checkpoint {given}: is neither a Hugging Face folder nor a complete checkpoint of a run",
                "a run's are in RUN_DIR/checkpoints",
            )
        if origin is not None and not any(origin.glob("*.safetensors")):
            raise UsageError(f"--copy-missing {origin}: no *.safetensors file there", "name a Hugging Face folder")

    def _entries(self, view: str) -> list[TensorEntry]:
        return self.of_folder if view == "checkpoint" and not self.is_distributed else self.of_model

    def _missing(self, view: str) -> list[TensorEntry]:
        """Tensors of --copy-missing that a view never had, chosen or not."""
        if self.asked.copy_missing is None:
            return []
        names = set(self.spec.tensors())
        if view == "checkpoint" and not self.is_distributed:
            names = {entry.name for entry in folder_entries(self.folder, self.config.model.dtype)}
        return [entry for entry in read_specs(self.asked.copy_missing) if entry.name not in names]

    def _started(self, stack: ExitStack, jobs: Mapping[str, Job]) -> Live | None:
        if not self.needs_trainer and not self.needs_engine:
            return None
        loading = None if self.needs_trainer else jobs.get("engine-received")
        return Live(self.config, self.say, stack, loading, self.asked.checkpoint if self.is_distributed else None)

    def _take(self, view: str, job: Job, copied: list[TensorEntry], live: Live | None) -> Dump:
        size = sum(num_bytes(entry) for entry in job.entries)
        buffers: dict[str, Any] = {}
        began = time.perf_counter()
        with self.say.phase(f"{view}, MB", round(size / MEGABYTE)) as job.phase:
            if view == "checkpoint" and not self.is_distributed:
                records: Mapping[str, Any] = job.here(folder_tensors(self.folder, self.config.model.dtype))
            elif live is None:
                raise AssertionError(f"{view} needs a live part")
            elif view in ("checkpoint", "trainer"):
                records = live.trainer_records(job)
            elif view == "engine-received":
                records = live.received(job)
            else:
                records, buffers = live.held(job)
        self.seconds[view] = time.perf_counter() - began
        records = {**records, **self._copy(job, copied)}
        if job.folder is not None:
            copy_beside(self.folder, job.folder, self.config.model.dtype)
        return self._dump(view, records, buffers, live)

    def _copy(self, job: Job, copied: list[TensorEntry]) -> dict[str, TensorRecord]:
        if self.asked.copy_missing is None:
            return {}
        self.say.note(f"{len(copied)} tensors copied from {self.asked.copy_missing}: {listed(e.name for e in copied)}")
        return copy_missing(self.asked.copy_missing, copied, job.folder)

    def _readers(self, *views: str) -> list[Read | None]:
        return [None if self.asked.digests_only else Shards(self.asked.out / view).tensor for view in views]

    def _dump(self, view: str, records: dict[str, Any], buffers: dict[str, Any], live: Live | None) -> Dump:
        version = live.version if live is not None and view != "checkpoint" else 0
        return Dump(
            version=version,
            origin=view,
            tensors=_typed(records),
            buffers=_typed(buffers),
            family=self.spec.family,
            layout=_layout(view, self.config),
            model=str(self.asked.checkpoint or self.folder),
            is_tied=self.spec.is_tied,
            vocab_size=self.spec.vocab_size,
            selection=self.asked.selection,
            folder=None if self.asked.digests_only else self.asked.out / view,
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror}", "choose another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--out {folder} cannot be written to", "choose another folder")


def _pairs(dumps: Mapping[str, Dump]) -> list[tuple[str, str]]:
    """Every view with the first."""
    first, *others = dumps
    return [(first, other) for other in others]


def _typed(rows: Mapping[str, Any]) -> dict[str, TensorRecord]:
    """Records by name, from this process or as plain data from another."""
    return {name: row if isinstance(row, TensorRecord) else TensorRecord.from_dict(row) for name, row in rows.items()}


def _layout(view: str, config: Config) -> str:
    if view == "checkpoint":
        return "folder"
    if view == "trainer":
        p = config.parallel
        return " ".join(
            f"{name}={getattr(p, name)}" for name in ("tp", "pp", "vpp", "cp", "dp", "ep") if getattr(p, name)
        )
    return f"engine tp={config.rollout.engine_tp}"


@contextmanager
def _made(final: Path, digests_only: bool) -> Iterator[Path | None]:
    """A folder to write in, which gets its name at the end, or is removed."""
    if digests_only:
        yield None
        return
    folder = writing_folder(final)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    put_in_place(folder, final)
