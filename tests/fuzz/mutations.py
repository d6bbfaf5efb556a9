"""Mutated records: from flipped bits to pickles that want to run something. Every choice comes from one generator."""

from __future__ import annotations

import io
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.record import schema1
from vime.record.layout import checksum
from vime.record.writer import write
from vime.types import RolloutBatch, RolloutHeader, Sample

SCHEMA_1 = Path(__file__).parents[1] / "record" / "schema1.pt"


def originals(folder: Path) -> list[bytes]:
    """Good files: records of both schemas, an empty one, and dumps of upstream with lists, tensors and arrays."""
    samples = [_sample(g, i) for g in range(3) for i in range(2)]
    header = RolloutHeader(model={"path": "m"}, sampling={"temperature": 1.0, "stop": ["a"]}, stop_token_ids=[7])
    files = []
    for batch in (RolloutBatch.from_samples(0, samples, header), RolloutBatch.from_samples(1, [])):
        write(folder / "original.pt", batch, overwrite=True)
        files.append((folder / "original.pt").read_bytes())
    for kind in (list, torch.tensor, np.array):
        rows = [_row(i, kind) for i in range(3)]
        files.append(saved({"rollout_id": 3, "samples": rows}))
    return [*files, SCHEMA_1.read_bytes()]


def _sample(group: int, index: int) -> Sample:
    length = 4 + group + index
    mask = np.arange(length) >= 2
    return Sample(
        group, index, np.arange(length) * 20_000, 2, mask, np.where(mask, -0.5, 0.0),
        text=f"answer {index} \u65e5", prompt_text=f"question {group}", label="4", reward=float(index), seed=index,
        metadata={"source": "x", "reward": {"acc": 0.5}, "list": [1, None, True]},
    )  # fmt: skip


