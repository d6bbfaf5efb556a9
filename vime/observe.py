"""What a run reports: one metrics object a rollout, one line on the console, the first-step verdicts, the samples."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vime.align.coherence import Level
from vime.align.examine import Examination
from vime.align.first_step import engine_equals_trainer, reference_equals_policy
from vime.config.schema import Config
from vime.debug.processes import Roster
from vime.debug.watchdog import Watchdog
from vime.log import Phase, Progress
from vime.metrics import Metrics
from vime.models import load_spec
from vime.record.writer import write
from vime.rollout.eval import eval_metrics, eval_statistics, of_set
from vime.rollout.statistics import SpreadWatch, statistics, warnings
from vime.rollout.summary import RolloutSummary
from vime.train.statistics import log_prob_metrics
from vime.types import CheckResult, RolloutBatch, Sample, StepStats, Verdict, Verification, WeightManifest

ROLES = ("", "system", "user", "assistant")


@dataclass
class Observer:
    """Collects while the loop runs; ``metrics`` gets one complete object per rollout, in order."""

    config: Config
    progress: Progress
    metrics: Metrics
    evaluation_path: Callable[[int, str], Path]
    verify_first_step: bool = True
    rewards: list[float] = field(default_factory=list)
    evaluations: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    """Name of the set -> weight version -> ``eval_statistics``."""
    first_evaluation: RolloutBatch | None = None
    last_evaluation: RolloutBatch | None = None
    checks: list[CheckResult] = field(default_factory=list)
    examine: Callable[[RolloutBatch], Examination] | None = None
    examinations: list[Examination] = field(default_factory=list)
    summary: RolloutSummary = field(default_factory=RolloutSummary)  # filled where nothing is trained
    watchdog: Watchdog | None = None
    syncs: list[Verification] = field(default_factory=list)
    _num_cached: tuple[int, int] | None = None
    _row: dict[str, Any] = field(default_factory=dict)
    _steps: list[StepStats] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _phase: Phase | None = None
    _spread: SpreadWatch = field(default_factory=SpreadWatch)

    @property
    def roster(self) -> Roster | None:
        """Where to note who is who, if anywhere."""
        return None if self.watchdog is None else self.watchdog.roster

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase of the loop; its seconds become ``perf/<name>_time``."""
        start = time.perf_counter()
        watched = nullcontext() if self.watchdog is None else self.watchdog.phase(name)
        with self.progress.phase(name) as self._phase, watched:
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        """Samples done, of how many, and response tokens so far, in the current phase."""
        if self._phase is not None:
            self._phase.total = total
            self._phase.update(done, tokens)

    def on_counted(self, num_cached: tuple[int, int] | None) -> None:
        """Prompt tokens of the rollout that ends, and those found in the prefix cache, see ``CountedRollouts``."""
        self._num_cached = num_cached

    @contextmanager
    def rollout(self, rollout_id: int) -> Iterator[None]:
        """One turn of the loop: on leaving, its metrics are written."""
        self._row, self._steps, self._seconds = {"rollout_id": rollout_id}, [], {}
        start = time.perf_counter()
        yield
        self._close_row(time.perf_counter() - start)

    def produced(self, batch: RolloutBatch) -> None:
        self._row |= statistics(batch)
        self.rewards.append(self._row["rollout/raw_reward"])
        if self.config.debug.rollout_only:
            self.summary.add(batch, self._seconds.get("generate", 0.0), self._num_cached)
        for text in [*warnings(batch, self.config), self._spread.update(self._row)]:
            if text is not None:
                self.progress.warn(text)
        for i in range(min(self.config.log.show_samples, len(batch))):
            self.progress.note(show(batch.sample(i)))
        if self.examine is not None:
            self._examined(self.examine(batch))

    def _examined(self, found: Examination) -> None:
        """A clean rollout is shown in full once; in training only what is wrong is said, once as long as it stays."""
        before = self.examinations[-1].level if self.examinations else Level.PASS
        self.examinations.append(found)
        if not self.config.debug.rollout_only and found.level == before != Level.PASS:
            self.progress.warn(f"coherence of rollout {found.rollout_id}: {found.level}, as before")
        elif found.check.verdict != Verdict.PASS:
            self.progress.warn(str(found))
        elif self.config.debug.rollout_only:
            self.progress.note(str(found) if len(self.examinations) == 1 else found.line)

    def verdicts(self) -> list[CheckResult]:
        """All checks of the run; of the rollouts' coherence the worst."""
        order = list(Level)
        worst = max(self.examinations, key=lambda found: order.index(found.level), default=None)
        return [*self.checks, *([] if worst is None else [worst.check])]

    def scored(self, batch: RolloutBatch, old_T: np.ndarray, ref_T: np.ndarray | None) -> None:
        self._row |= log_prob_metrics(batch, old_T, ref_T)
        if self.verify_first_step:
            self.verify_first_step = False
            self.checks = [
                reference_equals_policy(batch, old_T, ref_T if self.config.model.ref_path is None else None),
                engine_equals_trainer(
                    batch, old_T, self.config.model.dtype, load_spec(self.config.model.path).num_layers
                ),
            ]
            for check in self.checks:
                say = self.progress.warn if check.verdict == Verdict.FAIL else self.progress.note
                say(describe(check))

    def stepped(self, stats: StepStats) -> None:
        self._steps.append(stats)
        if stats.is_skipped:
            self.progress.warn(f"optimizer step skipped, weights unchanged: {stats.skip_reason}")

    def synced(self, manifest: WeightManifest) -> None:
        self._row["weights/version"] = manifest.version
        self._row["weights/num_bytes"] = manifest.num_bytes
        if manifest.verification is not None:
            self.syncs.append(manifest.verification)
            self._row["weights/num_compared"] = manifest.verification.num_compared
            self._row["weights/verify_time"] = manifest.verification.seconds

    def evaluated(self, version: int, batches: Mapping[str, RolloutBatch]) -> None:
        """``batches``: the answers by the name of the set. One row of metrics for all of them."""
        row: dict[str, Any] = {"rollout_id": version, "perf/eval_time": self._seconds.pop("eval", 0.0)}
        for name, batch in batches.items():
            write(self.evaluation_path(version, name), batch, overwrite=True)
            found = eval_statistics(batch, self.config.eval.pass_reward)
            row |= eval_metrics(name, found)
            self.evaluations.setdefault(name, {})[version] = found
            for text in warnings(batch, self.config, is_evaluation=True):
                self.progress.warn(f"evaluation{of_set(name)}: {text}")
            score = f"mean reward {found['reward']:.3f} ({len(batch)} samples)"
            self.progress.note(f"evaluation{of_set(name)} with weights v{version}: {score}")
        self.metrics.log(row)
        shown = next(iter(batches.values()))
        if self.first_evaluation is None:
            self.first_evaluation = shown
        else:
            self.last_evaluation = shown

    def _close_row(self, seconds: float) -> None:
        row, phases = self._row, self._seconds
        done = [s for s in self._steps if not s.is_skipped]
        if self._steps:
            row["train/num_skipped_steps"] = len(self._steps) - len(done)
        if done:
            row["train/loss"] = float(np.mean([s.loss for s in done]))
            row["train/grad_norm"] = float(np.mean([s.grad_norm for s in done]))
            row["train/lr"] = done[-1].lr
            for name in done[0].metrics:
                row[name] = float(np.mean([s.metrics[name] for s in done]))
        row |= {f"perf/{name}_time": value for name, value in phases.items()}
        row["perf/step_time"] = seconds
        row["perf/other_time"] = seconds - sum(phases.values())
        row["perf/tokens_per_second"] = row["rollout/num_tokens"] / seconds
        if phases.get("generate") and self.config.needs_engines:  # a record is read, not generated
            row["perf/generate_tokens_per_second"] = row["rollout/num_response_tokens"] / phases["generate"]
        if phases.get("train"):
            row["perf/train_tokens_per_second"] = row["rollout/num_tokens"] / phases["train"]
        self.metrics.log(row)
        self.progress.line(row)


def describe(check: CheckResult) -> str:
    """One check on one line, with what to try next where it did not pass."""
    text = f"{check.verdict}  {check.name}: {check.measured or check.cause}"
    if check.limit:
        text += f" (limit: {check.limit})"
    if check.verdict in (Verdict.FAIL, Verdict.WARN):
        text += "".join(
            f"\n  {line}" for line in (*check.evidence, f"likely: {check.cause}", f"try: {check.next_step}")
        )
    return text


def show(sample: Sample) -> str:
    """A sample on one line."""
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    return f"{sample.name} reward {reward}: {brief(sample.prompt_text, 60)} -> {brief(sample.text, 160, False)}"


def brief(text: str, width: int, is_end_kept: bool = True) -> str:
    """Text on one line for a person: no chat markers and roles, line breaks visible, cut to ``width`` characters."""
    lines = re.sub(r"<\|[^|>]*\|>", "\n", text).split("\n")
    text = r"\n".join(line.strip() for line in lines if line.strip() not in ROLES)
    if len(text) <= width:
        return text
    return "..." + text[-width:] if is_end_kept else text[:width] + "..."
