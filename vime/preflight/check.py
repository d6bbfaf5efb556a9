"""The single checks of a preflight. Each takes the loaded configuration and yields lines for problems or warnings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vime.config import native
from vime.config.load import Loaded, read, value_of
from vime.config.message import UNSET, Finding, short
from vime.config.names import field_of, paths_of
from vime.config.schema import Config
from vime.errors import ConfigError, UsageError, VimeError
from vime.models import ModelSpec, check_layout, load_spec
from vime.preflight import model_folder
from vime.preflight.packages import is_installed
from vime.run_folder import RunFolder, num_rollouts_of

CHECKED_BYTES = 1 << 30
"""So much of the records is read before anything starts: some seconds."""


def native_names(loaded: Loaded) -> tuple[list[str], list[str]]:
    """[megatron.*] and [vllm] against the libraries; the tables of derived names are read where they are needed."""
    derived: dict[str, dict[str, str]] = {}
    megatron = loaded.config.megatron
    if megatron.transformer or megatron.optimizer or megatron.ddp:
        from vime.backends.megatron.derived import DERIVED_DDP, DERIVED_OPTIMIZER, DERIVED_TRANSFORMER

        derived["megatron.transformer"] = DERIVED_TRANSFORMER
        derived["megatron.optimizer"] = DERIVED_OPTIMIZER
        derived["megatron.ddp"] = DERIVED_DDP
    if loaded.config.vllm:
        from vime.backends.vllm.derived import DERIVED_ENGINE

        derived["vllm"] = DERIVED_ENGINE
    return native.check(loaded, derived)


def model(loaded: Loaded, setting: str) -> tuple[ModelSpec | None, list[str]]:
    """(what the model is, problems) of the folder under ``setting``; no spec where config.json cannot be used."""
    path = value_of(loaded.config, setting)
    if path is None or loaded.concerns_invalid([setting]) or _has_line(loaded, setting):
        return None, []
    folder = Path(path)
    problems = [loaded.line(Finding(setting, text)) for text in model_folder.check_parts(folder)]
    if not (folder / "config.json").is_file() or any(": config.json " in text for text in problems):
        return None, problems
    try:
        spec = load_spec(folder)
    except VimeError as error:
        return None, [*problems, loaded.line(Finding(setting, _one_line(error).removeprefix("model.path: ")))]
    problems += [loaded.line(Finding(setting, t)) for t in model_folder.check_weights(folder, spec.tensors())]
    return spec, problems


def layout(loaded: Loaded, spec: ModelSpec) -> Iterator[str]:
    """Tensor and pipeline sizes against the model."""
    if loaded.config.needs_trainer and not any(path.startswith("parallel.") for path in loaded.invalid):
        yield from _as_ours(loaded, check_layout(spec, loaded.config.parallel))


def engine_layout(loaded: Loaded, spec: ModelSpec) -> Iterator[str]:
    """Tensor-parallel size of the engines against the model."""
    c, heads = loaded.config, spec.num_attention_heads
    if c.needs_engines and not loaded.concerns_invalid(["rollout.engine_tp"]) and heads % c.rollout.engine_tp:
        valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield loaded.line(Finding("rollout.engine_tp", f"does not divide num_attention_heads = {heads} (try {valid})"))
    width = spec.expert_ffn_hidden_size
    if c.needs_engines and not loaded.concerns_invalid(["rollout.engine_tp"]) and width % c.rollout.engine_tp:
        yield loaded.line(Finding("rollout.engine_tp", f"does not divide moe_intermediate_size = {width}"))


def same_architecture(loaded: Loaded, policy: ModelSpec, reference: ModelSpec) -> Iterator[str]:
    if policy.tensors() != reference.tensors():
        text = "has other tensors than model.path: policy and reference must be of one architecture"
        yield loaded.line(Finding("model.ref_path", text))


def context(loaded: Loaded, spec: ModelSpec) -> tuple[list[str], list[str]]:
    """Prompt limit and response against the context that the model was made for."""
    c, longest = loaded.config, spec.max_position_embeddings
    limits = {
        "rollout.max_context_len": (c.rollout.max_context_len or 0, f"must be <= {longest}"),
        "data.max_prompt_len": (
            (c.data.max_prompt_len or 0) + 1,
            f"must be < {longest}, to leave room for a response",
        ),
        "rollout.sampling.max_response_len": (
            c.rollout.sampling.max_response_len + 1,
            f"must be < {longest}, to leave room for a prompt",
        ),
    }
    for name, own in c.eval.sets.items():
        text = limits["rollout.sampling.max_response_len"][1]
        limits[f"eval.sets.{name}.max_response_len"] = ((own.max_response_len or 0) + 1, text)
    of = f", the context of the model (max_position_embeddings = {longest})"
    problems = [loaded.line(Finding(path, text + of)) for path, (size, text) in limits.items() if size > longest]
    wanted = (c.data.max_prompt_len or 0) + c.longest_response
    warnings = []
    if not problems and c.rollout.max_context_len is None and wanted > longest:
        text = f"data.max_prompt_len + max_response_len = {wanted} is over the model's context {longest}: "
        warnings.append(
            loaded.line(Finding("rollout.sampling.max_response_len", text + "the longest responses are cut"))
        )
    ids = c.rollout.sampling.stop_token_ids
    if ids and max(ids) >= spec.vocab_size and not loaded.concerns_invalid(["rollout.sampling.stop_token_ids"]):
        text = f"must be < vocab_size = {spec.vocab_size} of the model"
        problems.append(loaded.line(Finding("rollout.sampling.stop_token_ids", text)))
    return problems, warnings


def chat_template(loaded: Loaded) -> Iterator[str]:
    if loaded.concerns_invalid(["model.path"]) or _has_line(loaded, "model.path"):
        return
    folder = Path(loaded.config.model.path)
    if loaded.config.data.apply_chat_template and folder.is_dir() and not model_folder.has_chat_template(folder):
        text = "needs a chat template, and the tokenizer of model.path has none; set it to false for plain text prompts"
        yield loaded.line(Finding("data.apply_chat_template", text, ("model.path",)))
    elif loaded.config.data.apply_chat_template and (problem := model_folder.chat_template_problem(folder)):
        yield loaded.line(Finding("model.path", problem))


def data_files(loaded: Loaded) -> list[str]:
    """Prompt files of training and evaluation, row by row. Needs numpy installed (the data package does)."""
    from vime.data import check_files
    from vime.reward import needs_label

    c = loaded.config
    problems = [] if _has_line(loaded, "data.prompts") else check_files(c.data, needs_label(c.reward))
    for name, found in c.evaluation_sets.items():
        setting = f"eval.sets.{name}.prompts" if name in c.eval.sets else "eval.prompts"
        if not _has_line(loaded, setting) and not loaded.concerns_invalid([setting]):
            evaluation = check_files(c.data.model_copy(update={"prompts": found.prompts}), needs_label(c.reward))
            problems += [line.replace("data.prompts", setting) for line in evaluation]
    return problems


def estimator(loaded: Loaded) -> list[str]:
    """``algo.name`` is one of the known ones. Needs numpy installed (the algorithms do)."""
    from vime.algo import REGISTRY

    if loaded.config.algo.name in REGISTRY:
        return []
    return [loaded.line(Finding("algo.name", f"must be one of {', '.join(sorted(REGISTRY))}"))]


def leftovers(loaded: Loaded) -> Iterator[str]:
    """Forgotten breakpoints in the user's modules, before these are imported. They are ignored from here on."""
    from vime.debug.leftovers.user_modules import user_leftovers
    from vime.reward.breakpoints import ignore

    if loaded.concerns_invalid(["reward.name", "reward.function", "rollout.generate"]):
        return
    found = user_leftovers(loaded.config, [str(loaded.base_dir)])
    ignore(found.ignored)
    yield from found.warnings()


