"""The walk: order, selection, what an earlier failure explains, and what it comes to."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fake_bench import FakeBench

from vime.align import summary
from vime.align.bench import Unavailable
from vime.align.checks import CHECKS
from vime.align.faults import FAULTS
from vime.align.walk import Check, chosen, walk
from vime.errors import UsageError, VimeError
from vime.types import CheckResult, Verdict


def check(name: str, step: str, verdict: Verdict = Verdict.PASS, **more) -> Check:
    def run(bench) -> CheckResult:
        return CheckResult(
            name, verdict, "1 of 2", "0", ("look here",), "a cause", "a step", numbers={"n": np.int64(3)}
        )

    return Check(name, step, f"title of {name}", "guide", more.pop("run", run), **more)


def test_checks_are_chosen_by_name_step_and_group_in_the_order_of_the_walk() -> None:
    checks = [check("one", "1"), check("two", "8a"), check("three", "8b"), check("four", "8")]
    names = lambda *args: [c.name for c in chosen(checks, *args)]  # noqa: E731
    assert names((), ()) == ["one", "two", "three", "four"]
    assert names(("8",), ()) == ["two", "three", "four"]
    assert names(("four", "1"), ()) == ["one", "four"]
    assert names((), ("8a", "one")) == ["three", "four"]
    assert names(("8",), ("8b",)) == ["two", "four"]


@pytest.mark.parametrize("name", ["9", "twoo", "8c", ""])
def test_a_name_that_is_no_check_lists_all(name: str) -> None:
    with pytest.raises(UsageError) as error:
        chosen([check("one", "1"), check("two", "8a")], (name,), ())
    assert repr(name) in error.value.message
    assert "1 one, 8a two" in error.value.hint


def test_a_failure_is_explained_by_one_that_comes_later_where_it_says_so() -> None:
    checks = [check("a", "1", Verdict.FAIL, explained_by=("b",)), check("b", "2", Verdict.FAIL)]
    report = walk(checks, FakeBench())
    assert [c.follows for c in report.checks] == ["b", ""]
    assert [c.name for c in report.findings] == ["b"]


def test_a_result_may_leave_fewer_explanations_than_its_check() -> None:
    def fails(bench) -> CheckResult:
        return CheckResult("c", Verdict.FAIL, explained_by=("b",))

    late = check("c", "3", run=fails, explained_by=("a", "b"))
    report = walk([check("a", "1", Verdict.FAIL), late], FakeBench())
    assert [c.name for c in report.findings] == ["a", "c"]
    report = walk([check("a", "1", Verdict.FAIL), check("b", "2", Verdict.FAIL), late], FakeBench())
    assert report.checks[2].follows == "b"


def test_a_failure_that_an_earlier_one_explains_is_no_finding() -> None:
    checks = [
        check("a", "1", Verdict.FAIL),
        check("b", "2", Verdict.FAIL, explained_by=("a",)),
        check("c", "3", Verdict.FAIL, explained_by=("b",)),  # b is no finding itself
        check("d", "4", Verdict.FAIL, explained_by=("x",)),
        check("e", "5", Verdict.WARN, explained_by=("a",)),
    ]
    report = walk(checks, FakeBench())
    assert [c.follows for c in report.checks] == ["", "a", "", "", ""]
    assert [c.name for c in report.findings] == ["a", "c", "d"]
    assert summary.overall(report) == Verdict.FAIL
    assert summary.line(report) == "FAIL: 4 FAIL (3 findings: a, c, d), 1 WARN"


def test_an_error_is_the_finding_of_the_check_and_the_walk_goes_on() -> None:
    def fails(bench):
        raise VimeError("engine 0 died\nlast words", "look at its log")

    def rests_on_it(bench):
        raise Unavailable("the start of the engines failed in check a: engine 0 died")

    heard: list[tuple[str, str]] = []
    checks = [check("a", "1", run=fails), check("b", "2", run=rests_on_it), check("c", "3")]
    report = walk(checks, FakeBench(), lambda c, r: heard.append((c.name, "" if r is None else str(r.verdict))))
    assert heard == [("a", ""), ("a", "FAIL"), ("b", ""), ("b", "NOT TESTED"), ("c", ""), ("c", "PASS")]
    first, second, third = report.checks
    assert (first.measured, first.evidence, first.next_step) == ("engine 0 died", ("last words",), "look at its log")
    assert second.cause == "the start of the engines failed in check a: engine 0 died"
    assert third.verdict == Verdict.PASS
    assert set(report.seconds) == {"a", "b", "c"}


def test_a_check_that_breaks_is_said_with_its_traceback_and_costs_no_other() -> None:
    def breaks(bench) -> CheckResult:
        return CheckResult("a", Verdict.PASS, str(1 // 0))

    report = walk([check("a", "1", run=breaks), check("b", "2")], FakeBench())
    assert [c.verdict for c in report.checks] == [Verdict.FAIL, Verdict.PASS]
    broken = report.checks[0]
    assert broken.measured.startswith("ZeroDivisionError: ")
    assert any("in breaks" in line for line in broken.evidence)
    assert "a fault of vime" in broken.cause
    late = check("c", "3", run=breaks, explained_by=("b",))
    report = walk([check("b", "2", Verdict.FAIL), late], FakeBench())
    assert [c.name for c in report.findings] == ["b", "c"]  # no finding of the run explains a fault of vime


def test_what_needs_a_live_engine_is_skipped_on_a_record() -> None:
    report = walk([check("a", "1", is_live=True), check("b", "2")], FakeBench(is_live=False))
    assert [c.verdict for c in report.checks] == [Verdict.SKIP, Verdict.PASS]
    assert "recorded" in report.checks[0].cause


@pytest.mark.parametrize(
    ("verdicts", "overall"),
    [
        ((Verdict.PASS, Verdict.SKIP, Verdict.NOT_TESTED), Verdict.PASS),
        ((Verdict.PASS, Verdict.WARN), Verdict.WARN),
        ((Verdict.SKIP, Verdict.NOT_TESTED), Verdict.NOT_TESTED),  # nothing compared is no PASS
        ((Verdict.SKIP,), Verdict.SKIP),
        ((), Verdict.NOT_TESTED),
    ],
)
def test_the_worst_verdict_counts(verdicts, overall) -> None:
    report = walk([check(f"c{i}", str(i + 1), v) for i, v in enumerate(verdicts)], FakeBench())
    assert summary.overall(report) == overall


def test_the_report_in_words_and_as_plain_data() -> None:
    checks = [check("a", "1", Verdict.FAIL), check("b", "2", Verdict.FAIL, explained_by=("a",)), check("c", "3")]
    report = walk(checks, FakeBench())
    assert summary.rows(report, checks)[0] == ("1", "a", "FAIL", "1 of 2", "0")
    assert list(summary.told(report, checks)) == [
        "FAIL 1 a: title of a", "  measured: 1 of 2 (limit: 0)", "  | look here", "  likely:   a cause",
        "  try:      a step", "",
        "FAIL 2 b, follows from a: 1 of 2", "",
    ]  # fmt: skip
    found = json.loads(json.dumps(summary.as_dict(report, checks)))
    assert (found["verdict"], found["counts"], found["findings"]) == ("FAIL", {"FAIL": 2, "PASS": 1}, ["a"])
    assert found["checks"][1]["follows"] == "a"
    assert found["checks"][0]["numbers"] == {"n": 3}


def test_all_checks_are_told_apart_and_explained_by_others() -> None:
    names = [c.name for c in CHECKS]
    assert len(set(names)) == len(names)
    assert len({c.step for c in CHECKS}) == len(CHECKS)
    for found in CHECKS:
        assert found.title
        assert found.guide
        assert set(found.explained_by) <= set(names) - {found.name}


def test_every_fault_of_the_walk_has_its_check() -> None:
    names = {c.name for c in CHECKS}
    assert {fault.check for fault in FAULTS.values() if fault.check} <= names
