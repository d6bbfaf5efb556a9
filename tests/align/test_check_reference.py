"""Check 6b: log_probs == ref_log_probs, bit by bit (case A17)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from fake_bench import FakeBench, config
from safetensors.torch import save_file

from vime.align.checks.reference import run
from vime.types import Verdict
from vime.weights.manifest import build_manifest


def test_equal_bits_pass() -> None:
    result = run(FakeBench())
    assert (result.verdict, result.measured) == (Verdict.PASS, "0 of 6 tokens differ, kl (k3) 0")


def test_one_bit_of_one_token_fails_and_the_token_is_shown() -> None:
    smallest = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    result = run(FakeBench(ref=lambda at: smallest if at == 4 else -0.5))
    assert result.verdict == Verdict.FAIL
    assert result.measured.startswith("1 of 6 tokens differ")
    assert result.evidence[0].startswith("1 of 3 samples differ; the worst: sample 0/0")
    assert result.evidence[1].startswith("sample 0/0 position 4 token 6 'w6' after 'w0 w0 w0 w5'")
    assert "not deterministic" in result.cause
    assert "attention_backend=flash" in result.next_step


def test_other_weights_are_told_from_rounding() -> None:
    result = run(FakeBench(ref=lambda at: -0.7))
    assert "do not hold the same weights" in result.cause
    assert abs(result.numbers["kl"] - (np.exp(-0.2) - 1 + 0.2)) < 1e-6  # k3 of ref - policy = -0.2


def test_what_does_not_apply_is_skipped_with_the_reason(tmp_path: Path) -> None:
    assert run(FakeBench(ref=None)).verdict == Verdict.SKIP
    save_file({"t": torch.ones(2)}, tmp_path / "model.safetensors")
    bench = FakeBench(config=config(model={"path": "none", "ref_path": str(tmp_path)}), ref=lambda at: -2.0)
    bench.checkpoint = build_manifest(0, "checkpoint", [("t", torch.zeros(2))])
    assert run(bench).verdict == Verdict.SKIP
    assert "by intent" in run(bench).cause
    bench.checkpoint = build_manifest(0, "checkpoint", [("t", torch.ones(2))])  # another folder, the same weights
    assert run(bench).verdict == Verdict.FAIL


def test_no_sampled_token_is_no_pass() -> None:
    bench = FakeBench()
    for one in bench.samples:
        one.loss_mask[:] = False
    assert run(bench).verdict == Verdict.NOT_TESTED
