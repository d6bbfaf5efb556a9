"""Are the weights the same on both ends? The trainer's tensors, as every engine received them and as it holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vime.align.bench import Bench, Unavailable
from vime.align.probe import probed
from vime.align.walk import Check
from vime.errors import VimeError
from vime.types import CheckResult, Verdict, WeightManifest
from vime.weights.checkpoint import checkpoint_manifest
from vime.weights.manifest import Difference, compare

NAME = "weights"
Answers = Mapping[str, tuple[WeightManifest, WeightManifest | None]]
"""By engine, what it received and what it holds; None where that is not read back."""
SHOWN = 8
LIMIT = "bitwise, as received and as held"


@dataclass(frozen=True)
class View:
    """What one engine received or holds, against the trainer's tensors."""

    engine: str
    side: str
    found: list[Difference]
    num_equal: int

    def __str__(self) -> str:
        return f"{self.engine} {self.side}: {self.num_equal}"


def run(bench: Bench) -> CheckResult:
    """A sync that is refused is the finding; the walk goes on with what the engines hold."""
    try:
        sent = bench.synced
        answers = bench.engine.manifests()
    except Unavailable:
        raise
    except VimeError as error:
        return _refused(bench, error)
    views = [view for engine, sides in answers.items() for view in _views(sent, engine, sides)]
    total = len(sent.tensors)
    numbers: dict[str, Any] = {
        "tensors": total,
        "megabytes": round(sent.num_bytes / 1e6, 1),
        "equal": {f"{v.engine} {v.side}": v.num_equal for v in views},
    }
    measured = "; ".join(f"{view} of {total} tensors" for view in views)
    if not any(view.found for view in views):
        if not views:
            return CheckResult(NAME, Verdict.NOT_TESTED, cause="no engine said what it received", numbers=numbers)
        return _equal(bench, sent, answers, CheckResult(NAME, Verdict.PASS, measured, LIMIT, numbers=numbers))
    lines = [f"{view.engine} {view.side}: {difference}" for view in views for difference in view.found[:SHOWN]]
    cause, next_step = _cause(bench, sent, views, answers)
    return CheckResult(NAME, Verdict.FAIL, measured, LIMIT, tuple(lines[:SHOWN]), cause, next_step, numbers=numbers)


def _equal(bench: Bench, sent: WeightManifest, answers: Answers, passed: CheckResult) -> CheckResult:
    """Every digest that there is agrees. A probe forward answers for what has none, and its word stands beside them."""
    evidence = _origin(bench, sent)
    unread = _unread(answers)
    if not unread:
        return replace(passed, evidence=evidence)
    probe = probed(bench)
    measured = f"{passed.measured}; the rest by a {probe.text}"
    if probe.verdict != Verdict.FAIL:
        return replace(passed, verdict=probe.verdict, measured=measured, evidence=(*evidence, *unread))
    return replace(
        passed,
        verdict=Verdict.FAIL,
        measured=measured,
        evidence=(*unread, *evidence),
        cause="the engine received the right bytes and computes otherwise: what cannot be read back was put elsewhere",
        next_step="vime align-check RUN.toml --bisect names the first module that differs",
    )


def _views(sent: WeightManifest, engine: str, sides: tuple[WeightManifest, WeightManifest | None]) -> list[View]:
    names = ("received", "holds")
    return [_view(sent, engine, name, side) for name, side in zip(names, sides, strict=True) if side is not None]


def _view(sent: WeightManifest, engine: str, side: str, manifest: WeightManifest) -> View:
    equal = sum(
        name in manifest.tensors and manifest.tensors[name].digest == entry.digest
        for name, entry in sent.tensors.items()
    )
    return View(engine, side, compare(sent, manifest), equal)


def _refused(bench: Bench, error: VimeError) -> CheckResult:
    lines = error.message.splitlines()
    held = _held_line(bench)
    return CheckResult(
        NAME, Verdict.FAIL, f"the weight sync was refused: {lines[0]}", LIMIT, (*lines[1 : SHOWN + 1], held),
        "trainer and engine do not have the same set of tensors, or the sync did not come to its end",
        error.hint or "the check names says what the export has wrong",
    )  # fmt: skip


