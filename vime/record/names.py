"""The names of the fields of a sample, for expressions, tables and exports. Needs no numpy."""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "rollout_id": "number of the rollout",
    "group_id": "the prompt; unique in the run",
    "index": "place in the group, from 0",
    "status": "completed, truncated, aborted or failed",
    "reward": "None where there is none",
    "prompt_len": "tokens of the prompt",
    "response_len": "tokens of the response",
    "num_sampled": "tokens that the policy sampled (the others are prompt or tool)",
    "mean_log_prob": "mean log-prob of the sampled tokens, nats",
    "min_log_prob": "log-prob of the least likely sampled token, nats",
    "prompt": "the prompt as the model saw it",
    "text": "the response",
    "label": "expected answer, or None",
    "seed": "seed of this sample",
    "weight_version": "largest version of the weights that made the response",
    "weight_version_min": "smallest version of the weights that made the response",
    "metadata": "what came with the prompt and from the reward: metadata['key']",
}
"""Name -> meaning."""

STATUSES = ("completed", "truncated", "aborted", "failed")


def sample_id(group_id: int, index: int) -> str:
    """How people call a sample: "3/1"."""
    return f"{group_id}/{index}"
