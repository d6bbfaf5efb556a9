"""``vime replay --regenerate``: recorded prompts, seeds and options once more through live engines; no trainer."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vime.align.first_step import engine_limit
from vime.backends.vllm.remote import RemoteEngines
from vime.cluster.engines import RayEngines
from vime.config.load import Loaded
from vime.config.schema import Config, Sampling
from vime.config.sources import COMMAND_LINE
from vime.data.tokenizer import load_tokenizer, tokenizer_digest
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.log import Phase, Progress
from vime.models import load_spec
from vime.preflight.planted import REGENERATE
from vime.protocols import RolloutEngine
from vime.record.files import record_files
from vime.record.reader import read
from vime.rollout import regenerate as comparing
from vime.rollout.regenerate import Known, Regeneration, SampleMatch
from vime.run_folder import versions
from vime.runs.parts import engines_alone
from vime.runs.planted import planted
from vime.types import CheckResult, Prompt, RolloutBatch, RolloutHeader, Sample, Status, Verdict
from vime.weights.manifest import manifest_digest

LOAD = "--load"


@dataclass(frozen=True)
class Regenerated:
    """What ``vime replay --regenerate`` hands back."""

    files: list[Path]
    found: Regeneration
    check: CheckResult

    @property
    def failed_checks(self) -> list[CheckResult]:
        return [self.check] if self.check.verdict == Verdict.FAIL else []

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) for the closing table."""
        found, check = self.found, self.check
        rows = [
            ("records", ", ".join(map(str, self.files))),
            ("samples identical", f"{found.num_identical} of {len(found.matches)}"),
            ("tokens that match", f"{found.num_matching} of {found.num_tokens} ({found.match_share:.2%})"),
            ("max |log-prob difference|", f"{found.log_prob_gap:.3g} before the answers part"),
        ]
        rows += [("not tested", f"{n} samples: {reason}") for reason, n in found.not_tested.items()]
        rows += [("known difference", known.text) for known in found.known]
        rows.append(("check", f"{check.verdict}  {check.name}: {check.measured or check.cause}"))
        if check.verdict in (Verdict.WARN, Verdict.FAIL):
            rows += [("likely", check.cause), ("try", check.next_step)]
        return rows

    def departure_rows(self, limit: int) -> list[tuple[str, str, str, str]]:
        """The first ``limit`` departing samples: sample, where, recorded, again."""
        return comparing.rows(self.found.departures[:limit])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        found, check = self.found, self.check
        return {
            "command": REGENERATE,
            "files": [str(path) for path in self.files],
            "num_samples": len(found.matches),
            "num_identical": found.num_identical,
            "num_tokens": found.num_tokens,
            "num_matching_tokens": found.num_matching,
            "max_log_prob_gap": found.log_prob_gap,
            "not_tested": found.not_tested,
            "known_differences": [known.text for known in found.known],
            "check": {name: getattr(check, name) for name in CheckResult.__dataclass_fields__}
            | {"verdict": str(check.verdict), "evidence": list(check.evidence)},
            "departures": [comparing.as_dict(m) for m in found.departures],
        }


@dataclass(frozen=True)
class Record:
    """One file: its rollout, and the options it is asked with again."""

    path: Path
    batch: RolloutBatch
    sampling: dict[str, Any]

    @property
    def header(self) -> RolloutHeader:
        return self.batch.header


