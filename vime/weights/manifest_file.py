"""A dump of weights as a file: what every tensor of one view is, plain JSON, readable without the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vime.errors import UsageError
from vime.files import whole_file
from vime.types import TensorEntry, WeightManifest
from vime.weights.manifest import layer_of, manifest_digest
from vime.weights.shm import DTYPE_BYTES, num_bytes

FORMAT = 1
NOT_TESTED = "not tested"
SUFFIX = ".manifest.json"
VIEWS = ("checkpoint", "trainer", "engine-received", "engine-held")
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a dump, by Hugging Face name (a buffer: by the engine's).

    digest         blake3 of the contiguous little-endian bytes; empty where not tested, see ``how``
    l2, minimum, maximum, mean   of the finite elements, 0.0 where there are none
    num_nonfinite  elements that are nan or infinite
    is_bf16        every element is one that bfloat16 can hold, whatever ``dtype`` is
    bag            sums, 16 hex digits each, of the elements' bits and of the squares of these mixed: the same elements
                   have the same in whatever order; empty: not taken
    block, rows    digests, 16 hex digits, of each ``block`` rows along the first axis; empty where not worth it
    how            bytes: digested as they lie in memory; not tested: WHY
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    l2: float = 0.0
    minimum: float = 0.0
    maximum: float = 0.0
    mean: float = 0.0
    num_nonfinite: int = 0
    is_bf16: bool = False
    block: int = 0
    rows: tuple[str, ...] = ()
    how: str = "bytes"
    bag: str = ""

    @property
    def layer(self) -> int | None:
        return layer_of(self.name)[1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_constant(self) -> bool:
        """All elements are one finite number; of a single element nothing is said."""
        return self.numel > 1 and self.num_nonfinite == 0 and self.minimum == self.maximum

    @property
    def is_zero(self) -> bool:
        return self.is_constant and self.minimum == 0.0

    def entry(self) -> TensorEntry:
        return TensorEntry(self.name, self.shape, self.dtype, self.digest, self.l2, "", self.layer)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; what is at its default is left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        kept = {k: v for k, v in plain.items() if k in _ALWAYS or v not in (0, "", (), False, "bytes")}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> TensorRecord:
        """TypeError, ValueError or KeyError for what is no record."""
        given = dict(row)
        given["shape"] = tuple(given["shape"])
        given["rows"] = tuple(given.get("rows", ()))
        record = cls(**given)
        record._check()
        return record

    def _check(self) -> None:
        for name, kind in _TYPES.items():
            _require_type(getattr(self, name), kind, f"{self.name}: {name}")
        for each in self.shape:
            _require_type(each, int, f"{self.name}: shape")
        for text in self.rows:
            _require_type(text, str, f"{self.name}: rows")
        num_blocks = -(-self.shape[0] // self.block) if self.block > 0 and self.shape else 0
        if min(self.shape, default=0) < 0 or len(self.rows) != num_blocks:
            raise ValueError(f"{self.name}: shape {list(self.shape)} and {len(self.rows)} blocks of {self.block} rows")


_ALWAYS = ("name", "shape", "dtype", "digest", "l2")
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "dtype", "digest", "how", "bag"), str),
    **dict.fromkeys(("l2", "minimum", "maximum", "mean"), (int, float)),
    **dict.fromkeys(("num_nonfinite", "block"), int),
    "is_bf16": bool,
}


def _require_type(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """TypeError for another type, ValueError for a number that is not finite."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{what} = {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} = {value}")


@dataclass(frozen=True)
class Dump:
    """One view of the weights. ``folder``: where its tensors lie, None where only digests were taken.

    selection   what ``--layer`` and ``--match`` left, in words; empty: everything
    buffers     what no checkpoint carries (rotary caches, scales), by the engine's names; of engine-held only
    """

    version: int
    origin: str
    tensors: dict[str, TensorRecord]
    buffers: dict[str, TensorRecord] = field(default_factory=dict)
    family: str = ""
    layout: str = ""
    model: str = ""
    is_tied: bool = False
    vocab_size: int = 0
    selection: str = ""
    folder: Path | None = None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(record.entry()) for record in self.tensors.values())

    def manifest(self) -> WeightManifest:
        entries = {name: record.entry() for name, record in self.tensors.items()}
        return WeightManifest(self.version, self.origin, entries, self.family, self.layout)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the file and for ``--json``."""
        about = {name: getattr(self, name) for name in _ABOUT}
        return {
            "vime_manifest": FORMAT,
            **about,
            "digest": manifest_digest(self.manifest()),
            "tensors": [record.as_dict() for record in self.tensors.values()],
            "buffers": [record.as_dict() for record in self.buffers.values()],
        }


_ABOUT_TYPES = {"version": int, "is_tied": bool, "vocab_size": int}  # the others are texts
_ABOUT = tuple(f.name for f in fields(Dump) if f.name not in ("tensors", "buffers", "folder"))


def write_dump(path: Path, dump: Dump) -> None:
    """Whole or not at all."""
    with whole_file(path) as file:
        file.write((json.dumps(dump.as_dict(), indent=1, allow_nan=False) + "\n").encode())


def read_dump(path: Path) -> Dump:
    """A manifest file. ``VIEW/`` beside it holds its tensors.

    UsageError if it is none, of a newer format, or not as it was written: types, shapes, the digest of the whole.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: is no manifest (not JSON: {error})", _HINT) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})", _HINT) from None
    if not isinstance(content, dict) or "vime_manifest" not in content:
        raise UsageError(f"{path}: is no manifest (it has no vime_manifest)", _HINT)
    if content["vime_manifest"] != FORMAT:
        raise UsageError(f"{path}: manifest format {content['vime_manifest']}, this vime reads {FORMAT}", "update vime")
    folder = path.with_name(path.name.removesuffix(SUFFIX))
    try:
        about: dict[str, Any] = {name: content[name] for name in _ABOUT}
        for name, value in about.items():
            _require_type(value, _ABOUT_TYPES.get(name, str), name)
        parts: dict[str, Any] = {part: _records(content[part]) for part in ("tensors", "buffers")}
        dump = Dump(**about, **parts, folder=folder if any(folder.glob("*.safetensors")) else None)
        _check_whole(dump, content["digest"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path}: damaged manifest ({type(error).__name__}: {error})", "dump the weights again"
        ) from None
    return dump


def _check_whole(dump: Dump, digest: Any) -> None:
    """ValueError where a tensor is of a type that no checkpoint has, or was changed, added or lost since."""
    if unknown := {record.dtype for record in dump.tensors.values()} - DTYPE_BYTES.keys():
        raise ValueError(f"dtype {min(unknown)}")
    if digest != (found := manifest_digest(dump.manifest())):
        raise ValueError(f"its digest is {digest}, its tensors give {found}")


_HINT = "name a manifest (VIEW.manifest.json), a folder with one in it, or a Hugging Face folder"


def _records(rows: list[dict[str, Any]]) -> dict[str, TensorRecord]:
    found = {}
    for row in rows:
        record = TensorRecord.from_dict(row)
        if record.name in found:
            raise ValueError(f"tensor {record.name} comes twice")
        found[record.name] = record
    return found


def manifests_in(folder: Path) -> Iterator[Path]:
    """The manifests of a dump folder, in the order of the views."""
    found = {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    order = [*(view for view in VIEWS if view in found), *(name for name in found if name not in VIEWS)]
    return (found[name] for name in order)