def _row(i: int, kind: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "group_index": i // 2, "index": i, "prompt": [{"role": "user", "content": "2+2?"}], "tokens": kind([5, 6, 7]),
        "response": "4!", "response_length": 2, "label": "4", "reward": {"score": 1.0, "acc": kind([1.0])},
        "loss_mask": kind([1, 1]), "rollout_log_probs": kind([-0.5, -1.0]), "status": "completed",
        "metadata": {"k": [1, {"deep": None}]}, "weight_versions": ["3", "4"], "remove_sample": False,
        "spec_info": {"a": 0}, "session_id": None,
    }  # fmt: skip


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Mutator:
    """``mutate`` returns (what was done, the file). Equal seeds give equal files."""

    def __init__(self, seed: int, files: list[bytes], canary: Path) -> None:
        self.random = random.Random(seed)
        self.files = files
        self.canary = str(canary)
        self.kinds = [
            self.flip, self.overwrite, self.cut, self.shuffle, self.splice, self.pickle_bytes, self.pickle_insert,
            self.bomb, self.content, self.content, self.header_of_zip, self.unfold,
        ]  # fmt: skip

    def mutate(self) -> tuple[str, bytes]:
        data, kind = self.random.choice(self.files), self.random.choice(self.kinds)
        return kind.__name__, kind(data)

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8, 64))):
            changed[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def overwrite(self, data: bytes) -> bytes:
        changed, at = bytearray(data), self.random.randrange(len(data))
        piece = self.random.choice((b"\0" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff", self.random.randbytes(4)))
        changed[at : at + len(piece)] = piece
        return bytes(changed)

    def cut(self, data: bytes) -> bytes:
        return data[: self.random.randrange(len(data))]

    def shuffle(self, data: bytes) -> bytes:
        """A piece is left out, doubled or moved."""
        a, b = sorted(self.random.randrange(len(data)) for _ in range(2))
        at = self.random.randrange(len(data))
        return self.random.choice((data[:a] + data[b:], data[:b] + data[a:], data[:at] + data[a:b] + data[at:]))

    def splice(self, data: bytes) -> bytes:
        other = self.random.choice(self.files)
        return data[: self.random.randrange(len(data))] + other[self.random.randrange(len(other)) :]

    def header_of_zip(self, data: bytes) -> bytes:
        """Numbers of the zip directory: offsets, sizes, methods."""
        changed = bytearray(data)
        marks = [match.start() for match in re.finditer(b"PK(\x01\x02|\x05\x06|\x03\x04)", data)]
        for _ in range(self.random.choice((1, 2, 4))):
            at = min(self.random.choice(marks) + self.random.randrange(4, 46), len(data) - 1)
            changed[at] = self.random.choice((0, 1, 8, 0x7F, 0xFF, self.random.randrange(256)))
        return bytes(changed)

    def pickle_bytes(self, data: bytes) -> bytes:
        """Bytes of the pickle, in a zip archive that is right in itself."""
        return self._with_pickle(data, self.random.choice((self.flip, self.overwrite, self.cut, self.shuffle)))

    def pickle_insert(self, data: bytes) -> bytes:
        return self._with_pickle(data, lambda pickled: self._insert(pickled, self.random.choice(_SNIPPETS)))

    def bomb(self, data: bytes) -> bytes:
        """A call that makes the canary, somewhere in the pickle or in place of it."""
        call = self.random.choice(_calls(self.canary))
        ways = (lambda p: self._insert(p, call), lambda p: p[:2] + call + b"0" + p[2:], lambda p: call + b".")
        return self._with_pickle(data, self.random.choice(ways))

    def _insert(self, pickled: bytes, snippet: bytes) -> bytes:
        at = self.random.randrange(2, len(pickled))
        return pickled[:at] + snippet + pickled[at:]

    def _with_pickle(self, data: bytes, change: Callable[[bytes], bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
            for name in source.namelist():
                member = source.read(name)
                target.writestr(name, change(member) if name.endswith("data.pkl") else member)
        return out.getvalue()

    def content(self, data: bytes) -> bytes:
        """Any part of the content replaced, taken away or added, and the checksum made right again."""
        content = torch.load(io.BytesIO(data), weights_only=False)
        for _ in range(self.random.choice((1, 1, 2, 5))):
            self._change_somewhere(content)
        if isinstance(content.get("arrays"), dict) and self.random.random() < 0.9:
            _set_checksum(content)
        return saved(content)

    def unfold(self, data: bytes) -> bytes:
        """A list of lists that are one and the same, 40 levels deep: a hundred bytes in the file, 2^40 in the walk."""
        content: Any = torch.load(io.BytesIO(data), weights_only=False)
        shared: list[Any] = [0]
        for _ in range(40):
            shared = [shared, shared]
        parts = [content, *(v for v in content.values() if isinstance(v, dict)), *content.get("samples", [])]
        part = self.random.choice(parts)
        part[self.random.choice(list(part))] = self.random.choice((shared, {"x": shared}, [[0] * 1000] * 1000))
        return saved(content)

    def _change_somewhere(self, node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return None
        key = self.random.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and self.random.random() < 0.8:
            return self._change_somewhere(node[key])
        if isinstance(node[key], torch.Tensor | np.ndarray) and self.random.random() < 0.6:
            node[key] = self._changed_array(node[key])
        elif self.random.random() < 0.2:
            node.pop(key)
        elif isinstance(node, dict) and self.random.random() < 0.2:
            node[self.random.choice(("x", "a\nb", 3, "seed"))] = node[key]
        else:
            node[key] = self.random.choice(_values())
        return None

    def _changed_array(self, array: Any) -> Any:
        if isinstance(array, torch.Tensor) and (array.is_sparse or array.numel() > 1_000_000):
            return torch.zeros(1)
        values = np.array(array.float() if getattr(array, "dtype", None) == torch.bfloat16 else array)
        kind = self.random.randrange(5)
        if kind == 0 or not values.size:
            values = values[: self.random.randrange(values.size + 1)] if values.ndim else values
        elif kind == 1:
            values = np.resize(values, values.size + self.random.choice((1, 7, 1000)))
        elif kind == 2:
            with np.errstate(invalid="ignore"):
                values = values.astype(self.random.choice(("float32", "int64", "int16", "uint8", "bool")))
        else:
            for _ in range(self.random.choice((1, 3))):
                extremes = (0, 1, -1, 127, 2**15, 2**31 - 1, -(2**63), 2**63 - 1, 255)
                place = self.random.randrange(values.size)
                values.reshape(-1)[place] = np.array(self.random.choice(extremes)).astype(values.dtype)
        return torch.from_numpy(np.ascontiguousarray(values)) if isinstance(array, torch.Tensor) else values


def _set_checksum(content: dict[str, Any]) -> None:
    plain = {k: content[k] for k in ("format", "schema_version", "rollout_id", "header") if k in content}
    try:
        arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in content["arrays"].items()}
        first = content.get("schema_version") == 1
        content["checksum"] = schema1.checksum({**content, "arrays": arrays}) if first else checksum(plain, arrays)
    except Exception:  # noqa: BLE001 - what cannot be summed keeps the sum it had
        return


def _values() -> list[Any]:
    return [
        None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "x", "\ud800", "a\nb" * 99, [],
        {}, [[]], [1, "2"], [None], {"a": 1}, {1: 2}, {"score": None}, {"score": float("nan")}, [1] * 5000,
        torch.zeros(0), torch.zeros(2, 2), torch.tensor(1), torch.ones(1).expand(10**9), np.zeros(3),
        np.float32(1), torch.zeros(3).bfloat16(), torch.zeros(2).to_sparse(), b"bytes", {1, 2}, (1, 2), 1 + 2j,
        "failed", "pending",
    ]  # fmt: skip


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _calls(canary: str) -> list[bytes]:
    """Pickled calls that make the file or folder ``canary``, each pushing one object."""
    code = f"open({canary!r},'w').close()"
    return [
        b"cos\nmkdir\n" + _text(canary) + b"\x85R",
        b"cposix\nsystem\n" + _text(f"touch {canary}") + b"\x85R",
        b"c__builtin__\neval\n" + _text(code) + b"\x85R",
        b"cbuiltins\nexec\n" + _text(code) + b"\x85R",
        b"(" + _text(canary) + b"ios\nmkdir\n",
        b"(cos\nmkdir\n" + _text(canary) + b"o",
        b"\x8c\x02os\x8c\x05mkdir\x93" + _text(canary) + b"\x85R",
        b"cos\nmkdir\n" + _text(canary) + b"\x85\x81",
        b"ctorch._utils\n_rebuild_tensor_v2\ncos\nmkdir\n" + _text(canary) + b"\x85R\x85R",
        b"ctorch.serialization\nload\n" + _text(canary) + b"\x85R",
        b"cnumpy.core.multiarray\n_reconstruct\ncos\nmkdir\n" + _text(canary) + b"\x85\x87R",
        b"cnumpy\ndtype\n" + _text("O8") + b"\x85R",
        b"ccollections\nOrderedDict\n](cos\nmkdir\n" + _text(canary) + b"\x85Re\x85R",
    ]


_SNIPPETS = [
    b"0", b"1", b"2", b"(", b".", b"N", b")", b"]", b"}", b"R", b"b", b"s", b"u", b"a", b"e", b"t", b"Q", b"\x85",
    b"\x93", b"h\x00", b"q\x00", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"\x96" + b"\xff" * 8,
    b"\x8e" + b"\x7f" * 8, b"\x8b\xff\xff\xff\x7f", b"B\xff\xff\xff\xff", b"]" * 5000, b"\x85" * 5000, b"(" * 5000,
    b"]q\x00h\x00a",
    b"}q\x01h\x01h\x01s", b"\x80\x05", b"\x95" + b"\xff" * 8, b"\x82\x01", b"P1\n", b"L" + b"9" * 5000 + b"L\n",
    b"ccopyreg\n_reconstructor\n", b"c\n\n", b"cos\n\xff\n", b"ctorch\nFloatStorage\n)R",
]  # fmt: skip
