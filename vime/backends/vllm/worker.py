"""Worker extension: methods that the engine calls by name in each of its workers (``collective_rpc``)."""

from __future__ import annotations

import faulthandler
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vime import device
from vime.backends.vllm import cpu_sleep
from vime.backends.vllm.layouts import unreadable
from vime.backends.vllm.live import LiveWeights, packed, padding
from vime.backends.vllm.loader_trace import Layout, trace
from vime.backends.vllm.outputs import Capture
from vime.errors import UsageError
from vime.types import TensorEntry
from vime.weights.manifest import digest
from vime.weights.shm import BufferPlan, SharedBuffer

Row = Sequence[Any]  # (name, shape, dtype): what survives vLLM's message format


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def entries_of(rows: Sequence[Row]) -> list[TensorEntry]:
    return [TensorEntry(name, tuple(shape), dtype) for name, shape, dtype in rows]


class WorkerExtension:
    """Mixed into vLLM's worker. Names start with ``vime_`` so that none can clash with the worker's own."""

    _vime_layout: Layout
    _vime_specs: dict[str, TensorEntry]
    _vime_sleeping: cpu_sleep.Sleeping
    _vime_capture: Capture
    _vime_undo: list[Callable[[], None]]

    def vime_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def vime_empty_parameters(self) -> list[str]:
        """Parameters without elements: weights that something has hidden or freed."""
        return [name for name, p in self.vime_model().named_parameters() if p.numel() == 0]

    def vime_facts(self) -> dict[str, str]:
        """Log-prob mode and dtypes of the live model (``dtype``: of most weights), see ``VllmEngine.describe``."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        model = self.vime_model()
        sizes = Counter[str]()
        for parameter in model.parameters():
            sizes[dtype_name(parameter.dtype)] += parameter.numel()
        processor = next(m for m in model.modules() if isinstance(m, LogitsProcessor))
        own = dtype_name(model.lm_head.weight.dtype)  # type: ignore[union-attr, arg-type]
        head = own if processor.head_dtype is None else dtype_name(processor.head_dtype)
        mode = self.model_runner.sampler.logprobs_mode  # type: ignore[attr-defined]
        return {"dtype": sizes.most_common(1)[0][0], "head_dtype": head, "logits_dtype": head, "log_probs_mode": mode}

    def vime_trace(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Trace the loader over these tensors and keep the layout.

        Returns ``regions``: name -> [[dtype of the parameter, source offset, shape, stride], ...], ``uncovered``:
        parameter -> elements that nothing is loaded into, and ``unreadable``: name -> why it cannot be read back.
        """
        model = self.vime_model()
        specs = entries_of(rows)
        self._vime_layout = trace(model, specs)
        tensors, padded = dict([*model.named_parameters(), *model.named_buffers()]), padding(model)
        self._vime_specs = {s.name: s for s in specs}
        for name, regions in self._vime_layout.regions.items():
            if regions:
                dtype = dtype_name(tensors[regions[0].parameter].dtype)
                self._vime_specs[name] = replace(self._vime_specs[name], dtype=dtype)
        return {
            "regions": {
                name: [
                    [self._vime_specs[name].dtype, r.source.offset, list(r.source.shape), list(r.source.stride)]
                    for r in regions
                ]
                for name, regions in self._vime_layout.regions.items()
            },
            "uncovered": {n: c for n, c in self._vime_layout.uncovered.items() if c != padded.get(n)},
            "unreadable": self._vime_unreadable(),
        }

    def _vime_unreadable(self) -> dict[str, str]:
        why, found = unreadable(self.vime_model(), packed(self.vime_model())), {}
        for name, regions in self._vime_layout.regions.items():
            for region in regions:
                if region.parameter in why:
                    found[name] = f"{why[region.parameter]} ({region.parameter})"
        return found

    def vime_buffers(self) -> dict[str, str]:
        """Digests of what no checkpoint carries and no update sends: rotary caches, scales."""
        return {name: digest(b) for name, b in self.vime_model().named_buffers()}

    def vime_sleep(self, level: int) -> int:
        """CPU platform: free weights and caches. Returns bytes freed."""
        self._vime_sleeping = cpu_sleep.sleep(self.vime_model(), cpu_sleep.kv_caches(self.model_runner), level)  # type: ignore[attr-defined]
        return self._vime_sleeping.freed_bytes

    def vime_wake(self) -> None:
        """CPU platform: take the memory back."""
        cpu_sleep.wake(self.vime_model(), self._vime_sleeping)
        del self._vime_sleeping

    def vime_memory(self) -> dict[str, int]:
        """Bytes held by this worker, see ``device.memory``."""
        return device.memory()

    def vime_outputs_start(self, points: Sequence[str]) -> None:
        """Keep what the model puts out at these points (``vime.align.points``) until ``vime_outputs_take``."""
        self._vime_capture = Capture(self.vime_model(), self.vllm_config, points)  # type: ignore[attr-defined]

    def vime_outputs_take(self) -> list[list[Any]]:
        """[point, shape, float32 bytes] of each; the hooks are gone."""
        return [[name, list(value.shape), value.numpy().tobytes()] for name, value in self._vime_capture.take().items()]

    def vime_hooks(self) -> int:
        """Hooks on the modules of the live model."""
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.vime_model().modules())

    def vime_plant(self, name: str, value: float, rank: int | None = None) -> None:
        """Overwrite one parameter or buffer with ``value``, on one rank or all: the fault that a check must catch."""
        if rank not in (None, self.rank):  # type: ignore[attr-defined]
            return
        tensors = self._vime_live()
        if name not in tensors:
            raise UsageError(f"no parameter or buffer is called {name}", f"known: {', '.join(sorted(tensors)[:20])}")
        tensors[name].fill_(value)

    def vime_plant_fault(self, name: str) -> str:
        """Plant a fault of ``vime.align.faults``; returns what was changed, in words."""
        from vime.backends.vllm.walk_faults import plant

        said, undo = plant(self, name)
        self._vime_undo = [*getattr(self, "_vime_undo", []), undo]
        return said

    def vime_settings(self) -> dict[str, Any]:
        """What this worker reads back of its own settings and environment."""
        from vime.backends.vllm.crash_facts import facts

        return facts(self)

    def vime_write_stacks(self) -> None:
        """Let a fatal signal write this worker's Python stacks, whatever handler a library has put in between."""
        faulthandler.disable()
        faulthandler.enable()

    def vime_plant_crash(self, text: str, requests: Sequence[Sequence[Any]], arguments: Mapping[str, Any]) -> str:
        """Plant a crash (``vime.debug.crash.planted``); returns it in words."""
        from vime.backends.vllm.crash_faults import plant

        return plant(self, text, requests, arguments)

    def vime_heal(self) -> None:
        """Undo what was planted, but for weights, which the next update carries."""
        for undo in reversed(getattr(self, "_vime_undo", [])):
            undo()
        self._vime_undo = []
        for cache in cpu_sleep.kv_caches(self.model_runner):  # type: ignore[attr-defined]
            cache.zero_()  # a NaN in a block that is used again would pass through its mask

    def vime_received(self) -> tuple[dict[str, str], float]:
        """Digests of the latest update's tensors as they entered ``load_weights``, and the seconds that these took."""
        receiver = self.weight_transfer_engine  # type: ignore[attr-defined]
        return dict(receiver.received), receiver.seconds

    def vime_held(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """Digests of the tensors that the live parameters hold, put back into Hugging Face names and shapes.

        Of ``names`` alone, where given; the others are empty. Only for a worker that holds whole tensors
        (tensor-parallel size 1).
        """
        live, chosen = LiveWeights(self.vime_model()), None if names is None else set(names)
        return {
            name: digest(self._vime_gather(name, live)) if chosen is None or name in chosen else ""
            for name, regions in self._vime_layout.regions.items()
            if regions
        }

    def vime_dump_buffers(self) -> dict[str, dict[str, Any]]:
        """Records of every buffer: what no checkpoint carries."""
        from vime.backends.vllm.dumping import dump_buffers

        return dump_buffers(self.vime_model())

    def vime_recorded_loading(self) -> dict[str, dict[str, Any]]:
        """Records of what entered the first load, where that was asked for; empty but on rank 0."""
        from vime.backends.vllm.dumping import recorded_loading

        return recorded_loading()

    def vime_record_update(self, order: dict[str, Any]) -> None:
        """Dump what enters ``load_weights`` in the next update; rank 0 does."""
        from vime.backends.vllm.dumping import Order, Stream, is_first_rank

        if is_first_rank():
            self.weight_transfer_engine.stream = Stream(Order(**order))  # type: ignore[attr-defined]

    def vime_recorded_update(self) -> dict[str, dict[str, Any]]:
        """Records of the update that was asked to be dumped; empty but on rank 0."""
        receiver = self.weight_transfer_engine  # type: ignore[attr-defined]
        stream, receiver.stream = receiver.stream, None
        return {} if stream is None else stream.finish()

    def vime_put(self, path: str, num_bytes: int, rows: Sequence[Row], offsets: Sequence[int]) -> None:
        """Copy this worker's parts of these tensors into the shared file; all workers together put whole tensors."""
        live = LiveWeights(self.vime_model())
        buffer = SharedBuffer.attach(path, num_bytes)
        try:
            for entry, whole in buffer.views(BufferPlan(tuple(entries_of(rows)), tuple(offsets), num_bytes)):
                for r in self._vime_layout.regions[entry.name]:
                    r.source.within(whole).copy_(r.target.within(live[r.parameter]))
        finally:
            buffer.close()

    def vime_unequal(self, path: str, num_bytes: int, rows: Sequence[Row], offsets: Sequence[int]) -> list[str]:
        """Names whose part in this worker's parameters is not, byte for byte, that part of the shared file."""
        live = LiveWeights(self.vime_model())
        plan = BufferPlan(tuple(entries_of(rows)), tuple(offsets), num_bytes)
        buffer = SharedBuffer.attach(path, num_bytes)
        try:
            return [e.name for e, sent in buffer.views(plan) if not self._vime_is_equal(e.name, sent, live)]
        finally:
            buffer.close()

    def _vime_is_equal(self, name: str, sent: torch.Tensor, live: Mapping[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(_bytes(r.target.within(live[r.parameter])), _bytes(r.source.within(sent)))
            for r in self._vime_layout.regions[name]
        )

    def _vime_live(self) -> dict[str, torch.Tensor]:
        model = self.vime_model()
        return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}

    def _vime_gather(self, name: str, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        spec, regions = self._vime_specs[name], self._vime_layout.regions[name]
        if len(regions) == 1 and regions[0].source.shape == spec.shape:
            return regions[0].target.within(live[regions[0].parameter])
        whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=live[regions[0].parameter].device)
        for region in regions:
            region.source.within(whole).copy_(region.target.within(live[region.parameter]))
        return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
