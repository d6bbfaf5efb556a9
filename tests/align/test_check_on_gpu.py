"""Checks of what only a GPU has: skipped with the reason on a CPU; their judgement on hand-made facts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from fake_bench import FakeBench, FakeEngine, config, manifest
from fakes import sample

from vime import device
from vime.align.checks.on_gpu import CHECKS
from vime.types import Verdict

RUN = {check.name: check.run for check in CHECKS}


@pytest.mark.parametrize("name", list(RUN))
def test_without_a_gpu_the_reason_is_said(name: str) -> None:
    result = RUN[name](FakeBench())
    assert (result.name, result.verdict) == (name, Verdict.SKIP)
    assert result.cause.startswith("no GPU here: ")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: "cuda")


@dataclass
class Sleeper(FakeEngine):
    """Frees ``share`` of its memory while it sleeps at level 2, half of that at level 1."""

    share: float = 0.9
    is_asleep: bool = False

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False

    def memory(self):
        freed = self.share * self.level / 2 if self.is_asleep else 0.0
        return {"engine 0": {"reserved": int(1e9 * (1 - freed)), "rss": 5}}


@pytest.mark.usefixtures("gpu")
def test_sleep_frees_and_keeps() -> None:
    assert RUN["sleep_levels"](FakeBench(engine=Sleeper())).verdict == Verdict.PASS
    held = RUN["sleep_levels"](FakeBench(engine=Sleeper(share=0.3)))
    assert (held.verdict, held.measured) == (Verdict.FAIL, "level 2 frees only 30%")
    wrong = manifest("engine-held", {"lm_head.weight": replace(manifest("x").tensors["lm_head.weight"], digest="y")})
    lost = RUN["sleep_levels"](FakeBench(engine=Sleeper(held=wrong)))
    assert lost.verdict == Verdict.FAIL
    assert lost.measured.startswith("level 1: value: lm_head.weight")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("attention", "cp", "noise", "verdict"),
    [
        ("transformer-engine, backend flash", 2, 0.0, Verdict.PASS),
        ("transformer-engine, backend fused", 1, 0.0, Verdict.PASS),
        ("transformer-engine, backend fused", 2, 0.0, Verdict.WARN),
        ("transformer-engine, backend fused", 1, 1e-6, Verdict.FAIL),
    ],
)
def test_the_backend_in_effect_and_its_determinism(attention: str, cp: int, noise: float, verdict: Verdict) -> None:
    bench = FakeBench(config=config(parallel={"cp": cp}))
    bench.trainer.attention = attention
    passes = iter((-3.0, -3.0 + noise))  # both of now: since the first pass of the walk steps were taken
    bench.trainer.log_probs = lambda batch: np.float32(next(passes)) * batch.loss_mask_T
    result = RUN["transformer_engine"](bench)
    assert result.verdict == verdict
    assert ("flash" in result.next_step) is (verdict != Verdict.PASS)


@pytest.mark.usefixtures("gpu")
def test_padded_replays_are_told_from_others() -> None:
    def generate(prompts, seeds, sampling):
        assert (sampling["temperature"], sampling["top_p"]) == (1.0, 1.0)  # what scores are of
        error = 0.1 if len(prompts) in (3, 5) else 0.0
        return [[sample(p.group_id, log_probs=[-0.5 - error] * 2)] for p in prompts]

    bench = FakeBench()
    bench.engine.score = lambda sequences, at_once: [np.full(len(ids), -0.5, np.float32) for ids in sequences]
    bench.engine.generate = generate
    result = RUN["cuda_graphs"](bench)
    assert result.verdict == Verdict.FAIL
    assert result.numbers["max_by_batch_size"] == pytest.approx({"1": 0, "2": 0, "3": 0.1, "5": 0.1})
    assert bench.num_syncs == 1  # a colocated step leaves the engines without weights
    eager = FakeBench(config=config(vllm={"enforce_eager": True}))
    assert RUN["cuda_graphs"](eager).verdict == Verdict.SKIP


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("vllm", "value", "verdict"),
    [
        ({}, -0.5, Verdict.SKIP),
        ({"quantization": "fp8"}, -0.52, Verdict.PASS),
        ({"quantization": "fp8"}, -0.8, Verdict.WARN),
    ],
)
def test_fp8_has_a_band_of_its_own(vllm: dict, value: float, verdict: Verdict) -> None:
    assert RUN["fp8"](FakeBench(config=config(vllm=vllm), policy=lambda at: value)).verdict == verdict


@pytest.mark.usefixtures("gpu")
def test_sleep_is_held_against_the_weights_of_now() -> None:
    """Steps were taken since the first sync: the engine holds what was sent last."""
    moved = manifest("trainer", {"lm_head.weight": replace(manifest("x").tensors["lm_head.weight"], digest="later")})

    class Later(FakeBench):
        synced = manifest("trainer")

    bench = Later(engine=Sleeper(held=moved))
    bench.trainer.exported = moved
    assert RUN["sleep_levels"](bench).verdict == Verdict.PASS


@pytest.mark.usefixtures("gpu")
def test_a_replay_that_gives_no_number_fails() -> None:
    bench = FakeBench()
    bench.engine.generate = lambda prompts, seeds, sampling: [[sample(p.group_id)] for p in prompts]
    scored = iter([0.5, 0.5, np.nan, *[0.5] * 8])  # not the first, which max() would keep
    bench.engine.score = lambda sequences, at_once: [np.full(len(s), next(scored), np.float32) for s in sequences]
    assert RUN["cuda_graphs"](bench).verdict == Verdict.FAIL


@pytest.mark.usefixtures("gpu")
def test_fp8_that_gives_no_number_fails() -> None:
    bench = FakeBench(config=config(vllm={"quantization": "fp8"}), policy=lambda at: float("nan"))
    assert RUN["fp8"](bench).verdict == Verdict.FAIL
