"""How records look in a terminal: tables, and the strip of tokens coloured by log-prob. Makes text; prints nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vime_cli.output import number, size

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from vime.record.overview import Overview, Rollout
    from vime.types import RolloutHeader, Sample

BAND_STYLES = ("", "black on bright_yellow", "black on yellow", "white on red", "bold white on magenta")
MASKED_STYLE = "white on bright_black"
NUM_LEAST_LIKELY = 10
NARROW = 100  # columns of a terminal, below which the prompt makes room for the response
STRIP_WIDTH = 110

# What would move the cursor, ring, turn the writing round, or cannot be encoded.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep_lines: bool = False) -> str:
    """``text`` that is safe to print: control characters as ``\\x1b``; line ends as they are, or as one sign."""

    def shown(match: re.Match[str]) -> str:
        if match[0] == "\n":
            return "\n" if keep_lines else "⏎"
        return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")

    return _HIDDEN.sub(shown, text)


def listing(rollouts: Sequence[Rollout]) -> Table:
    """One line per rollout."""
    columns = ["rollout", "samples", "reward", "truncated", "response_len", "weight_version", "size", ""]
    rows: list[tuple[Any, ...]] = []
    for rollout in rollouts:
        if rollout.problem:
            rows.append((rollout.file.rollout_id, *["-"] * 6, rollout.problem))
            continue
        s = rollout.statistics
        rows.append(
            (
                rollout.rollout_id,
                number(s["rollout/num_samples"]),
                number(s["rollout/raw_reward"]),
                number(s["rollout/truncated_ratio"]),
                number(s.get("rollout/response_len/mean")),
                rollout.header.weight_version,
                size(rollout.num_bytes),
                _misnamed(rollout),
            )
        )
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table("rollouts (means over samples)", columns, rows, right=(0, 1, 2, 3, 4, 5, 6))


def _misnamed(rollout: Rollout) -> str:
    named = rollout.file.rollout_id
    return "" if named in (None, rollout.rollout_id) else f"its name says {named}"


def headers(rollouts: Sequence[Rollout]) -> list[Table]:
    """What must be known of the rollouts, and the sampling options in effect; where they differ, which has what."""
    read = [rollout for rollout in rollouts if not rollout.problem]
    facts = [(str(r.rollout_id), _facts(r.header)) for r in read]
    options = [
        (str(r.rollout_id), {k: (_plain(v), r.header.sampling_origin.get(k, "")) for k, v in r.header.sampling.items()})
        for r in read
    ]
    found = [table("record", ("", ""), _merged(facts), has_header=False)]
    sampling = [(name, *pair) for name, value in _merged(options) for pair in _split(value)]
    return found + ([table("sampling", ("option", "value", "from"), sampling)] if sampling else [])


def _facts(header: RolloutHeader) -> dict[str, str]:
    model = {f"model {name.replace('_', ' ')}": value for name, value in header.model.items()}
    return {
        "model": header.model.get("path", ""),
        **{name: value for name, value in model.items() if name != "model path"},
        "weight version": str(header.weight_version),
        "weights manifest": header.manifest_digest,
        "stop ids": " ".join(map(str, header.stop_token_ids)),
        "seed": str(header.seed),
        "counts": ", ".join(f"{name.replace('_', ' ', 1)} {n}" for name, n in header.counts.items()),
        "configuration": header.config_digest,
        "versions": ", ".join(f"{n} {v}" for n, v in ({"vime": header.vime_version} | header.library_versions).items()),
    }


def _merged(columns: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, Any]]:
    """[("0", {"seed": 1}), ("1", {"seed": 2})] -> [("seed", "1 (rollout 0); 2 (rollout 1)")]; nothing empty."""
    names = dict.fromkeys(name for _, facts in columns for name in facts)
    rows: list[tuple[str, Any]] = []
    for name in names:
        holders: dict[Any, list[str]] = {}
        for rollout, facts in columns:
            holders.setdefault(facts.get(name, ""), []).append(rollout)
        if len(holders) == 1:
            rows += [(name, value) for value in holders if value]
        else:
            rows.append((name, "; ".join(f"{_one(v) or 'none'} (rollout {_few(ids)})" for v, ids in holders.items())))
    return rows


def _split(value: Any) -> list[tuple[str, str]]:
    return [value] if isinstance(value, tuple) else [(value, "")]


def _one(value: Any) -> str:
    return " from ".join(filter(None, value)) if isinstance(value, tuple) else str(value)


def _few(ids: list[str], limit: int = 6) -> str:
    return ", ".join(ids[:limit]) + (f" and {len(ids) - limit} more" if len(ids) > limit else "")


def statistics(rollout: Rollout) -> Table:
    """All metrics of one rollout."""
    rows = [(name.removeprefix("rollout/"), number(value)) for name, value in rollout.statistics.items()]
    return table("statistics", ("", ""), rows, has_header=False, right=(1,))


def samples(found: Overview, width: int | None) -> Table | str:
    """One line per sample: end of the prompt and start of the response in ``width`` columns; without it both whole."""
    has_rollout, has_prompt = len(found.rollouts) > 1, width is None or width >= NARROW
    numeric = ["reward", "prompt_len", "response_len", "mean_log_prob"]
    columns = [*(["rollout_id"] if has_rollout else []), "sample", "status", *numeric]
    columns += ["prompt", "response"] if has_prompt else ["response"]
    prompts = [visible(row["prompt"]) for row in found.samples]
    prompts = [_end(question, width // 4) for question in _questions(prompts)] if width else prompts
    rows = [
        [
            *([str(row["rollout_id"])] if has_rollout else []),
            row["sample"],
            row["status"],
            *(number(row[name]) for name in numeric),
            *([prompt] if has_prompt else []),
            visible(row["text"])[:width],
        ]
        for row, prompt in zip(found.samples, prompts, strict=True)
    ]
    right = [i for i, name in enumerate(columns) if name in ("rollout_id", *numeric)]
    title = "samples (lengths in tokens; mean_log_prob over sampled tokens, in nats)"
    if width is None:
        return plain_table(title, columns, rows, right)
    return table(title, columns, rows, right=right, one_line=True)


def _questions(prompts: Sequence[str]) -> list[str]:
    """The prompts without what all of them start and end with (a chat template), as far as its marks and lines go."""
    if len(set(prompts)) < 2:
        return list(prompts)
    head, tail = _shared(prompts), _shared([prompt[::-1] for prompt in prompts])[::-1]
    start = max(head.rfind("⏎"), head.rfind(">")) + 1
    mark = re.search("[<⏎]", tail)
    end = len(tail) - mark.start() if mark else 0
    return [prompt[start : len(prompt) - end] for prompt in prompts]


def _shared(texts: Sequence[str]) -> str:
    """What all texts start with."""
    first, last = min(texts), max(texts)  # in between lies all else
    return first[: next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))]


def _end(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[1 - limit :]


def one_sample(sample: Sample, rollout_id: int) -> Table:
    """The facts of one sample."""
    versions = sorted({sample.weight_version_min, sample.weight_version_max})
    lengths = f"{sample.prompt_len} + {sample.response_len} tokens, {int(sample.loss_mask.sum())} sampled"
    rows = [
        ("rollout", rollout_id),
        ("status", str(sample.status)),
        ("reward", number(sample.reward)),
        ("label", visible(sample.label or "")),
        ("prompt + response", lengths),
        ("weight version", " - ".join(map(str, versions))),
        ("seed", sample.seed),
        ("metadata", _plain(sample.metadata) if sample.metadata else ""),
    ]
    return table(sample.name, ("", ""), [row for row in rows if row[1] != ""], has_header=False)


def strip(sample: Sample, texts: Sequence[str]) -> Text:
    """The response with the colour of each token's log-prob behind it, under a legend."""
    from rich.text import Text

    from vime.record.bands import BANDS, MASKED, band

    found = Text("response  ")
    for (_, name), style in zip(BANDS, BAND_STYLES, strict=True):
        found.append(f" {name} ", style).append(" ")
    found.append(f" {MASKED} ", MASKED_STYLE).append("\n\n")
    for i, text in enumerate(texts, sample.prompt_len):
        style = BAND_STYLES[band(float(sample.rollout_log_probs[i]))] if sample.loss_mask[i] else MASKED_STYLE
        found.append(visible(text), style)
        found.append("\n" * text.count("\n"))
    return found.append("\n")


