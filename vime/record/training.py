"""The training record: what the trainer did with one rollout, a small file beside its record. See docs/formats.md."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vime.errors import UsageError, VimeError
from vime.record.archive import format_of, load_plain, put_file
from vime.record.layout import arrays_problem, checksum, keys_problem, plain_copy
from vime.record.reader import check_sum, check_version
from vime.types import RolloutBatch

FORMAT = "vime-training"
SCHEMA_VERSION = 1
ARRAYS: dict[str, str] = {
    "offsets": "int64",
    "log_probs_T": "float32",
    "ref_log_probs_T": "float32",
    "advantages_T": "float32",
    "sample_losses_N": "float64",
    "dp_ranks_N": "int32",
}
"""Every array with its dtype; offsets is N+1, ref_log_probs_T may be empty."""
_DTYPES = {name: (dtype,) for name, dtype in ARRAYS.items()}
_HEADER: dict[str, type] = {
    "layout": dict,
    "settings": dict,
    "library_versions": dict,
    "rollout_digest": str,
    "weights_before": str,
}
_STEP: dict[str, type] = {"loss": float, "grad_norm": float, "lr": float, "num_tokens": int, "is_skipped": bool}
_PLAIN: dict[str, type] = {
    "format": str,
    "schema_version": int,
    "rollout_id": int,
    "header": dict,
    "steps": list,
    "weights": dict,
}


@dataclass(frozen=True, slots=True)
class TrainingHeader:
    """layout, settings: dotted name -> value; ``weights_before``: digest of the weights trained from, "" unknown."""

    layout: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    library_versions: dict[str, str] = field(default_factory=dict)
    rollout_digest: str = ""
    weights_before: str = ""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One optimizer step, as ``vime.types.StepStats`` says it."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    is_skipped: bool = False


@dataclass(slots=True)
class TrainingRecord:
    """What the trainer computed from one rollout of N samples, T tokens.

    offsets            int64 [N+1], as in the rollout
    log_probs_T        float32 [T], of the policy before the first step; ref_log_probs_T: [T], or [0] without reference
    advantages_T       float32 [T], 0.0 off mask
    sample_losses_N    float64 [N]: each sample's share of its step's loss; the shares of a step add up to it
    dp_ranks_N         int32 [N]: the data-parallel rank that trained on the sample; -1 where its step was skipped
    weights            Hugging Face name -> digest of the weights after the last step; empty where they were not read
    """

    rollout_id: int
    header: TrainingHeader
    offsets: np.ndarray
    log_probs_T: np.ndarray
    ref_log_probs_T: np.ndarray
    advantages_T: np.ndarray
    sample_losses_N: np.ndarray
    dp_ranks_N: np.ndarray
    steps: list[TrainingStep] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)


def rollout_digest(batch: RolloutBatch) -> str:
    """blake2b-128, hex, of what a rollout gives to its training: offsets, tokens, mask, rewards."""
    digest = hashlib.blake2b(digest_size=16)
    for name, dtype in {"offsets": "<i8", "token_ids_T": "<i4", "loss_mask_T": "?", "rewards_N": "<f8"}.items():
        digest.update(np.ascontiguousarray(getattr(batch, name), dtype=dtype).tobytes())
    return digest.hexdigest()


def write_training(path: str | os.PathLike[str], record: TrainingRecord, *, overwrite: bool = False) -> None:
    """Write ``record`` to ``path``, whole or not at all. UsageError if the file exists and ``overwrite`` is False."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already", "choose another name, or allow overwriting with run.overwrite=true")
    try:
        plain = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "rollout_id": record.rollout_id,
            "header": plain_copy(asdict(record.header), "header"),
            "steps": plain_copy([asdict(step) for step in record.steps], "steps"),
            "weights": plain_copy(record.weights, "weights"),
        }
    except TypeError as error:
        raise VimeError(f"the training of rollout {record.rollout_id} cannot be recorded: {error}") from error
    arrays = {name: np.ascontiguousarray(getattr(record, name), dtype=dtype) for name, dtype in ARRAYS.items()}
    put_file(path, {**plain, "arrays": arrays, "checksum": checksum(plain, arrays)})


def read_training(path: str | os.PathLike[str]) -> TrainingRecord:
    """The record in ``path``, checked against its checksum. UsageError (one line) for every defect, as in ``read``."""
    path = Path(path)
    content = load_plain(path)
    if format_of(content) != FORMAT:
        raise UsageError(f"{path} is not a training record", "they are written beside the records of vime train")
    check_version(path, content, SCHEMA_VERSION)
    problem = _type_problem(content) or arrays_problem(content["arrays"], _DTYPES)
    if problem is None:
        check_sum(path, content, lambda found: checksum({key: found[key] for key in _PLAIN}, found["arrays"]))
        problem = _length_problem(content["arrays"], len(content["steps"]))
    if problem is not None:
        raise UsageError(f"{path} is not a training record of schema {SCHEMA_VERSION}: {problem}")
    return TrainingRecord(
        rollout_id=content["rollout_id"],
        header=TrainingHeader(**content["header"]),
        steps=[TrainingStep(**step) for step in content["steps"]],
        weights=content["weights"],
        **content["arrays"],
    )


def _type_problem(content: dict[str, Any]) -> str | None:
    """The first part that is not there or of another type, or None."""
    for key, kind in {**_PLAIN, "arrays": dict, "checksum": str}.items():
        if not isinstance(content.get(key), kind) or isinstance(content.get(key), bool):
            return f"{key} is {type(content.get(key)).__name__}, expected {kind.__name__}"
    problem = _entries_problem("header", content["header"], _HEADER)
    for i, step in enumerate(content["steps"]):
        problem = problem or _entries_problem(f"steps[{i}]", step, _STEP)
    return problem or next(
        (
            f"weights.{name} is {type(v).__name__}, expected str"
            for name, v in content["weights"].items()
            if type(v) is not str
        ),
        None,
    )


def _entries_problem(where: str, found: Any, kinds: dict[str, type]) -> str | None:
    """What keeps ``found`` from being a dict with exactly the entries ``kinds``, or None."""
    if not isinstance(found, dict):
        return f"{where} is {type(found).__name__}, expected dict"
    if problem := keys_problem(where, found, kinds):
        return problem
    for name, kind in kinds.items():
        if type(found[name]) is not kind and (kind is not float or type(found[name]) is not int):
            return f"{where}.{name} is {type(found[name]).__name__}, expected {kind.__name__}"
    return None


def _length_problem(arrays: dict[str, np.ndarray], num_steps: int) -> str | None:
    offsets = arrays["offsets"]
    if len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 1).any():
        return "arrays.offsets must rise from 0"
    num_tokens, num_samples = int(offsets[-1]), len(offsets) - 1
    if num_steps and num_samples % num_steps:
        return f"{num_samples} samples do not make {num_steps} steps of one size"
    for name, array in arrays.items():
        want = {"T": num_tokens, "N": num_samples}.get(name.rsplit("_", 1)[-1], num_samples + 1)
        if len(array) != want and not (name == "ref_log_probs_T" and not len(array)):
            return f"arrays.{name} has {len(array)} entries, expected {want}"
    return None
