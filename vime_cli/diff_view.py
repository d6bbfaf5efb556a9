"""How the difference of two records looks in a terminal. Makes text; prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from vime_cli.output import number
from vime_cli.record_view import table, visible

if TYPE_CHECKING:
    from vime.record.diff import RecordDiff, SampleDiff
    from vime.record.tokens import TokenTexts

NUM_NAMES = 20


def parts(found: RecordDiff, paths: tuple[Any, Any], limit: int, texts: tuple[TokenTexts, TokenTexts]) -> list[Any]:
    """Header, samples on one side, and the first ``limit`` samples that differ."""
    made: list[Any] = [f"rollout {found.rollout_ids[0]}\n  A {paths[0]}, {found.num_samples[0]} samples"]
    made.append(f"  B {paths[1]}, {found.num_samples[1]} samples\n")
    if found.header:
        rows = [(name, _shown(a), _shown(b)) for name, a, b in found.header]
        made.append(table("header", ("field", "A", "B"), rows))
    made += [f"{line}\n" for line in _one_sided(found)]
    if found.samples:
        # Other weights and other tokens have been said: by the header, and by the place where a sample departs.
        said = (
            {"weight_version_min", "weight_version_max"} if "weight_version" in {h[0] for h in found.header} else set()
        )
        made.append(samples(found.samples[:limit], texts, said))
        if (num := len(found.samples)) > limit:
            made.append(f"{limit} of {num} samples that differ (all: --limit {num})\n")
    return made


def _shown(value: Any) -> str:
    return "-" if value is None else visible(str(value))


def _one_sided(found: RecordDiff) -> list[str]:
    lists: list[tuple[str, Sequence[Any]]] = [
        ("prompts only in A", found.prompts_only_a),
        ("prompts only in B", found.prompts_only_b),
        ("samples only in A", found.only_a),
        ("samples only in B", found.only_b),
    ]
    lines = [f"{name}: {_few(entries)}" for name, entries in lists if entries]
    return [*lines, "the samples of both stand in another order"] if found.is_reordered else lines


def _few(entries: Sequence[Any]) -> str:
    more = f" and {len(entries) - NUM_NAMES} more" if len(entries) > NUM_NAMES else ""
    return ", ".join(map(str, entries[:NUM_NAMES])) + more


def samples(found: Sequence[SampleDiff], texts: tuple[TokenTexts, TokenTexts], said: AbstractSet[str]) -> Any:
    """One line per sample: where it departs, which tokens stand there, and what else differs but ``said``."""
    columns = (
        "sample",
        "token match",
        "departs at",
        "A there",
        "B there",
        "reward",
        "log-probs max",
        "mean",
        "besides",
    )
    rows = [
        (
            s.name,
            f"{s.token_match:.4f}",
            _place(s),
            *(_token(s, side, texts[side]) for side in (0, 1)),
            _change(s.rewards),
            number(s.log_prob_max),
            number(s.log_prob_mean),
            _besides(s, said | ({"text"} if s.position is not None else set())),
        )
        for s in found
    ]
    title = (
        "samples that differ (departs at: index of the token, prompt included; "
        "log-probs: |A - B| over the tokens before, nats)"
    )
    return table(title, columns, rows, right=(1, 5, 6, 7))


def _place(s: SampleDiff) -> str:
    if s.position is None:
        return "prompt length" if s.is_in_prompt else ""
    return f"{s.position} (prompt)" if s.is_in_prompt else f"{s.position} (response {s.response_position})"


def _token(s: SampleDiff, side: int, texts: TokenTexts) -> str:
    token_id = s.token_ids[side]
    if s.position is None:
        return ""
    if token_id is None:
        return "ended"
    return f"[{token_id}]" if texts.problem else f"{visible(texts.of([token_id])[0])!r} [{token_id}]"


def _change(values: tuple[Any, Any]) -> str:
    a, b = values
    return "" if a == b else f"{number(a)} -> {number(b)}"


def _besides(s: SampleDiff, said: AbstractSet[str]) -> str:
    status = [f"status {s.statuses[0]} -> {s.statuses[1]}"] if s.statuses[0] != s.statuses[1] else []
    return ", ".join([*status, *(name for name in s.other if name not in said)])
