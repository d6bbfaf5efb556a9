"""Is it human language? Every fault of ``vime rollout --inject`` is caught on two real models, and no clean rollout is.

One engine per model: a fault is planted in it, rollouts are made and examined as ``vime rollout`` does, and the weights
are sent again. The rotary cache comes last, for nothing brings it back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Engine, make_config
from fakes import FakeReward
from safetensors.torch import load_file
from sending import send

from vime.align.coherence import Level
from vime.align.examine import Examination, Examiner
from vime.align.planting import foreign_template, pretrained_copy
from vime.config.schema import Config
from vime.data.prompts import PromptSource
from vime.data.tokenizer import load_tokenizer
from vime.record import read, write
from vime.rollout.live import LiveRollouts
from vime.types import Prompt, RolloutBatch, Sample, Status

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.quickstart.make_model import make_quickstart_model

ROOT = Path(__file__).parents[2]
MAX_RESPONSE_LEN = {"tiny": 4, "quickstart": 48}
MIDDLE = {"tiny": 2, "quickstart": 15}
ROTARY = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
SEEDS = range(5)
SIGNALS = ("log_prob", "uniformity", "nonfinite_share", "one_token_share", "truncated_share", "oracle_gap",
           "oracle_log_prob", "marker_log_prob")  # fmt: skip


@dataclass
class Hosted:
    """The engine of the host process as ``RolloutEngine``, and as what the examiner asks for weights and buffers."""

    engine: Engine

    async def generate(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        return await asyncio.wrap_future(self.engine.submit("generate", prompt, list(seeds), sampling))

    def held(self) -> dict[str, Any]:
        return {"engine 0": self.engine("held")}

    def changed_buffers(self) -> dict[str, Any]:
        return {"engine 0": self.engine("changed_buffers")}


@dataclass
class Bench:
    """One model and its running engine."""

    name: str
    folder: str
    hosted: Hosted
    examiners: dict[str, Examiner] = field(default_factory=dict)
    found: dict[str, Examination] = field(default_factory=dict)
    batches: dict[str, RolloutBatch] = field(default_factory=dict)

    def config(self, folder: str, seed: int = 0) -> Config:
        return config_of(self.name, folder, seed)

    def rollout(self, row: str, *, seed: int = 0, folder: str | None = None, template: str | None = None) -> None:
        """One rollout, examined; ``folder``: the checkpoint that the engine is told to hold."""
        folder = folder or self.folder
        config = self.config(folder, seed)
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = template or tokenizer.chat_template
        source = PromptSource(config.data, tokenizer, seed=seed, context_len=256)
        batch = LiveRollouts(config, source, [self.hosted], FakeReward(lambda sample: 1.0)).produce(0)
        assert len(batch) == config.num_samples_per_rollout
        self.batches[row] = batch
        if folder not in self.examiners:
            stop_ids = tuple(self.hosted.engine.info["stop_token_ids"])
            own = load_tokenizer(folder)
            self.examiners[folder] = Examiner(config, own, engines=self.hosted, stop_ids=stop_ids)
        self.found[row] = self.examiners[folder](batch)

    def reload(self, folder: str | None = None) -> None:
        """The weights of ``folder`` as version 0, as if the engine had been started from it."""
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self.hosted.engine("weight_specs")}
        weights = load_file(Path(folder or self.folder) / "model.safetensors")
        send(self.hosted.engine, 0, {name: t.to(dtypes[name]) for name, t in weights.items() if name in dtypes})

    @contextmanager
    def planted(self, fault: str) -> Iterator[None]:
        assert self.hosted.engine("plant", fault)
        yield
        self.hosted.engine("heal")
        self.reload()


def config_of(name: str, folder: str, seed: int = 0) -> Config:
    return make_config(
        folder,
        run={"seed": seed},
        data={"prompts": [str(ROOT / "examples" / name / "prompts.jsonl")]},
        rollout={
            "rollout_batch_size": 4,
            "num_samples_per_prompt": 2,
            "max_context_len": 256,
            "sampling": {"max_response_len": MAX_RESPONSE_LEN[name]},
        },
        debug={"rollout_only": True, "oracle_samples": 4},
        vllm={"max_num_seqs": 16, "kv_cache_memory_bytes": 128 << 20},
    )


@pytest.fixture(scope="module", params=MAX_RESPONSE_LEN)
def bench(request, host, tmp_path_factory) -> Bench:
    """All rollouts of one model, examined."""
    name = request.param
    if name == "tiny":
        folder = str(request.getfixturevalue("trained_model"))
    else:
        folder = str(make_quickstart_model(tmp_path_factory.mktemp(name) / "model"))
    bench = Bench(name, folder, Hosted(Engine(host, name, config_of(name, folder))))
    for seed in SEEDS:
        bench.rollout(f"clean, seed {seed}", seed=seed)
    own = load_tokenizer(folder)
    bench.rollout("wrong-chat-template", template=foreign_template(own.chat_template))
    with pretrained_copy(folder, own, Path(folder).parent) as copy:
        bench.reload(copy)
        bench.rollout("base-model", folder=copy)
    assert not Path(copy).exists()
    bench.reload()
    for fault in ("random-weights", "swapped-layers", "nan-weight"):
        with bench.planted(fault):
            bench.rollout(fault)
    bench.rollout("clean again")
    bench.hosted.engine("plant", "zero-rotary")
    bench.rollout("zero-rotary")
    bench.hosted.engine("shutdown")
    return bench


def table(bench: Bench) -> str:
    lines = [f"\n{bench.name}: fault, verdict, likely cause; " + ", ".join(SIGNALS)]
    for row, found in bench.found.items():
        numbers = found.case.numbers()
        shown = " ".join(f"{numbers[name]:>9.3g}" if name in numbers else "        -" for name in SIGNALS)
        lines.append(f"{row:<20} {found.level:<8} {found.check.cause.partition(';')[0][:70]:<70} {shown}")
    return "\n".join(lines)


@pytest.mark.slow
def test_every_planted_fault_is_caught_with_its_cause_and_no_clean_rollout_is(bench: Bench, capsys) -> None:
    """Cases R18, A20."""
    with capsys.disabled():
        print(table(bench))
    clean = [found for row, found in bench.found.items() if row.startswith("clean")]
    assert len(clean) == len(SEEDS) + 1
    assert [(found.level, found.symptoms) for found in clean] == [(Level.PASS, ())] * len(clean)
    causes = {row: found.check.cause for row, found in bench.found.items() if found not in clean}
    middle = MIDDLE[bench.name]
    assert causes["nan-weight"].startswith(f"conversion: model.layers.{middle}.self_attn.q_proj.weight: 1 of ")
    assert causes["random-weights"].startswith("load: the engine does not hold the checkpoint: ")
    layers = f"layer 0, layer {middle}"
    assert causes["swapped-layers"].startswith(f"conversion: layers have each other's weights ({layers})")
    assert causes["zero-rotary"].startswith(f"released buffers: {ROTARY} is not what it was")
    assert causes["wrong-chat-template"].startswith("chat template: ")
    assert causes["base-model"].startswith("pretrained model: its chat markers were never trained")
    assert {row: bench.found[row].level for row in ("nan-weight", "random-weights", "zero-rotary")} == dict.fromkeys(
        ("nan-weight", "random-weights", "zero-rotary"), Level.GARBLED
    )
    assert all(bench.found[row].level != Level.PASS for row in causes)


@pytest.mark.slow
def test_answers_without_finite_log_probs_come_back_failed_and_unscored(bench: Bench, tmp_path: Path) -> None:
    """Case R18: token 0 again and again, and NaN; the record holds them as they came."""
    found = bench.found["nan-weight"]
    assert not found.case.signals.is_finite_N.any()
    assert found.case.oracle == "no sampled token has a finite log-prob"
    assert all(line.split()[2] == f"{Status.FAILED}," and "ids 0 0 0" in line for line in found.worst)
    first, *others = [symptom.text for symptom in found.symptoms]
    assert first == "8 of 8 samples have log-probs that are not finite"
    assert set(others) <= {"100% of the samples are one token again and again"}  # said of longer answers
    write(tmp_path / "data_0.pt", bench.batches["nan-weight"])
    record = read(tmp_path / "data_0.pt")
    assert record.header.counts == {"status_failed": 8}
    assert not np.isfinite(record.rollout_log_probs_T[record.loss_mask_T]).any()
    assert all("log-probs are not finite" in row["metadata"]["failure"] for row in record.rows)


@pytest.mark.slow
def test_the_engine_is_right_where_the_prompts_or_the_checkpoint_are_wrong(bench: Bench) -> None:
    """Case A20: the oracle separates them, and the evidence names the markers."""
    for row in ("wrong-chat-template", "base-model"):
        assert bench.found[row].case.is_engine_right
    assert "<|eot_id|>" in str(bench.found["wrong-chat-template"])
    marker = {"tiny": "<bos>", "quickstart": "<|im_start|>"}[bench.name]
    assert any(f"the embedding of {marker} is that of" in line for line in bench.found["base-model"].check.evidence)
