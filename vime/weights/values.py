"""What a manifest says about the values of one tensor, and how far two tensors are apart. Memory: pieces, no copies."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.weights.manifest import digest
from vime.weights.manifest_file import TensorRecord

if TYPE_CHECKING:
    import torch

PIECE = 1 << 17  # elements looked at together: they stay in the cache
MAX_BLOCKS = 64  # of rows, where their number has a power of two in it; a head, or a shard, is whole blocks
MAX_ROWS = 2048  # more blocks than this say nothing that shapes do not
ROW_DIGITS = 16
HEADS = re.compile(r"\.[qkv]_proj\.")
HEAD_BLOCK, MAX_HEAD_ROWS = 4, 8192  # the three are compared as one: their blocks must be alike, whatever their sizes
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_WORD, _ODD = (1 << 64) - 1, -1640531535


def record_of(name: str, tensor: torch.Tensor, how: str = "bytes") -> TensorRecord:
    """Everything the manifest holds about one tensor."""
    import torch

    data = tensor.detach().cpu().contiguous()
    block = block_of(tuple(data.shape), is_heads=HEADS.search(name) is not None)
    with ThreadPoolExecutor(1) as side:  # digests and sums let go of the interpreter's lock
        digests = side.submit(_digests, data, block)
        numbers = _numbers(data) if data.is_floating_point() else _whole_numbers(data.to(torch.float64))
        whole, rows = digests.result()
    return TensorRecord(
        name=name,
        shape=tuple(data.shape),
        dtype=str(data.dtype).removeprefix("torch."),
        digest=whole,
        block=block,
        rows=rows,
        how=how,
        **numbers,
    )


def _digests(data: torch.Tensor, block: int) -> tuple[str, tuple[str, ...]]:
    """Of the whole, and of each block of rows."""
    return digest(data), tuple(digest(part)[:ROW_DIGITS] for part in data.split(block)) if block else ()


def block_of(shape: tuple[int, ...], is_heads: bool = False) -> int:
    """Rows that are digested together; 0: none. Rows per block are a power of two, so that shards are whole blocks.

    ``is_heads``: of a query, key or value projection, which are fused and have different numbers of rows.
    """
    if len(shape) < 2 or shape[0] < 2 or 0 in shape:
        return 0
    rows, block = shape[0], 1
    largest = HEAD_BLOCK if is_heads else rows
    while (is_heads or rows // block > MAX_BLOCKS) and block < largest and rows % (2 * block) == 0:
        block *= 2
    return block if rows // block <= (MAX_HEAD_ROWS if is_heads else MAX_ROWS) else 0


def _numbers(data: torch.Tensor) -> dict[str, Any]:
    """Over pieces: norm, extremes, mean, how many are not finite, whether bfloat16 would hold all, ``bag``."""
    import torch

    low, high, total, squares, num_bad, is_bf16 = math.inf, -math.inf, 0.0, 0.0, 0, data.dtype != torch.float16
    bits, products = 0, 0
    kind = getattr(torch, _BITS[data.element_size()])
    for piece in data.view(-1).split(PIECE) if data.numel() else ():
        whole = piece.view(kind) if data.element_size() >= 4 else piece.view(kind).int()
        bits += int(whole.sum(dtype=torch.int64))
        mixed = whole * _ODD
        mixed ^= mixed >> (16 if whole.element_size() == 4 else 32)
        mixed *= mixed  # square() of integers is ten times slower
        products += int(mixed.sum(dtype=torch.int64))
        if is_bf16 and piece.dtype == torch.float32:
            is_bf16 = not bool((whole & 0xFFFF).any())
        wide = piece.float() if piece.element_size() < 4 else piece
        smallest, largest = (float(x) for x in torch.aminmax(wide))
        if not math.isfinite(smallest) or not math.isfinite(largest):
            wide = wide[torch.isfinite(wide)]
            num_bad += piece.numel() - wide.numel()
            if not wide.numel():
                continue
            smallest, largest = (float(x) for x in torch.aminmax(wide))
        low, high = min(low, smallest), max(high, largest)
        doubles = wide.double()
        total += float(doubles.sum())
        squares += float(torch.dot(doubles, doubles))
    found = data.numel() - num_bad
    return {
        "l2": math.sqrt(squares),
        "minimum": low if found else 0.0,
        "maximum": high if found else 0.0,
        "mean": total / found if found else 0.0,
        "num_nonfinite": num_bad,
        "is_bf16": is_bf16 and data.dtype in (torch.float32, torch.bfloat16),
        "bag": f"{bits & _WORD:016x}{products & _WORD:016x}",
    }


def _whole_numbers(data: torch.Tensor) -> dict[str, Any]:
    return _numbers(data) | {"is_bf16": False}


@dataclass(frozen=True, slots=True)
class Gap:
    """Two tensors of one shape: largest absolute difference, ||b - a|| / ||a||, cosine. inf where one is not finite."""

    max_abs: float
    relative_l2: float
    cosine: float


def gap(a: torch.Tensor, b: torch.Tensor) -> Gap:
    """In float64 sums over pieces; an element that is not finite in only one of the two is infinitely far."""
    import torch

    far = norm = other = dot = largest = 0.0
    for one, two in zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE), strict=True):
        x, y = one.double(), two.double()
        same = (x == y) | (x.isnan() & y.isnan())
        apart = torch.where(same, 0.0, (y - x).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, float(apart.max())) if apart.numel() else largest
        far += float(torch.dot(apart, apart))
        norm, other, dot = norm + float(torch.dot(x, x)), other + float(torch.dot(y, y)), dot + float(torch.dot(x, y))
    scale = math.sqrt(norm) * math.sqrt(other) if math.isfinite(norm * other) else 0.0
    relative = 0.0 if not far else math.sqrt(far / norm) if norm and math.isfinite(norm) else math.inf
    return Gap(largest, relative, dot / scale if scale else float(not far))