def _held_line(bench: Bench) -> str:
    """What the engine is left with."""
    try:
        found = compare(bench.checkpoint, bench.engine.manifest("engine-held"))
    except VimeError as error:
        return f"what the engine is left with: not known ({error.message.splitlines()[0]})"
    if not found:
        return "the engine is left with its own load of model.path, complete: the walk goes on with that"
    return f"the engine is left with {len(found)} differences from the checkpoint, first {found[0]}"


def _origin(bench: Bench, sent: WeightManifest) -> tuple[str, ...]:
    """Whether the tensors on both ends are also the checkpoint's."""
    found = compare(bench.checkpoint, sent)
    if not found:
        return ("trainer, engine and checkpoint hold the same bits",)
    return (f"but the tensors on both ends are not the checkpoint's: {len(found)} differences, first {found[0]}",)


def _unread(answers: Answers) -> tuple[str, ...]:
    """Engines whose tensors are compared as received alone."""
    names = [engine for engine, (_, held) in answers.items() if held is None]
    whole = f"what {', '.join(names)} holds is not read back (rollout.engine_tp > 1)"
    unread = [
        n for _, held in answers.values() if held is not None for n, entry in held.tensors.items() if not entry.digest
    ]
    first = min(unread, default="")
    some = f"no digests of {len(set(unread))} tensors that are held and cannot be read back, first {first}"
    return (*([whole] if names else []), *([some] if unread else []))


def _cause(
    bench: Bench,
    sent: WeightManifest,
    views: list[View],
    answers: Answers,
) -> tuple[str, str]:
    kinds = Counter(d.kind for view in views for d in view.found)
    side = next(view.side for view in views if view.found)
    if rounded := _rounded(bench, sent, views, answers):
        return (
            f"{rounded} tensors passed through bfloat16 on their way: each equals the trainer's value rounded to it",
            "look for a cast between export and load_weights; trainer and engine both have model.dtype",
        )
    if kinds.get("dtype"):
        return "tensors arrive in another type than the trainer's", "one model.dtype for trainer and engine"
    if kinds.get("permuted"):
        return "layers changed places on the way", "which side numbers its layers wrongly: the check names"
    if kinds.get("missing"):
        return "tensors are not sent, and old values stay", "compare the names of both sides: the check names"
    if side == "holds":
        return (
            "the engine received the right bytes and put them elsewhere, or changed them afterwards",
            "vime dump-weights RUN.toml --from trainer --from engine-held names the tensor and its rows",
        )
    return (
        "bytes change between the trainer's export and the engine's loader",
        "vime dump-weights RUN.toml --from trainer --from engine-received shows what changes",
    )


def _rounded(
    bench: Bench,
    sent: WeightManifest,
    views: list[View],
    answers: Answers,
) -> int:
    """How many of the tensors that differ are the trainer's, rounded to bfloat16; 0 unless all of them are.

    Known only while the trainer's weights are the checkpoint's, whose values can be had and rounded.
    """
    wrong = {difference.name for view in views for difference in view.found if difference.kind == "value"}
    if not wrong or bench.config.model.dtype != "float32" or compare(bench.checkpoint, sent):
        return 0
    rounded = checkpoint_manifest(bench.config.model.path, dict.fromkeys(wrong, "float32"), through="bfloat16")
    received = [sides[0] for sides in answers.values()]
    if not wrong <= rounded.tensors.keys():
        return 0
    same = all(
        name in side.tensors and side.tensors[name].digest in (rounded.tensors[name].digest, sent.tensors[name].digest)
        for side in received
        for name in wrong
    )
    return len(wrong) if same else 0


CHECK = Check(
    NAME,
    "3",
    "every engine receives and holds the trainer's weights",
    "first step, 1: save all parameters in the engine's load_weights and compare them with the loaded checkpoint",
    run,
    is_live=True,
    explained_by=("names", "loaded"),
)
