"""Is the rollout human language? If not: load, conversion, released buffers, template or the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vime.align.bench import Bench
from vime.align.coherence import Level
from vime.align.examine import Examination, Examiner
from vime.align.walk import Check
from vime.config.schema import Config
from vime.types import CheckResult, Verdict, WeightManifest

NAME = "coherence"
SHOWN_IDS = 24


@dataclass(frozen=True)
class _Engines:
    """What ``engine_state`` asks of engines, of the bench's first."""

    bench: Bench

    def held(self) -> Mapping[str, WeightManifest]:
        return {"engine 0": self.bench.engine.manifest("engine-held")}

    def changed_buffers(self) -> Mapping[str, list[list[str]]]:
        return self.bench.engine.changed_buffers()


def run(bench: Bench) -> CheckResult:
    """The examination that ``vime rollout`` makes, with oracle and the engine's state where they can tell more."""
    batch = bench.batch
    if not batch.loss_mask_T.any():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no sampled token in this rollout")
    mode = str(bench.engine.describe()["log_probs_mode"]) if bench.is_live else "processed_logprobs"
    examiner = Examiner(
        _as_rollout(bench.config),
        bench.tokenizer,
        engines=_Engines(bench) if bench.is_live else None,
        stop_ids=tuple(batch.header.stop_token_ids),
        log_probs_mode=mode,
    )
    found = examiner(batch)
    numbers = found.case.numbers()
    if found.level == Level.PASS:
        lines = (_prompt(bench), *found.worst[:1])
        return replace(found.check, evidence=lines, numbers=numbers)
    verdict = Verdict.FAIL if _are_markers_wrong(found) else found.check.verdict
    return replace(found.check, verdict=verdict, evidence=_evidence(bench, found), numbers=numbers)


def _are_markers_wrong(found: Examination) -> bool:
    """The prompts alone show it: they are of another family, or hold markers that the model was never trained on."""
    prompts = found.case.prompts
    return bool(prompts.foreign or prompts.absent or prompts.untrained)


def _as_rollout(config: Config) -> Config:
    """Generation alone is examined with everything there is, as a check should be."""
    return config.model_copy(update={"debug": config.debug.model_copy(update={"rollout_only": True})})


def _evidence(bench: Bench, found: Examination) -> tuple[str, ...]:
    symptoms = (symptom.text for symptom in found.symptoms[2:])
    return tuple(dict.fromkeys((*found.check.evidence, *symptoms, *found.worst, _prompt(bench))))


def _prompt(bench: Bench) -> str:
    """The first prompt as the model sees it, special tokens and all, with its ids."""
    batch = bench.batch
    ids = batch.token_ids_T[: int(batch.prompt_lens_N[0])].tolist()
    more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    text = bench.tokenizer.decode(ids, skip_special_tokens=False)
    return f"first prompt, as the model sees it: {text!r}, ids {' '.join(map(str, ids[:SHOWN_IDS]))}{more}"


CHECK = Check(
    name=NAME,
    step="5",
    title="the rollout is human language",
    guide="first step, 1: is what the rollout generates human language?",
    run=run,
    explained_by=(
        "loaded",
        "names",
        "weights",
        "buffers",
        "tokens",
        "sampling",
    ),  # misplaced log-probs look like a wrong engine
)
