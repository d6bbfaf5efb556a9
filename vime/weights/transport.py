"""Carries weights through shared memory, from the trainer's one writer into every engine of the machine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vime.errors import OutOfTime, UsageError, VimeError
from vime.types import TensorEntry, Verification, WeightManifest
from vime.weights.manifest import compare, compare_specs
from vime.weights.shm import BufferPlan, SharedBuffer, WritePlan

log = logging.getLogger(__name__)

SAMPLED_IN = 10
"""``weights.verify = sampled``: after so many syncs every tensor was compared again."""
SHOWN = 8  # differences named in a message; the count is always complete


class WeightReceiver(Protocol):
    """What the transport needs of an engine."""

    async def weight_specs(self) -> list[TensorEntry]: ...

    async def update_weights(
        self,
        version: int,
        path: str,
        tensors: Sequence[tuple[TensorEntry, int]],
        verify: str,
        names: Sequence[str] | None,
    ) -> tuple[WeightManifest, WeightManifest | None]: ...


@dataclass(slots=True)
class SyncFault:
    """What a planted fault does to a sync: weights pass through bfloat16; engines get only the first version."""

    is_rounded: bool = False
    forgets_engines: bool = False


class ShmTransport:
    """Implements ``protocols.WeightTransport``.

    write            called once per sync with a WritePlan; blocks until every whole tensor lies in the file, in the
                     order of ``trainer_specs``, and returns the manifest of what was written. However many pipeline
                     stages the trainer has, they go through this one call.
    trainer_specs    names, shapes, dtypes of those tensors
    report           called with one line per successful sync
    engines          each named "engine i" in messages, or by its ``name``
    is_strict        False: engines take, and go on with, what is not what the trainer wrote; who asks compares
    fault            what a planted fault does, see ``vime.align.faults``
    manifest         of the latest sync that succeeded: what the engines hold
    answers          of the latest sync that every engine answered, by engine: what it received, and holds where asked
    """

    def __init__(
        self,
        write: Callable[[WritePlan], WeightManifest],
        trainer_specs: Sequence[TensorEntry],
        engines: Sequence[WeightReceiver],
        verify: str = "full",
        timeout_seconds: float = 300.0,
        report: Callable[[str], None] = log.info,
        is_strict: bool = True,
    ) -> None:
        self.write = write
        self.plan = BufferPlan.of(trainer_specs)
        self.engines = {getattr(e, "name", f"engine {i}"): e for i, e in enumerate(engines)}
        self.verify = verify
        self.timeout_seconds = timeout_seconds
        self.report = report
        self.is_strict = is_strict
        self.manifest: WeightManifest | None = None
        self.answers: dict[str, tuple[WeightManifest, WeightManifest | None]] = {}
        self.fault = SyncFault()
        self._buffer: SharedBuffer | None = None
        self._num_syncs = 0

    def sync(self, version: int) -> WeightManifest:
        """Bring every engine to ``version``; returns the trainer's manifest. Not for use inside an event loop."""
        return asyncio.run(self.sync_async(version))

    async def sync_async(self, version: int) -> WeightManifest:
        """As ``sync``. Raises UsageError, with no engine touched, if names, shapes or dtypes disagree; VimeError naming
        engine and tensors if what an engine received or holds is not what the trainer wrote, or engine and phase if the
        time limit ran out. An engine with other weights generates nothing until a sync succeeds.
        """
        self.manifest = None
        try:
            self.manifest = await self._sync(version)
            return self.manifest
        except BaseException:
            self.close()  # a late writer must not write into the next version
            raise

    async def _sync(self, version: int) -> WeightManifest:
        started = time.perf_counter()
        await self._check_specs()
        buffer = self._open()
        verify, names = self._asked()
        plan = WritePlan(self.plan, buffer.path, version, is_digested=self.verify != "off")
        sent = await self._limited("the trainer", "writing the weights", _in_thread(self.write, plan))
        if self.fault.forgets_engines and version > 0:
            return sent
        if self.fault.is_rounded:
            buffer.round_to_bfloat16(self.plan)
        entries = sent.tensors.values()
        if not self.is_strict:  # an engine refuses what has another digest than its entry
            entries = [replace(entry, digest="") for entry in entries]
        tensors = list(zip(entries, self.plan.offsets, strict=True))
        self.answers = await self._each(
            "updating the weights", lambda e: e.update_weights(version, buffer.path, tensors, verify, names)
        )
        counts, num_equal = self._compare(sent, self.answers, names)
        self._num_syncs += 1
        num_compared = len(sent.tensors) if names is None else len(names)
        spent = sent.seconds + max(
            (received.seconds + (0.0 if held is None else held.seconds) for received, held in self.answers.values()),
            default=0.0,
        )
        done = Verification(
            version, self.verify, len(sent.tensors), num_compared, num_equal, spent, time.perf_counter() - started
        )
        cost = f" (verified in {done.seconds:.2f} s, {done.share:.0%})" if self.verify != "off" else ""
        self.report(
            f"weights v{version}: {len(sent.tensors)} tensors, {sent.num_bytes / 1e6:.1f} MB, {counts}, "
            f"{done.sync_seconds:.2f} s{cost}"
        )
        return replace(sent, verification=done)

    def _asked(self) -> tuple[str, list[str] | None]:
        """What engines digest at this sync: (full or received, the tensors; None: all)."""
        names = [entry.name for entry in self.plan.entries]
        if self.verify == "off":
            return "received", []
        if self.verify == "sampled":
            chosen = names[(self._num_syncs - 1) % SAMPLED_IN :: SAMPLED_IN]
            return "full", None if self._num_syncs == 0 else chosen
        return self.verify, None

    def close(self) -> None:
        """Remove the shared file."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer.unlink()
            self._buffer = None

    def _open(self) -> SharedBuffer:
        if self._buffer is None:
            self._buffer = SharedBuffer.create(self.plan.num_bytes)
        return self._buffer

    async def _check_specs(self) -> None:
        ours = {entry.name: entry for entry in self.plan.entries}
        problems = []
        for name, specs in (await self._each("listing the weights it needs", lambda e: e.weight_specs())).items():
            problems += [str(d) for d in compare_specs({s.name: s for s in specs}, ours, name, "the trainer")]
        if problems:
            raise UsageError(
                f"trainer and engine do not have the same weights ({len(problems)} differences), nothing was sent:\n"
                + "\n".join(problems[:SHOWN]),
                "do trainer and engine have one model.path? vime train --dry-run shows which rank holds which layers",
            )

    def _compare(self, sent: WeightManifest, answers: dict[str, Any], names: Sequence[str] | None) -> tuple[str, int]:
        problems: list[str] = []
        num = len(sent.tensors) if names is None else len(names)
        equal = {"received": num, "held": num}
        for name, (received, held) in answers.items():
            sides = [("received", received)] + ([("held", held)] if held is not None else [])
            for side, manifest in sides:
                found = compare(sent, manifest)
                equal[side] = min(equal[side], num - len(_wrong_tensors(sent, manifest)))
                problems += [f"{name} {side}: {d}" for d in found]
        if problems and self.is_strict:
            raise VimeError(
                f"weights v{sent.version}: {len(problems)} differences from the trainer's tensors; the engines "
                "concerned generate nothing until a sync succeeds:\n" + "\n".join(problems[:SHOWN]),
                "vime dump-weights RUN.toml compares checkpoint, trainer and engine, and names what was exchanged",
            )
        if not num:
            return "not compared", 0
        sides_asked = ["received", "held"] if self.verify in ("full", "sampled") else ["received"]
        of = f" (of {len(sent.tensors)})" if num < len(sent.tensors) else ""
        text = ", ".join(f"{side} = trainer {equal[side]}/{num}{of}" for side in sides_asked)
        return text + _untested_text(answers, names), min(equal[side] for side in sides_asked)

    async def _each(self, phase: str, call: Callable[[WeightReceiver], Awaitable[Any]]) -> dict[str, Any]:
        """Call every engine at once; all are waited for before the first error is raised."""
        results = await asyncio.gather(
            *(self._limited(name, phase, call(engine)) for name, engine in self.engines.items()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return dict(zip(self.engines, results, strict=True))

    async def _limited(self, who: str, phase: str, call: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(call, self.timeout_seconds)
        except TimeoutError as error:
            raise OutOfTime(
                f"weight sync: {who} did not end {phase} within {self.timeout_seconds:g} s",
                "raise weights.timeout_seconds if it is merely slow",
            ) from error


def _untested_text(answers: dict[str, Any], names: Sequence[str] | None) -> str:
    """Of ``names`` (None: all), what engines hold and cannot read back."""
    asked = None if names is None else set(names)
    held = [entry for _, found in answers.values() if found is not None for entry in found.tensors.values()]
    unread = {t.name for t in held if not t.digest and (asked is None or t.name in asked)}
    return f" ({len(unread)} of what is held NOT TESTED, first {min(unread)})" if unread else ""


def _wrong_tensors(sent: WeightManifest, other: WeightManifest) -> list[str]:
    """Those that did not arrive, and those whose digest is another, where both have one."""
    found = {name: other.tensors[name].digest if name in other.tensors else None for name in sent.tensors}
    return [n for n, t in sent.tensors.items() if found[n] is None or (found[n] and t.digest and found[n] != t.digest)]


async def _in_thread(call: Callable[[Any], Any], argument: Any) -> Any:
    """Run a blocking call in a thread of its own, so that a call that never ends cannot hold up the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (call(argument), None)
        except BaseException as error:  # noqa: BLE001 carried over to the waiting coroutine
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="weight-writer", daemon=True).start()
    return await done
