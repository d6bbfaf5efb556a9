"""``vime replay --inspect`` and ``--diff``: look at records. Loads numpy alone, once the arguments are right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vime.errors import EXIT_CHECK_FAILED, UsageError
from vime_cli import output

if TYPE_CHECKING:
    from vime.record.asked import Asked
    from vime.record.diff import RecordDiff
    from vime.record.files import RecordFile
    from vime.record.overview import Overview
    from vime.record.where import Expression
    from vime.types import RolloutBatch, Sample

Inspect = Annotated[
    str | None, typer.Option("--inspect", metavar="TEMPLATE", help="Look at saved rollouts; nothing is trained.")
]
Diff = Annotated[
    tuple[str, str] | None, typer.Option("--diff", metavar="A B", help="Compare two records, or two templates.")
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where", metavar="EXPR", help="Samples for which it is true, e.g. \"reward < 0.1 and 'x' in text\"."
    ),
]
Sort = Annotated[
    str | None, typer.Option("--sort", metavar="KEY", help="Order of the samples, e.g. reward; -reward turns it round.")
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Samples to show (20).")]
OneSample = Annotated[str | None, typer.Option("--sample", metavar="G/I", help="One sample in full, e.g. 3/1.")]
Export = Annotated[
    str | None, typer.Option("--export", metavar="KIND", help="Write the samples to a file: jsonl, parquet or html.")
]
Out = Annotated[str | None, typer.Option("--out", metavar="PATH", help="The file to export to.")]

DEFAULT_LIMIT = 20
MANY_FILES = 20
EXPORTS = ("jsonl", "parquet", "html")


@dataclass(frozen=True, slots=True)
class View:
    """The options of a look at records, as they were given."""

    inspect: str | None = None
    diff: tuple[str, str] | None = None
    ids: str | None = None
    where: str | None = None
    sort: str | None = None
    limit: int | None = None
    sample: str | None = None
    export: str | None = None
    out: str | None = None
    as_json: bool = False

    def is_asked(self, others: Mapping[str, Any]) -> bool:
        """Whether this call looks at records. UsageError if it mixes that with ``others``, options of a run."""
        mine = {"--where": self.where, "--sort": self.sort, "--limit": self.limit, "--sample": self.sample}
        mine |= {"--export": self.export, "--out": self.out}
        if self.inspect is None and self.diff is None:
            if stray := _given(mine):
                raise UsageError(f"{stray[0]} goes with --inspect TEMPLATE")
            return False
        name = "--inspect" if self.inspect is not None else "--diff"
        if stray := _given(others) + (["--diff"] if self.inspect is not None and self.diff is not None else []):
            raise UsageError(f"{name} looks at records and starts nothing: it does not go with {', '.join(stray)}")
        if self.diff is not None and (stray := [o for o in _given(mine) if o != "--limit"]):
            raise UsageError(f"--diff compares whole records: it does not go with {', '.join(stray)}")
        return True


def look(view: View) -> None:
    """Do what ``view`` asks. Raises UsageError, and ends the command with 1 where ``--diff`` finds a difference."""
    asked = _checked(view)
    from vime.preflight.packages import install_line, is_installed

    if not is_installed("numpy"):
        raise UsageError("reading records needs numpy", install_line({"numpy": "cpu"}))
    if view.diff is not None:
        _diff(view, view.diff, asked.limit)
        return
    from vime.record.files import record_files

    assert view.inspect is not None
    files = record_files(view.inspect, view.ids)
    if len(files) > MANY_FILES:
        output.say(f"reading {len(files)} records")
    if view.export is not None:
        _export(view, files, asked.where)
    elif view.sample is not None:
        _one_sample(view, files, view.sample)
    else:
        _overview(view, files, asked)


def _checked(view: View) -> Asked:
    """Everything that can be said before a file is opened."""
    from vime.record.asked import Asked
    from vime.record.where import condition, sort_key

    where = condition(view.where) if view.where is not None else None
    key = view.sort.strip().removeprefix("-") if view.sort is not None else None
    sort = sort_key(key) if key is not None else None
    if view.limit is not None and view.limit < 1:
        raise UsageError(f"--limit {view.limit}: must be at least 1")
    if view.sample is not None and not re.fullmatch(r"\d{1,18}/\d{1,9}", view.sample, re.ASCII):
        raise UsageError(f"--sample {view.sample}: is no sample; the first column of the table names them, e.g. 3/1")
    if view.export is not None and view.export not in EXPORTS:
        raise UsageError(f"--export {view.export}: is none of {', '.join(EXPORTS)}")
    if view.out is not None and view.export is None:
        raise UsageError("--out goes with --export")
    _check_together(view)
    is_descending = view.sort is not None and view.sort.strip().startswith("-")
    return Asked(where, sort, is_descending, view.limit or DEFAULT_LIMIT)


def _check_together(view: View) -> None:
    shown = _given({"--sort": view.sort, "--limit": view.limit, "--sample": view.sample})
    if view.export is not None and shown:
        raise UsageError(
            f"--export writes every sample, in the record's order: it does not go with {', '.join(shown)}",
            "choose samples with --where; the HTML page sorts by a click",
        )
    rest = _given({"--where": view.where, "--sort": view.sort, "--limit": view.limit})
    if view.sample is not None and rest:
        raise UsageError(f"--sample shows one sample: it does not go with {', '.join(rest)}")


def _given(options: Mapping[str, Any]) -> list[str]:
    return [name for name, value in options.items() if value not in (None, False, [], ())]


def _overview(view: View, files: list[RecordFile], asked: Asked) -> None:
    from vime.record.overview import overview
    from vime.rollout.statistics import statistics
    from vime_cli import record_view

    found = overview(files, asked, statistics)
    _warn_about_keys(found, asked.where)
    if view.as_json:
        output.data(_as_data(found))
    else:
        parts: list[Any] = [record_view.listing(found.rollouts)] if len(files) > 1 else []
        if not _given({"--where": view.where, "--sort": view.sort, "--limit": view.limit}):
            parts += record_view.headers(found.rollouts)  # not where samples are what was asked for
            parts += [record_view.statistics(r) for r in found.rollouts] if len(files) == 1 else []
        if found.samples:
            parts.append(record_view.samples(found, output.width()))
        output.report([*parts, _last_line(found, view)])
    if found.problems:
        raise UsageError("\n".join(found.problems))


def _last_line(found: Overview, view: View) -> str:
    of = f" of {found.num_samples}" if view.where is not None else ""
    if not found.num_matching:
        return f"no sample{of} matches --where {view.where}" if view.where else "no samples"
    shown = f"{len(found.samples)} of {found.num_matching} samples" if not of else f"{len(found.samples)} samples"
    if of:
        shown += f" of {found.num_matching} that match, of {found.num_samples}"
    more = f"all: --limit {found.num_matching}; " if found.num_matching > len(found.samples) else ""
    return f"{shown} ({more}one in full: --sample {found.samples[0]['sample']}; a page to browse: --export html)"


def _warn_about_keys(found: Overview, where: Expression | None) -> None:
    from vime_cli import record_view

    absent = where.metadata_keys - found.metadata_keys if where and found.num_samples else frozenset()
    known = record_view.visible(", ".join(sorted(found.metadata_keys)[:20])) or "none"
    output.warn(f"no sample has metadata[{key!r}]; the keys are: {known}" for key in sorted(absent))


def _as_data(found: Overview) -> dict[str, Any]:
    rollouts = [
        {"path": str(r.file.path), "problem": r.problem}
        if r.problem
        else {
            "path": str(r.file.path),
            "rollout_id": r.rollout_id,
            "num_bytes": r.num_bytes,
            "header": asdict(r.header),
            "statistics": r.statistics,
        }
        for r in found.rollouts
    ]
    counts = {"num_samples": found.num_samples, "num_matching": found.num_matching}
    return {"rollouts": rollouts, **counts, "samples": found.samples}


def _one_sample(view: View, files: list[RecordFile], name: str) -> None:
    from vime.record.overview import find_sample
    from vime.record.tokens import token_texts
    from vime_cli import record_view

    parts: list[Any] = []
    rows: list[dict[str, Any]] = []
    for batch, i in find_sample(files, name):
        sample, known = batch.sample(i), token_texts(batch.header)
        texts = known.of(sample.token_ids[sample.prompt_len :].tolist())
        if known.problem and not view.as_json:
            output.warn([f"token ids instead of texts: {record_view.visible(known.problem)}"])
        parts += _sample_parts(sample, batch, texts, has_texts=not known.problem)
        rows.append(_sample_data(sample, batch, texts))
    if view.as_json:
        output.data(rows)
    else:
        output.report(parts)


def _sample_parts(sample: Sample, batch: RolloutBatch, texts: list[str], has_texts: bool) -> list[Any]:
    from vime_cli import record_view as view

    parts: list[Any] = [view.one_sample(sample, batch.rollout_id)]
    parts.append(f"prompt\n\n{view.visible(sample.prompt_text, keep_lines=True)}\n")
    if has_texts and output.has_colour():
        parts.append(view.strip(sample, texts))
    else:
        parts.append(f"response\n\n{view.visible(sample.text, keep_lines=True)}\n")
        parts.append(view.strip(sample, texts) if output.has_colour() else view.numbers(sample, texts))
    sampled = [row for row in view.token_rows(sample, texts) if row["is_sampled"]]
    sampled.sort(key=lambda row: row["log_prob"] if row["log_prob"] == row["log_prob"] else float("-inf"))
    return [*parts, view.least_likely(sampled[: view.NUM_LEAST_LIKELY])]


def _sample_data(sample: Sample, batch: RolloutBatch, texts: list[str]) -> dict[str, Any]:
    from vime_cli.record_view import token_rows

    fields = {name: getattr(sample, name) for name in type(sample).__slots__}
    fields |= {"status": str(sample.status), "token_ids": sample.token_ids.tolist()}
    del fields["loss_mask"], fields["rollout_log_probs"]
    return {"rollout_id": batch.rollout_id, **fields, "response": token_rows(sample, texts)}


def _export(view: View, files: list[RecordFile], where: Expression | None) -> None:
    from vime.files import check_new
    from vime.record.export import write_jsonl, write_parquet
    from vime.record.overview import matching

    assert view.export is not None
    path = Path(view.out) if view.out is not None else _default_name(files, view.export)
    check_new(path, "--out")
    selected = matching(files, where)
    if view.export == "html":
        from vime.report.samples import write_html

        num_rows = write_html(path, selected, title=view.inspect or "")
    else:
        write = write_jsonl if view.export == "jsonl" else write_parquet
        num_rows = write(path, selected)
    of = f" that match --where {view.where}" if view.where else ""
    if view.as_json:
        output.data({"path": str(path), "num_samples": num_rows})
    else:
        output.report([f"{num_rows} samples{of} written to {path} ({output.size(path.stat().st_size)})"])


def _default_name(files: list[RecordFile], kind: str) -> Path:
    """In the current folder, named after the first record and the last."""
    first, last = files[0].path.stem, files[-1].path.stem
    number = re.search(r"(\d+)\D*$", last)
    return Path(f"{first}{f'-{number[1]}' if len(files) > 1 and number else ''}.{kind}")


def _diff(view: View, sides: tuple[str, str], limit: int) -> None:
    from vime.record.diff import diff
    from vime.record.files import record_files
    from vime.record.reader import read
    from vime_cli.record_view import visible

    a, b = (record_files(side, view.ids, "--diff") for side in sides)
    only = _only_one_side(a, b)
    pairs = _pairs(a, b)
    found, parts = [], []
    for x, y in pairs:
        batches = read(x.path), read(y.path)
        found.append(diff(*batches))
        if not found[-1].is_equal and not view.as_json:
            parts += _diff_parts(found[-1], (x.path, y.path), batches, limit)
    is_equal = not only and all(d.is_equal for d in found)
    if view.as_json:
        output.data({"is_equal": is_equal, "only_one_side": only, "rollouts": [_diff_data(d) for d in found]})
    else:
        output.report([*parts, *only, *(visible(d.summary()) for d in found)])
    if not is_equal:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _pairs(a: list[RecordFile], b: list[RecordFile]) -> list[tuple[RecordFile, RecordFile]]:
    """By rollout id; two literal paths, or a path and a template of one id, are a pair whatever their ids."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    other = {file.rollout_id: file for file in b}
    return [(file, other[file.rollout_id]) for file in a if file.rollout_id in other]


