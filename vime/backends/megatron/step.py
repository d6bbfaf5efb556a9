"""One optimizer step: loss over all micro-batches, gradients summed over all ranks, clip, Adam.

loss = sum(loss_weight_T * loss_T) / normalizer over every micro-batch of every rank. DDP sums (Megatron's
``calculate_per_token_loss``), and nothing divides afterwards, so the gradient does not depend on layout or packing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as finish_gradients
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from vime import device
from vime.algo.loss import policy_loss
from vime.backends.megatron import parallel, weights
from vime.backends.megatron.build import Model, ddp_config, optimizer_config
from vime.backends.megatron.forward import Micro, make_micro, run_schedule, score
from vime.backends.megatron.schedule import LrSchedule
from vime.config.schema import Config
from vime.errors import CheckFailed, VimeError
from vime.models import hf_names
from vime.train.packing import pack, plan_micro_batches
from vime.types import StepStats, TrainBatch, TrainData

NO_TOKEN = "no trainable token in this step: every loss weight is 0"
NO_SIGNAL = "no signal in this step: every advantage is 0, and neither KL nor entropy enters the loss"
_SHOWN = 10


@dataclass
class SampleLoss:
    """A sample's share of the step's loss, and how many of its tokens carried loss."""

    loss: float = 0.0
    num_tokens: int = 0

    def __add__(self, other: SampleLoss) -> SampleLoss:
        return SampleLoss(self.loss + other.loss, self.num_tokens + other.num_tokens)


def undamaged(batches: list[TrainBatch]) -> list[TrainBatch]:
    """No fault is planted."""
    return batches


@dataclass
class Learner:
    """The policy with what it takes to change it. ``num_steps_done`` counts skipped steps too: the learning rate
    depends on where the run stands, not on the data.

    sample_losses  of the last step, by sample: those of this rank's positions, on the last pipeline stage
    damage         what a planted fault does to this rank's micro-batches
    """

    config: Config
    model: Model
    optimizer: Any
    schedule: LrSchedule
    num_steps_done: int = 0
    sample_losses: dict[str, SampleLoss] = field(default_factory=dict)
    damage: Callable[[list[TrainBatch]], list[TrainBatch]] = undamaged

    @property
    def optimizers(self) -> list[Any]:
        """The parts of a chained optimizer, or the one there is."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def gather_parameters(self) -> None:
        """Finish the overlapped parameter gather: until then parameters are one update old."""
        if self.config.megatron.ddp.get("overlap_param_gather"):
            for chunk in self.model.chunks:
                chunk.start_param_sync(force_sync=True)

    def adopt_weights(self) -> None:
        """After the model's weights were written from outside: main parameters, where there are such, follow."""
        self.optimizer.reload_model_params()

    def begin_again(self) -> None:
        """Optimizer and schedule as ``build_learner`` made them, with the model's present weights."""
        self.adopt_weights()
        for optimizer in self.optimizers:
            optimizer.optimizer.state.clear()
            for group in optimizer.optimizer.param_groups:
                group.pop("step", None)
        self.num_steps_done, self.sample_losses, self.damage = 0, {}, undamaged


