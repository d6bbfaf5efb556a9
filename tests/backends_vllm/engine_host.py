"""A process that imports vLLM once and hosts engines for the tests; calls travel through a pipe."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from typing import Any

CALL_SECONDS = 100.0


class EngineHost:
    """``call`` waits; ``submit`` returns a future, so that calls of one engine can overlap."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, {"OMP_NUM_THREADS": "1", **(env or {})}), daemon=False
        )
        self.process.start()
        theirs.close()
        self._futures: dict[int, Future] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()

    def submit(self, engine: str, method: str, *args: Any) -> Future:
        future: Future = Future()
        with self._lock:
            number = next(self._ids)
            self._futures[number] = future
            self._connection.send((number, engine, method, args))
        return future

    def call(self, engine: str, method: str, *args: Any) -> Any:
        return self.submit(engine, method, *args).result(CALL_SECONDS)

    def _receive(self) -> None:
        while True:
            try:
                number, error, value = self._connection.recv()
            except (EOFError, OSError):
                for future in self._futures.values():
                    future.set_exception(RuntimeError("the engine host ended"))
                return
            future = self._futures.pop(number)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

    def close(self) -> None:
        self.call("", "shutdown_all")
        self._connection.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def _serve(connection: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    faulthandler.register(signal.SIGUSR1)
    asyncio.run(_loop(connection))


async def _loop(connection: Any) -> None:
    engines: dict[str, Any] = {}
    loop = asyncio.get_running_loop()
    tasks = set()

    async def one(number: int, name: str, method: str, args: tuple) -> None:
        try:
            value, error = await _call(engines, name, method, args), None
        except Exception as raised:  # noqa: BLE001 carried to the test
            value, error = None, raised
        connection.send((number, error, value))

    while True:
        try:
            message = await loop.run_in_executor(None, connection.recv)
        except EOFError:
            return
        if message is None:
            return
        task = asyncio.ensure_future(one(*message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _call(engines: dict[str, Any], name: str, method: str, args: tuple) -> Any:
    from vime.backends.vllm.engine import VllmEngine

    if method == "open":
        engines[name] = VllmEngine(args[0], len(engines))
        return await engines[name].start()
    if method == "shutdown_all":
        for engine in engines.values():
            await engine.shutdown()
        return None
    if method == "get":
        return getattr(engines[name], args[0])
    if method == "rpc":
        return await engines[name]._rpc(*args)
    return await getattr(engines[name], method)(*args)