def _only_one_side(a: list[RecordFile], b: list[RecordFile]) -> list[str]:
    if len(a) == len(b) == 1:
        return []
    ids = [{file.rollout_id for file in side} for side in (a, b)]
    if not ids[0] & ids[1]:
        raise UsageError(f"--diff: no rollout id is on both sides ({_names(a)} and {_names(b)})")
    found = (("A", a, ids[1]), ("B", b, ids[0]))
    return [
        f"only in {name}: {file.path}" for name, side, there in found for file in side if file.rollout_id not in there
    ]


def _names(files: list[RecordFile]) -> str:
    return str(files[0].path) if len(files) == 1 else f"{files[0].path} to {files[-1].path}"


def _diff_data(found: RecordDiff) -> dict[str, Any]:
    header = [{"field": name, "a": a, "b": b} for name, a, b in found.header]
    return {**asdict(found), "header": header, "is_equal": found.is_equal}


def _diff_parts(
    found: RecordDiff, paths: tuple[Path, Path], batches: tuple[RolloutBatch, RolloutBatch], limit: int
) -> list[Any]:
    from vime.record.tokens import TokenTexts, token_texts
    from vime_cli import diff_view
    from vime_cli.record_view import visible

    has_tokens = any(s.position is not None for s in found.samples)  # else no tokenizer is needed
    texts = [token_texts(batch.header) if has_tokens else TokenTexts(problem="not needed") for batch in batches]
    if has_tokens and (problem := texts[0].problem or texts[1].problem):
        output.warn([f"token ids instead of texts: {visible(problem)}"])
    return diff_view.parts(found, paths, limit, (texts[0], texts[1]))
