"""What a command hands back: numbers for scripts, rows for the closing table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vime.config.schema import Config
from vime.observe import Observer, brief
from vime.rollout.eval import of_set
from vime.rollout.summary import RolloutSummary
from vime.run_folder import RunFolder
from vime.runs.compare import Compared
from vime.types import CheckResult, RolloutBatch, Verdict, Verification

NUM_EXAMPLES = 4


@dataclass(frozen=True)
class Example:
    """One evaluation prompt and the answers of the first and the last evaluation."""

    prompt: str
    label: str | None
    before: str
    after: str


@dataclass(frozen=True)
class RunResult:
    """``rewards``: mean raw reward of each rollout; ``evaluations``: set -> weight version -> ``eval_statistics``.

    ``summary`` where nothing was trained.
    """

    command: str
    run_dir: Path
    start: int
    rewards: list[float]
    evaluations: dict[str, dict[int, dict[str, float]]]
    examples: list[Example]
    checks: list[CheckResult]
    files: dict[str, str] = field(default_factory=dict)
    summary: RolloutSummary | None = None
    comparisons: list[Compared] = field(default_factory=list)
    coherence: list[dict[str, Any]] = field(default_factory=list)
    syncs: list[Verification] = field(default_factory=list)

    @property
    def failed_checks(self) -> list[CheckResult]:
        return [check for check in self.checks if check.verdict == Verdict.FAIL]

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) for the closing table."""
        rows = []
        if self.rewards and self.summary is None:
            part = max(1, len(self.rewards) // 4)
            first, last = float(np.mean(self.rewards[:part])), float(np.mean(self.rewards[-part:]))
            span = f"rollouts {self.start}-{self.start + len(self.rewards) - 1}"
            if self.command == "replay":  # nothing was generated: no sign of learning
                rows.append(("recorded reward", f"mean {float(np.mean(self.rewards)):.3f} ({span})"))
            else:
                rows.append(("mean reward", f"{first:.3f} -> {last:.3f} (first and last {part} of {span})"))
        rows += [(f"evaluation{of_set(name)}", _scores(found)) for name, found in self.evaluations.items()]
        rows += [("check", f"{c.verdict}  {c.name}: {c.measured or c.cause}") for c in self.checks]
        return rows + list(self.files.items())

    def example_rows(self) -> list[tuple[str, str, str, str]]:
        """(prompt, label, answer before, answer after) for people."""
        return [
            (brief(e.prompt, 40), e.label or "", brief(e.before, 60, False), brief(e.after, 60, False))
            for e in self.examples
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "command": self.command,
            "run_dir": str(self.run_dir),
            "rewards": self.rewards,
            "statistics": None if self.summary is None else self.summary.as_dict(),
            "evaluations": self.evaluations,
            "examples": [vars(e) for e in self.examples],
            "checks": [{"name": c.name, "verdict": str(c.verdict), "measured": c.measured} for c in self.checks],
            "comparisons": [found.as_dict() for found in self.comparisons],
            "coherence": self.coherence,
            "files": self.files,
        }


def summarize(
    command: str,
    config: Config,
    folder: RunFolder,
    observer: Observer,
    start: int,
    comparisons: Sequence[Compared] = (),
) -> RunResult:
    files = {"metrics": str(folder.metrics), "configuration": str(folder.config)}
    if folder.checkpoints():
        files["checkpoint"] = str(folder.checkpoints()[-1])
    if folder.hf.exists():
        files["model"] = str(folder.hf)
    if config.debug.save_rollout_data and config.run.num_rollouts:
        files["rollouts"] = config.debug.save_rollout_data
    return RunResult(
        command=command,
        run_dir=folder.path,
        start=start,
        rewards=observer.rewards,
        evaluations=observer.evaluations,
        examples=_examples(observer.first_evaluation, observer.last_evaluation),
        checks=[*observer.verdicts(), *(found.check for found in comparisons)],
        files=files,
        summary=observer.summary if observer.summary.parts else None,
        comparisons=list(comparisons),
        coherence=[found.as_dict() for found in observer.examinations],
        syncs=list(observer.syncs),
    )


def _scores(found: Mapping[int, Mapping[str, float]]) -> str:
    """First -> last mean reward; of the last, pass@k where it says more than the mean, and what was left out."""
    scores = [f"{numbers['reward']:.3f} (weights v{version})" for version, numbers in found.items()]
    text = " -> ".join([scores[0], *scores[1:][-1:]])
    last = list(found.values())[-1]
    passed = [f"pass@{name.removeprefix('pass_at_')} {last[name]:.3f}" for name in last if name.startswith("pass_at_")]
    dropped = [f"{name.removeprefix('dropped/')} {n:g}" for name, n in last.items() if name.startswith("dropped/")]
    text += f"; {', '.join(passed)}" if len(passed) > 1 else ""
    return text + (f"; prompts left out: {', '.join(dropped)}" if dropped else "")


def _examples(before: RolloutBatch | None, after: RolloutBatch | None = None) -> list[Example]:
    """Answers that changed first; one sample per prompt."""
    if before is None or after is None:
        return []
    later = {a.group_id: a for a in after.samples() if a.index == 0}
    pairs = [
        Example(b.prompt_text, b.label, b.text, later[b.group_id].text)
        for b in before.samples()
        if b.index == 0 and b.group_id in later  # a prompt may have got no answer in one of the two
    ]
    return sorted(pairs, key=lambda e: e.before == e.after)[:NUM_EXAMPLES]
