"""The optimizer steps of ``vime align-check``: what each of them left behind, for the checks.

A round is sync, rollout, log-probs, one optimizer step. Its advantages are made up (``rounds.step_data``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vime.align.bench import Forward, Learned, OneProcess, Resumed
from vime.align.checks.second import differing
from vime.align.gap import Gap
from vime.align.rounds import generate, memory_of, step_data
from vime.align.step_limits import limits
from vime.cluster.trainer import RayTrainer
from vime.config.schema import Config, Parallel
from vime.errors import CheckFailed, UsageError, VimeError
from vime.record.training import TrainingHeader, TrainingRecord, TrainingStep
from vime.runs.trace import layout_of, settings_of
from vime.train.packing import plan_micro_batches
from vime.types import RolloutBatch, StepStats, TrainData, WeightManifest

if TYPE_CHECKING:
    from vime.cluster.session import RaySession
    from vime.runs.bench import LiveBench

NUM_RESCORED = 4
SECOND, AFTER_RESUME = 1, 2
"""Rollout ids, from which the seeds follow; the first rollout is 0."""
SampleLosses = Mapping[str, tuple[float, int, int]]


def first(bench: LiveBench) -> Learned:
    """The first step, on the bench's own rollout. Nothing is asked of the engine: it may have gone on since."""
    found = {"batch": bench.batch, "log_probs_T": bench.log_probs_T, "ref_log_probs_T": bench.ref_log_probs_T}
    memory = {"generate": memory_of(bench)}
    return _step(bench, "first", memory, found)


def second(bench: LiveBench) -> Learned:
    """Sync, the same prompts with other seeds, and the second step."""
    before = bench.first  # also where it was refused: the weights are then those of before
    memory: dict[str, Any] = {}
    held = _held(bench, bench.sync())
    memory["sync"] = memory_of(bench)
    asked_before = bench.engine.prefix_cache()
    batch = generate(bench, before.batch, SECOND)
    cached = tuple(now - then for now, then in zip(bench.engine.prefix_cache(), asked_before, strict=True))
    memory["generate"] = memory_of(bench)
    log_probs_T = bench.trainer.log_probs(batch)
    found = {
        "batch": batch,
        "log_probs_T": log_probs_T,
        "ref_log_probs_T": bench.trainer.log_probs(batch, "ref") if bench.config.uses_reference else None,
        "held": held,
        "cached": cached,
        "rescored": _rescored(bench, Gap.of(batch, batch.rollout_log_probs_T, log_probs_T)),
    }
    if bench.config.cluster.colocate:  # as the run does it: the weights are dropped, and come with the next sync
        bench.engine.sleep(2)
    return _step(bench, "second", memory, found)


def _held(bench: LiveBench, sent: WeightManifest) -> WeightManifest | None:
    """Of all engines: what the first one holds that is not as ``sent``, with its name; else what the first holds."""
    try:
        found = bench.engine.held()
    except UsageError:  # rollout.engine_tp > 1: no worker holds whole tensors
        return None
    wrong = (replace(each, origin=f"{name} holds") for name, each in found.items() if differing(sent, each))
    return next(wrong, next(iter(found.values())))


def _rescored(bench: LiveBench, gap: Gap) -> tuple[float, float] | None:
    """Where engine and trainer are apart: whether the engine's fresh forward, without its cache, is right."""
    limit = limits(bench.config.model.dtype, bench.spec.num_layers, 1, is_same=False).log_probs
    if gap.max <= limit:
        return None
    rows = [one.row for one in gap.by_sample()[:NUM_RESCORED]]
    worst = gap.batch.select(rows)
    temperature = bench.config.rollout.sampling.temperature
    sequences = [sample.token_ids for sample in worst.samples()]
    again_T = np.concatenate(bench.engine.score(sequences))
    own_T = bench.trainer.log_probs(worst, how=Forward(temperature=1.0))
    at_run_T = own_T if temperature == 1.0 else bench.trainer.log_probs(worst)
    sampled = Gap.of(worst, worst.rollout_log_probs_T, at_run_T)
    return sampled.mean, Gap.of(worst, again_T, own_T).mean


def _step(bench: LiveBench, name: str, memory: dict[str, Any], found: dict[str, Any]) -> Learned:
    """The first optimizer step of the rollout, with what the checks want to know of it."""
    trainer, batch = bench.trainer, found["batch"]
    again_T = trainer.log_probs(batch)
    memory["log_probs"] = memory_of(bench)
    data = step_data(bench.config, batch, found["log_probs_T"], found["ref_log_probs_T"])
    before = trainer.manifest()
    refused = ""
    try:
        stats = trainer.step(data)
    except CheckFailed as error:  # the trainer's own check of what it trained on
        refused, nothing = error.message, math.nan
        stats = StepStats(nothing, nothing, nothing, 0, 0.0, is_skipped=True, skip_reason=refused)
    memory["train"] = memory_of(bench)
    losses: SampleLosses = {} if stats.is_skipped else trainer.sample_losses()
    gradients = None
    if not stats.is_skipped and not bench.config.parallel.distributed_optimizer:
        gradients = bench.folder / f"gradients_{name}"
        trainer.write_tensors("gradients", gradients, before.version)
    return Learned(
        data=data,
        stats=stats,
        gradients=gradients,
        before=before,
        after=trainer.manifest(),
        memory=memory,
        again_T=again_T,
        record=_record(bench.config, batch, data, found, stats, losses),
        refused=refused,
        **found,
    )


