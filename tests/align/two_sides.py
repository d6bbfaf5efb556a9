"""A trainer and an engine that are one small Hugging Face model in float32, with every fault that a term is there for.

What they compute is real, and hand-made faults are one line each: the checks see the protocols of ``vime.align.bench``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from examples.tiny.make_model import make_tiny_model
from vime.align.bench import AS_THE_RUN, Forward
from vime.align.oracle import NEUTRAL
from vime.align.processed import Position, distribution
from vime.config.schema import Config
from vime.data.tokenizer import load_tokenizer
from vime.models import load_spec
from vime.train.packing import plan_micro_batches
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

BLOCK = 16
CONTEXT = 128
SHARPER = 4.0
"""The random model's head times this: a distribution that is not flat."""
DTYPES = {"dtype": "float32", "head_dtype": "float32", "logits_dtype": "float32", "log_softmax_dtype": "float32"}


def make_model(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    path = make_tiny_model(folder, steps=0)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= SHARPER
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@dataclass
class Net:
    """logits [L, V] of one sequence."""

    path: Path
    kept: dict = field(default_factory=dict)

    @cached_property
    def model(self):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def logits(self, ids: np.ndarray) -> torch.Tensor:
        """Kept: the same sequences come again and again."""
        key = np.asarray(ids, np.int64).tobytes()
        if key not in self.kept:
            with torch.inference_mode():
                self.kept[key] = self.model(
                    input_ids=torch.from_numpy(np.frombuffer(key, np.int64).copy())[None]
                ).logits[0]
        return self.kept[key]

    def log_probs(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        """float32 [L], 0.0 at the first token."""
        scores = torch.log_softmax(self.logits(ids) / temperature, -1)[:-1]
        own = scores.gather(1, torch.from_numpy(np.asarray(ids, np.int64))[1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), own.numpy()])


@dataclass
class Trainer:
    """``spoil`` changes the log-probs of one sample: (values [L], rows of its pack before it, rows of its pack)."""

    net: Net
    config: Config
    ignores_temperature: bool = False
    spoil: Callable[[np.ndarray, int, int], np.ndarray] = lambda values, before, size: values
    noise: float = 0.0
    dtypes: dict = field(default_factory=lambda: dict(DTYPES))
    calls: int = 0

    def log_probs(self, batch: RolloutBatch, of: str = "policy", how: Forward = AS_THE_RUN) -> np.ndarray:
        self.calls += 1
        temperature = how.temperature or self.config.rollout.sampling.temperature
        if self.ignores_temperature:
            temperature = 1.0
        size = how.max_tokens_per_micro_batch or self.config.train.max_tokens_per_micro_batch
        out = np.zeros(batch.num_tokens, np.float32)
        for rank in plan_micro_batches(batch.lengths_N, self.config.parallel.dp, size):
            for rows in rank:
                for before, row in enumerate(rows.tolist()):
                    own = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
                    values = self.net.log_probs(batch.token_ids_T[own], temperature)
                    out[own] = self.spoil(values, before, len(rows)) + self.noise * self.calls
        return out

    def describe(self):
        return self.dtypes


@dataclass
class Engine:
    """``options``: what it samples with where a request does not say otherwise."""

    net: Net
    options: dict
    reports_raw: bool = False
    stays_stale: bool = False
    caching: bool = True
    cache_error: float = 0.0
    decode_error: float = 0.0
    batch_error: float = 0.0
    order_error: float = 0.0
    dtypes: dict = field(default_factory=lambda: dict(DTYPES))
    cache: set = field(default_factory=set)
    counted: list = field(default_factory=lambda: [0, 0])

    def generate(self, prompts, seeds, sampling=None):
        options = {**self.options, **(sampling or {})}
        return [
            [self._sample(p, i, seed, options, place) for i, seed in enumerate(own)]
            for place, (p, own) in enumerate(zip(prompts, seeds, strict=True))
        ]

    def _sample(self, prompt, index, seed, options, place):
        rng = torch.Generator().manual_seed(seed)
        ids, found = prompt.token_ids.tolist(), []
        start = len(ids)
        error = self.decode_error + self._look_up(tuple(ids)) * self.cache_error + place * self.order_error
        for _ in range(options["max_response_len"]):
            given = Position(self.net.logits(np.array(ids))[-1:], np.array(ids), start, np.array([len(ids)]))
            scores = distribution(given, options)[0][0]
            token = int(torch.multinomial(scores.exp(), 1, generator=rng))
            if options["temperature"] == 0.0:
                token = int(scores.argmax())
            plain = distribution(given, {"temperature": 1.0})[0][0]
            found.append(float((plain if self.reports_raw else scores)[token]) + error)
            ids.append(token)
            if token == 2:
                break
        mask = np.arange(len(ids)) >= start
        values = np.concatenate([np.zeros(start), found])
        status = Status.COMPLETED if ids[-1] == 2 else Status.TRUNCATED
        return Sample(prompt.group_id, index, np.array(ids), start, mask, values, seed=seed, status=status)

    def _look_up(self, ids):
        """Whether the prompt was found in the cache; counted as whole blocks."""
        is_found = self.caching and ids in self.cache and len(ids) > BLOCK
        self.counted[0] += len(ids)
        self.counted[1] += (len(ids) - 1) // BLOCK * BLOCK if is_found else 0
        self.cache.add(ids)
        return is_found

    def score(self, sequences, at_once=None):
        error = 0.0 if at_once == 1 else self.batch_error
        return [self.net.log_probs(s, 1.0) + np.float32(error + i * self.order_error) for i, s in enumerate(sequences)]

    def prefix_cache(self):
        return tuple(self.counted)

    def reset_prefix_cache(self):
        self.cache.clear()

    def describe(self):
        return {
            **self.dtypes,
            "sampling": self.options,
            "sampling_origin": dict.fromkeys(self.options, "default"),
            "log_probs_mode": "raw_logprobs" if self.reports_raw else "processed_logprobs",
            "prefix_caching": self.caching,
            "block_size": BLOCK,
            "max_model_len": CONTEXT,
        }


@dataclass
class TwoSides:
    """``vime.align.bench.Bench``, as far as the terms of engine against trainer ask for it."""

    net: Net
    config: Config
    trainer: Trainer
    engine: Engine
    is_live: bool = True
    damage: Callable[[RolloutBatch], RolloutBatch] = lambda batch: batch
    folder: Path = Path("/nonexistent")
    check: str = ""

    @cached_property
    def spec(self):
        return load_spec(str(self.net.path))

    @cached_property
    def tokenizer(self):
        return load_tokenizer(str(self.net.path))

    @cached_property
    def batch(self) -> RolloutBatch:
        from vime.types import Prompt

        texts = ["1+2=", "34+5=", "7+70=", "what is 1+1?"]
        prompts = [Prompt(i, np.array([1, *self.tokenizer.encode(t)]), t) for i, t in enumerate(texts)]
        groups = self.engine.generate(prompts, [[10 * i + j for j in range(4)] for i in range(len(prompts))])
        header = RolloutHeader(sampling=dict(self.engine.options))
        return self.damage(RolloutBatch.from_samples(0, [s for group in groups for s in group], header))

    @cached_property
    def log_probs_T(self) -> np.ndarray:
        return self.trainer.log_probs(self.batch)

    def sync(self):
        if not self.engine.stays_stale:
            self.engine.reset_prefix_cache()


def two_sides(net: Net, temperature: float = 1.0, *, dtype: str = "float32", dp: int = 1, **sampling) -> TwoSides:
    """A clean bench; ``sampling``: options of the engine that the run does not know."""
    own = {"temperature": temperature, "max_response_len": 10}
    config = Config.model_validate(
        {
            "model": {"path": str(net.path), "dtype": dtype},
            "data": {"prompts": ["none.jsonl"]},
            "rollout": {"sampling": own},
            "parallel": {"dp": dp},
        }
    )
    return TwoSides(net, config, Trainer(net, config), Engine(net, {**NEUTRAL, **own, **sampling}))
