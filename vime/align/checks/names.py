"""Was every parameter converted, under the right name and layer? The exported tensors against the checkpoint's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vime.align.bench import Bench
from vime.align.value_causes import value_causes
from vime.align.walk import Check
from vime.models import static_map
from vime.models.spec import ModelSpec
from vime.types import CheckResult, TensorEntry, Verdict, WeightManifest
from vime.weights.difference import Finding
from vime.weights.manifest import Difference, compare

NAME = "names"
SHOWN = 8
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CAUSES = {
    "missing": "the export leaves tensors out",
    "unexpected": "the export has tensors that the checkpoint has not",
    "shape": "tensors have another shape: padding rows of the vocabulary, or shards joined along the wrong dimension",
    "dtype": "tensors have another type",
    "permuted": "layers are numbered wrongly: a pipeline stage does not add its offset to its own layer numbers",
    "swapped": "tensors have each other's name",
    "value": "rows are in another order: shards of fused matrices (qkv, gate/up) joined in the order of the ranks, or "
    "a matrix that is transposed",
}
NEXT = (
    "vime dump-weights RUN.toml --from checkpoint --from trainer --html FILE shows every tensor; with parallel.tp=1 "
    "parallel.pp=1 too, whether the layout is the cause"
)


def run(bench: Bench) -> CheckResult:
    """Before any step the export must be the checkpoint, bit by bit: names, shapes, layers and values."""
    static = static_map(bench.spec, bench.config.parallel)
    exported = bench.trainer.manifest()
    expected = bench.checkpoint
    found = [*_head(bench.spec, expected, exported), *_named_swaps(compare(expected, exported), expected, exported)]
    numbers: dict[str, Any] = {"tensors": len(expected.tensors), "differences": dict(Counter(d.kind for d in found))}
    facts = tuple(_static_lines(static))
    if not found and not static.problems:
        tied = "; lm_head is the embedding (tied) and not exported" if bench.spec.is_tied else ""
        measured = f"{len(exported.tensors)} of {len(expected.tensors)} tensors equal the checkpoint's{tied}"
        return CheckResult(NAME, Verdict.PASS, measured, "bitwise, under the same names", facts, numbers=numbers)
    why = _why(bench, [d.name for d in found if d.kind == "value"])
    lines = [f"map of the ranks: {text}" for text in static.problems[:SHOWN]]
    lines += [str(finding) for finding in why[:SHOWN]]
    lines += [str(difference) for difference in found[:SHOWN]]
    lines += [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    cause = CAUSES[found[0].kind] if found else "the table of names is no bijection onto the checkpoint's tensors"
    if why and found[0].kind == "value":
        cause = f"{why[0].where}: {why[0].detail}"
    counted = ", ".join(f"{count} {kind}" for kind, count in numbers["differences"].items())
    return CheckResult(
        NAME, Verdict.FAIL, f"exported tensors against the checkpoint's: {counted or 'the map of the ranks is wrong'}",
        "bitwise, under the same names", (*lines, *facts), cause, NEXT, numbers=numbers,
    )  # fmt: skip


def _why(bench: Bench, names: Sequence[str]) -> list[Finding]:
    """Of tensors with other values: where those come from, by the tensors themselves."""
    if not names:
        return []
    with TemporaryDirectory(dir=bench.folder) as scratch:
        folder = Path(scratch) / "exported"
        bench.trainer.write_tensors("weights", folder, 0)
        return value_causes(Path(bench.config.model.path), folder, bench.config.model.dtype, names)


def _head(spec: ModelSpec, expected: WeightManifest, exported: WeightManifest) -> Iterator[Difference]:
    """The head of a tied model is the embedding and is not exported; that of an untied one is a tensor of its own,
    though it may hold the same values in the checkpoint already.
    """
    head, embedding = exported.tensors.get(HEAD), exported.tensors.get(EMBEDDING)
    if head == expected.tensors.get(HEAD):
        return
    if head is not None and embedding is not None and head.digest == embedding.digest and not spec.is_tied:
        yield Difference("unexpected", HEAD, f"is {EMBEDDING} once more, and the model is not tied (config.json)")


def _named_swaps(
    found: Sequence[Difference], expected: WeightManifest, exported: WeightManifest
) -> Iterator[Difference]:
    """``found``, where a tensor that holds another one's values, shapes being equal or not, is told as such."""
    owners: dict[str, str] = {entry.digest: name for name, entry in expected.tensors.items()}
    for each in found:
        entry = exported.tensors.get(each.name)
        owner = None if entry is None else owners.get(entry.digest)
        if each.kind == "value" and owner is not None and owner != each.name:
            yield replace(each, kind="swapped", detail=f"holds the values of {owner}")
        elif each.kind == "shape" and entry is not None:
            yield replace(each, detail=each.detail + _padding(entry, expected.tensors[each.name]))
        else:
            yield each


def _padding(entry: TensorEntry, expected: TensorEntry) -> str:
    more = entry.shape[0] - expected.shape[0]
    is_vocabulary = entry.name in (HEAD, EMBEDDING) and entry.shape[1:] == expected.shape[1:]
    return f": {more} rows that pad the vocabulary" if is_vocabulary and more > 0 else ""


def _static_lines(static: Any) -> Iterator[str]:
    """Which rank holds what, by the map that is read from configuration and layout alone."""
    for row in static.rows():
        ranks = f"ranks {row.ranks[0]}-{row.ranks[-1]}" if len(row.ranks) > 1 else f"rank {row.ranks[0]}"
        experts = f", experts {row.experts}" if row.experts else ""
        yield f"{ranks} ({row.place}): layers {row.layers}{experts}, {row.num_tensors} tensors"


CHECK = Check(
    NAME,
    "2",
    "every parameter is exported under its name, shape and layer",
    "first step, 1: all parameters converted, and named for the parallel layout (layer ids where pp_size > 1)?",
    run,
    explained_by=("loaded",),
    of_trainer=True,
)