def reward_function(loaded: Loaded) -> list[str]:
    """The user's reward can be imported and called. Runs the user's module."""
    from vime.reward import check

    reward = loaded.config.reward
    if reward.name != "user" or reward.function is None or loaded.concerns_invalid(["reward.name", "reward.function"]):
        return []
    return list(_as_ours(loaded, check(reward, [str(loaded.base_dir)])))


def generate_function(loaded: Loaded) -> Iterator[str]:
    """``rollout.generate`` can be imported and called. Runs the user's module; needs numpy installed."""
    from vime.rollout.live import load_generate

    if loaded.config.rollout.generate is None or _has_line(loaded, "rollout.generate"):
        return
    try:
        load_generate(loaded.config, [str(loaded.base_dir)])
    except UsageError as error:
        yield from _as_ours(loaded, [error.message])


def record_files(loaded: Loaded, first_rollout_id: int) -> Iterator[str]:
    """Records that would be written over, and records that are to be read and are not there."""
    from vime.record import check_template, list_ids, missing_problem, training_template
    from vime.record.template import has_placeholder

    c = loaded.config
    save, load = c.debug.save_rollout_data, c.debug.load_rollout_data
    ids = range(first_rollout_id, max(c.run.num_rollouts, first_rollout_id))
    if save is not None and not _has_line(loaded, "debug.save_rollout_data"):
        problem = _cannot_create(Path(save).parent)
        yield from [loaded.line(Finding("debug.save_rollout_data", problem))] if problem else []
        found = check_template(save, len(ids), first_rollout_id=first_rollout_id, overwrite=c.run.overwrite)
        if c.needs_trainer and not found:
            beside = training_template(save)
            found = check_template(beside, len(ids), first_rollout_id=first_rollout_id, overwrite=c.run.overwrite)
        yield from (loaded.line(Finding("debug.save_rollout_data", text)) for text in found[:5])
        if len(found) > 5:
            yield loaded.line(Finding("debug.save_rollout_data", f"and {len(found) - 5} more files exist already"))
    if load is not None and not _has_line(loaded, "debug.load_rollout_data"):
        problem = missing_problem(load, ids)
        if problem is not None and has_placeholder(load) and list_ids(load):
            problem += " (-n or --ids takes fewer)"
        yield from [loaded.line(Finding("debug.load_rollout_data", problem))] if problem else _record_problems(c, ids)


