"""Environment of the engine's processes. Must be set before vllm is imported; imports nothing heavy itself."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # vLLM's own log configuration takes 0.6 s of every start and hides the caller's; ours stays in force.
    "VLLM_CONFIGURE_LOGGING": "0",
}

ON_CPU = {
    # Two spinning OpenMP threads on shared cores are 8 times slower than one; one thread is also bitwise repeatable.
    "OMP_NUM_THREADS": "1",
    # "auto" binds every engine of the machine to the same core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A few sampler functions are compiled even with enforce_eager: 0.8 s on the first request.
    "TORCH_COMPILE_DISABLE": "1",
    # The worker runs inside the engine-core process: one process less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VIME_FORK_ENGINE": "1",
}


@dataclass
class EngineEnvironment:
    """A private temp folder and the variables of one engine; ``close`` removes what vLLM leaves behind."""

    engine_index: int
    on_cpu: bool
    start_timeout_seconds: float
    temp_dir: str = ""
    _before: dict[str, str | None] = field(default_factory=dict)

    def apply(self) -> None:
        """Set the variables in this process; engine processes inherit them."""
        self.temp_dir = tempfile.mkdtemp(prefix=f"vime-engine{self.engine_index}-")
        values = dict(ALWAYS, **(ON_CPU if self.on_cpu else {}))
        values["VLLM_RPC_BASE_PATH"] = self.temp_dir
        values["TMPDIR"] = self.temp_dir
        values["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(1, int(self.start_timeout_seconds)))
        self._before = {name: os.environ.get(name) for name in ("VLLM_RPC_BASE_PATH", "TMPDIR")}
        os.environ.update(values)
        tempfile.tempdir = None  # read TMPDIR again

    @contextmanager
    def recording(self, order: dict[str, Any] | None) -> Iterator[None]:
        """In here engine processes record what their first load reads; ``order``: a ``dumping.Order``, None: none."""
        if order is None:
            yield
            return
        os.environ["VIME_RECORD_LOADING"] = json.dumps(order)
        try:
            yield
        finally:
            os.environ.pop("VIME_RECORD_LOADING", None)

    def close(self) -> None:
        """Remove the temp folder (sockets, ``vllm_dist_*``) and give TMPDIR back."""
        import shutil

        for name, value in self._before.items():
            if os.environ.get(name) != self.temp_dir:
                continue  # another engine of this process has set its own since
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        if self.temp_dir:
            shutil.rmtree(self.temp_dir, ignore_errors=True)
            self.temp_dir = ""
