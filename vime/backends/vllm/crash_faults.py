"""A planted crash (``vime.debug.crash.planted``) inside the engine's worker: the process really is lost, or hangs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vime.backends.vllm.crash_facts import asked, facts, in_force
from vime.debug.crash.planted import PlantedCrash, State, parse

Key = tuple[tuple[int, ...], int]
"""What tells one request from all others, whatever its name in the engine: its tokens and its seed."""


class Planted:
    """Stands before the model of one worker. ``names``: "group/index" by the request's key."""

    def __init__(
        self, worker: Any, fault: PlantedCrash, names: Mapping[Key, str], arguments: Mapping[str, Any]
    ) -> None:
        found = facts(worker)
        self.fault = fault
        self._names = names
        self._in_force, self._asked = in_force(found), asked(arguments, found)
        self._fixed = {"max_num_seqs": found["max_num_seqs"], "block_size": found["block_size"]}
        self._running: dict[str, str] = {}
        self._execute: Callable[..., Any] = worker.model_runner.execute_model
        worker.model_runner.execute_model = self

    def __call__(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            seed = new.sampling_params.seed if new.sampling_params is not None else None
            key = tuple(new.prompt_token_ids or ()), -1 if seed is None else int(seed)
            self._running[new.req_id] = self._names.get(key, "")
        for done in scheduled.finished_req_ids:
            self._running.pop(done, None)
        batch = scheduled.num_scheduled_tokens
        numbers = {**self._fixed, "batch": len(batch), "tokens": scheduled.total_num_scheduled_tokens}
        here = {self._running.get(name, "") for name in batch}
        state = State(self._in_force, self._asked, numbers, here)
        if batch and (self.fault.condition is None or self.fault.condition.holds(state)):
            CRASHES[self.fault.kind]()
        return self._execute(scheduled, *args, **kwargs)


def plant(worker: Any, text: str, requests: Sequence[Sequence[Any]], arguments: Mapping[str, Any]) -> str:
    """``requests``: [name, token ids, seed] of all. Returns what was planted, in words."""
    names = {(tuple(ids), int(seed)): str(name) for name, ids, seed in requests}
    return str(Planted(worker, parse(text), names, arguments).fault)


def planted_segfault() -> None:
    ctypes.string_at(0)


def planted_abort() -> None:
    os.abort()


def planted_hang() -> None:
    while True:
        time.sleep(1)


def planted_exception() -> None:
    raise RuntimeError("planted: CUDA error: an illegal memory access was encountered")


CRASHES: dict[str, Callable[[], None]] = {
    "segfault": planted_segfault,
    "abort": planted_abort,
    "hang": planted_hang,
    "exception": planted_exception,
}
