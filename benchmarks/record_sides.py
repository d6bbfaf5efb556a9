"""The same samples as vime keeps them and as upstream's debug dumps do, each written, read and sent through Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vime.types import RolloutBatch, RolloutHeader, Sample

VOCAB_SIZE = 151_936
GROUP_SIZE = 8
PROMPT_SHARE = 2 / 15
WORDS_PER_TOKEN = 0.7  # and a word takes six characters: English takes about four characters a token


def make_samples(num_samples: int, length: int) -> list[Sample]:
    """Groups of 8 with a common prompt; frequent tokens have small ids, as in tokenizers made by merges."""
    rng = np.random.default_rng(0)
    prompt_len = int(length * PROMPT_SHARE)
    samples = []
    for i in range(num_samples):
        if i % GROUP_SIZE == 0:
            prompt_text, prompt_ids = _text(rng, prompt_len), _ids(rng, prompt_len)
        mask = np.arange(length) >= prompt_len
        samples.append(
            Sample(
                group_id=i // GROUP_SIZE,
                index=i % GROUP_SIZE,
                token_ids=np.concatenate([prompt_ids, _ids(rng, length - prompt_len)]),
                prompt_len=prompt_len,
                loss_mask=mask,
                rollout_log_probs=np.where(mask, -rng.exponential(0.5, length), 0.0),
                text=_text(rng, length - prompt_len),
                prompt_text=prompt_text,
                label="42",
                reward=float(rng.integers(0, 2)),
                seed=int(rng.integers(0, 2**53)),
                metadata={"source": "gsm8k", "row": i},
            )
        )
    return samples


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.minimum(rng.exponential(20_000, count), VOCAB_SIZE - 1).astype(np.int32)


def _text(rng: np.random.Generator, num_tokens: int) -> str:
    return " ".join(f"w{n:04d}" for n in rng.integers(0, 10_000, int(num_tokens * WORDS_PER_TOKEN)))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _Side:
    """``num_samples`` samples of ``length`` tokens; files lie in ``folder``. Every call answers in seconds."""

    content: Any

    def __init__(self, num_samples: int, length: int, folder: str) -> None:
        self.samples = make_samples(num_samples, length)
        self.path = Path(folder) / f"{type(self).__name__}.pt"
        self._has_ray = False

    def size(self) -> int:
        return self.path.stat().st_size

    def through_ray(self) -> float:
        """Put into Ray's object store and got out of it."""
        import ray

        if not self._has_ray:
            ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 27)
            self._has_ray = True
        return _timed(lambda: ray.get(ray.put(self.content)))

    def close(self) -> None:
        if self._has_ray:
            import ray

            ray.shutdown()


class Vime(_Side):
    def __init__(self, num_samples: int, length: int, folder: str) -> None:
        super().__init__(num_samples, length, folder)
        self.content = RolloutBatch.from_samples(0, self.samples, RolloutHeader(model={"path": "m"}))

    def write(self) -> float:
        from vime.record import write

        self.path.unlink(missing_ok=True)
        return _timed(lambda: write(self.path, self.content))

    def read(self) -> float:
        from vime.record import read

        return _timed(lambda: read(self.path))


class Upstream(_Side):
    """``torch.save({"rollout_id": ..., "samples": [dict of every field of a sample]})``, numbers in Python lists."""

    def __init__(self, num_samples: int, length: int, folder: str) -> None:
        super().__init__(num_samples, length, folder)
        self.content = [_as_upstream(i, s) for i, s in enumerate(self.samples)]

    def write(self) -> float:
        """With the same flush to the disk: else one side would only have written to memory."""
        import torch

        self.path.unlink(missing_ok=True)

        def save() -> None:
            with open(self.path, "wb") as file:
                torch.save({"rollout_id": 0, "samples": self.content}, file)
                file.flush()
                os.fsync(file.fileno())

        return _timed(save)

    def read(self, *, weights_only: bool) -> float:
        import torch

        return _timed(lambda: torch.load(self.path, weights_only=weights_only))

    def read_safely(self) -> float:
        return self.read(weights_only=True)

    def read_pickle(self) -> float:
        return self.read(weights_only=False)


def _as_upstream(i: int, s: Sample) -> dict[str, Any]:
    return {
        "group_index": s.group_id, "index": i, "rollout_id": 0, "prompt": s.prompt_text, "tokens": s.token_ids.tolist(),
        "multimodal_inputs": None, "response": s.text, "response_length": s.response_len, "label": s.label,
        "reward": s.reward, "loss_mask": [int(m) for m in s.loss_mask[s.prompt_len :]], "weight_versions": ["0"],
        "rollout_log_probs": s.rollout_log_probs[s.prompt_len :].tolist(), "remove_sample": False,
        "teacher_log_probs": None, "status": str(s.status), "metadata": s.metadata, "train_metadata": None,
        "session_id": f"{i:032x}", "non_generation_time": 0.0,
        "spec_info": {"num_accepted_tokens": 0, "num_draft_tokens": 0, "num_verify": 0},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }  # fmt: skip