def build_learner(model: Model, config: Config) -> Learner:
    """Wrap the model's chunks in DDP (in place) and give it Adam, or the distributed optimizer."""
    ddp, transformer = ddp_config(config), model.transformer
    model.chunks[:] = [
        DistributedDataParallel(transformer, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    if ddp.overlap_grad_reduce:
        hooks = [chunk.no_sync for chunk in model.chunks]
        transformer.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    transformer.finalize_model_grads_func = _finalize
    optimizer = get_megatron_optimizer(optimizer_config(config), model.chunks)
    train = config.train
    schedule = LrSchedule(train.lr, train.min_lr, train.lr_schedule, train.num_warmup_steps, config.num_steps)
    return Learner(config, model, optimizer, schedule)


def _finalize(chunks: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron's own, without its division: the loss is divided by the normaliser already."""
    finish_gradients(chunks, None, **options)


# ---------------------------------------------------------------- the step


@dataclass
class _Pass:
    """Sums over this rank's micro-batches."""

    loss: float = 0.0
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    bad_samples: list[str] = field(default_factory=list)
    samples: dict[str, SampleLoss] = field(default_factory=dict)


def train_step(learner: Learner, data: TrainData) -> StepStats:
    """One step. The same StepStats on every rank.

    Without a trainable token, or where nothing but 0 enters the loss, the step is skipped (Adam's momentum would move
    the weights, and so would weight decay). A non-finite loss or gradient raises VimeError naming parameters and
    samples (``train.nan_policy = "stop"``) or skips the step; skipped steps leave weights and optimizer bitwise alone.
    CheckFailed names the samples, and their data-parallel rank, that were not trained on whole.
    """
    started = time.monotonic()
    lr = learner.schedule.at(learner.num_steps_done)
    learner.num_steps_done += 1
    learner.sample_losses = {}
    if reason := _nothing_to_learn(learner.config, data):
        return StepStats(0.0, 0.0, lr, 0, time.monotonic() - started, is_skipped=True, skip_reason=reason)
    total = _forward_backward(learner, data)
    grad_norm = _measure(learner)
    stats = StepStats(
        loss=total.loss,
        grad_norm=grad_norm,
        lr=lr,
        num_tokens=total.num_tokens,
        seconds=time.monotonic() - started,
        metrics={f"train/{name}": value for name, value in total.sums.items()},
    )
    if not (math.isfinite(total.loss) and math.isfinite(grad_norm)):
        return _refuse(learner, stats, total.bad_samples)
    _update(learner, grad_norm, lr)
    return replace(stats, seconds=time.monotonic() - started)


def _nothing_to_learn(config: Config, data: TrainData) -> str:
    """Why no forward pass is needed to know that the step has nothing to learn; empty if it may have."""
    if not data.normalizer or not np.any(data.loss_weight_T):
        return NO_TOKEN
    has_penalty = config.algo.kl_coef > 0.0 or config.algo.entropy_coef > 0.0
    return "" if has_penalty or np.any(data.advantages_T[data.loss_weight_T != 0]) else NO_SIGNAL


def _forward_backward(learner: Learner, data: TrainData) -> _Pass:
    for chunk in learner.model.chunks:
        chunk.zero_grad_buffer()
    learner.optimizer.zero_grad()
    micros = _micros(learner, data)

    expected = int(np.count_nonzero(data.loss_weight_T))

    def loss_of(micro: Micro, logits: Tensor) -> tuple[Tensor, _Pass]:
        return _loss(learner, micro, logits, data.normalizer, expected)

    results = run_schedule(learner.model, micros, loss_of, forward_only=False)
    learner.sample_losses = {name: found for result in results for name, found in result.samples.items()}
    total = _reduce(results)
    if total.num_tokens != expected:
        _report_lost(learner, data)
    return total


def _report_lost(learner: Learner, data: TrainData) -> None:
    """Raise CheckFailed: which samples carry loss at other than their trained positions. A collective."""
    mine = learner.sample_losses if parallel.is_first_of_last_stage() else {}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: found.num_tokens for name, found in mine.items()})
    plan = _plan(learner, data)
    rank_of = {int(row): rank for rank, micros in enumerate(plan) for rows in micros for row in rows}
    wrong = []
    for row, name in enumerate(data.sample_ids):
        wanted = int(np.count_nonzero(data.loss_weight_T[data.offsets[row] : data.offsets[row + 1]]))
        found = sum(counts.get(name, 0) for counts in gathered)
        if found != wanted:
            wrong.append(f"sample {name} of data-parallel rank {rank_of[row]} ({found} of {wanted} tokens)")
    raise CheckFailed(
        f"optimizer step {learner.num_steps_done}: not trained on as the data says: {_count(wrong)}",
        "the samples were split over the ranks, or packed, wrongly: a fault of the trainer, not of the data",
    )


def _plan(learner: Learner, data: TrainData) -> list[list[np.ndarray]]:
    layout, budget = learner.config.parallel, learner.config.train.max_tokens_per_micro_batch
    return plan_micro_batches(data.lengths_N, layout.dp, budget, layout.pp if layout.vpp is not None else 1)


def _micros(learner: Learner, data: TrainData) -> list[Micro]:
    batches = learner.damage([pack(data, rows) for rows in _plan(learner, data)[parallel.dp_rank()]])
    return [make_micro(i, b.tokens_T, b.cu_seqlens, learner.config.parallel, b) for i, b in enumerate(batches)]


def _loss(learner: Learner, micro: Micro, logits: Tensor, normalizer: float, num_trained: int) -> tuple[Tensor, _Pass]:
    """This rank's share of the step's loss, and of its statistics: pg_loss is a part of the loss and weighted like it,
    all others are means over the step's ``num_trained`` tokens, whatever the normalisation of the loss.
    """
    config, batch = learner.config, micro.payload
    temperature, needs_entropy_grad = config.rollout.sampling.temperature, config.algo.entropy_coef > 0.0
    log_probs_S, entropy_S = score(learner.model, micro, logits, temperature, with_entropy=True)
    weight_S = micro.local(batch.loss_weight_T)
    is_on = weight_S != 0
    still_S = log_probs_S.detach()

    def on(values_T: np.ndarray, neutral_S: Tensor) -> Tensor:
        """Off mask neutral: a weight of 0 keeps no non-finite value out of the gradient (0 * inf is nan)."""
        return torch.where(is_on, micro.local(values_T), neutral_S)

    loss_S, stats = policy_loss(
        config.algo,
        log_probs_S,
        on(batch.old_log_probs_T, still_S),
        on(batch.advantages_T, torch.zeros_like(still_S)),
        None if batch.ref_log_probs_T is None else on(batch.ref_log_probs_T, still_S),
        entropy_S if needs_entropy_grad else entropy_S.detach(),
    )
    share_S = torch.where(is_on, weight_S * loss_S, 0.0)
    loss = share_S.sum() / normalizer
    sums = {}
    for name, value_S in stats.items():
        value_S, total = (weight_S * value_S, normalizer) if name == "pg_loss" else (value_S, num_trained)
        sums[name] = float((torch.where(is_on, value_S, 0.0).double().sum() / total).item())
    done = _Pass(float(loss.detach().item()), int(is_on.sum().item()), sums)
    done.samples = _by_sample(micro, share_S.detach().double() / normalizer, is_on)
    if not math.isfinite(done.loss):
        done.bad_samples = _samples_at(micro, is_on & ~torch.isfinite(loss_S.detach()))
    return loss, done


def _by_sample(micro: Micro, share_S: Tensor, is_on_S: Tensor) -> dict[str, SampleLoss]:
    rows_S = _rows_of(micro, micro.index_S)
    names = micro.payload.sample_ids
    size = len(names) + 1  # what is left over is padding
    losses = np.bincount(rows_S, weights=share_S.cpu().numpy(), minlength=size)
    counts = np.bincount(rows_S, weights=is_on_S.cpu().numpy(), minlength=size)
    return {name: SampleLoss(float(losses[row]), int(counts[row])) for row, name in enumerate(names)}


def _rows_of(micro: Micro, positions: np.ndarray) -> np.ndarray:
    """Number in the pack of the sequences that own these positions."""
    return np.searchsorted(micro.pack.cu_seqlens, positions, side="right") - 1


def _samples_at(micro: Micro, is_bad_S: Tensor) -> list[str]:
    """Ids of the samples that own the marked positions."""
    rows = np.unique(_rows_of(micro, micro.index_S[is_bad_S.cpu().numpy()]))
    return [micro.payload.sample_ids[row] for row in rows if row < len(micro.payload.sample_ids)]


def _reduce(results: list[_Pass]) -> _Pass:
    """Sum over micro-batches, data- and context-parallel ranks; then tell the other pipeline stages."""
    total: list[_Pass | None] = [None]
    if parallel.is_last_stage():
        names = list(results[0].sums)
        rows = [[r.loss, float(r.num_tokens), *(r.sums[name] for name in names)] for r in results]
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        numbers = _sum_over(group, rows)
        bad = [sample for result in results for sample in result.bad_samples]
        total = [_Pass(numbers[0], int(numbers[1]), dict(zip(names, numbers[2:], strict=True)), bad)]
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        dist.broadcast_object_list(total, src=parallel.last_stage_rank(), group=pipeline)
    assert total[0] is not None
    return total[0]


def _sum_over(group: dist.ProcessGroup, rows: list[list[float]]) -> list[float]:
    sums = torch.tensor(rows, dtype=torch.float64, device=device.current()).sum(0)
    dist.all_reduce(sums, group=group)
    return sums.tolist()


def _measure(learner: Learner) -> float:
    """Norm of the whole, unclipped gradient."""
    learner.optimizer.prepare_grads()
    return float(learner.optimizer.get_grad_norm())


def _update(learner: Learner, grad_norm: float, lr: float) -> None:
    clip = learner.config.train.clip_grad
    for optimizer in learner.optimizers:
        parameters = optimizer.get_parameters()
        if parameters and grad_norm > clip:
            clip_grad_by_total_norm_fp32(parameters, clip, grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = learner.config.train.weight_decay * group.get("wd_mult", 1.0)
    learner.optimizer.step_with_ready_grads()


def _refuse(learner: Learner, stats: StepStats, samples: list[str]) -> StepStats:
    """Non-finite: name the parameters and samples, then stop or skip as configured. A collective."""
    names = [
        hf
        for name, parameter in weights.named_parameters(learner.model)
        if not torch.isfinite(parameter.main_grad).all()
        for hf in (hf_names(name) if name != weights.OUTPUT or not learner.model.spec.is_tied else ())
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (names, samples))
    bad = {name for part, _ in gathered for name in part}
    ordered = [name for name in learner.model.spec.tensors() if name in bad]
    ids = sorted({sample for _, part in gathered for sample in part})
    reason = (
        f"loss {stats.loss}, grad_norm {stats.grad_norm}: "
        f"gradient not finite in {_count(ordered)}; loss not finite in samples {_count(ids)}"
    )
    if learner.config.train.nan_policy == "stop":
        raise VimeError(reason, 'inspect those samples; train.nan_policy = "skip" would skip and count such steps')
    return replace(stats, is_skipped=True, skip_reason=reason)


def _count(names: list[str]) -> str:
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"({len(names)}) {', '.join(names[:_SHOWN])}{rest}" if names else "(0)"
