"""Is the rollout human language? The verdict, the likely cause in the debug guide's order, and what to try next.

Source: the debug guide, "first training step", point 1: the checkpoint was not loaded; a parameter was not converted or
has another's name; a buffer was lost on release; or it is what a pretrained model says, or the wrong chat template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vime.align.engine_state import EngineState
from vime.align.first_step import engine_limit
from vime.align.oracle import OracleScores
from vime.rollout.coherence import Signals
from vime.types import CheckResult, Verdict

NAME = "coherence"


@dataclass(frozen=True, slots=True)
class Limits:
    """Every threshold, found on SmolLM2-135M-Instruct and the tiny model: clean at temperature 0, 0.5, 1 and 1.5, and
    with each planted fault. ``clean`` and ``faults`` below are what was measured there.
    """

    uniform: float = 0.7
    """Mean log-prob / -log V, up to temperature 1. clean <= 0.26; random weights >= 0.81."""
    vague: float = 0.4
    """The same, as a suspicion. Swapped layers, lost rotary cache: 0.37 to 0.55."""
    one_token: float = 0.5
    """Share of samples that are one token again and again. clean 0; greedy with random weights 1."""
    some_one_token: float = 0.2
    """The same, as a suspicion: a small model that is asked for a row of dashes may write one."""
    repetition: float = 8.0
    """Median compression of the texts, as a suspicion alone: small models loop when greedy. clean <= 1.4."""
    undecodable: float = 0.01
    """Share of U+FFFD. clean <= 0.002; swapped layers 0.02."""
    mixed_scripts: float = 0.25
    """Share of samples with two scripts or more that no prompt has. clean 0, whatever languages the prompts are in."""
    invalid: float = 0.01
    """Share of ids that the tokenizer does not know; any at all is suspicious: trained models sample none."""
    wide_gap: float = 0.5
    """Mean |engine - oracle|, nats: another distribution. faults >= 2."""
    bfloat16_gap: float = 0.15
    """Mean |engine - oracle| where the engine computes in bfloat16: clean 0.04 with 30 layers, at temperature 1."""
    long_response: int = 512
    """Tokens within which most answers end; where the limit is lower, truncated samples say nothing."""
    marker_log_prob: float = 1.0
    """Mean log-prob of the end of turn in the prompt / -log V: rarer than at random. clean 0.02; base model 1.5."""


LIMITS = Limits()


class Level(StrEnum):
    """The public words of this verdict."""

    PASS = "PASS"
    SUSPECT = "SUSPECT"
    GARBLED = "GARBLED"


VERDICTS = {Level.PASS: Verdict.PASS, Level.SUSPECT: Verdict.WARN, Level.GARBLED: Verdict.FAIL}


@dataclass(frozen=True, slots=True)
class PromptEvidence:
    """What the prompts say about the chat template.

    foreign    markers in the prompts that are no tokens of this model
    absent     the template's own markers, where the prompts hold none of them though messages were rendered
    untrained  sentences about markers whose embedding was never trained
    marker_log_prob  mean log-prob of the end-of-turn markers in the prompts under the oracle, nats; None: none there
    """

    foreign: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    marker_log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class Symptom:
    level: Level
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """All that is known of one rollout. ``oracle``: scores, or the reason why there are none."""

    signals: Signals
    temperature: float
    max_response_len: int
    dtype: str
    num_layers: int
    oracle: OracleScores | str = "only vime rollout asks it"
    prompts: PromptEvidence = field(default_factory=PromptEvidence)

    @property
    def gap_limit(self) -> float:
        """Largest mean |engine - oracle|, nats; a temperature below 1 multiplies every difference of logits."""
        base = LIMITS.bfloat16_gap if self.dtype == "bfloat16" else engine_limit(self.dtype, self.num_layers)
        return base / min(1.0, self.temperature or 1.0)

    @property
    def gap(self) -> float | None:
        """Mean |engine - oracle|, nats; None where they cannot be compared."""
        if isinstance(self.oracle, str) or not self.oracle.is_comparable:
            return None
        return self.oracle.mean_gap

    @property
    def is_engine_right(self) -> bool:
        """The engine computes what the checkpoint says, so what it writes is what the model writes."""
        return self.gap is not None and self.gap <= self.gap_limit and not self.signals.nonfinite_share

    def numbers(self) -> dict[str, float]:
        """Every signal, for people and scripts."""
        found = self.signals.as_dict()
        if isinstance(self.oracle, OracleScores):
            found |= {"oracle_log_prob": self.oracle.log_prob, "oracle_samples": float(len(self.oracle.rows))}
            found["oracle_stops"] = self.oracle.expected_stops
        if self.gap is not None and isinstance(self.oracle, OracleScores):
            found |= {"oracle_gap": self.gap, "oracle_gap_max": self.oracle.max_gap}
        if self.prompts.marker_log_prob is not None:
            found["marker_log_prob"] = self.prompts.marker_log_prob
        return found


def symptoms(case: Case) -> list[Symptom]:
    """What speaks against the rollout, the gravest first; nothing for a clean one."""
    found = [*_of_numbers(case.signals), *_of_text(case.signals), *_of_certainty(case)]
    found += [*_of_oracle(case), *_of_prompts(case.prompts, case.signals.log_size)]
    return sorted(found, key=lambda symptom: symptom.level != Level.GARBLED)


def _of_numbers(s: Signals) -> list[Symptom]:
    found = []
    if s.nonfinite_share:
        count, total = int((~s.is_finite_N).sum()), len(s.is_finite_N)
        found.append(Symptom(Level.GARBLED, f"{count} of {total} samples have log-probs that are not finite"))
    if s.invalid_share:
        level = Level.GARBLED if s.invalid_share >= LIMITS.invalid else Level.SUSPECT
        found.append(Symptom(level, f"{s.invalid_share:.2%} of the sampled ids are outside the tokenizer's vocabulary"))
    return found


def _of_text(s: Signals) -> list[Symptom]:
    found = []
    if s.one_token_share >= LIMITS.some_one_token:
        level = Level.GARBLED if s.one_token_share >= LIMITS.one_token else Level.SUSPECT
        found.append(Symptom(level, f"{s.one_token_share:.0%} of the samples are one token again and again"))
    if s.repetition >= LIMITS.repetition:
        found.append(Symptom(Level.SUSPECT, f"the texts repeat themselves: zlib shrinks them {s.repetition:.1f} times"))
    if s.undecodable_share >= LIMITS.undecodable:
        found.append(Symptom(Level.SUSPECT, f"{s.undecodable_share:.1%} of the characters could not be decoded"))
    if s.mixed_scripts_share >= LIMITS.mixed_scripts:
        text = f"{s.mixed_scripts_share:.0%} of the samples mix scripts that no prompt has"
        found.append(Symptom(Level.SUSPECT, text))
    return found


def _of_certainty(case: Case) -> list[Symptom]:
    s, found = case.signals, []
    if case.temperature <= 1.0 and s.uniformity >= LIMITS.vague:
        level = Level.GARBLED if s.uniformity >= LIMITS.uniform else Level.SUSPECT
        text = f"mean log-prob {s.log_prob:.2f}: a model that draws any token has {-s.log_size:.2f}"
        found.append(Symptom(level, text))
    if s.truncated_share == 1.0 and case.max_response_len >= LIMITS.long_response:
        text = f"no sample of {len(s.is_finite_N)} ended within {case.max_response_len} tokens"
        if isinstance(case.oracle, OracleScores):
            text += f"; the Hugging Face model expects {case.oracle.expected_stops:.2g} stop ids in each"
        found.append(Symptom(Level.SUSPECT, text))
    return found


def _of_oracle(case: Case) -> list[Symptom]:
    if case.gap is None or case.gap <= case.gap_limit:
        return []
    level = Level.SUSPECT if case.gap < LIMITS.wide_gap else Level.GARBLED  # nan, of a checkpoint that holds nan, too
    assert isinstance(case.oracle, OracleScores)
    text = (
        f"mean |engine - Hugging Face| is {case.gap:.2g} nats (limit {case.gap_limit:.2g}); to the checkpoint's own "
        f"model the tokens have mean log-prob {case.oracle.log_prob:.2f}"
    )
    return [Symptom(level, text)]


def _of_prompts(p: PromptEvidence, log_size: float) -> list[Symptom]:
    found = []
    if p.foreign:
        found.append(f"the prompts hold {_few(p.foreign)}, which are no tokens of this model")
    if p.absent:
        found.append(f"the prompts hold none of the template's own markers {_few(p.absent)}")
    found += p.untrained
    if p.marker_log_prob is not None and p.marker_log_prob < -LIMITS.marker_log_prob * log_size:
        found.append(
            f"the model gives the end of turn in the prompts log-prob {p.marker_log_prob:.1f}, less than any token at "
            f"random ({-log_size:.1f})"
        )
    return [Symptom(Level.SUSPECT, text) for text in found]


def level_of(found: list[Symptom]) -> Level:
    """The gravest level."""
    levels = {symptom.level for symptom in found}
    return next((level for level in (Level.GARBLED, Level.SUSPECT) if level in levels), Level.PASS)


def needs_engine_state(case: Case, level: Level) -> bool:
    """Whether reading back weights and buffers can tell more: not where the engine is known to be right."""
    return level != Level.PASS and not case.is_engine_right


def cause_of(case: Case, state: EngineState | None) -> tuple[str, str, tuple[str, ...]]:
    """(likely cause, next step, evidence) of a rollout that did not pass, in the order of the guide."""
    if state is not None and state.differences:
        return _weights_cause(state)
    if state is not None and state.lost_buffers:
        names = _few(state.lost_buffers)
        return (
            f"released buffers: {names} is not what it was when the engine started",
            "restart the engine: no checkpoint and no weight sync carries buffers; if it was lost on sleep, keep it "
            "out of what is released",
            tuple(f"changed: {name}" for name in state.lost_buffers[:3]),
        )
    if case.is_engine_right or (case.gap is None and _of_prompts(case.prompts, case.signals.log_size)):
        return _model_cause(case)
    if state is None or state.unknown:
        why = state.unknown if state is not None else "the engines were not asked what they hold"
        return (
            f"not decided between load, conversion, released buffers and the model itself ({why})",
            "run vime rollout on the same model: it compares the engine with the checkpoint"
            if state is None
            else "run vime rollout with its own engines: they are compared with the checkpoint",
            (),
        )
    if case.gap is None:
        why = case.oracle if isinstance(case.oracle, str) else "sampled with top_p, top_k, min_p or penalties"
        return (
            f"the engine holds the checkpoint's weights; whether it computes rightly was not tested ({why})",
            "if the model is a pretrained one, try the instruct version; sample with neutral options to compare",
            (),
        )
    return (
        f"the engine's computation: its {state.num_tensors} tensors and its buffers are right, its log-probs are not",
        "run the engine with model.dtype = float32, vllm.enforce_eager = true, vllm.enable_prefix_caching = false and "
        "other attention backends",
        (),
    )


def _weights_cause(state: EngineState) -> tuple[str, str, tuple[str, ...]]:
    evidence = (*map(str, state.differences[:3]), *(f"changed: {name}" for name in state.lost_buffers[:3]))
    count = f"{state.num_wrong} of {state.num_tensors} tensors are not the checkpoint's"
    if state.num_wrong == state.num_tensors:
        return (
            f"load: the engine does not hold the checkpoint: {count}",
            "look for the loader's messages in the engine's log (VLLM_LOGGING_LEVEL=INFO); is vllm.load_format set?",
            evidence,
        )
    permuted = [d.name for d in state.differences if d.kind == "permuted"]
    if permuted:
        return (
            f"conversion: layers have each other's weights ({_few(tuple(permuted))}): {count}",
            "vime dump-weights RUN.toml --map shows which rank gives its tensors which layer numbers",
            evidence,
        )
    return (
        f"conversion: {_few(tuple(d.name for d in state.differences))}: {count}",
        "vime dump-weights RUN.toml compares all ends, and names rows, shards and tensors that were exchanged",
        evidence,
    )


def _model_cause(case: Case) -> tuple[str, str, tuple[str, ...]]:
    p = case.prompts
    evidence = tuple(symptom.text for symptom in _of_prompts(p, case.signals.log_size))
    agrees = f"the engine agrees with Hugging Face (mean gap {case.gap:.2g} nats)" if case.gap is not None else ""
    agrees = agrees if case.is_engine_right else "the prompts alone show it"
    if p.foreign or p.absent:
        return (
            f"chat template: the prompts are not what this model was trained on; {agrees}",
            "render messages with the model's own template: data.apply_chat_template=true, prompts without markers",
            evidence,
        )
    if evidence:
        return (
            f"pretrained model: its chat markers were never trained; {agrees}",
            "use the instruct version of the model, or data.apply_chat_template=false with plain prompts",
            evidence,
        )
    if case.signals.uniformity >= LIMITS.uniform:
        return (
            f"pretrained model: the checkpoint is as good as random; {agrees}",
            "is model.path the trained model? Its weights draw nearly every token alike",
            evidence,
        )
    return (
        f"pretrained model or chat template: {agrees}, so the model itself writes this",
        "compare with the instruct version of the model, and look at the first prompt as the model sees it",
        evidence,
    )


def check_of(case: Case, found: list[Symptom], state: EngineState | None, is_training: bool) -> CheckResult:
    """The verdict. In training GARBLED is a warning: reinforcement learning may start from a random model."""
    if not case.signals.num_tokens_N.sum():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no sampled token in this rollout")
    level = level_of(found)
    verdict = VERDICTS[level]
    if is_training and verdict == Verdict.FAIL:
        verdict = Verdict.WARN
    if level == Level.PASS:
        return CheckResult(NAME, verdict, _agreement(case))
    cause, next_step, evidence = cause_of(case, state)
    measured = f"{level}: " + "; ".join(symptom.text for symptom in found[:2])
    return CheckResult(NAME, verdict, measured, "", evidence, cause, next_step)


def _agreement(case: Case) -> str:
    if case.gap is not None:
        return f"mean |engine - Hugging Face| {case.gap:.2g} nats (limit {case.gap_limit:.2g})"
    why = case.oracle if isinstance(case.oracle, str) else "sampled with options that change the distribution"
    return f"mean log-prob {case.signals.log_prob:.2f}; Hugging Face model NOT TESTED: {why}"


def _few(names: tuple[str, ...], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