def regenerate(loaded: Loaded, say: Progress, template: str, ids: str | None = None) -> Regenerated:
    """Ask again what the records of ``template`` hold, and compare.

    UsageError for a record that cannot be asked again: another tokenizer, or none of its options and seeds.
    """
    tokenizer = load_tokenizer(loaded.config.model.path)
    files = record_files(template, ids, LOAD)
    overrides = _overrides(loaded)
    digest = tokenizer_digest(tokenizer)
    records = [_read(file.path, digest, overrides) for file in files]
    known = [*_config_differs(records, loaded.config), *_overridden(records, overrides)]
    for record in records:
        if record.header.weight_version > 0:
            version = record.header.weight_version
            say.warn(f"{record.path} was sampled with weights v{version}: does model.path hold an export of them?")
    questions, skipped = _questions(records)
    matches: list[SampleMatch] = []
    with tempfile.TemporaryDirectory(prefix="vime-") as folder, planted(loaded, Path(folder), say) as planted_loaded:
        config = _as_recorded(planted_loaded.config, records)
        if questions:  # else no engine is started for nothing
            with engines_alone(config, say, tokenizer) as (engines, infos):
                known = [*_weights_differ(records, engines, say), *known, *_versions_differ(records, infos[0], config)]
                with say.phase("generate", len(questions)) as phase:
                    matches = asyncio.run(_all(config, questions, engines.engines, tokenizer, phase, skipped))
    found = Regeneration(matches, dict(skipped), known)
    layers, dtype = load_spec(config.model.path).num_layers, config.model.dtype
    check = comparing.judge(found, engine_limit(dtype, layers), f"{dtype}, {layers} layers")
    return Regenerated([r.path for r in records], found, check)


def _read(path: Path, digest: str, overrides: Mapping[str, Any]) -> Record:
    batch = read(path, tokenizer_digest=digest)
    options = {name: batch.header.sampling[name] for name in Sampling.model_fields if name in batch.header.sampling}
    if "temperature" not in options:
        what = batch.header.model.get("source", "it")
        raise UsageError(
            f"{path} cannot be generated again: {what} holds neither sampling options nor seeds",
            "take a record that vime wrote (vime rollout --save, vime train --save-debug-rollout-data)",
        )
    try:
        sampling = Sampling.model_validate(options)
    except ValidationError as error:
        bad = "; ".join(f"sampling.{e['loc'][0]} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UsageError(f"{path} cannot be generated again: {bad}", "its header was changed, or is damaged") from error
    return Record(path, batch, {name: getattr(sampling, name) for name in options} | dict(overrides))


def _overrides(loaded: Loaded) -> dict[str, Any]:
    """Sampling options of the command line: they win over the record."""
    given = [n for n in Sampling.model_fields if loaded.origin(f"rollout.sampling.{n}") == COMMAND_LINE]
    return {name: getattr(loaded.config.rollout.sampling, name) for name in given}


def _as_recorded(config: Config, records: Sequence[Record]) -> Config:
    """With the options of the first record, and a context for the longest answers of all."""
    longest = max(record.sampling.get("max_response_len", 1) for record in records)
    sampling = Sampling.model_validate(records[0].sampling | {"max_response_len": longest})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"sampling": sampling})})


# ---- what is known to differ -----------------------------------------------------------------------------------------


def _config_differs(records: Sequence[Record], config: Config) -> Iterator[Known]:
    content = (Path(config.model.path) / "config.json").read_bytes()
    here = hashlib.blake2b(content, digest_size=16).hexdigest()
    for there in dict.fromkeys(r.header.model.get("config_digest", "") for r in records):
        if there not in ("", here):
            path = next(r.header.model.get("path") for r in records if r.header.model.get("config_digest") == there)
            text = f"config.json of model.path is not that of the record ({here[:12]}, recorded {there[:12]})"
            yield Known(text, f"model.path={path}")


def _overridden(records: Sequence[Record], overrides: Mapping[str, Any]) -> Iterator[Known]:
    for name, value in overrides.items():
        recorded = [r.header.sampling.get(name) for r in records]
        if others := list(dict.fromkeys(str(there) for there in recorded if there != value)):
            text = f"rollout.sampling.{name} = {value} (command line), recorded {', '.join(others)}"
            yield Known(text, f"leave rollout.sampling.{name} out of the command line", is_asked=True)


def _weights_differ(records: Sequence[Record], engines: RayEngines | RemoteEngines, say: Progress) -> Iterator[Known]:
    """The digest of the weights that a sync sent against that of what the engine holds; the version where no digest."""
    recorded = {(r.header.weight_version, r.header.manifest_digest) for r in records}
    held = _held_digest(engines) if any(digest for _, digest in recorded) else ""
    for version, digest in sorted(recorded):
        step = "model.path=RUN_DIR/hf of the run that was recorded (checkpoint.export_hf)"
        if digest and held == digest:
            say.note(f"weights: the engine holds those of the record (v{version}, {digest[:12]})")
        elif digest and held:
            text = f"the record's weights v{version} are {digest[:12]}, the engine holds {held[:12]}"
            yield Known(text, step)
        elif version > 0:
            yield Known(f"the record's weights are v{version}, trained; model.path is taken for them", step)


