from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np

from vime import device


def test_kind_backend_and_current_agree():
    assert (device.kind(), device.backend()) in {("cpu", "gloo"), ("cuda", "nccl")}
    assert device.current().type == device.kind() == device.select(0).type
    device.synchronize()
    device.empty_cache()


def test_memory_grows_with_what_is_held():
    size = 64 * 2**20
    before = device.memory()["rss"]
    with mmap.mmap(-1, size) as held:  # new pages: a heap may hand out what an earlier test has given back
        held.write(b"x" * size)
        assert device.memory()["rss"] - before > size // 2


def test_private_memory_is_what_the_process_holds_alone():
    size = 64 * 2**20
    before = device.memory()["private"]
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * size)
        assert device.memory()["private"] - before > size // 2
    assert device.memory()["private"] < device.memory()["rss"]


def test_seed_covers_python_numpy_and_torch():
    import random

    import torch

    def draw() -> tuple[float, float, float]:
        device.seed(2**40 + 3)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    assert draw() == draw()


def test_import_is_light():
    code = "import sys, vime.device; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"
