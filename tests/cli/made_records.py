"""Small records to look at."""

import numpy as np

from vime.record import write
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

HEADER = RolloutHeader(
    vime_version="0.1.0",
    model={"path": "/nowhere/model", "family": "llama", "tokenizer_digest": "00"},
    sampling={"temperature": 1.0, "top_p": 0.9},
    sampling_origin={"temperature": "default", "top_p": "rollout.sampling"},
    stop_token_ids=[2],
    seed=7,
    library_versions={"torch": "2.13"},
    counts={"status_completed": 3, "dropped_prompt_too_long": 1},
)
ESCAPE = "\x1b]0;owned\x07"


def sample(group_id, index, **changes):
    """Three prompt and four response tokens; the third response token is a tool's, the last is unlikely."""
    mask = [False] * 3 + [True, True, False, True]
    log_probs = [0, 0, 0, -0.01, -0.5, 0, -6.0 - index]
    fields = {"text": f"answer {group_id}", "prompt_text": f"<s>{group_id}+{index}=", "label": "7", **changes}
    return Sample(group_id, index, np.arange(7) + 10 * group_id, 3, np.array(mask), np.array(log_probs), **fields)


def record(rollout_id, num_groups=2, **header):
    """Two samples of each prompt, with the rewards 0.0 and 1.0; the second is truncated."""
    first = rollout_id * num_groups
    samples = [
        sample(g, i, reward=float(i), status=[Status.COMPLETED, Status.TRUNCATED][i], metadata={"level": g})
        for g in range(first, first + num_groups)
        for i in range(2)
    ]
    batch = RolloutBatch.from_samples(rollout_id, samples, HEADER)
    return batch.with_header(weight_version=rollout_id, **header)


def save(folder, num_rollouts=3):
    """Writes data_0.pt and so on; returns the template."""
    for i in range(num_rollouts):
        write(folder / f"data_{i}.pt", record(i))
    return f"{folder}/data_{{rollout_id}}.pt"
