"""What a replay is compared with, read off the command line and checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vime.config.load import Loaded, read
from vime.config.schema import Parallel
from vime.errors import ConfigError, UsageError
from vime.preflight import preflight
from vime.record import list_ids, missing_problem, template_path
from vime.record.template import training_template

RECORD = "record"
SHORT = {name: f"parallel.{name}" for name in Parallel.model_fields} | {
    "max_tokens_per_micro_batch": "train.max_tokens_per_micro_batch",
    "dtype": "model.dtype",
}
OF_A_STEP = ("parallel.", "train.", "algo.", "model.", "megatron.", "rollout.sampling.temperature", "cluster.threads_")
"""Settings that a training step depends on; with others the reference would be no run of the same rollouts."""
_QUIET = ("debug.inject=[]", "log.show_samples=0", "checkpoint.save_interval=0", "checkpoint.export_hf=false")


@dataclass(frozen=True)
class Against:
    """The reference of a comparison.

    title       what it is, for people
    references  runs to make before the candidate; the candidate, and those after the first, are compared with the first
    is_asked    False: nobody asked for it, so that what cannot be compared is NOT TESTED
    is_repeat   the references are the replay itself, without a planted fault
    """

    title: str
    references: tuple[Loaded, ...] = ()
    is_asked: bool = True
    is_repeat: bool = False


def against(
    loaded: Loaded, files: Sequence[Path], overrides: Sequence[str], vs: str | None, repeat: int | None, start: int = 0
) -> Against | None:
    """``--vs`` and ``--repeat`` of a replay from rollout ``start`` on, ``loaded`` from ``files`` and ``overrides``.

    None: nothing is asked for, and there is no training record to compare with. Raises UsageError or ConfigError with
    what is wrong, and for a planted fault that nothing would catch.
    """
    if repeat is not None and (repeat < 2 or vs is not None):
        why = "must be >= 2" if repeat < 2 else f"compares the replay with itself, not with --vs {vs}"
        raise UsageError(f"--repeat {repeat}: {why}", "--repeat 2 runs the replay twice; --vs LAYOUT|RECORD once each")
    if repeat is not None:
        same = read(files, [*overrides, *_QUIET])
        return Against(f"itself, {repeat} runs", (same,) * (repeat - 1), is_repeat=True)
    if vs is None or vs.lower() == RECORD:
        return _record(loaded, range(start, loaded.config.run.num_rollouts), is_asked=vs is not None)
    reference = read(files, [*overrides, *layout_overrides(vs), *_QUIET])
    found = preflight(reference, "replay")
    if found.problems:
        raise ConfigError([f"--vs {vs}: {line}" for line in found.problems])
    return Against(vs, (reference,))


def layout_overrides(text: str) -> list[str]:
    """``tp=1,pp=1`` -> KEY=VALUE with dotted names; ``1`` and ``one`` are a single process. UsageError otherwise."""
    if text.strip() in ("1", "one"):
        single = {f"parallel.{name}": field.default for name, field in Parallel.model_fields.items()}
        return [f"{path}={_value(value)}" for path, value in single.items()]
    found = []
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        path = name if "." in name else SHORT.get(name)
        if not equals or not value or path is None:
            raise UsageError(
                f"--vs {text}: {part.strip()!r} is no KEY=VALUE of a layout; keys: {', '.join(SHORT)}, dotted names",
                "for example --vs tp=1,pp=1, --vs one (a single process) or --vs RECORD",
            )
        if not path.startswith(OF_A_STEP):
            rule = f"a reference may differ in {', '.join(f'{start}*' for start in OF_A_STEP)} alone"
            raise UsageError(f"--vs {text}: {path}: {rule}", "what both runs share is set for the replay itself")
        found.append(f"{path}={value}")
    return found


def _value(value: object) -> str:
    return "none" if value is None else str(value).lower()


def _record(loaded: Loaded, ids: range, is_asked: bool) -> Against | None:
    template, faults = loaded.config.debug.load_rollout_data, loaded.config.debug.inject
    assert template is not None
    beside = training_template(template)
    if is_asked or faults:
        if problem := missing_problem(beside, ids):
            what = "--vs RECORD" if is_asked else f"--inject {faults[0]} without --vs"
            hint = "vime train --save-debug-rollout-data writes one beside each record; --vs LAYOUT needs none"
            raise UsageError(f"{what} needs training records: {problem}", hint)
        return Against("the recorded run")
    return (
        Against("the recorded run", is_asked=False) if list_ids(beside) or template_path(beside, 0).is_file() else None
    )


def rollout_ids(template: str, text: str) -> range:
    """``--ids``: the recorded rollouts to train on, one after the other. UsageError lists the ids that exist."""
    from vime.record import parse_ids
    from vime.record.template import has_placeholder

    if not has_placeholder(template):
        hint = "leave --ids out, and say --num-rollouts 1"
        raise UsageError(f"--ids {text}: {template} is one file; ids need {{rollout_id}} in the name", hint)
    ids = parse_ids(text, list_ids(template))
    if ids != list(range(ids[0], ids[-1] + 1)):
        raise UsageError(
            f"--ids {text}: the rollouts {ids} do not follow one another", "training needs A:B without gaps"
        )
    if problem := missing_problem(template, ids):
        raise UsageError(f"--ids {text}: {problem}")
    return range(ids[0], ids[-1] + 1)
