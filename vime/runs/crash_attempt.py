"""One attempt of ``vime rollout --bisect-crash``, in a process of its own: engine up, requests sent, how it went.

``python -m vime.runs.crash_attempt PARENT ORDER.json`` makes one, and ends with the process PARENT that started it.
``... PARENT --warm IN OUT`` imports vLLM once and forks an attempt for each order that is named on descriptor IN; it
tells on OUT. Written down at each phase, since what comes after may
end the process. Only where nothing of a device was touched may one fork, so that the CPU platform alone is warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import PromptTooLong, UsageError, VimeError
from vime.files import whole_file

RESULT = "result.json"
OUTPUT = "output.txt"
EXIT_SECONDS = 3.0
REFUSING = ("create_engine_config", "engine_arguments")
"""Functions that build vLLM's configuration: what they raise is no crash."""
IMPORTS = ("vllm", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""What an engine on the CPU platform loads."""


@dataclass(frozen=True)
class Order:
    """``requests``: those to send. ``all_requests``: [name, token ids, seed, options] of all of them, in this file.

    ``config``: of the run, with the toggles in it. ``planted``: crashes to plant, in words.
    """

    config: dict[str, Any]
    requests: list[int]
    all_requests: str
    planted: list[str]
    folder: str

    def write(self, path: Path) -> None:
        write_json(path, {name: getattr(self, name) for name in Order.__dataclass_fields__})


class Notes:
    """What is known so far, in a file that is seen whole or not at all."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / RESULT
        self.known: dict[str, Any] = {}

    def write(self, **facts: Any) -> None:
        self.known |= facts
        write_json(self.path, self.known)


def write_json(path: Path, content: Any) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(content) + "\n").encode())


def attempt(path: str) -> None:
    """Make the attempt that the order at ``path`` asks for."""
    from vime.log import answer_stack_requests

    order = Order(**json.loads(Path(path).read_text(encoding="utf-8")))
    faulthandler.enable()
    answer_stack_requests()
    asyncio.run(_attempt(order, Notes(order.folder)))


async def _attempt(order: Order, notes: Notes) -> None:
    from vime import device
    from vime.backends.vllm.arguments import engine_arguments
    from vime.backends.vllm.crash_facts import agreed
    from vime.backends.vllm.engine import VllmEngine
    from vime.config.schema import Config

    config = Config.model_validate(order.config)
    engine = VllmEngine(config, 0)
    notes.write(phase="starting", device=device.kind())
    try:
        await engine.start()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the attempt is to tell
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        is_refused = isinstance(error, UsageError) or any(name in REFUSING for name in frames)
        if not is_refused:
            traceback.print_exc()
        notes.write(outcome="refused" if is_refused else "crashed", cause=_in_a_line(error))
        return
    requests = json.loads(Path(order.all_requests).read_text(encoding="utf-8"))
    arguments = engine_arguments(config, engine.on_cpu)
    processes = engine.processes
    try:
        notes.write(facts=agreed(await engine.settings()))
        await engine.write_stacks()
        for text in order.planted:
            await engine.plant_crash(text, [request[:3] for request in requests], arguments)
        notes.write(phase="serving")
        notes.write(**await _answers(engine, [requests[i] for i in order.requests]), phase="done")
    except VimeError as error:
        codes = await asyncio.to_thread(_exit_codes, processes)
        notes.write(outcome="crashed", cause=_in_a_line(error), exit_codes=codes)
    with contextlib.suppress(VimeError):  # of an engine that is dead already
        await engine.shutdown()


async def _answers(engine: Any, requests: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """All at once, as a rollout sends them."""
    import numpy as np

    from vime.backends.vllm.requests import all_or_none
    from vime.types import Prompt, Status

    async def one(number: int, ids: list[int], seed: int, options: Mapping[str, Any]) -> str:
        try:
            samples = await engine.generate(Prompt(number, np.array(ids, np.int32), ""), [seed], options)
        except PromptTooLong:
            return "too long"
        return str(samples[0].status)

    found = await all_or_none([one(i, *request[1:]) for i, request in enumerate(requests)])
    if failed := found.count(str(Status.FAILED)):
        return {"outcome": "crashed", "cause": f"log-probs of {failed} of {len(found)} answers are not finite"}
    return {"outcome": "survived", "statuses": {status: found.count(status) for status in sorted(set(found))}}


def _exit_codes(processes: Sequence[Any]) -> list[int | None]:
    """Of the engine's processes; None of one that goes on. vLLM waits for them too: one of two sees the code late."""
    deadline = time.monotonic() + EXIT_SECONDS
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process.exitcode for process in processes]


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, VimeError) else f"{type(error).__name__}: {text}"


# ---- warm ------------------------------------------------------------------------------------------------------------


def warm(orders: int, answers: int) -> None:
    """Import, say whether attempts may be forked, then fork one per line of ``orders``, each in its own session."""
    from vime.forks import forking_dies_with_parent

    for name in IMPORTS:
        importlib.import_module(name)
    from vime import device

    num_threads = len(os.listdir("/proc/self/task"))
    is_fit = device.kind() == "cpu" and num_threads == 1
    os.write(answers, b"ready\n" if is_fit else b"unfit\n")
    with os.fdopen(orders, encoding="utf-8") as lines:
        for line in lines:
            sys.stdout.flush()
            sys.stderr.flush()
            with forking_dies_with_parent():
                pid = os.fork()
            if pid == 0:
                os.close(answers)
                _forked(line.rstrip("\n"))
            os.write(answers, f"pid {pid}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(answers, f"exit {status}\n".encode())


def _forked(path: str) -> None:
    """In the child; never returns. Its output goes where the order lies, its temporary files where it says."""
    status = 1
    try:
        os.setsid()
        output = os.open(Path(path).with_name(OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        attempt(path)
        status = 0
    except BaseException:  # noqa: BLE001 - a fork ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(arguments: Sequence[str]) -> None:
    from vime.forks import die_with
    from vime.log import setup_logging

    die_with(int(arguments[0]))
    setup_logging("attempt")
    if arguments[1] == "--warm":
        warm(int(arguments[2]), int(arguments[3]))
    else:
        attempt(arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