def _record_problems(config: Config, ids: range) -> Iterator[str]:
    """What is wrong with the records themselves; those beyond ``CHECKED_BYTES`` are read when their turn comes."""
    from vime.record import read as read_record
    from vime.record import template_path
    from vime.train.steps import check_size, check_trainable

    if not is_installed("blake3"):  # a light install reads no record
        return
    assert config.debug.load_rollout_data is not None
    left = CHECKED_BYTES
    for rollout_id in ids:
        path = template_path(config.debug.load_rollout_data, rollout_id)
        left -= path.stat().st_size
        if left < 0:
            return
        try:
            batch = read_record(path)
            check_trainable(batch)
            check_size(config, batch)
        except VimeError as error:
            text = _one_line(error)
            yield text if str(path) in text else f"{path}: {text}"


def records_used(config: Config, start: int) -> str:
    """Which of the recorded rollouts are trained on, so that one sees what is left out."""
    from vime.record import list_ids

    assert config.debug.load_rollout_data is not None
    used, existing = range(start, config.run.num_rollouts), list_ids(config.debug.load_rollout_data)
    span = f"rollouts {used.start}-{used.stop - 1}" if len(used) > 1 else f"rollout {start}"
    return f"{span}, {len(used)} of the {max(len(existing), 1)} recorded"


def run_folder(loaded: Loaded, resume: str | None) -> Iterator[str]:
    """A folder holds one run: a second one needs ``run.overwrite``, and a resume a checkpoint to start from."""
    folder = Path(loaded.config.run_dir)
    if _has_line(loaded, "run.dir"):
        return
    if resume is not None:
        yield from _resume_problems(loaded, Path(resume))
    if problem := _cannot_create(folder):
        yield loaded.line(Finding("run.dir", problem))
    elif resume is None and RunFolder(folder).has_results() and not loaded.config.run.overwrite:
        text = f"{folder} already holds a run; take another run.name, --resume it, or set run.overwrite=true"
        yield loaded.line(Finding("run.dir", text))


