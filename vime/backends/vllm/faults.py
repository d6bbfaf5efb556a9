"""Plants the engine's faults (``vime.align.faults``) in the live model of a worker, so that one sees them caught."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from vime.errors import UsageError
from vime.weights.manifest import layer_of

SEED = 20_240_817
STD = 0.02  # of a fresh weight matrix, as transformers' ``initializer_range``


def plant(model: torch.nn.Module, fault: str) -> str:
    """Plant ``fault`` in ``model``; returns what was changed, in words.

    UsageError for a name that is no fault of an engine, or where the model has no place for it. What is computed from
    packed copies of the weights is packed again.
    """
    if fault not in PLANTERS:
        raise UsageError(f"debug.inject: {fault!r} is no fault of an engine", f"known: {', '.join(PLANTERS)}")
    with torch.no_grad():
        done = PLANTERS[fault](model)
    pack_again(model)
    return done


def _nan_weight(model: torch.nn.Module) -> str:
    layers = _layers(model)
    middle = len(layers) // 2
    kind, weight = next((kind, p) for kind, p in layers[middle].items() if p.ndim >= 2)
    weight.view(-1)[0] = float("nan")
    return f"{kind.replace('*', str(middle))}: element 0 is NaN"


def _random_weights(model: torch.nn.Module) -> str:
    generator = torch.Generator().manual_seed(SEED)
    count = 0
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            fresh = torch.empty(parameter.shape).normal_(0.0, STD, generator=generator)
            parameter.copy_(fresh)
        else:
            parameter.fill_(1.0)
        count += 1
    return f"{count} parameters drawn anew"


def _zero_rotary(model: torch.nn.Module) -> str:
    names = [name for name, _ in model.named_buffers() if "cos_sin_cache" in name or "rotary" in name]
    if not names:
        raise UsageError("debug.inject: 'zero-rotary': the model has no rotary cache")
    buffers = dict(model.named_buffers())
    for name in names:
        buffers[name].zero_()
    return f"{', '.join(names)}: all zero"


def _swapped_layers(model: torch.nn.Module) -> str:
    """The first layers of two pipeline stages: what a stage that counts its layers from 0 again would send."""
    layers = _layers(model)
    if len(layers) < 2:
        raise UsageError(f"debug.inject: 'swapped-layers': the model has {len(layers)} layer")
    one, other = 0, len(layers) // 2
    shapes = [{kind: parameter.shape for kind, parameter in layers[i].items()} for i in (one, other)]
    if shapes[0] != shapes[1]:
        raise UsageError(f"debug.inject: 'swapped-layers': layers {one} and {other} are not built alike")
    for kind, parameter in layers[one].items():
        kept = parameter.clone()
        parameter.copy_(layers[other][kind])
        layers[other][kind].copy_(kept)
    return f"layers {one} and {other} are swapped"


PLANTERS: dict[str, Callable[[torch.nn.Module], str]] = {
    "nan-weight": _nan_weight,
    "random-weights": _random_weights,
    "zero-rotary": _zero_rotary,
    "swapped-layers": _swapped_layers,
}


def _layers(model: torch.nn.Module) -> dict[int, dict[str, torch.Tensor]]:
    """layer -> kind (the name with ``*`` for the layer) -> parameter."""
    found: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        kind, layer = layer_of(name)
        if layer is not None:
            found[layer][kind] = parameter.detach()
    if not found:
        raise UsageError("debug.inject: the model has no numbered layers to plant a fault in")
    return found


def pack_again(model: torch.nn.Module) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vime.backends.vllm.cpu_repairs import refresh

        refresh(model, is_complete=True)
