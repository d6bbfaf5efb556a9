"""What ``vime dump-weights`` shows: views side by side, differences with their causes, the static map, syncs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import CheckFailed
from vime.files import check_target
from vime_cli import output

if TYPE_CHECKING:
    from vime.config.load import Loaded
    from vime.runs.dump import Dumped
    from vime.weights.compare import WeightDiff

NUM_FINDINGS, NUM_TENSORS = 30, 12
HINT = "--html FILE or --json shows every tensor"


def compared(a: Path, b: Path, html: Path | None, as_json: bool) -> None:
    """Compare two things on the disk. Raises CheckFailed where they differ."""
    from vime.preflight.packages import require

    is_manifests = a.suffix == b.suffix == ".json"  # of tensors, their digests are what is compared
    require("comparing weights", "numpy", "blake3", *(() if is_manifests else ("torch", "safetensors")))
    from vime.weights.files import compare_paths

    if html is not None:
        check_target(html, "--html")
    found = compare_paths(a, b)
    if as_json:
        output.data(found[0].as_dict() if len(found) == 1 else [each.as_dict() for each in found])
    else:
        for each in found:
            _difference(each)
    _page(found, html)
    _raise_unequal(found)


def dumped(found: Dumped, html: Path | None, as_json: bool) -> None:
    """The views, and how they compare. Raises CheckFailed where they differ."""
    if as_json:
        output.data(found.as_dict())
    else:
        columns = ("view", "tensors", "buffers", "MB", "seconds", "MB/s", f"against {next(iter(found.dumps))}")
        output.table("weights", columns, found.rows())
        for each in found.diffs:
            if each.findings or each.notes:
                _difference(each)
        what = "manifests" if all(dump.folder is None for dump in found.dumps.values()) else "manifests and tensors"
        output.table("result", ("", ""), [("weights", found.summary), (what, str(found.out))], has_header=False)
    _page(list(found.diffs), html)
    _raise_unequal(found.diffs)


def _difference(found: WeightDiff) -> None:
    names = f"{found.b.origin} (B) against {found.a.origin} (A)"
    if found.findings:
        rows = [(str(f.kind), f.where, f.detail) for f in found.findings[:NUM_FINDINGS]]
        more = len(found.findings) - NUM_FINDINGS
        title = f"findings, {names}" + (f", the first {NUM_FINDINGS}; {more} more: {HINT}" if more > 0 else "")
        output.table(title, ("what", "where", "how"), rows)
    if worst := found.worst(NUM_TENSORS):
        columns = ("tensor", "max |difference|", "relative L2", "cosine")
        apart = [(t.name, *(output.number(x) for x in (g.max_abs, g.relative_l2, g.cosine))) for t, g in worst]
        output.table("tensors furthest apart", columns, apart)
    notes = [("note", note) for note in found.notes]
    output.table("comparison", ("", ""), [("result", found.summary), *notes], has_header=False)


def _page(found: list[WeightDiff], html: Path | None) -> None:
    """The comparison, of several the one with most differences."""
    if html is None or not found:
        return
    from vime.files import whole_file
    from vime.report.weights import weights_page

    worst = max(found, key=lambda each: len(each.findings))
    with whole_file(html) as file:
        file.write(weights_page(worst).encode())
    output.say(f"page: {html} ({worst.b.origin} against {worst.a.origin})")


def _raise_unequal(found: Any) -> None:
    wrong = [each for each in found if not each.is_equal]
    if wrong:
        lines = [f"weights differ: {each.summary}" for each in wrong]
        raise CheckFailed("\n".join(lines), "the findings above name the cause; " + HINT)


def static_map(loaded: Loaded, as_json: bool) -> None:
    """Rank -> layers, experts, tensors. Problems were raised with those of the configuration."""
    from vime.models import load_spec
    from vime.models.layout import static_map as map_of

    c = loaded.config
    found = map_of(load_spec(c.model.path), c.parallel)
    rows = [
        (_ranks(r.ranks), r.place, r.layers or "-", r.experts or "-", r.num_tensors, f"{r.num_elements:,}")
        for r in found.rows()
    ]
    num = len(found.spec.tensors())
    verdict = f"every rank's names are a bijection onto the checkpoint's {num} tensors, with equal shapes"
    if as_json:
        names = ("ranks", "place", "layers", "experts", "num_tensors", "num_elements")
        values = ((list(r.ranks), r.place, r.layers, r.experts, r.num_tensors, r.num_elements) for r in found.rows())
        maps = [dict(zip(names, row, strict=True)) for row in values]
        output.data({"command": "dump-weights --map", "num_tensors": num, "problems": found.problems, "ranks": maps})
    else:
        output.table("static map", ("ranks", "place", "layers", "experts", "tensors", "elements per rank"), rows)
        output.table("result", ("", ""), [("map", "; ".join(found.problems) or verdict)], has_header=False)
    if found.problems:
        raise CheckFailed("\n".join(found.problems), "another layout, or a fault in the table of the family")


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def watched(found: Any, as_json: bool) -> None:
    """One row per weight sync of a run. Raises CheckFailed where one was not equal."""
    syncs = found.syncs
    if as_json:
        plain = [asdict(s) | {"share": s.share} for s in syncs]
        output.data({"command": "dump-weights --watch", "run_dir": str(found.run_dir), "syncs": plain})
    else:
        columns = ("version", "level", "compared", "equal", "verified in", "of the sync")
        rows = [
            (
                s.version,
                s.level,
                f"{s.num_compared}/{s.num_tensors}",
                s.num_equal,
                f"{s.seconds:.3f} of {s.sync_seconds:.3f} s",
                f"{s.share:.0%}",
            )
            for s in syncs
        ]
        output.table("weight syncs", columns, rows)
    if any(s.num_equal < s.num_compared for s in syncs):
        raise CheckFailed("a weight sync was not equal", "the table names its version")