def _held_digest(engines: RayEngines | RemoteEngines) -> str:
    """Of the first engine; "" where it cannot be asked."""
    if isinstance(engines, RemoteEngines):
        return ""
    return manifest_digest(next(iter(engines.held().values())))


def _versions_differ(records: Sequence[Record], info: Mapping[str, Any], config: Config) -> Iterator[Known]:
    now = versions()
    for name in ("vllm", "torch"):
        here = str(info["vllm_version"]) if name == "vllm" else "" if config.rollout.engines else now.get(name, "")
        for there in dict.fromkeys(_recorded_version(r.header, name) for r in records):
            if here and there and _plain(here) != _plain(there):
                text = f"{name} is {here}, recorded {there}"
                yield Known(text, f"install {name} {there}, or take this record's samples anew")


def _recorded_version(header: RolloutHeader, name: str) -> str:
    found = header.library_versions
    return found.get(name) or found.get(f"{name}-cpu") or ""


def _plain(version: str) -> str:
    return version.partition("+")[0]


# ---- asking again ----------------------------------------------------------------------------------------------------

Question = tuple[Record, list[Sample]]
"""Samples of one group and one prompt, asked together as they were."""


def _questions(records: Sequence[Record]) -> tuple[list[Question], Counter[str]]:
    """What can be asked again, in the order of the records; and reason -> samples that cannot."""
    skipped: Counter[str] = Counter()
    questions: dict[tuple[int, int, bytes], Question] = {}
    for at, record in enumerate(records):
        for sample in record.batch.samples():
            reason = comparing.reason_not_to(sample)
            if reason is not None:
                skipped[reason] += 1
                continue
            key = (at, sample.group_id, sample.token_ids[: sample.prompt_len].tobytes())
            questions.setdefault(key, (record, []))[1].append(sample)
    return list(questions.values()), skipped


async def _all(
    config: Config,
    questions: Sequence[Question],
    engines: Sequence[RolloutEngine],
    tokenizer: Any,
    phase: Phase,
    skipped: Counter[str],
) -> list[SampleMatch]:
    """Every sample against its second generation. VimeError if an engine fails, or after rollout.timeout_seconds."""
    tasks = [
        asyncio.ensure_future(_again(engines[i % len(engines)], record, asked, tokenizer, skipped))
        for i, (record, asked) in enumerate(questions)
    ]
    for task in tasks:
        task.add_done_callback(lambda done: phase.update(phase.done + 1))
    try:
        async with asyncio.timeout(config.rollout.timeout_seconds):
            return [match for found in await asyncio.gather(*tasks) for match in found]
    except TimeoutError as error:
        pending = sum(t.cancelled() or not t.done() for t in tasks)  # the limit has cancelled them
        text = f"rollout.timeout_seconds={config.rollout.timeout_seconds:g}: {pending} of {len(tasks)} prompts pending"
        raise VimeError(text, "raise the limit, or choose fewer rollouts with --ids") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again(
    engine: RolloutEngine, record: Record, asked: Sequence[Sample], tokenizer: Any, skipped: Counter[str]
) -> list[SampleMatch]:
    first = asked[0]
    prompt = Prompt(first.group_id, np.array(first.token_ids[: first.prompt_len]), first.prompt_text, first.label)
    try:
        answers = await engine.generate(prompt, [s.seed for s in asked], record.sampling)
    except PromptTooLong:
        skipped["the prompt is over the context of this engine"] += len(asked)
        return []
    is_greedy = record.sampling["temperature"] == 0.0
    rollout_id = record.batch.rollout_id
    pairs = [(r, a) for r, a in zip(asked, answers, strict=True) if a.status is not Status.ABORTED]
    if len(pairs) < len(asked):
        skipped["the second generation was aborted"] += len(asked) - len(pairs)
    return [comparing.match(rollout_id, recorded, again, tokenizer.decode, is_greedy) for recorded, again in pairs]
