"""Faults that ``--inject`` plants, so that one sees each check catch the fault it is there for.

This file names them; the code that plants a fault stands where the fault happens: in the engine's worker, in the
trainer's rank, in its export, in the sync, in the rendering of prompts, in a copy of the checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError

if TYPE_CHECKING:
    from vime.config.schema import Config

NEEDS = re.compile(r"([\w.]+) (>=|!=) (\d+)")


class Place(StrEnum):
    ENGINE = "engine"  # in the live weights, buffers or options of every engine, after they were loaded
    CHECKPOINT = "checkpoint"  # in a copy of the model folder, before anything reads it
    PROMPTS = "prompts"  # in the rendering of the prompts
    TRAINER = "trainer"  # in trainer ranks: weights, kernels, micro-batches, memory
    EXPORT = "export"  # in the tensors that the trainer exports, under their Hugging Face names
    SYNC = "sync"  # between the trainer's export and the engine's loader
    ANSWERS = "answers"  # in what the engine answered, on its way to the trainer


@dataclass(frozen=True, slots=True)
class Fault:
    """``description``: what is broken. ``needs``: the layout or model it takes, in words; empty if any will do.

    check       the check of ``vime align-check`` that is there for it; empty: none is
    is_of_walk  only ``vime align-check`` plants it
    """

    place: Place
    description: str
    needs: str = ""
    check: str = ""
    is_of_walk: bool = False

    @property
    def is_early(self) -> bool:
        """Planted before the run's parts begin; all others can be planted in parts that are alive."""
        return self.place in (Place.PROMPTS, Place.CHECKPOINT)


def _of_walk(place: Place, check: str, description: str, needs: str = "") -> Fault:
    return Fault(place, description, needs, check, True)


_EXPORT, _TRAINER = Place.EXPORT, Place.TRAINER
FAULTS: dict[str, Fault] = {
    "nan-weight": Fault(Place.ENGINE, "one element of a weight is NaN", check="weights"),
    "random-weights": Fault(
        Place.ENGINE, "every weight is drawn anew, as if the checkpoint was never loaded", check="weights"
    ),
    "zero-rotary": Fault(
        Place.ENGINE, "the rotary cache is zero, as after a release that lost the buffer", check="buffers"
    ),
    "swapped-layers": Fault(
        Place.ENGINE, "two layers hold each other's weights, as with a wrong stage offset", check="weights"
    ),
    "wrong-chat-template": Fault(
        Place.PROMPTS, "messages are rendered with the markers of another model family", check="coherence"
    ),
    "base-model": Fault(
        Place.CHECKPOINT, "the chat markers were never trained, as in a pretrained model", check="coherence"
    ),
    "loss-scale": Fault(_TRAINER, "the loss of data-parallel rank 1 counts twice", "parallel.dp >= 2", "gradients"),
    "shard-order": Fault(
        _TRAINER, "tensor-parallel ranks hold each other's shard of one matrix", "parallel.tp >= 2", "loaded"
    ),
    "hung-rank": Fault(_TRAINER, "data-parallel rank 1 never comes to the sum of the gradients", "parallel.dp >= 2"),
    "dropped-sample": Fault(
        _TRAINER, "data-parallel rank 1 trains on one sample less", "parallel.dp >= 2", "gradients"
    ),
    "unloaded-tensor": _of_walk(_TRAINER, "loaded", "one tensor is left as it was initialised"),
    "stage-offset": _of_walk(_EXPORT, "names", "two pipeline stages number their layers alike, and swap them"),
    "swapped-qk": _of_walk(_EXPORT, "names", "rows of the query and of the key projection are exchanged in one layer"),
    "swapped-gate-up": _of_walk(_EXPORT, "names", "gate and up projection have each other's name in one layer"),
    "joined-shards": _of_walk(_EXPORT, "names", "gate and up shards of two ranks are joined in rank order"),
    "transposed": _of_walk(_EXPORT, "names", "one square matrix is transposed"),
    "padded-rows": _of_walk(_EXPORT, "names", "the embedding keeps the rows that pad the vocabulary"),
    "duplicated-lm-head": _of_walk(_EXPORT, "names", "the head is the embedding once more, tied or not"),
    "dropped-tensor": _of_walk(Place.SYNC, "weights", "one tensor is not sent; the engine keeps an old value"),
    "bf16-weights": _of_walk(Place.SYNC, "weights", "weights pass through bfloat16 on their way", "float32"),
    "stale-engine": _of_walk(Place.SYNC, "second", "a later sync says that it is done and sends nothing"),
    "stale-prefix-cache": _of_walk(Place.ENGINE, "prefix_cache", "keys and values of the old weights stay cached"),
    "lost-buffer": _of_walk(Place.ENGINE, "buffers", "a buffer is lost when the engine sleeps"),
    "one-sided-temperature": _of_walk(
        _TRAINER, "sampling", "the trainer leaves the temperature out", "rollout.sampling.temperature != 1"
    ),
    "top-p": _of_walk(Place.ENGINE, "sampling", "the engine samples with top_p = 0.8"),
    "raw-log-probs": _of_walk(
        Place.ENGINE,
        "sampling",
        "the engine reports log-probs before temperature",
        "rollout.sampling.temperature != 1",
    ),
    "generation-config": _of_walk(Place.ENGINE, "sampling", "generation_config.json adds a repetition penalty of 1.3"),
    "shifted-log-probs": _of_walk(Place.ANSWERS, "tokens", "log-probs stand one token late"),
    "exchanged-log-probs": _of_walk(Place.ANSWERS, "tokens", "one sample has the log-probs of another"),
    "noisy-kernel": _of_walk(_TRAINER, "determinism", "one layer adds noise of 1e-6 at every forward"),
    "router-bias": _of_walk(_TRAINER, "routing", "the router of one layer prefers an expert by a bias", "experts"),
    "packed-leak": _of_walk(_TRAINER, "packing", "attention sees the neighbour before it in the pack"),
    "wrong-normalizer": _of_walk(
        _TRAINER, "gradients", "each data-parallel rank divides by its own tokens", "parallel.dp >= 2"
    ),
    "memory-leak": _of_walk(_TRAINER, "memory", "20 MB are kept at every step"),
    "moved-reference": _of_walk(_TRAINER, "resume", "loading a checkpoint moves the reference too"),
}


def listed(*places: Place) -> str:
    """The names of the faults that runs plant in ``places``, for people; those of the walk alone are left out."""
    return ", ".join(name for name, fault in FAULTS.items() if fault.place in places and not fault.is_of_walk)


def is_in_engine(name: str) -> bool:
    """Whether fault ``name`` is planted in the engines."""
    return name in FAULTS and FAULTS[name].place == Place.ENGINE and not FAULTS[name].is_of_walk


def unmet(name: str, config: Config) -> str:
    """What the configuration has otherwise than the fault takes (``needs``: ``KEY >= NUMBER`` or ``!=``); or ""."""
    found = NEEDS.fullmatch(FAULTS[name].needs)
    if found is None:
        return ""
    value: Any = config
    for part in found[1].split("."):
        value = getattr(value, part)
    number = int(found[3])
    is_met = value >= number if found[2] == ">=" else value != number
    return "" if is_met else f"{name} needs {FAULTS[name].needs}; {found[1]} = {value:g}"


def require(name: str, config: Config) -> None:
    """UsageError where ``config`` has no place for the fault."""
    if reason := unmet(name, config):
        raise UsageError(f"the fault {reason}", "choose such a setting")
