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


LATER = 10.0
"""How much wider after the first optimizer step: Adam's first steps have the size of the learning rate however small a
gradient is, so that rounding decides over the elements whose gradient is nothing but rounding."""


def limits(dtype: str, num_layers: int, num_steps_before: int, is_same: bool) -> Limits:
    """``is_same``: one layout, one set of libraries. ``num_steps_before``: steps since the weights were equal.

    Measured, float32, 4 layers, lr 1e-3 (large): log-probs 1.4e-6 before the first step and 5e-6 after it, gradients
    1.4e-6 and 7e-6, weights 3e-4 of the step and 6e-4 after four. A wrong shard, sample or scale shows as 1e-1 or more.
    """
    if is_same:
        return Limits()
    reason = f"{dtype} rounding, sums in another order"
    first = (engine_limit(dtype, num_layers), 1e-5, 1e-5, 1e-4, 1e-2)
    if dtype == "bfloat16":
        first = (engine_limit(dtype, num_layers), 2e-2, 2e-2, 1e-1, 5e-1)
    if not num_steps_before:
        return Limits(*first, reason=reason)
    return Limits(*(LATER * size for size in first), reason=f"{reason}; x {LATER:g} after an optimizer step (Adam)")
