"""Did the trainer really load the checkpoint? Every parameter of every rank against the files, read once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vime.align.bench import Bench, LoadedParameter
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "loaded"
SHOWN = 6
MODELS = {"policy": "policy", "ref": "reference"}
LIMIT = "bitwise, every parameter of every rank"


def run(bench: Bench) -> CheckResult:
    """PASS only where every parameter holds what the files have for it, after their cast and split over ranks."""
    trainer = bench.trainer
    lines = [f"{of}: {text}" for of, texts in trainer.accounting().items() for text in texts]
    parameters = trainer.loaded()
    if not parameters:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="the trainer names no parameter", evidence=tuple(lines))
    wrong = [p for p in parameters if p.digest != p.expected]
    unloaded = [p for p in wrong if p.digest == p.initial]
    numbers = {"parameters": len(parameters), "wrong": len(wrong), "still_initial": len(unloaded)}
    if not wrong:
        ranks = len({p.rank for p in parameters})
        measured = f"{_counted(parameters)} equal the files on {ranks} {'rank' if ranks == 1 else 'ranks'}"
        return CheckResult(NAME, Verdict.PASS, measured, LIMIT, tuple(lines), numbers=numbers)
    cause, next_step = _cause(wrong, unloaded)
    return CheckResult(
        NAME, Verdict.FAIL, f"{len(wrong)} of {_counted(parameters)} are not what the files have", LIMIT,
        (*_evidence(wrong, parameters), *lines), cause, next_step, numbers=numbers,
    )  # fmt: skip


def _counted(parameters: Sequence[LoadedParameter]) -> str:
    found = Counter(MODELS[p.of] for p in parameters)
    return " and ".join(f"{count} parameters of the {of}" for of, count in found.items())


def _evidence(wrong: Sequence[LoadedParameter], parameters: Sequence[LoadedParameter]) -> Iterator[str]:
    owners = {(p.of, p.expected): p for p in parameters}
    for each in wrong[:SHOWN]:
        where = f"{MODELS[each.of]}, rank {each.rank}: {each.name} (from {', '.join(each.sources)})"
        other = owners.get((each.of, each.digest))
        if each.digest == each.initial:
            yield f"{where}: still holds its initial value"
        elif other is not None:
            yield f"{where}: holds what belongs to {other.name} of rank {other.rank}"
        else:
            yield f"{where}: digest {each.digest[:12]}, the files give {each.expected[:12]}"
    if len(wrong) > SHOWN:
        yield f"and {len(wrong) - SHOWN} more"


def _cause(wrong: Sequence[LoadedParameter], unloaded: Sequence[LoadedParameter]) -> tuple[str, str]:
    if unloaded:
        return (
            f"{len(unloaded)} parameters were never loaded: they are as initialised",
            "does model.path hold all tensors? then the name table of the family (vime/models) misses one",
        )
    if all(p.of == "ref" for p in wrong):
        return "only the reference is wrong", "is model.ref_path the folder that is meant?"
    return (
        "values were changed, split or placed otherwise than the files say",
        "vime dump-weights RUN.toml --from checkpoint --from trainer compares the values",
    )


CHECK = Check(
    NAME,
    "1",
    "the checkpoint is loaded, parameter by parameter",
    "first step, 1: parameters not loaded: is there a log that Megatron loaded the checkpoint?",
    run,
    of_trainer=True,
)