def _record(
    config: Config,
    batch: RolloutBatch,
    data: TrainData,
    found: Mapping[str, Any],
    stats: StepStats,
    losses: SampleLosses,
) -> TrainingRecord:
    """Of the step's samples alone, which are the first of the rollout."""
    num_tokens = int(data.offsets[-1])
    ref_T = found["ref_log_probs_T"]
    shares = [losses.get(name, (0.0, 0, -1)) for name in data.sample_ids]
    return TrainingRecord(
        batch.rollout_id,
        TrainingHeader(layout_of(config), settings_of(config)),
        data.offsets,
        found["log_probs_T"][:num_tokens],
        np.empty(0, np.float32) if ref_T is None else ref_T[:num_tokens],
        data.advantages_T,
        np.array([loss for loss, _, _ in shares], np.float64),
        np.array([rank for _, _, rank in shares], np.int32),
        [TrainingStep(stats.loss, stats.grad_norm, stats.lr, stats.num_tokens, stats.is_skipped)],
    )


# ---------------------------------------------------------------- the same step by one process


def reference_gradients(bench: LiveBench) -> OneProcess:
    """The first step, of the weights in model.path and of the same data, by one process that ends right after."""
    learned = bench.first
    config, title = other_layout(bench.config, learned.data)
    with _alone(bench, config) as trainer:
        before = trainer.write_tensors("weights", None, 0)
        log_probs_T = trainer.log_probs(learned.batch)
        stats = trainer.step(learned.data)
        losses: SampleLosses = {} if stats.is_skipped else trainer.sample_losses()
        gradients = None if stats.is_skipped else bench.folder / "gradients_one_process"
        if gradients is not None:
            trainer.write_tensors("gradients", gradients, 0)
    found = {"log_probs_T": log_probs_T, "ref_log_probs_T": learned.ref_log_probs_T}
    record = _record(config, learned.batch, learned.data, found, stats, losses)
    return OneProcess(title, before, record, gradients)


def other_layout(config: Config, data: TrainData) -> tuple[Config, str]:
    """The run's settings in one process, and the layout in words. One process already: packed otherwise, every sample
    alone; or two at a time, where they were alone.
    """
    alone: dict[str, Any] = {"parallel": Parallel(), "debug": config.debug.model_copy(update={"inject": []})}
    alone["algo"] = config.algo.model_copy(update={"log_ref": False})  # the data has its log-probs already
    ddp = {k: v for k, v in config.megatron.ddp.items() if k not in OF_SHARDS}
    alone["megatron"] = config.megatron.model_copy(update={"ddp": ddp})
    if config.parallel.world_size > 1:
        return config.model_copy(update=alone), "one process"
    budget, (packs,) = 1, plan_micro_batches(data.lengths_N, 1, config.train.max_tokens_per_micro_batch)
    if all(len(rows) < 2 for rows in packs):
        budget = 2 * int(data.lengths_N.max())
    alone["train"] = config.train.model_copy(update={"max_tokens_per_micro_batch": budget})
    how = "every sample alone" if budget == 1 else f"at most {budget} tokens a micro-batch"
    return config.model_copy(update=alone), f"one process as the run's, packed otherwise ({how})"


OF_SHARDS = ("overlap_param_gather", "use_distributed_optimizer")
"""Settings of Megatron's DDP that need parallel.distributed_optimizer."""


@contextmanager
def _alone(bench: LiveBench, config: Config) -> Iterator[RayTrainer]:
    """A trainer of one process beside the run's, in the same Ray session; it shares what there is."""
    if bench.serves_many:
        trainer = bench.fact("one process", lambda: _started(config, bench.begun.session))
        trainer.restart(config.model.path)
        yield trainer
        return
    trainer = RayTrainer(config, bench.begun.session, ALONE)
    try:
        trainer.start()
        yield trainer
    finally:
        trainer.end()


ALONE: list[dict[str, Any]] = [{"num_cpus": 0}]


def _started(config: Config, session: RaySession) -> RayTrainer:
    trainer = RayTrainer(config, session, ALONE)
    trainer.start()
    return trainer


# ---------------------------------------------------------------- resume


def resumed(bench: LiveBench) -> Resumed:
    """Save, take one more step, load, let the engines lose their weights, ask them, sync, ask again."""
    trainer, scored, folder = bench.trainer, bench.second.batch, bench.folder / "checkpoint"
    state = {"next_rollout_id": SECOND + 1, "rollouts": {}}
    policy_T, ref_T = _both(bench, scored)
    saved = trainer.manifest()
    trainer.save(str(folder), state)
    try:
        trainer.step(bench.second.data)
    except CheckFailed as error:
        bench.say(f"between saving and loading no step was taken: {error.message}")
    moved = trainer.manifest()
    state_after = trainer.load(str(folder))
    loaded = trainer.manifest()
    policy_after_T, ref_after_T = _both(bench, scored)
    refusal = _refusal(bench, lambda: generate(bench, scored, AFTER_RESUME, num_prompts=1))
    held = _held(bench, bench.sync())
    batch = generate(bench, scored, AFTER_RESUME)
    return Resumed(
        folder, saved, moved, loaded, refusal, held, batch, trainer.log_probs(batch),
        scored, policy_T, policy_after_T, ref_T, ref_after_T, state, state_after,
    )  # fmt: skip


def _both(bench: LiveBench, batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray | None]:
    ref_T = bench.trainer.log_probs(batch, "ref") if bench.config.uses_reference else None
    return bench.trainer.log_probs(batch), ref_T


def _refusal(bench: LiveBench, ask: Callable[[], Any]) -> str:
    """What an engine without weights says when it is asked to generate; "" where it generates."""
    bench.engine.sleep(2)
    bench.engine.wake()
    try:
        ask()
    except VimeError as error:
        return error.message.splitlines()[0]
    return ""
