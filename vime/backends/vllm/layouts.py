"""Parameters that a kernel has rearranged after loading: what they hold cannot be read back unless it can be undone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from vime.weights.manifest import digest

UNDONE = "how the kernel has laid out its parameter is not known"
SAMPLED = 4096
"""Elements of a parameter that are looked at: a rearrangement moves nearly all."""

_rearranged: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def rearranged(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters whose shape, type or elements were others before vLLM processed them after loading."""
    return _rearranged.get(model, frozenset())


def unreadable(model: torch.nn.Module, undone: Collection[str]) -> dict[str, str]:
    """Parameter -> why it cannot be read back. ``undone``: those that can be, though they were rearranged."""
    return {name: UNDONE for name in sorted(rearranged(model)) if name not in undone}


def watch_processing() -> None:
    """Let every model be looked at around vLLM's processing. May be called any number of times."""
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading
    if not getattr(original, "_vime_watches", False):
        base_loader.process_weights_after_loading = watching(original)


def watching(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``process_weights_after_loading(model, ...)``."""

    @functools.wraps(original)
    def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        before = {name: _sample(parameter) for name, parameter in model.named_parameters()}
        original(model, *args, **kwargs)
        after = {name: _sample(parameter) for name, parameter in model.named_parameters()}
        _rearranged[model] = frozenset(n for n, value in after.items() if before.get(n, value) != value)

    process._vime_watches = True  # type: ignore[attr-defined]
    return process


def _sample(parameter: torch.Tensor) -> tuple[Any, ...]:
    flat = parameter.detach().reshape(-1)
    return tuple(parameter.shape), parameter.dtype, digest(flat[:: max(1, flat.numel() // SAMPLED)])
