"""Check 7: bands of size with the guide's causes (case A20)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_bench import SPEC, FakeBench, config
from fakes import sample

from vime.align.checks.size import run
from vime.types import Verdict

LARGE = replace(SPEC, num_layers=400, hidden_size=1024, ffn_hidden_size=4096)
LOG_V = 3.4657  # log 32


def bench(size: float, engine: float | None = None, spec=LARGE, **more) -> FakeBench:
    values = [-(size if engine is None else engine)] * 2
    samples = [sample(i, prompt_len=3, log_probs=values) for i in range(3)]
    return FakeBench(spec=spec, policy=lambda at: -size, samples=samples, **more)


@pytest.mark.parametrize(
    ("size", "verdict", "cause"),
    [
        (0.3, Verdict.PASS, ""),
        (0.85, Verdict.WARN, "a little larger than after supervised fine-tuning"),
        (1.5, Verdict.WARN, "larger than a trained model is on its own answers; engine and trainer agree"),
        (3.0, Verdict.WARN, "near that of a guess among all tokens (3.47)"),
        (4.5, Verdict.FAIL, "less likely than a guess"),
        (float("inf"), Verdict.FAIL, "less likely than a guess"),
        (float("nan"), Verdict.FAIL, "less likely than a guess"),
    ],
)
def test_the_bands_of_a_large_model(size: float, verdict: Verdict, cause: str) -> None:
    result = run(bench(size, engine=min(5.0, size)))
    assert result.verdict == verdict
    assert cause in result.cause


def test_a_small_model_is_unsure_by_itself() -> None:
    assert run(bench(1.3, spec=SPEC)).verdict == Verdict.PASS
    assert run(bench(0.4 * LOG_V + 0.05, spec=SPEC)).verdict == Verdict.WARN


def test_without_a_chat_template_the_lower_band_does_not_hold() -> None:
    plain = config(data={"prompts": ["none.jsonl"], "apply_chat_template": False})
    assert run(bench(0.85, config=plain)).verdict == Verdict.PASS


def test_a_trainer_alone_with_its_numbers_is_told() -> None:
    assert "the engine gives 0.4 for the same tokens, so it is the trainer" in run(bench(1.5, engine=0.4)).cause


def test_the_first_prompt_is_shown_with_special_tokens_and_ids() -> None:
    found = bench(0.3)
    found.samples[0].token_ids[:3] = (1, 7, 9)
    evidence = run(found).evidence
    assert evidence[0] == "first prompt, as the model sees it: '<bos> w7 w9'"
    assert evidence[1] == "its token ids: 1, 7, 9"
    assert evidence[2].startswith("largest mean: sample ")