def numbers(sample: Sample, texts: Sequence[str]) -> str:
    """The strip without colour: every response token with its log-prob, ``-`` where the policy did not sample it."""
    lines, line = ["response, each token with its log-prob in nats (-: not sampled)", ""], ""
    for i, text in enumerate(texts, sample.prompt_len):
        value = f"{float(sample.rollout_log_probs[i]):.2f}" if sample.loss_mask[i] else "-"
        cell = f"{visible(text)!r} {value}"
        if line and len(line) + len(cell) + 2 > STRIP_WIDTH:
            lines, line = [*lines, line], ""
        line += ("  " if line else "") + cell
    return "\n".join([*lines, line, ""])


def least_likely(rows: Sequence[dict[str, Any]]) -> Table:
    """``rows`` of ``token_rows``: position counts from 0 over prompt and response."""
    cells = [(r["position"], r["id"], repr(visible(r["text"])), number(r["log_prob"])) for r in rows]
    return table("least likely tokens", ("position", "id", "text", "log-prob"), cells, right=(0, 1, 3))


def token_rows(sample: Sample, texts: Sequence[str]) -> list[dict[str, Any]]:
    """position, id, text, log_prob and is_sampled of every response token."""
    where = range(sample.prompt_len, len(sample.token_ids))
    return [
        {
            "position": i,
            "id": int(sample.token_ids[i]),
            "text": text,
            "log_prob": float(sample.rollout_log_probs[i]),
            "is_sampled": bool(sample.loss_mask[i]),
        }
        for i, text in zip(where, texts, strict=True)
    ]


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    has_header: bool = True,
    right: Sequence[int] = (),
    one_line: bool = False,
) -> Table:
    """``right``: columns of numbers. ``one_line``: the last column is cut at the edge, no other; none is wrapped."""
    from rich.box import SIMPLE
    from rich.table import Table

    padding = (0, 1, 0, 0) if one_line else (0, 1)
    found = Table(
        title=title, title_justify="left", box=SIMPLE, show_header=has_header, padding=padding, expand=one_line
    )
    for i, column in enumerate(columns):
        justify: Any = "right" if i in right else "left"
        if not one_line:
            found.add_column(column, justify=justify, overflow="fold")
        elif i < len(columns) - 1:
            found.add_column(column.replace("_", "\n", 1), justify=justify, no_wrap=True)
        else:
            found.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        found.add_row(*(_cell(cell) for cell in row))
    return found


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """What ``table`` looks like off a terminal, for any number of rows at once."""
    from rich.cells import cell_len

    widths = [max(cell_len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
        return "  " + "   ".join(
            p + c if i in right else c + p for i, (c, p) in enumerate(zip(cells, padding, strict=True))
        )

    return "\n".join([title, "", line(columns), " " + "─" * (sum(widths) + 3 * len(widths) - 1), *map(line, rows), ""])


def _cell(cell: Any) -> Text:
    from rich.text import Text

    return Text("-" if cell is None else visible(str(cell)))


def _plain(value: Any) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
