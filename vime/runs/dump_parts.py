"""The live parts that ``vime dump-weights`` takes its views from, and one view on its way to the disk."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.cluster.engines import RayEngines
from vime.cluster.placement import place
from vime.cluster.session import RaySession
from vime.cluster.trainer import RayTrainer
from vime.config.schema import Config
from vime.log import Phase, Progress
from vime.runs.introduce import introduce_trainer
from vime.runs.parts import transport_of, up
from vime.types import TensorEntry
from vime.weights.dump import Tensors, record_stream
from vime.weights.manifest_file import TensorRecord

POLL_SECONDS = 0.5
MEGABYTE = 1_000_000


@dataclass
class Job:
    """One view to take: which tensors, where to write them, whom to tell."""

    entries: list[TensorEntry]
    folder: Path | None
    phase: Phase

    def here(self, tensors: Tensors) -> dict[str, TensorRecord]:
        """Take it in this process."""
        return record_stream(tensors, self.entries, self.folder, self._hear)

    def order(self, progress: Path) -> dict[str, Any]:
        """For an engine's process."""
        folder = None if self.folder is None else str(self.folder)
        return {"rows": self.rows, "folder": folder, "progress": str(progress)}

    @property
    def rows(self) -> list[list[Any]]:
        return [[e.name, list(e.shape), e.dtype] for e in self.entries]

    def _hear(self, done: int) -> None:
        self.phase.update(round(done / MEGABYTE))

    @contextmanager
    def followed(self) -> Iterator[Path]:
        """A file into which another process writes how many bytes are done, and which is read and told on."""
        ended = threading.Event()
        with tempfile.TemporaryDirectory(prefix="vime-dump-") as scratch:
            file = Path(scratch) / "progress"

            def follow() -> None:
                while not ended.wait(POLL_SECONDS):
                    with contextlib.suppress(OSError, ValueError):  # not there yet
                        self._hear(int(file.read_text()))

            thread = threading.Thread(target=follow, name="vime-dump-progress", daemon=True)
            thread.start()
            try:
                yield file
            finally:
                ended.set()
                thread.join()


class Live:
    """The trainer and the engine that the views need, started together, and what each can be asked for."""

    def __init__(
        self, config: Config, say: Progress, stack: ExitStack, loading: Job | None, restore: Path | None
    ) -> None:
        self.config, self.say, self.version = config, say, 0
        self._loading, self._stack = loading, stack
        self.trainer: RayTrainer | None = None
        self.engines: RayEngines | None = None
        with say.phase("starting"):
            session = RaySession.start(config)
            stack.callback(session.close)
            placement = place(config, session.resources())
            for text in placement.warnings:
                say.warn(text)
            if config.needs_engines:
                self.engines = RayEngines(config, session, placement.engine_options)
                self._progress = stack.enter_context(loading.followed()) if loading is not None else None
                order = None if loading is None or self._progress is None else loading.order(self._progress)
                self.engines.begin(order)
            if config.needs_trainer:
                self.trainer = RayTrainer(config, session, placement.trainer_options)
                introduce_trainer(say, self.trainer.start())
            if self.engines is not None:
                up(self.engines, say, stack)
        if restore is not None:
            assert self.trainer is not None
            with say.phase("load"):
                state = self.trainer.load(str(restore))
            self.version = int(state["next_rollout_id"])
            say.note(f"trainer: weights v{self.version} of {restore}")

    def trainer_records(self, job: Job) -> dict[str, Any]:
        assert self.trainer is not None
        with job.followed() as file:
            return self.trainer.dump_weights(job.rows, job.folder, file)

    def received(self, job: Job) -> dict[str, Any]:
        """Of an update by the trainer; without one, of the first load."""
        engines = self.engines
        assert engines is not None
        if self.trainer is None:
            return engines.first("recorded_loading", what="records of the first load")
        transport = transport_of(self.config, self.trainer, engines, self.say, self._stack, is_strict=False)
        assert transport is not None
        with job.followed() as file:
            engines.first("record_update", job.order(file), what="asking for records of the update")
            transport.sync(self.version)
            return engines.first("recorded_update", what="records of the update")

    def held(self, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors, and buffers, which no checkpoint carries."""
        assert self.engines is not None
        with job.followed() as file:
            records = self.engines.first("dump_held", job.order(file), what="reading back the weights")
        return records, self.engines.first("dump_buffers", what="reading back the buffers")
