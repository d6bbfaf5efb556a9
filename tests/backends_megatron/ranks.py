"""Runs a function on N real trainer processes over gloo, with a time limit. Processes are kept between calls.

A job is a module-level function ``job(rank, world_size, port, *args)``; its results come back in rank order.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import time
import traceback
from typing import Any

from ports import free_port

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class RankFailed(Exception):
    """A job raised; the text is the traceback of that rank."""


class Pool:
    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, world_size: int, job: Any, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Results of all ranks. Raises RankFailed with the first traceback, TimeoutError if any rank is late."""
        while len(self._ranks) < world_size:
            self._ranks.append(_start())
        port = free_port()
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            pipe.send((job, rank, world_size, port, args))
        deadline = time.monotonic() + timeout
        answers: list[Any] = []
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(
                    f"rank {rank} of {world_size} gave no answer in {timeout} s; answers so far {answers}"
                )
            ok, value = pipe.recv()
            if not ok:
                self.close()  # the others may wait for it in a collective
                raise RankFailed(f"rank {rank}:\n{value}")
            answers.append(value)
        return answers

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join(10)
        self._ranks.clear()


def _start() -> tuple[Any, Any]:
    os.environ.update(THREADS)
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()
    there.close()
    return process, here


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job, rank, world_size, port, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(rank, world_size, port, *args)))
        except BaseException:  # noqa: BLE001 - reported to the test, whatever it is
            pipe.send((False, traceback.format_exc()))
        gc.collect()  # models and their process groups, which are in cycles
        gc.freeze()  # what is left are modules: not to be looked through each time
