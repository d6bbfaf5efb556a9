"""The one place that knows what the numbers live on: a CUDA device where there is one, else the CPU.

Beside the redirect of Megatron-core's own source (``backends/megatron/cpu_redirect.py``) no other file names cuda.
torch is imported when a function is called, never at import. The CUDA branches were not run without a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def kind() -> str:
    """``cuda`` or ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """Collective backend that moves tensors of this kind: ``nccl`` or ``gloo``."""
    return "nccl" if kind() == "cuda" else "gloo"


def current() -> torch.device:
    """Device on which this process allocates."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if kind() == "cuda" else torch.device("cpu")


def select(local_rank: int) -> torch.device:
    """Make the visible device ``local_rank`` (modulo their number) the current one. Nothing to choose on the CPU."""
    import torch

    if kind() == "cuda":
        # Tensor parallelism overlaps communication only if kernels keep the order in which they were launched.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return current()


def synchronize() -> None:
    """Wait for all queued work of this process. CPU work is never queued."""
    import torch

    if kind() == "cuda":
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give unused device memory back to the driver."""
    import torch

    if kind() == "cuda":
        torch.cuda.empty_cache()


_HELD = ("VmRSS", "RssAnon", "VmSwap")


def memory() -> dict[str, int]:
    """Bytes held by this process: ``rss``; ``private``, what is its own whether resident or swapped out (mapped files,
    which the kernel drops and reads again as it likes, are not); on a CUDA device also ``allocated``, ``reserved`` and
    ``peak``.
    """
    import torch

    with open("/proc/self/status", encoding="ascii") as status:
        kib = {
            name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in status) if name in _HELD
        }
    held = {"rss": 1024 * kib["VmRSS"], "private": 1024 * (kib["RssAnon"] + kib["VmSwap"])}
    if kind() == "cuda":
        held["allocated"] = torch.cuda.memory_allocated()
        held["reserved"] = torch.cuda.memory_reserved()
        held["peak"] = torch.cuda.max_memory_allocated()
    return held


def seed(value: int) -> None:
    """Seed Python, numpy and torch on every device of this process."""
    import random

    import numpy as np
    import torch

    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