def resume_changes(loaded: Loaded, resume: str) -> Iterator[str]:
    """Settings that differ from those the run was started with."""
    saved = RunFolder(Path(resume)).config
    if not saved.is_file():
        return
    try:
        before = read([saved])
    except ConfigError:
        yield f"--resume {resume}: config.toml of the run cannot be read, so settings are not compared"
        return
    ours = {"run.dir", "run.name", "run.num_rollouts", "run.overwrite"}
    for path in dict.fromkeys((*paths_of(loaded.config), *paths_of(before.config))):
        old, new = ((None if v is UNSET else v) for v in (value_of(of, path) for of in (before.config, loaded.config)))
        if old != new and path not in ours:
            yield loaded.line(Finding(path, f"differs from the run that is resumed, which had {short(old)}"))
    planned, schedule = before.config.run.num_rollouts, loaded.config.train.lr_schedule
    if schedule != "constant" and planned != loaded.config.run.num_rollouts:
        text = f"changes the learning rate from here on: the {schedule} decay was planned over {planned} rollouts"
        yield loaded.line(Finding("run.num_rollouts", text, ("train.lr_schedule",)))


def _resume_problems(loaded: Loaded, folder: Path) -> Iterator[str]:
    run = RunFolder(folder)
    if not run.config.is_file():
        yield f"--resume {folder}: is no run folder (it has no config.toml)"
        return
    if not loaded.config.needs_trainer:
        yield f"--resume {folder}: without a trainer (debug.rollout_only, num_rollouts = 0) there is nothing to restore"
        return
    found = run.checkpoints()
    if not found:
        yield f"--resume {folder}: has no complete checkpoint; only runs with checkpoint.save_interval > 0 have one"
    elif (done := num_rollouts_of(found[-1])) >= loaded.config.run.num_rollouts:
        text = f"the run has {done} rollouts behind it, so nothing is left to do; set a larger run.num_rollouts"
        yield loaded.line(Finding("run.num_rollouts", text))


def _cannot_create(folder: Path) -> str | None:
    """Why nothing can be written below ``folder``, which need not exist yet; None if it can."""
    try:
        near = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    except OSError as error:
        return f"cannot be a folder: {error.strerror}"
    if not near.is_dir():
        return f"{near} is a file, not a folder"
    return None if os.access(near, os.W_OK | os.X_OK) else f"{near} is not writable for this user"


def _as_ours(loaded: Loaded, lines: Iterable[str]) -> Iterator[str]:
    """Lines that read ``setting = value: text``, with the origin; a setting that a rule refused is not named twice."""
    for text in lines:
        path = text.partition(" = ")[0]
        value = value_of(loaded.config, path) if field_of(path) is not None else None
        start = f"{path} = {value!r}: "
        if not text.startswith(start):
            yield text
        elif not _has_line(loaded, path):
            yield loaded.line(Finding(path, text.removeprefix(start)))


def _has_line(loaded: Loaded, path: str) -> bool:
    return any(line.startswith(f"{path} ") for line in loaded.problems)


def _one_line(error: VimeError) -> str:
    lines = str(error).replace(":\n", ": ").splitlines()
    return "; ".join([" ".join(line.split()) for line in lines] + ([error.hint] if error.hint else []))


def facts(loaded: Loaded, spec: ModelSpec | None) -> dict[str, str]:
    """What a dry run says about the run, label -> text."""
    c = loaded.config
    p = c.parallel
    found: dict[str, str] = {"model": c.model.path}
    if spec is not None:
        found["family"] = (
            f"{spec.family}, {spec.num_layers} layers, {spec.num_parameters:,} parameters, {c.model.dtype}"
        )
    if c.needs_engines:
        found["prompts"] = ", ".join(c.data.prompts or c.eval.prompts)
        own = f"{c.rollout.num_engines} x tensor-parallel {c.rollout.engine_tp}"
        for name, evaluation in c.evaluation_sets.items():
            found["evaluation" if name == "eval" else f"evaluation of {name}"] = ", ".join(evaluation.prompts)
        found["engines"] = ", ".join(c.rollout.engines) or own
    if c.debug.load_rollout_data:
        found["records"] = c.debug.load_rollout_data
    if c.needs_trainer:
        sizes = f"tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.dp}" + (f", vpp {p.vpp}" if p.vpp else "")
        found["trainer"] = f"{p.world_size} processes = {sizes}"
        reference = c.model.ref_path or "the policy's starting weights"
        found["reference"] = reference if c.uses_reference else "none"
    found["run folder"] = c.run_dir
    return found
