"""How far apart two runs of one training step may be, and why. Measured on the tiny models and SmolLM2-135M."""

from __future__ import annotations

from dataclasses import dataclass

from vime.align.first_step import engine_limit

FLOOR = 1e-2
"""A gradient that is 0 but for rounding, as that of a key bias is, has no relative error of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest differences within which two runs count as the same. 0.0 everywhere: bitwise.

    log_probs  largest |difference| of a token, nats
    loss       of a step and of each sample's share, relative to the sum of |shares|: the shares themselves cancel
    grad_norm  relative
    gradients  relative L2 of each tensor, or relative to ``FLOOR`` of the whole gradient where that is larger
    weights    of each tensor, L2 distance relative to the length of the step that the tensor took
    reason     why not bitwise
    """

    log_probs: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    reason: str = ""

    @property
    def is_bitwise(self) -> bool:
        return not self.reason


def limits(dtype: str, num_layers: int, num_steps_before: int, is_same: bool) -> Limits:
    """``is_same``: one layout, one set of libraries. ``num_steps_before``: steps since the weights were equal."""
    if is_same:
        return Limits()
    log_probs = engine_limit(dtype, num_layers)
    if dtype == "bfloat16":
        return Limits(log_probs, 2e-2, 2e-2, 1e-1, 5e-1, "bfloat16 rounding, sums in another order")
    return Limits(log_probs, 1e-5, 1e-5, 1e-4, 5e-2, "float32 rounding, sums in another order")
