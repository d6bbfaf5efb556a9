"""How far apart two runs of one training step may be, and why. Measured on the tiny models and SmolLM2-135M."""

from __future__ import annotations

from dataclasses import dataclass

from vime.align.first_step import engine_limit

FLOOR = 1e-2
"""A gradient that is 0 but for rounding, as that of a key bias is, has no relative error of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest differences within which two runs count as the same. 0.0 everywhere: bitwise.

    log_probs  largest |difference| of a token, nats; of the reference model, which nothing trains: ref_log_probs
    loss       of a step and of each sample's share, relative to the sum of |shares|: the shares themselves cancel
    grad_norm  relative
    gradients  relative L2 of each tensor, or relative to ``FLOOR`` of the whole gradient where that is larger
    weights    of each tensor, L2 distance relative to the length of the step that the tensor took, or to ``resolution``
               of the tensor where that is larger
    resolution one step between two numbers of the type: what a smaller update is rounded to
    reason     why not bitwise
    """

    log_probs: float = 0.0
    ref_log_probs: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    resolution: float = 0.0
    reason: str = ""

    @property
    def is_bitwise(self) -> bool:
        return not self.reason


MOST_OF_A_STEP = 0.9
"""No limit of weights reaches 1: that is how far weights are off that never moved."""
LATER = {"float32": 10.0, "bfloat16": 2.0}
"""How much wider after the first optimizer step: Adam's first steps have the size of the learning rate however small a
gradient is, so that rounding decides over the elements whose gradient is nothing but rounding."""
RESOLUTION = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


def limits(dtype: str, num_layers: int, num_steps_before: int, is_same: bool) -> Limits:
    """``is_same``: one layout, one set of libraries. ``num_steps_before``: steps since the weights were equal.

    Measured, 4 layers, lr 1e-3 (large), tp 2 against 1, before the first step and after it: log-probs 1.4e-6 and 5e-6,
    gradients 1.4e-6 and 7e-6, weights 3e-4 of the step and 6e-4 after four; in bfloat16 0.02 and 0.03, 0.03 and 0.04,
    0.2 and 0.5. SmolLM2-135M, 30 layers, tp 3: log-probs 1.9e-5, grad norm 2.6e-5, gradients 5.4e-5, weights 1e-3 of
    the step; that is float32's own error: against transformers in float64 the grad norm of a single process is off by
    2.6e-5, and the gradients of transformers in float32 by up to 9.6e-5. A wrong shard, sample or scale shows as 0.1 or
    more.
    """
    if is_same:
        return Limits()
    reason = f"{dtype} rounding, sums in another order"
    wide = LATER[dtype] if num_steps_before else 1.0
    if num_steps_before:
        reason += f"; x {wide:g} after an optimizer step (Adam)"
    log_probs = engine_limit(dtype, num_layers)
    depth = log_probs / engine_limit(dtype, 0)  # rounding adds up from layer to layer, on the way back too
    loss, gradients, weights = (2e-2, 1e-1, 5e-1) if dtype == "bfloat16" else (1e-5, 1e-4, 1e-2)
    return Limits(
        log_probs=wide * log_probs,
        ref_log_probs=log_probs,
        loss=wide * depth * loss,
        grad_norm=wide * depth * loss,
        gradients=wide * depth * gradients,
        weights=min(wide * weights, MOST_OF_A_STEP),
        resolution=RESOLUTION[dtype],
        reason=reason,
    )
