"""Plain data out of a pickle by ``torch.save``: containers, numbers, strings, and numpy arrays. Runs nothing.

What ``torch.load(weights_only=True)`` does, with a shorter list of what is allowed: no operation that a record does not
need, and behind the dozen names that a pickle may mention stand functions of this file, never the named ones. Whatever
a file claims, no memory beyond a multiple of its size is used, and no time beyond that.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

BFLOAT16 = "bfloat16"  # numpy has none: such tensors become float32

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": BFLOAT16, "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_NUMPY_TYPES = {"f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"}


class NotPlain(Exception):
    """A Python object that is no plain data; the message is its name."""


def unpickle(data: bytes, members: Mapping[str, np.ndarray]) -> Any:
    """The content of ``data``; ``members`` are the bytes (uint8) of the archive's storages by key.

    NotPlain names the first object that is no plain data. A damaged pickle raises anything.
    """
    return _PlainUnpickler(io.BytesIO(data), members).load()


@dataclass(frozen=True, slots=True)
class _Named:
    """Something that a pickle only hands on: a storage type, or numpy.ndarray."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    data: np.ndarray  # uint8, contiguous


class _Type:
    """A dtype of numpy on its way: its byte order comes later, in BUILD."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        if code not in _NUMPY_TYPES:
            raise NotPlain(f"numpy.dtype({str(code)[:20]!r})")
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise ValueError(f"byte order {state[1]!r}")


class Array(np.ndarray):
    """An array of numpy on its way: shape and contents come later, in BUILD."""

    def set_state(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        if not isinstance(kind, _Type) or not isinstance(data, bytes) or not _is_counts(shape):
            raise ValueError("not an array of numbers")
        if _product(shape) * kind.dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for an array of shape {shape}")
        values = _clean(np.frombuffer(data, np.uint8), kind.dtype)
        super().__setstate__((1, shape, values.dtype, bool(is_fortran), values.tobytes()))  # type: ignore[arg-type]


def _clean(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bytes as numbers. A bool is one byte that is 0 or not: numpy relies on 0 or 1."""
    return data != 0 if dtype.kind == "b" else data.view(dtype)


def _is_counts(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) <= 32 and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _product(counts: tuple[int, ...]) -> int:
    total = 1
    for count in counts:
        total *= count
    return total


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> np.ndarray:
    """A tensor as an array, never larger than the storage it lies in. Its device does not matter: files hold bytes."""
    if not isinstance(storage, _Storage) or not _is_counts(size) or not _is_counts(stride) or not _is_counts((offset,)):
        raise ValueError("not a tensor of numbers")
    is_half = storage.dtype == BFLOAT16
    values = _clean(storage.data, np.dtype("uint16" if is_half else storage.dtype))
    if len(size) != len(stride) or _product(size) > len(values):
        raise ValueError(f"a tensor of shape {size} in a storage of {len(values)} numbers")
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if _product(size) == 0:
        offset = last = 0
        values = np.zeros(1, values.dtype)
    if offset + last >= len(values):
        raise ValueError(f"a tensor that ends at {offset + last} in a storage of {len(values)} numbers")
    strides = [step * values.itemsize for step in stride]
    view = np.lib.stride_tricks.as_strided(values[offset:], size, strides, writeable=False)
    return (view.astype(np.uint32) << 16).view(np.float32) if is_half else view


def _reconstruct(kind: Any, *_: Any) -> Array:
    if kind != _Named("numpy.ndarray"):
        raise ValueError("an array of another class than numpy.ndarray")
    return np.empty(0).view(Array)


def _scalar(kind: Any, data: Any) -> Any:
    if not isinstance(kind, _Type) or not isinstance(data, bytes) or len(data) != kind.dtype.itemsize:
        raise ValueError("not a number of numpy")
    return _clean(np.frombuffer(data, np.uint8), kind.dtype)[0]


def _encode(text: Any, codec: Any) -> bytes:
    """Bytes, as protocol 2 writes them. Other codecs take quadratic time or blow up."""
    if codec != "latin1" or not isinstance(text, str):
        raise ValueError(f"codec {str(codec)[:20]!r}")
    return text.encode("latin1")


def _ordered_dict() -> dict[Any, Any]:
    return {}


_KNOWN: dict[str, Callable[..., Any] | _Named] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "collections.OrderedDict": _ordered_dict,
    "_codecs.encode": _encode,
    "numpy.dtype": _Type,
    "numpy.ndarray": _Named("numpy.ndarray"),
    **{f"torch.{name}Storage": _Named(dtype) for name, dtype in _STORAGES.items()},
    **{f"numpy.{package}.multiarray._reconstruct": _reconstruct for package in ("core", "_core")},
    **{f"numpy.{package}.multiarray.scalar": _scalar for package in ("core", "_core")},
}

_OPERATIONS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE
"""


class _PlainUnpickler(pickle._Unpickler):  # the one in Python: the one in C takes gigabytes for one number in a memo
    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPERATIONS.split()
    }

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, members: Mapping[str, np.ndarray]) -> None:
        super().__init__(file)
        self._members = members

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise NotPlain(full)
        return _KNOWN[full]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, count = pid
        if kind != "storage" or not isinstance(storage_type, _Named) or storage_type.name == "numpy.ndarray":
            raise ValueError("not a storage")
        data = self._members[key]
        itemsize = np.dtype("uint16" if storage_type.name == BFLOAT16 else storage_type.name).itemsize
        if count * itemsize != len(data):
            raise ValueError(f"a storage of {count} numbers of {itemsize} bytes in {len(data)} bytes")
        return _Storage(storage_type.name, data)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not any(function is known for known in _FUNCTIONS):
            raise ValueError("a call of something that is no function")
        self.stack[-1] = function(*arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Array | _Type):
            raise ValueError("a state for something that has none")
        self.stack[-1].set_state(state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        """Only simple keys: the hash of nested tuples can take for ever, or all of the stack."""
        if type(self.stack[-1]) is not dict:
            raise ValueError("items of something that is no dict")
        for key in items[::2]:
            if key is not None and type(key) not in (str, int, float, bool):
                raise NotPlain(f"{type(key).__name__} as a key")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


_FUNCTIONS = [known for known in _KNOWN.values() if callable(known)]
