"""Dumps of a 0.5 GB model from its files, against the disk's and the digest's speed, and the memory that they take."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Goal, Result, Row, Spread, compare, interleave

LAYERS, HIDDEN, FFN, VOCAB = 12, 1024, 2816, 8192
HALF = Goal(at_least=0.5)
LIMIT_SECONDS = 300.0


def run(repetitions: int) -> Result:
    """Everything in one run, in turn, on one disk: the temporary folder's."""
    result = Result("dump")
    result.notes.append(
        "dump: read the files of a random model, digest every tensor (whole and in blocks of rows), its norm, mean and "
        "extremes, write them as a folder, flushed to the disk; disk: the same bytes, in one file, flushed; digest: "
        "blake3 of every tensor as it is read, once; memory: largest resident size of a process that dumps, without "
        "that of one that has only loaded the same libraries"
    )
    with tempfile.TemporaryDirectory(prefix="vime-benchmark-") as scratch:
        _measure(Path(scratch), repetitions, result)
    return result


def _measure(scratch: Path, repetitions: int, result: Result) -> None:
    from vime.weights.files import folder_entries
    from vime.weights.shm import num_bytes

    model = make_model(scratch / "model")
    size = sum(num_bytes(entry) for entry in folder_entries(model, "float32"))
    sides: dict[str, Callable[[int], float]] = {
        "dump": lambda turn: _seconds(lambda: dump(model, _fresh(scratch / "dump"))),
        "disk": lambda turn: _seconds(lambda: _disk(model, scratch / "plain")),
        "digests": lambda turn: _seconds(lambda: dump(model, None)),
        "digest": lambda turn: _seconds(lambda: _digest(model)),
    }
    rates = {name: [size / s / 1e9 for s in values] for name, values in interleave(sides, repetitions).items()}
    slower = [min(pair) for pair in zip(rates["disk"], rates["digest"], strict=True)]
    what = f"{size / 1e6:.0f} MB"
    result.rows += [
        compare(
            f"{what}: dump with tensors, against the slower of disk and digest", "GB/s", rates["dump"], slower, HALF
        ),
        compare(f"{what}: dump with tensors, against the disk", "GB/s", rates["dump"], rates["disk"]),
        compare(f"{what}: dump with tensors, against the digest", "GB/s", rates["dump"], rates["digest"]),
        compare(f"{what}: digests only, against the digest", "GB/s", rates["digests"], rates["digest"]),
        compare(f"{what}: digests only, against the slower of both", "GB/s", rates["digests"], slower, HALF),
    ]
    plain, peak = (_peak(mode, model, _fresh(scratch / "dump")) for mode in ("load", "dump"))
    bound = size + 2 * (VOCAB * HIDDEN * 4)
    result.rows.append(
        Row(
            f"{what}: memory of a dump, against the model and two of its largest tensors",
            "MB",
            Spread.of([(peak - plain) / 1e6]),
            Spread.of([bound / 1e6]),
            Spread.of([(peak - plain) / bound]),
            Goal(at_most=1.0),
        )
    )


def make_model(folder: Path) -> Path:
    """Random tensors under the names of a dense model, float32, in one file."""
    import torch
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        for part, shape in {"q": (HIDDEN, HIDDEN), "k": (256, HIDDEN), "v": (256, HIDDEN)}.items():
            shapes[f"model.layers.{i}.self_attn.{part}_proj.weight"] = shape
        shapes[f"model.layers.{i}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        for part, shape in {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}.items():
            shapes[f"model.layers.{i}.mlp.{part}_proj.weight"] = shape
    folder.mkdir(parents=True)
    save_file({n: torch.randn(s) for n, s in shapes.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    return folder


def dump(model: Path, folder: Path | None) -> None:
    from vime.weights.dump import record_stream
    from vime.weights.files import folder_entries, folder_tensors

    record_stream(folder_tensors(model, "float32"), folder_entries(model, "float32"), folder)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _disk(model: Path, file: Path) -> None:
    with (model / "model.safetensors").open("rb") as source, file.open("wb") as target:
        shutil.copyfileobj(source, target, 16 << 20)
        target.flush()
        os.fsync(target.fileno())


def _digest(model: Path) -> None:
    from vime.weights.files import folder_tensors
    from vime.weights.manifest import digest

    for _, tensor in folder_tensors(model, "float32"):
        digest(tensor)


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _peak(mode: str, model: Path, folder: Path) -> int:
    """Largest resident size, in bytes, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.dump", mode, str(model), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_SECONDS, text=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    import torch  # noqa: F401 - counted on both sides
    from safetensors import safe_open  # noqa: F401

    import vime.weights.files  # noqa: F401

    if sys.argv[1] == "dump":
        dump(Path(sys.argv[2]), Path(sys.argv[3]))
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would tell that of the process it came from
    print(1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))))
