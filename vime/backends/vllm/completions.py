"""Requests and answers of ``/v1/completions``, token ids in and out: what is sent, and what may pass as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from vime.backends.vllm.answers import STATUS, response_arrays
from vime.errors import VimeError
from vime.types import Status

PROCESSED, RAW, LOGITS = "processed_logprobs", "raw_logprobs", "logits"
PROBED = (0, 1)
"""Token ids that the request which measures the mode allows, and no other."""
FLOOR = -9999.0
"""What a server sends for a log-prob of minus infinity."""
ROUNDING = 1e-3
MAX_ID = 2**31 - 1
NEW_ENOUGH = "the server must be a vLLM that knows return_token_ids (0.10.2 and later)"


def request_body(model_id: str, ids: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """A request: ``options`` as for vLLM's own SamplingParams, and that ids come back as ids."""
    ours = {name: value for name, value in options.items() if name not in ("flat_logprobs", "detokenize")}
    return ours | {
        "model": model_id,
        "prompt": ids,
        "stream": False,
        "echo": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def parse(
    request_id: str, body: Mapping[str, Any], content: Any, *, must_be_finite: bool = True
) -> tuple[tuple[Any, Any], Status]:
    """(int32 [R] ids, float32 [R] log-probs) and status of the answer ``content`` to the request ``body``.

    Raises VimeError (never with the text) where the answer is to another prompt, lacks ids or log-probs, fails
    ``response_arrays``, or ended for a reason that the request does not know.
    """
    choices = entries(content, "choices")
    if len(choices) != 1:
        raise VimeError(f"request {request_id}: {len(choices)} answers, one was asked for")
    choice = choices[0]
    ids, used = choice.get("token_ids"), choice.get("prompt_token_ids")
    if not _are_ids(ids):
        raise VimeError(f"request {request_id}: the answer has no token ids", NEW_ENOUGH)
    if not _are_ids(used):
        raise VimeError(f"request {request_id}: the answer does not say which prompt ids it is to", NEW_ENOUGH)
    _require_prompt(request_id, body["prompt"], used)
    log_probs, names = _log_probs(choice.get("logprobs"))
    arrays = response_arrays(request_id, ids, log_probs, names, must_be_finite=must_be_finite)
    return arrays, _status(request_id, body, ids, choice.get("finish_reason"))


def top_log_probs(request_id: str, content: Any) -> dict[int, float]:
    """Token id -> value of the largest ones at the first place of an answer that ``parse`` took."""
    found = entries(content, "choices")[0]["logprobs"].get("top_logprobs")
    first = found[0] if isinstance(found, list) and found else None
    if not isinstance(first, dict) or not all(isinstance(v, int | float) for v in first.values()):
        raise VimeError(f"request {request_id}: the answer has no top_logprobs, which were asked for", NEW_ENOUGH)
    return {_id_of(name): float(value) for name, value in first.items()}


def mode_of(top: Mapping[int, float], vocab_size: int) -> str:
    """Which log-probs a server reports. ``top``: the largest ones where ``PROBED`` alone were allowed.

    After the sampling options the probabilities of these two add up to 1, and no other token has any. Before them
    others have, and what is no logit adds up to 1 at most, with the largest at least 1 / ``vocab_size``.
    """
    seen = {token_id: value for token_id, value in top.items() if value > FLOOR}
    most = max(seen.values(), default=-math.inf)
    total = sum(map(math.exp, seen.values())) if most <= 0.0 else math.inf
    if seen.keys() <= set(PROBED):
        return PROCESSED if abs(total - 1.0) < ROUNDING else LOGITS
    return RAW if total < 1.0 + ROUNDING and most > -math.log(vocab_size) - ROUNDING else LOGITS


def entries(content: Any, key: str) -> list[dict[str, Any]]:
    """The objects in the list ``content[key]``; none where there is no such list."""
    found = content.get(key) if isinstance(content, dict) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _are_ids(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(isinstance(i, int) and 0 <= i <= MAX_ID for i in found)


def _log_probs(found: Any) -> tuple[list[float] | None, list[int]]:
    """Log-probs, NaN for what is no number; and the ids of the tokens that they are said to belong to."""
    found = found if isinstance(found, dict) else {}
    values, names = found.get("token_logprobs"), found.get("tokens")
    ids = [_id_of(name) for name in names] if isinstance(names, list) else []
    if not isinstance(values, list):
        return None, ids
    return [math.nan if not isinstance(v, int | float) else -math.inf if v <= FLOOR else v for v in values], ids


def _id_of(name: Any) -> int:
    """``token_id:7`` is 7; -1 for any other name, which is no token's id."""
    number = str(name).removeprefix("token_id:")
    return int(number) if number.isascii() and number.isdecimal() else -1


def _require_prompt(request_id: str, sent: Sequence[int], used: Sequence[int]) -> None:
    if list(used) != list(sent):
        pairs = enumerate(zip(used, sent, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(used), len(sent)))
        raise VimeError(
            f"request {request_id}: the server answered another prompt: {len(used)} tokens, {len(sent)} were sent; "
            f"they differ from position {at} on"
        )


def _status(request_id: str, body: Mapping[str, Any], ids: Sequence[int], reason: Any) -> Status:
    hint = "start the server with --generation-config vllm, so that it adds nothing of its own"
    if reason == "stop" and (not ids or ids[-1] not in body["stop_token_ids"]):
        last = ids[-1] if ids else "none"
        raise VimeError(f"request {request_id}: stopped at token {last}, which is no stop id that was sent", hint)
    if reason == "length" and len(ids) != body["max_tokens"]:
        text = f"request {request_id}: cut at {len(ids)} tokens, {body['max_tokens']} were allowed"
        raise VimeError(text, hint)
    if not isinstance(reason, str) or reason not in STATUS:
        raise VimeError(f"request {request_id}: ended for the reason {reason!r}", "see the server's log")
    return STATUS[reason]
