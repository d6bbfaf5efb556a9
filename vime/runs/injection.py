"""Faults planted in a live bench, each where it belongs, and healed, so that one start serves many walks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vime.align.answer_faults import damaged
from vime.align.faults import FAULTS, Place, require
from vime.align.planting import pretrained_copy
from vime.config.load import Loaded
from vime.errors import UsageError
from vime.runs.parts import WRONG_TEMPLATE, read_prompts
from vime.types import RolloutBatch
from vime.weights.transport import SyncFault

if TYPE_CHECKING:
    from vime.runs.bench import LiveBench

LOSES_ROTARY = "zero-rotary"
"""A sync refuses an engine that has lost a buffer: this one is lost right after the first."""
PROMPTS = "reading the prompts"
OF_PROMPTS = ("the rollouts", "the first prompts")
"""Facts of the bench that rest on how prompts are rendered."""


@dataclass
class Injection:
    """What is planted in a bench at this moment, beside what trainer, engines and transport know themselves.

    answers     the fault of what the engines answer
    after_sync  the fault of the engines that waits for the first sync
    undo        ends what was begun for a fault
    """

    answers: str = ""
    after_sync: str = ""
    undo: ExitStack = field(default_factory=ExitStack)

    def synced(self, bench: LiveBench) -> None:
        """Right after a sync."""
        if self.after_sync:
            bench.engine.plant(self.after_sync)
            self.after_sync = ""

    def answered(self, batch: RolloutBatch) -> RolloutBatch:
        """What arrives of a rollout."""
        return damaged(batch, self.answers)[0] if self.answers else batch


def plant(bench: LiveBench, fault: str) -> str:
    """Plant ``fault``; returns in words what was changed. Before the walk, or after ``LiveBench.begin_again``.

    UsageError for a name that is no fault, or where model, layout or settings have no place for it.
    """
    if fault not in FAULTS:
        raise UsageError(f"{fault!r} is no fault", f"known: {', '.join(FAULTS)}")
    require(fault, bench.config)
    return PLANTERS[FAULTS[fault].place](bench, fault)


def _in_engine(bench: LiveBench, fault: str) -> str:
    if fault != LOSES_ROTARY:
        return bench.engine.plant(fault)
    bench.injection.after_sync = fault
    return f"{FAULTS[fault].description}; right after the first sync"


def _in_sync(bench: LiveBench, fault: str) -> str:
    if fault == "dropped-tensor":
        return bench.engine.plant(fault)
    if fault == "bf16-weights":
        if bench.config.model.dtype != "float32":
            raise UsageError("bf16-weights needs model.dtype = float32: nothing else is rounded")
        bench.transport.fault.is_rounded = True
        return "every tensor passes through bfloat16 between the trainer's export and the engine's loader"
    bench.transport.fault.forgets_engines = True
    return "every sync after the first writes the weights and tells no engine"


def _in_answers(bench: LiveBench, fault: str) -> str:
    bench.injection.answers = fault
    return FAULTS[fault].description


def _in_prompts(bench: LiveBench, fault: str) -> str:
    """The rollouts of this bench go on with other prompts; healed, they are the first ones again."""
    if not bench.config.data.apply_chat_template:
        raise UsageError(f"{fault} needs data.apply_chat_template = true: no prompt is rendered")
    debug = bench.config.debug.model_copy(update={"inject": [WRONG_TEMPLATE]})
    prompts = read_prompts(bench.config.model_copy(update={"debug": debug}))
    bench.injection.undo.enter_context(bench.replaced({PROMPTS: prompts}, without=OF_PROMPTS))
    return "prompts are rendered with the template of another family"


def _in_checkpoint(bench: LiveBench, fault: str) -> str:
    own = bench.loaded
    copy = bench.injection.undo.enter_context(pretrained_copy(own.config.model.path, bench.tokenizer, bench.folder))
    bench.injection.undo.callback(setattr, bench, "loaded", own)
    bench.loaded = _at(own, copy)
    bench.trainer.restart(copy)
    return f"the embedding of the chat markers is the mean of all, in a copy of {own.config.model.path}"


def _at(loaded: Loaded, path: str) -> Loaded:
    model = loaded.config.model.model_copy(update={"path": path})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


PLANTERS: dict[Place, Callable[[LiveBench, str], str]] = {
    Place.ENGINE: _in_engine,
    Place.CHECKPOINT: _in_checkpoint,
    Place.PROMPTS: _in_prompts,
    Place.TRAINER: lambda bench, fault: bench.trainer.plant(fault),
    Place.EXPORT: lambda bench, fault: bench.trainer.plant(fault),
    Place.SYNC: _in_sync,
    Place.ANSWERS: _in_answers,
}


def heal(bench: LiveBench) -> None:
    """Undo whatever is planted: the trainer is bitwise as at the start, and so are engines after the next sync."""
    bench.injection.undo.close()
    bench.injection = Injection()
    bench.transport.fault = SyncFault()
    bench.trainer.heal()
    bench.engine.heal()
