"""The table of faults and checks, by hand-made reports: who claims what, and what counts as a problem."""

from __future__ import annotations

import pytest

from vime.align.checks import CHECKS
from vime.align.confusion import MARKS, Confusion, Outcome, markdown
from vime.align.faults import FAULTS
from vime.types import AlignReport, CheckResult, Verdict


def outcome(fault, family="qwen3", reason="", **verdicts):
    """``check="FAIL"``, or ``check="weights"`` for a failure that follows from that check."""
    results = []
    for name, text in verdicts.items():
        is_known = text in list(Verdict)
        result = CheckResult(name, Verdict(text) if is_known else Verdict.FAIL, f"{name} measured")
        results.append(result if is_known else CheckResult(name, Verdict.FAIL, follows=text))
    return Outcome(family, fault, "said", AlignReport(tuple(results)), reason)


def test_a_fault_that_its_check_alone_claims_is_caught():
    found = outcome("bf16-weights", loaded="PASS", weights="FAIL", engine="weights", head="SKIP")
    assert (found.verdict, found.problems) == ("caught", [])
    assert (found.meant, found.claims, found.follows) == ("weights", ("weights",), ("engine",))
    assert found.measured == "weights measured"
    kinds = [found.kind(name) for name in ("loaded", "weights", "engine", "head", "order")]
    assert kinds == ["passed", "claimed", "follows", "untested", "untested"]


def test_a_fault_that_nobody_or_somebody_else_claims_is_a_problem():
    missed = outcome("bf16-weights", weights="PASS", engine="PASS")
    assert missed.problems == ["qwen3, bf16-weights: not caught by weights"]
    wrong = outcome("bf16-weights", weights="FAIL", order="FAIL")
    assert wrong.problems == ["qwen3, bf16-weights: order claims it too"]
    assert (wrong.verdict, wrong.kind("order")) == ("order claims it too", "wrong")


@pytest.mark.parametrize("verdict", ["FAIL", "WARN"])
def test_a_clean_walk_must_be_clean(verdict):
    assert outcome("", loaded="PASS", weights="SKIP", head="NOT TESTED").verdict == "clean"
    assert outcome("", size=verdict).problems == [f"qwen3, no fault: size says {verdict}: size measured"]


def confusion(*outcomes):
    return Confusion(outcomes, CHECKS)


def test_a_fault_that_was_planted_in_no_model_is_a_problem():
    refused = outcome("router-bias", reason="qwen3 has no router")
    assert refused.problems == []
    assert confusion(refused).problems == ["router-bias: planted in no model"]
    assert Confusion((refused,), CHECKS, is_whole=False).problems == []  # one family alone has no place for all
    planted = outcome("router-bias", "qwen3_moe", routing="FAIL")
    assert confusion(refused, planted).problems == []
    assert [row[2] for row in confusion(refused, planted).rows()] == ["not planted", "caught"]


def test_the_matrix_shows_the_worst_of_all_families():
    found = confusion(
        outcome("", weights="PASS"),
        outcome("bf16-weights", weights="FAIL", engine="weights"),
        outcome("bf16-weights", "llama", weights="FAIL", engine="FAIL", loaded="WARN"),
    )
    rows = {row[0]: dict(zip([c.name for c in CHECKS], row[1:], strict=True)) for row in found.matrix()[1:]}
    assert rows["(none)"]["weights"] == MARKS["passed"]
    shown = {name: mark for name, mark in rows["bf16-weights"].items() if mark.strip()}
    assert shown == {"loaded": "w", "weights": "X", "engine": "!"}
    assert len({len(line) for line in found.matrix_lines()}) == 1


def test_the_page_names_every_fault_and_every_check():
    text = "\n".join(markdown(confusion(outcome("bf16-weights", weights="FAIL"))))
    assert [name for name in FAULTS if f"`{name}`" not in text] == []
    assert [check.name for check in CHECKS if f"`{check.name}`" not in text] == []
    assert "| sync | 3 `weights` | weights measured |" in text


def test_plain_data_has_every_walk():
    found = confusion(outcome("bf16-weights", weights="FAIL", engine="weights")).as_dict()
    (walk,) = found["walks"]
    assert found["problems"] == []
    assert walk["follows"] == {"engine": "weights"}
    assert walk["verdicts"] == {"weights": "FAIL", "engine": "FAIL"}


def test_walks_that_ended_early_are_a_problem():
    found = Confusion((outcome("", names="PASS"),), CHECKS, is_whole=False, broken=("llama: ended: engine 0 is dead",))
    assert found.problems == ["llama: ended: engine 0 is dead"]
