"""CUDA core dumps: the variables that ask the driver for one, how to open it, and the kernel that failed.

A core dump sees into a replayed CUDA graph, which CUDA_LAUNCH_BLOCKING does not. Not run without a CUDA device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAME = "cuda_coredump_%h.%p.%t"
GLOB = "cuda_coredump_*"
LIMIT_SECONDS = 120.0
_FLAGS = "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory"
_KERNEL = re.compile(r"^\*?\s*\d+\s+\d+\s+\d+\s+\S+\s+0x[0-9a-f]+\s+\(\S+\)\s+\(\S+\)\s+(\S+.*)$", re.MULTILINE)


@dataclass(frozen=True)
class CoreDump:
    """``files``: what was written. ``kernel``: that failed, as cuda-gdb says. ``skipped``: why there is none."""

    pattern: str
    variables: dict[str, str]
    files: tuple[str, ...] = ()
    command: str = ""
    kernel: str = ""
    skipped: str = ""


def variables(folder: Path) -> dict[str, str]:
    """They have to be in the environment before the process makes its CUDA context."""
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": _FLAGS,
        "CUDA_COREDUMP_FILE": str(folder / NAME),
    }


def collect(folder: Path, device: str) -> CoreDump:
    """What the last attempt left in ``folder``."""
    pattern, asked = str(folder / NAME), variables(folder)
    if device in ("", "cpu"):
        why = "there is no CUDA device, so that no driver writes a core dump"
        return CoreDump(pattern, asked, command=open_command(pattern), skipped=why)
    files = tuple(str(path) for path in sorted(folder.glob(GLOB)))
    if not files:
        why = "the driver wrote no core dump: the crash was none of a kernel"
        return CoreDump(pattern, asked, command=open_command(pattern), skipped=why)
    return CoreDump(pattern, asked, files, open_command(files[0]), failing_kernel(files[0]))


def open_command(file: str) -> str:
    return f'cuda-gdb -ex "target cudacore {file}"'


def failing_kernel(file: str) -> str:
    """As cuda-gdb names it; empty where there is no cuda-gdb, or it says nothing within its limit."""
    program = shutil.which("cuda-gdb")
    if program is None:
        return ""
    command = [program, "--batch", "-ex", f"target cudacore {file}", "-ex", "info cuda kernels"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    found = _KERNEL.search(done.stdout)
    return found[1].strip() if found else ""
