"""Outputs at the named points of the model folder's own Hugging Face model, transformers in float32 on the CPU.

It shares no code with trainer and engine: the third opinion. Axes: L tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from vime.align.oracle import load_model, no_room
from vime.align.points import EMBED, FINAL_NORM, LOG_PROB, check_points, layer_of, part_of
from vime.errors import VimeError
from vime.models import load_spec

if TYPE_CHECKING:
    import torch

Pick = Callable[[Any], Any]  # output of a module -> the tensor of the point


class HfOutputs:
    """The model of ``path``, loaded at the first use and kept."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._model: Any = None

    def outputs(self, token_ids: np.ndarray, points: Sequence[str]) -> Mapping[str, np.ndarray]:
        """float32 [L, width] of the named points (``vime.align.points``) in one forward of one sequence."""
        import torch

        model = self._loaded()
        check_points(points, len(model.model.layers))
        tokens = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        with torch.inference_mode(), captured(model, points) as found:
            if LOG_PROB in points:
                found[LOG_PROB] = _log_probs(model(tokens, use_cache=False).logits[0], tokens[0])
            else:
                model.model(tokens, use_cache=False)
        return found

    def _loaded(self) -> Any:
        """VimeError where this machine has no room for it."""
        if self._model is None:
            if reason := no_room(4 * load_spec(self.path).num_parameters):
                raise VimeError(f"{self.path}: {reason}", "compare trainer and engine with each other")
            self._model = load_model(self.path)
        return self._model


def _log_probs(logits_LV: torch.Tensor, tokens_L: torch.Tensor) -> np.ndarray:
    """float32 [L, 1]; row by row, so that beside the logits nothing of their size is held."""
    out = np.zeros((len(tokens_L), 1), np.float32)
    for at in range(1, len(tokens_L)):
        out[at] = logits_LV[at - 1].log_softmax(-1)[tokens_L[at]].item()
    return out


@contextmanager
def captured(model: Any, points: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    """What the modules of ``model`` put out at ``points``, while inside. No hook stays behind."""
    found: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        for name in points:
            place = _place(model, name)
            if place is not None:
                stack.callback(place[0].register_forward_hook(_keep(found, name, place[1])).remove)
        yield found


def _keep(found: dict[str, np.ndarray], name: str, pick: Pick) -> Callable[..., None]:
    def hook(module: Any, arguments: Any, output: Any) -> None:
        value = pick(output)
        rows = value.shape[1] if value.ndim > 2 else len(value)
        found[name] = value.float().reshape(rows, -1).numpy().copy()

    return hook


def _place(model: Any, name: str) -> tuple[Any, Pick] | None:
    """The module that puts out point ``name``, and how; None where there is none (no experts in this layer)."""
    layer = layer_of(name)
    if layer is None:
        modules = {EMBED: model.model.embed_tokens, FINAL_NORM: model.model.norm}
        return (modules[name], _first) if name in modules else None
    return _places(model.model.layers[layer]).get(part_of(name))


def _places(block: Any) -> dict[str, tuple[Any, Pick]]:
    attention, router = block.self_attn, getattr(block.mlp, "gate", None)
    places: dict[str, tuple[Any, Pick]] = {
        "attn_in": (block.input_layernorm, _first),
        "q": (getattr(attention, "q_norm", attention.q_proj), _first),
        "k": (getattr(attention, "k_norm", attention.k_proj), _first),
        "v": (attention.v_proj, _first),
        "attn_out": (attention, _first),
        "mlp_in": (block.post_attention_layernorm, _first),
        "mlp_out": (block.mlp, _first),
        "out": (block, _first),
    }
    if router is not None:
        places |= {"router": (router, _first), "experts": (router, _experts)}
    return places


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _experts(output: Any) -> Any:
    return output[2].sort(-1).values
