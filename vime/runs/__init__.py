"""The commands: pick the parts, call the loop, end everything. ``train``, ``rollout`` and ``replay`` are one path."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime import loop
from vime.config.load import Loaded
from vime.config.schema import Config
from vime.errors import VimeError
from vime.log import Progress
from vime.metrics import JsonlSink, Metrics, Sink, TensorBoardSink, WandbSink
from vime.observe import Observer
from vime.preflight.against import Against
from vime.preflight.check import records_used
from vime.run_folder import RunFolder
from vime.runs.compare import FOLDER, Comparison
from vime.runs.ending import ends_in_order
from vime.runs.parts import started
from vime.runs.planted import planted
from vime.runs.regenerate import Regenerated
from vime.runs.regenerate import regenerate as ask_again
from vime.runs.result import RunResult, summarize
from vime.runs.watched import watchdog
from vime.types import CheckResult, Verdict

NOT_COMPARED = CheckResult(
    "replay against the recorded run",
    Verdict.NOT_TESTED,
    cause="there is no training record beside the records; --vs LAYOUT compares with another layout",
)


def train(*, loaded: Loaded, console: Progress, resume: str | None = None) -> RunResult:
    """``vime train``; with ``resume`` (a run folder) it goes on from the newest checkpoint there."""
    return _run("train", loaded, console, resume)


def rollout(*, loaded: Loaded, console: Progress) -> RunResult:
    """``vime rollout``: generate and score only; Megatron-core is never loaded."""
    return _run("rollout", loaded, console)


def replay(*, loaded: Loaded, console: Progress, start: int = 0, against: Against | None = None) -> RunResult:
    """``vime replay``: train on recorded rollouts from ``start`` on, compare with ``against``; vLLM is never loaded."""
    config = loaded.config
    console.note(f"records: {records_used(config, start)}")
    if against is None:
        result = _run("replay", loaded, console, start=start)
        return replace(result, checks=[*result.checks, NOT_COMPARED])
    ids = range(start, config.run.num_rollouts)
    comparison = Comparison(against, config, ids, Path(config.run_dir) / FOLDER, console)
    return _run("replay", loaded, console, start=start, comparison=comparison)


def regenerate(*, loaded: Loaded, console: Progress, template: str, ids: str | None = None) -> Regenerated:
    """``vime replay --regenerate``: the records' prompts and seeds once more through live engines, no trainer."""
    with console, ends_in_order():
        return ask_again(loaded, console, template, ids)


def _run(
    command: str,
    loaded: Loaded,
    console: Progress,
    resume: str | None = None,
    start: int = 0,
    comparison: Comparison | None = None,
) -> RunResult:
    config = loaded.config
    folder = RunFolder(Path(config.run_dir))
    with ExitStack() as stack:
        stack.enter_context(folder.held())
        checkpoint = RunFolder(Path(resume)).newest_checkpoint() if resume else None
        folder.begin(loaded, resume is not None)
        stack.enter_context(console)
        stack.enter_context(ends_in_order())
        loaded = stack.enter_context(planted(loaded, folder.path, console))
        config = loaded.config
        metrics = stack.enter_context(Metrics(_sinks(config, folder)))
        observer = Observer(config, console, metrics, folder.evaluation, verify_first_step=checkpoint is None)
        observer.watchdog = watchdog(command, config, folder, console)
        stack.enter_context(observer.watchdog.awake())
        if comparison is not None:
            comparison.check()
            stack.enter_context(comparison.held(observer.watchdog))
            comparison.run_references()
        with started(loaded, observer, None if comparison is None else comparison.session) as parts:
            parts = parts if comparison is None else comparison.watched(parts)
            start = _restore(parts, checkpoint, observer, start)
            _forget_later_rows(metrics, start)
            loop.run(config, replace(parts, save=_saver(config, parts, folder)), observer, start)
            if config.checkpoint.export_hf and parts.trainer is not None:
                with observer.phase("export"):
                    parts.trainer.export(str(folder.hf))
        if comparison is not None:
            comparison.judge()
    outcomes = [] if comparison is None else comparison.outcomes
    return summarize(command, config, folder, observer, start, outcomes)


def _restore(parts: loop.Parts, checkpoint: Path | None, observer: Observer, start: int = 0) -> int:
    """Load the checkpoint, if any; returns the first rollout to do and says where it came from (case T16)."""
    if checkpoint is None:
        return start
    if parts.trainer is None:
        raise VimeError(f"--resume {checkpoint}: this run has no trainer to restore")
    with observer.phase("load"):
        state = parts.trainer.load(str(checkpoint))
    parts.rollouts.load_state_dict(state["rollouts"])
    observer.progress.note(f"resumed from {checkpoint}: next is rollout {state['next_rollout_id']}")
    return int(state["next_rollout_id"])


def _saver(config: Config, parts: loop.Parts, folder: RunFolder) -> loop.Save | None:
    trainer = parts.trainer
    if trainer is None or config.checkpoint.save_interval == 0:
        return None

    def save(next_rollout_id: int, state: dict[str, Any]) -> None:
        trainer.save(str(folder.checkpoint(next_rollout_id)), state)
        folder.prune(config.checkpoint.keep)

    return save


def _sinks(config: Config, folder: RunFolder) -> list[Sink]:
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(folder.path / "tensorboard"))
    if config.log.wandb_project is not None:
        sinks.append(WandbSink(config.log.wandb_project, config.run.name, folder.path))
    return sinks


def _forget_later_rows(metrics: Metrics, start: int) -> None:
    """Rows that a run interrupted after its last checkpoint wrote, and that are written again."""
    for sink in metrics.sinks:
        if isinstance(sink, JsonlSink):
            sink.truncate_after(start - 1)
