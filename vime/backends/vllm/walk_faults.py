"""Faults that ``vime align-check`` plants in a live engine, each with what undoes it; weights come back by a sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError

if TYPE_CHECKING:
    import torch

OPTIONS: dict[str, dict[str, float]] = {"top-p": {"top_p": 0.8}, "generation-config": {"repetition_penalty": 1.3}}
"""Sampling options that an engine takes from somewhere else than the run's configuration."""
KEEPS_CACHE, LOSES_BUFFER = "stale-prefix-cache", "lost-buffer"
IN_ENGINE = (*OPTIONS, KEEPS_CACHE, LOSES_BUFFER)
"""Faults that the engine itself remembers; all others are its workers' alone."""
WEIGHTS = ("nan-weight", "random-weights", "swapped-layers")
"""Faults that a loader makes anew at every update."""
Undo = Callable[[], None]


def plant(worker: Any, fault: str) -> tuple[str, Undo]:
    """Plant ``fault`` in one worker; returns what was changed, in words, and what undoes it, but for weights.

    UsageError for a name that is no fault of an engine, or where the model has no place for it.
    """
    from vime.backends.vllm import faults

    if fault in WORKER_PLANTERS:
        return WORKER_PLANTERS[fault](worker)
    if fault not in faults.PLANTERS:
        known = ", ".join([*faults.PLANTERS, *WORKER_PLANTERS, *IN_ENGINE])
        raise UsageError(f"{fault!r} is no fault of an engine", f"known: {known}")
    model = worker.vime_model()
    undo = _buffers_back(model)
    said = faults.plant(model, fault)
    if fault not in WEIGHTS:
        return said, undo
    worker.weight_transfer_engine.damage = lambda: faults.plant(model, fault)
    return f"{said}, after every update too", lambda: setattr(worker.weight_transfer_engine, "damage", None)


def _buffers_back(model: torch.nn.Module) -> Undo:
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def undo() -> None:
        for buffer, copy in kept:
            buffer.copy_(copy)

    return undo


def _raw_log_probs(worker: Any) -> tuple[str, Undo]:
    sampler = worker.model_runner.sampler
    parts = [sampler, sampler.topk_topp_sampler]
    modes = [part.logprobs_mode for part in parts]

    def use(values: list[str]) -> None:
        for part, value in zip(parts, values, strict=True):
            part.logprobs_mode = value

    use(["raw_logprobs"] * len(parts))
    return "the sampler reports log-probs before temperature", lambda: use(modes)


def _dropped_tensor(worker: Any) -> tuple[str, Undo]:
    """A tensor that fills its module alone: vLLM refuses halves of a fused one by itself."""
    names = [name for name, regions in worker._vime_layout.regions.items() if regions and "layers." in name]
    name = next((n for n in names[len(names) // 2 :] if n.endswith("o_proj.weight")), names[-1])
    receiver = worker.weight_transfer_engine
    receiver.dropped = frozenset({name})
    return f"{name} never comes to the engine's loader", lambda: setattr(receiver, "dropped", frozenset())


WORKER_PLANTERS: dict[str, Callable[[Any], tuple[str, Undo]]] = {
    "raw-log-probs": _raw_log_probs,
    "dropped-tensor": _dropped_tensor,
}
