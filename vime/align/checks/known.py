"""Are versions and settings in use of which issues are known? The table is ``vime/align/known_issues.toml``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vime import device
from vime.align.bench import Bench
from vime.align.known_issues import Facts, Issue, known_issues, that_apply
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "known_issues"


def run(bench: Bench) -> CheckResult:
    """WARN for an issue that applies; those that vime works around are told."""
    found = that_apply(Facts(bench.config, bench.spec, device.kind()), _installed())
    open_ones = [issue for issue in found if not issue.mended_by]
    mended = [f"{issue.library}: {issue.symptom}: mended: {issue.mended_by}" for issue in found if issue.mended_by]
    measured = f"{len(open_ones)} of {len(known_issues())} known issues apply, {len(mended)} more mended by vime"
    if not open_ones:
        return CheckResult(NAME, Verdict.PASS, measured, "none that vime does not mend", tuple(mended))
    return CheckResult(
        NAME, Verdict.WARN, measured, "none that vime does not mend", (*map(_said, open_ones), *mended),
        open_ones[0].symptom, "; ".join(dict.fromkeys(issue.advice for issue in open_ones)),
    )  # fmt: skip


def _said(issue: Issue) -> str:
    return f"{issue.library}: {issue.symptom}: {issue.advice} ({issue.source})"


def _installed() -> dict[str, str]:
    """Version by package; vLLM for CPUs is a package of another name."""
    found = {}
    for name in {issue.library for issue in known_issues()}:
        for package in (f"{name}-cpu", name):
            try:
                found[name] = version(package)
            except PackageNotFoundError:
                continue
    return found


CHECK = Check(
    NAME,
    "0",
    "no known issue of these versions and settings",
    "what to know before: attention-backend flash, moe-permute-fusion",
    run,
    of_trainer=True,
)
