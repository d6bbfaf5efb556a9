"""From the engine's answer to a Sample: what must hold for token ids and log-probs before they are trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime.errors import VimeError
from vime.types import Prompt, Sample, Status

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def response_arrays(
    request_id: str,
    token_ids: Sequence[int],
    log_probs: Sequence[float] | None,
    log_prob_ids: Sequence[int] | None = None,
    *,
    must_be_finite: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [R] ids and float32 [R] log-probs of one response.

    An empty answer and a true 0.0 are kept. Raises VimeError (request id and both lengths, never the text) where
    log-probs are missing, are not one per token, belong to other tokens, or (``must_be_finite``) are not finite.
    """
    if log_probs is None:
        raise VimeError(
            f"request {request_id}: log-probs were asked for and are missing ({len(token_ids)} tokens, 0 log-probs)",
            "the engine must be asked for logprobs=0; nothing may replace them by a default",
        )
    if len(log_probs) != len(token_ids):
        raise VimeError(f"request {request_id}: {len(token_ids)} tokens but {len(log_probs)} log-probs")
    if log_prob_ids is not None and len(log_prob_ids) != len(token_ids):
        named = f"{len(token_ids)} tokens, but log-probs are said to be of {len(log_prob_ids)}"
        raise VimeError(f"request {request_id}: {named}")
    if log_prob_ids is not None and list(log_prob_ids) != list(token_ids):
        at = next(i for i, (a, b) in enumerate(zip(log_prob_ids, token_ids, strict=True)) if a != b)
        raise VimeError(
            f"request {request_id}: log-prob {at} of {len(token_ids)} belongs to another token than the one sampled"
        )
    ids = np.asarray(token_ids, dtype=np.int32)
    values = np.asarray(log_probs, dtype=np.float32)
    if must_be_finite and (problem := not_finite(values)):
        raise VimeError(
            f"request {request_id}: {problem} ({len(token_ids)} tokens, {len(values)} log-probs)",
            "the engine's weights or logits hold NaN or infinity: vime dump-weights RUN.toml names what differs",
        )
    return ids, values


def not_finite(log_probs: np.ndarray) -> str | None:
    """What is wrong with ``log_probs`` float32 [R] that are not all finite; None where they are."""
    bad = np.flatnonzero(~np.isfinite(log_probs))
    if not len(bad):
        return None
    first = f"the first ({log_probs[bad[0]]}) at response token {bad[0]}"
    return f"{len(bad)} of {len(log_probs)} log-probs are not finite, {first}"


def make_sample(
    prompt: Prompt,
    index: int,
    seed: int,
    arrays: tuple[np.ndarray, np.ndarray],
    status: Status,
    versions: tuple[int, int],
    text: str,
) -> Sample:
    """The Sample of one response: prompt and response ids end to end, loss mask True on the response.

    Log-probs that are not finite make it FAILED, with the reason under ``failure`` in its metadata.
    """
    ids, log_probs = arrays
    failure = not_finite(log_probs)
    prompt_len = len(prompt.token_ids)
    total = prompt_len + len(ids)
    mask = np.zeros(total, dtype=bool)
    mask[prompt_len:] = True
    all_log_probs = np.zeros(total, dtype=np.float32)
    all_log_probs[prompt_len:] = log_probs
    return Sample(
        group_id=prompt.group_id,
        index=index,
        token_ids=np.concatenate([np.asarray(prompt.token_ids, dtype=np.int32), ids]),
        prompt_len=prompt_len,
        loss_mask=mask,
        rollout_log_probs=all_log_probs,
        text=text,
        prompt_text=prompt.text,
        label=prompt.label,
        status=Status.FAILED if failure else status,
        seed=seed,
        weight_version_min=versions[0],
        weight_version_max=versions[1],
        metadata=dict(prompt.metadata) | ({"failure": failure} if failure else {}),
    )
