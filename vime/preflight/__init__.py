"""Everything that can be known before a process starts: cheap, light, and all problems at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vime.config.load import PRINT_CONFIG_HINT, Loaded
from vime.config.rules import batch_arithmetic
from vime.errors import ConfigError
from vime.forecast import ForecastRow, forecast
from vime.models import ModelSpec, layer_map
from vime.preflight import check
from vime.preflight.packages import install_line, is_installed, missing
from vime.preflight.planted import REGENERATE, faults
from vime.run_folder import RunFolder, num_rollouts_of

MAP = "dump-weights --map"
DUMPS = ("dump-weights", MAP)
__all__ = ["Preflight", "preflight"]


@dataclass
class Preflight:
    """What is wrong, what is doubtful, and what is known about a run that has not started.

    problems, warnings  one line each, with setting, value and origin
    facts               label -> text
    layers              (trainer ranks of a pipeline stage, its layers); empty where there are problems
    memory              forecast per process; empty where there are problems
    hint                where to look, where settings are wrong
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    layers: list[tuple[str, str]] = field(default_factory=list)
    memory: list[ForecastRow] = field(default_factory=list)
    hint: str | None = None

    def raise_problems(self) -> None:
        """Raises ConfigError with every problem, if there is one."""
        if self.problems:
            raise ConfigError(self.problems, self.hint)

    def add(self, problems: Iterable[str], warnings: Iterable[str] = ()) -> None:
        self.problems += [p for p in problems if p not in self.problems]
        self.warnings += [w for w in warnings if w not in self.warnings]


def preflight(
    loaded: Loaded, command: str, *, resume: str | None = None, start: int = 0, is_dry_run: bool = False
) -> Preflight:
    """Check ``loaded`` for ``command`` ("train", "rollout", "replay"). Starts nothing and loads no library.

    ``start`` is the first rollout to do where nothing is resumed. In a dry run libraries that are not installed are a
    warning, otherwise a problem.
    """
    found = Preflight(list(loaded.problems), list(loaded.warnings))
    found.hint = PRINT_CONFIG_HINT if loaded.problems else None
    found.add(*check.native_names(loaded))
    spec, problems = check.model(loaded, "model.path")
    found.add(*faults(loaded, command, spec))
    found.add(problems)
    if command not in (REGENERATE, *DUMPS):  # prompts, reward and run folder are not used
        _inputs(found, loaded, resume, start)
        found.add(check.run_folder(loaded, resume), check.resume_changes(loaded, resume) if resume else ())
    _packages(found, loaded, command, is_dry_run)
    if spec is not None:
        _model_rules(found, loaded, spec)
    found.facts = check.facts(loaded, spec)
    if loaded.config.debug.load_rollout_data:
        found.facts["records"] += f": {check.records_used(loaded.config, start)}"
    if loaded.config.needs_trainer and not loaded.config.debug.load_rollout_data:
        found.facts["batch"] = batch_arithmetic(loaded.config)
    return found


def _inputs(found: Preflight, loaded: Loaded, resume: str | None, start: int) -> None:
    """Tokenizer, prompt files, reward, records."""
    c = loaded.config
    done = RunFolder(Path(resume)).checkpoints() if resume else []
    start = num_rollouts_of(done[-1]) if done else start
    if c.needs_engines:
        found.add(check.chat_template(loaded))
        found.add([], check.leftovers(loaded))
        found.add(check.reward_function(loaded))
    if not is_installed("numpy"):
        found.add([], ["algo.name, rollout.generate, prompt files and records: not checked, numpy is not installed"])
        return
    if c.needs_trainer:
        found.add(check.estimator(loaded))
    if c.needs_engines:
        found.add(check.generate_function(loaded))
        if not loaded.concerns_invalid(["data.prompts"]):
            found.add(check.data_files(loaded))
    found.add(check.record_files(loaded, start))


def _model_rules(found: Preflight, loaded: Loaded, spec: ModelSpec) -> None:
    c = loaded.config
    found.add(*check.context(loaded, spec))
    if c.needs_trainer and c.uses_reference and c.model.ref_path is not None:
        reference, problems = check.model(loaded, "model.ref_path")
        found.add(problems)
        if reference is not None:
            found.add(check.same_architecture(loaded, spec, reference))
    found.add(check.layout(loaded, spec))
    found.add(check.engine_layout(loaded, spec))
    if found.problems:
        return
    if c.needs_trainer:
        found.layers = _layer_rows(loaded, spec)
    found.memory = forecast(c, spec) if not (c.needs_engines and c.rollout.engines) else []


def _layer_rows(loaded: Loaded, spec: ModelSpec) -> list[tuple[str, str]]:
    """One row per pipeline stage; the stage is the slowest part of a trainer's rank."""
    p = loaded.config.parallel
    width = p.world_size // p.pp
    rows = []
    for stage, chunks in enumerate(layer_map(spec, p)):
        ranks = f"ranks {stage * width}-{(stage + 1) * width - 1}" if width > 1 else f"rank {stage}"
        experts = f", {spec.num_experts // p.ep} of {spec.num_experts} experts a rank" if spec.is_moe else ""
        rows.append((f"stage {stage}, {ranks}", "; ".join(_span(chunk) for chunk in chunks) + experts))
    return rows


def _span(layers: list[int]) -> str:
    if len(layers) <= 1:
        return f"layer {layers[0]}" if layers else "no layer"
    return f"layers {layers[0]}-{layers[-1]}"


def _packages(found: Preflight, loaded: Loaded, command: str, is_dry_run: bool) -> None:
    absent = missing(loaded.config)
    if not absent or command == MAP:  # which asks config.json alone
        return
    text = f"vime {command} needs {', '.join(absent)}: not installed. Run: {install_line(absent)}"
    found.add([] if is_dry_run else [text], [text] if is_dry_run else [])
