"""What a person wants to see of a record: one plain row per sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vime.types import RolloutBatch


def describe(batch: RolloutBatch, *, max_chars: int | None = 200) -> Iterator[dict[str, Any]]:
    """One dict per sample: sample, status, reward, prompt_len, response_len, label, prompt, text. Plain values only.

    ``max_chars`` cuts prompt (keeping its end, the question) and text (keeping its start); None keeps all.
    """
    for i, row in enumerate(batch.rows):
        reward = float(batch.rewards_N[i])
        yield {
            "sample": f"{batch.group_ids_N[i]}/{batch.indices_N[i]}",
            "status": row["status"],
            "reward": None if reward != reward else reward,
            "prompt_len": int(batch.prompt_lens_N[i]),
            "response_len": int(batch.response_lens_N[i]),
            "label": row["label"],
            "prompt": row["prompt_text"] if max_chars is None else row["prompt_text"][-max_chars:],
            "text": row["text"][:max_chars],
        }
