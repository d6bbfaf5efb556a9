"""The table of known issues: well-formed, and each entry applies where its conditions hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_bench import SPEC, FakeBench, config

from vime.align.checks.known import run
from vime.align.known_issues import Condition, Facts, known_issues, that_apply
from vime.config.message import UNSET
from vime.config.names import field_of, free_table_of
from vime.models import ModelSpec
from vime.types import Verdict

INSTALLED = {"megatron-core": "0.16.1", "vllm": "0.32.0+cpu", "transformer-engine": "2.9"}


def test_every_entry_names_settings_that_exist_and_says_what_to_do() -> None:
    for issue in known_issues():
        assert issue.symptom
        assert issue.advice
        assert issue.source
        for condition in issue.when:
            name = condition.setting
            is_of_model = name.startswith("spec.") and hasattr(ModelSpec, name[5:])
            assert name == "device" or is_of_model or field_of(name) is not None or free_table_of(name), name


@pytest.mark.parametrize(
    ("text", "actual", "holds"),
    [
        ("a.b > 1", 2, True), ("a.b > 1", 1, False), ("a.b >= 1", 1, True), ("a.b < 1", 0, True),
        ("a.b <= 1", 2, False), ("a.b > 1", None, False), ("a.b != 'flash'", UNSET, True),
        ("a.b == true", UNSET, False), ("a.b == true", True, True),
    ],
)  # fmt: skip
def test_conditions(text: str, actual, holds: bool) -> None:
    assert Condition.of(text).holds(actual) is holds


def test_what_is_no_condition_is_refused() -> None:
    with pytest.raises(ValueError, match="is not SETTING OPERATOR VALUE"):
        Condition.of("parallel.cp")


def applying(spec=SPEC, device="cpu", installed=None, **sections) -> list[str]:
    facts = Facts(config(**sections), spec, device)
    return [issue.advice for issue in that_apply(facts, installed or INSTALLED) if not issue.mended_by]


def test_an_issue_applies_by_version_device_model_and_setting() -> None:
    flash = "megatron.transformer.attention_backend = 'flash'"
    fused = "megatron.transformer.moe_permute_fusion = true"
    moe = replace(SPEC, num_experts=8)
    assert applying() == []
    assert applying(device="cuda", parallel={"cp": 2}) == [flash]
    given = {"transformer": {"attention_backend": "flash"}}
    assert applying(device="cuda", parallel={"cp": 2}, megatron=given) == []
    assert applying(device="cuda", parallel={"cp": 2}, installed={"vllm": "0.32.0"}) == []
    assert applying(moe, "cuda") == [fused]
    assert applying(moe, "cuda", megatron={"transformer": {"moe_permute_fusion": True}}) == []


def test_versions_count() -> None:
    facts = Facts(config(parallel={"distributed_optimizer": True}), SPEC, "cpu")
    shifted = lambda version: [i for i in that_apply(facts, {"megatron-core": version}) if "shifted" in i.symptom]  # noqa: E731
    assert len(shifted("0.16.1")) == 1
    assert shifted("0.17.0") == []


def test_the_check_warns_and_tells_what_is_mended() -> None:
    clean = run(FakeBench())
    assert clean.verdict == Verdict.PASS
    assert any("prefix cache" in line for line in clean.evidence)
    bfloat16 = FakeBench(spec=replace(SPEC, num_experts=8), config=config(model={"path": "x", "dtype": "bfloat16"}))
    warned = run(bfloat16)
    assert warned.verdict == Verdict.WARN
    assert warned.next_step == "megatron.transformer.moe_router_dtype = 'fp32'"
