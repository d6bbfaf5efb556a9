"""Faults that ``--inject`` plants, so that one sees each check catch the fault it is there for.

This file names them; the code that plants a fault stands where the fault happens: in the engine's worker, in the
trainer's rank, in the rendering of prompts, in a copy of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    ENGINE = "engine"  # in the live weights or buffers of every engine, after they were loaded
    CHECKPOINT = "checkpoint"  # in a copy of the model folder, before anything reads it
    PROMPTS = "prompts"  # in the rendering of the prompts
    TRAINER = "trainer"  # in one trainer rank


@dataclass(frozen=True, slots=True)
class Fault:
    """``description``: what is broken. ``needs``: the layout it takes, in words; empty if any will do."""

    place: Place
    description: str
    needs: str = ""


FAULTS: dict[str, Fault] = {
    "nan-weight": Fault(Place.ENGINE, "one element of a weight is NaN"),
    "random-weights": Fault(Place.ENGINE, "every weight is drawn anew, as if the checkpoint was never loaded"),
    "zero-rotary": Fault(Place.ENGINE, "the rotary cache is zero, as after a release that lost the buffer"),
    "swapped-layers": Fault(Place.ENGINE, "two layers hold each other's weights, as with a wrong stage offset"),
    "wrong-chat-template": Fault(Place.PROMPTS, "messages are rendered with the markers of another model family"),
    "base-model": Fault(Place.CHECKPOINT, "the chat markers were never trained, as in a pretrained model"),
    "loss-scale": Fault(Place.TRAINER, "the loss of data-parallel rank 1 counts twice", "parallel.dp >= 2"),
    "shard-order": Fault(
        Place.TRAINER, "tensor-parallel ranks hold each other's shard of one matrix", "parallel.tp >= 2"
    ),
    "hung-rank": Fault(
        Place.TRAINER, "data-parallel rank 1 never comes to the sum of the gradients", "parallel.dp >= 2"
    ),
    "dropped-sample": Fault(Place.TRAINER, "data-parallel rank 1 trains on one sample less", "parallel.dp >= 2"),
}


def listed(*places: Place) -> str:
    """The names of the faults that are planted in ``places``, for people."""
    return ", ".join(name for name, fault in FAULTS.items() if fault.place in places)


def is_in_engine(name: str) -> bool:
    """Whether fault ``name`` is planted in the engines."""
    return name in FAULTS and FAULTS[name].place == Place.ENGINE
