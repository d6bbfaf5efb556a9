"""What the tests run on real trainer processes. Everything returned is numpy or plain data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ports import free_port

import vime.backends.megatron  # noqa: F401 - the redirect, before any job imports megatron
from vime.config.schema import Config
from vime.types import RolloutBatch, Sample, StepStats, TrainData

VOCAB = 128
LENGTHS = (5, 17, 40, 64, 3, 29, 12)
PROMPT_LEN = 2


def config(path: Any, **sections: dict[str, Any]) -> Config:
    train = {"max_tokens_per_micro_batch": 70, "lr": 1e-3, "step_timeout_seconds": 60.0, **sections.pop("train", {})}
    algo = {"kl_coef": 0.1, "eps_clip_low": 0.05, "eps_clip_high": 0.05, **sections.pop("algo", {})}
    model = {"path": str(path), **sections.pop("model", {})}
    return Config.model_validate(
        {"model": model, "data": {"prompts": ["none.jsonl"]}, "train": train, "algo": algo, **sections}
    )


def batch(lengths: tuple[int, ...] = LENGTHS, vocab: int = VOCAB) -> RolloutBatch:
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        mask = (np.arange(length) >= PROMPT_LEN) & (rng.random(length) < 0.8)
        ids = rng.integers(0, vocab, length)
        samples.append(Sample(i, 0, ids, PROMPT_LEN, mask, np.zeros(length)))
    return RolloutBatch.from_samples(0, samples)


def train_data(rollout: RolloutBatch, log_probs: np.ndarray, seed: int = 3, **changes: Any) -> TrainData:
    """Advantages at random; old and reference log-probs a little off, so that some tokens clip."""
    rng = np.random.default_rng(seed)
    shape = log_probs.shape
    old = (log_probs + 0.08 * rng.normal(size=shape)).astype(np.float32)
    ref = (log_probs + 0.2 * rng.normal(size=shape)).astype(np.float32)
    fields: dict[str, Any] = {
        "offsets": rollout.offsets,
        "token_ids_T": rollout.token_ids_T,
        "loss_weight_T": rollout.loss_mask_T.astype(np.float32),
        "advantages_T": rng.normal(size=shape).astype(np.float32),
        "rollout_log_probs_T": old,
        "old_log_probs_T": old,
        "ref_log_probs_T": ref,
        "normalizer": float(rollout.loss_mask_T.sum()),
        "sample_ids": [f"{g}/{i}" for g, i in zip(rollout.group_ids_N, rollout.indices_N, strict=True)],
    }
    return TrainData(**{**fields, **changes})


@contextmanager
def trainer(settings: Config, rank: int, world_size: int, port: int) -> Iterator[Any]:
    from vime.backends.megatron.rank import MegatronRank

    made = MegatronRank(settings, rank, world_size, "127.0.0.1", port)
    try:
        yield made
    finally:
        made.close()
        _release(made)


def _release(made: Any) -> None:
    """Let go of the process groups: each has threads that wake up all the time, and the process serves many tests.

    A cache of Megatron's holds them; so does the last step's graph, by nodes the garbage collector cannot look into.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()
    for chunk in made.policy.modules:
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher = None


def log_probs(made: Any, rollout: RolloutBatch, of: str = "policy") -> np.ndarray:
    """float32 [T] of the whole batch, on every rank."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, made.log_probs(rollout, of))
    out = np.full(rollout.num_tokens, np.nan, np.float32)
    for rows, flat in filter(None, parts):
        at = 0
        for row in rows:
            a, b = rollout.offsets[row], rollout.offsets[row + 1]
            assert np.isnan(out[a:b]).all(), "one row on two ranks"
            out[a:b] = flat[at : at + b - a]
            at += b - a
        assert at == len(flat)
    assert not np.isnan(out).any(), "a row on no rank"
    return out


def arrays(named: Any) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, tensor in named:
        assert name not in out, f"{name} twice"
        assert tensor.is_contiguous()
        out[name] = tensor.float().numpy()
    return out


@dataclass
class Outcome:
    """One layout: log-probs, exported weights, a step on advantage 0, and a real step."""

    policy: np.ndarray
    ref: np.ndarray
    before: dict[str, np.ndarray]
    at_rest: StepStats
    stats: StepStats
    after: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    describe: dict[str, Any] = field(default_factory=dict)
    specs: list[Any] = field(default_factory=list)


def layout(rank: int, world_size: int, port: int, settings: Config, vocab: int, hf: np.ndarray) -> Outcome:
    """``hf``: log-probs from transformers, from which the step's data is made alike in every layout."""
    rollout = batch(vocab=vocab)
    with trainer(settings, rank, world_size, port) as made:
        policy, ref = log_probs(made, rollout), log_probs(made, rollout, "ref")
        before = arrays(made.named_weights())
        zero = np.zeros_like(policy)
        still = train_data(rollout, policy, advantages_T=zero, old_log_probs_T=policy, ref_log_probs_T=policy)
        at_rest = made.step(still)
        stats = made.step(train_data(rollout, hf))
        sharded = settings.parallel.distributed_optimizer
        return Outcome(
            policy,
            ref,
            before,
            at_rest,
            stats,
            arrays(made.named_weights()),
            {} if sharded else arrays(made.named_gradients()),
            made.describe(),
            made.weight_specs(),
        )


def save_and_go_on(
    rank: int, world_size: int, port: int, settings: Config, path: str, vocab: int, num_steps: int = 2
) -> dict[str, Any]:
    """``num_steps`` steps, two at most, save, one more step."""
    rollout = batch(vocab=vocab)
    with trainer(settings, rank, world_size, port) as made:
        scored = log_probs(made, rollout)
        for seed in (3, 4)[:num_steps]:
            made.step(train_data(rollout, scored, seed))
        made.save(path, {"cursor": 7})
        saved = arrays(made.named_weights())
        stats = made.step(train_data(rollout, scored, 5))
        return {"scored": scored, "saved": saved, "stats": stats, "after": arrays(made.named_weights())}


def save_as_megatron_does(
    rank: int, world_size: int, port: int, settings: Config, path: str, vocab: int
) -> dict[str, Any]:
    """``save_and_go_on`` without our repair of the offsets between buckets."""
    from contextlib import nullcontext

    from vime.backends.megatron import checkpoint

    repair = checkpoint._true_offsets
    checkpoint._true_offsets = nullcontext
    try:
        return save_and_go_on(rank, world_size, port, settings, path, vocab)
    finally:
        checkpoint._true_offsets = repair


def save_without_room(rank: int, world_size: int, port: int, settings: Config, path: str) -> str:
    """The message of saving where no file may grow over 64 KiB (as on a full disk, writing fails half-way)."""
    import resource

    from vime.errors import VimeError

    with trainer(settings, rank, world_size, port) as made:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            made.save(path, {})
        except VimeError as error:
            return error.message
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


def resume(
    rank: int, world_size: int, port: int, settings: Config, path: str, vocab: int, scored: np.ndarray
) -> dict[str, Any]:
    """Load, then the third step."""
    rollout = batch(vocab=vocab)
    with trainer(settings, rank, world_size, port) as made:
        ref = log_probs(made, rollout, "ref")
        state = made.load(path)
        loaded = arrays(made.named_weights())
        same_ref = np.array_equal(ref, log_probs(made, rollout, "ref"))
        stats = made.step(train_data(rollout, scored, 5))
        after = arrays(made.named_weights())
        return {"state": state, "loaded": loaded, "same_ref": same_ref, "stats": stats, "after": after}


def refusal(rank: int, world_size: int, port: int, settings: Config, path: str | None = None) -> str:
    """The message of the VimeError that building, or loading ``path``, raises."""
    from vime.errors import VimeError

    try:
        with trainer(settings, rank, world_size, port) as made:
            if path is not None:
                made.load(path)
    except VimeError as error:
        return error.message
    return "no error"


def overlap(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """One step; weights as exported, and as they lie in memory before the parameter gather."""
    from vime.backends.megatron import weights

    rollout = batch()
    with trainer(settings, rank, world_size, port) as made:
        stats = made.step(train_data(rollout, log_probs(made, rollout)))
        stale = arrays(weights.export(made.policy))
        return {"stats": stats, "stale": stale, "weights": arrays(made.named_weights())}


def steps(rank: int, world_size: int, port: int, settings: Config, budgets: list[int]) -> list[dict[str, Any]]:
    """The same step under several token budgets."""
    rollout = batch()
    out = []
    scored: np.ndarray | None = None
    for budget in budgets:
        train = settings.train.model_copy(update={"max_tokens_per_micro_batch": budget})
        with trainer(settings.model_copy(update={"train": train}), rank, world_size, free_port()) as made:
            own = log_probs(made, rollout)
            scored = own if scored is None else scored
            still = train_data(
                rollout, scored, advantages_T=np.zeros_like(own), old_log_probs_T=own, ref_log_probs_T=own
            )
            at_rest = made.step(still)
            stats = made.step(train_data(rollout, scored))
            out.append({"scored": own, "at_rest": at_rest, "stats": stats, "gradients": arrays(made.named_gradients())})
    return out


def snapshot(made: Any) -> list[np.ndarray]:
    """Every weight and optimizer state of this rank, as bits."""
    out = [p.detach().clone().numpy() for module in made.policy.modules for p in module.parameters()]
    for optimizer in made.learner.optimizers:
        for state in optimizer.optimizer.state.values():
            out += [value.clone().numpy() for value in state.values()]  # numpy() pins a storage to its size
    return out


def edge_steps(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """Steps that must not change anything, in one process: no token, a bad advantage, a bad weight; and case T13."""
    from vime.backends.megatron.weights import named_parameters
    from vime.errors import VimeError

    out: dict[str, Any] = {}
    rollout = batch()
    with trainer(settings, rank, world_size, port) as made:
        scored = log_probs(made, rollout)
        good = train_data(rollout, scored)
        made.step(good)
        before = snapshot(made)
        nothing = np.zeros_like(good.loss_weight_T)
        out["masked"] = made.step(train_data(rollout, scored, loss_weight_T=nothing, normalizer=0.0))
        advantages = good.advantages_T.copy()
        at = int(np.flatnonzero(good.loss_weight_T[rollout.offsets[3] :])[0] + rollout.offsets[3])
        advantages[at] = np.nan
        bad = train_data(rollout, scored, advantages_T=advantages)
        try:
            out["nan"] = made.step(bad)
        except VimeError as error:
            out["nan"] = error.message
        off_mask = good.advantages_T.copy()
        off_mask[rollout.offsets[3] + 1] = np.inf  # a prompt token with a predecessor: a log-prob, but no weight
        out["same"] = all(np.array_equal(a, b) for a, b in zip(before, snapshot(made), strict=True))
        old, ref = good.old_log_probs_T.copy(), good.ref_log_probs_T.copy()
        old[rollout.offsets[4] + 1], ref[rollout.offsets[4] + 1] = -np.inf, np.nan
        changes = {"advantages_T": off_mask, "old_log_probs_T": old, "ref_log_probs_T": ref}
        out["off_mask"] = made.step(train_data(rollout, scored, **changes))
        weight = dict(named_parameters(made.policy))["decoder.layers.1.mlp.linear_fc2.weight"]
        weight.data[0, 0] = np.nan
        try:
            out["nan_weight"] = made.step(good)
        except VimeError as error:
            out["nan_weight"] = error.message
    return out


def offload_round_trip(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """Empty and refill everything a real trainer holds (forced, on the CPU too), then step."""
    from vime.backends.megatron import offload

    rollout = batch()
    with trainer(settings, rank, world_size, port) as made:
        data = train_data(rollout, log_probs(made, rollout))
        made.step(data)
        before, ref = snapshot(made), log_probs(made, rollout, "ref")
        emptied = offload.empty(*offload.tensors_of(made.learner, made.reference))
        held = [p for module in made.policy.modules for p in module.parameters()]
        left = sum(t.untyped_storage().size() for p in held for t in (p, p.main_grad))
        num_bytes = emptied.num_bytes
        offload.refill(emptied)
        return {
            "left": left,
            "num_bytes": num_bytes,
            "same": all(np.array_equal(a, b) for a, b in zip(before, snapshot(made), strict=True)),
            "same_ref": np.array_equal(ref, log_probs(made, rollout, "ref")),
            "on_cpu": (made.offload(), made.onload()),
            "loss": made.step(data).loss,
            "memory": made.memory(),
        }


def late(rank: int, world_size: int, port: int, settings: Config) -> str:
    """Rank 1 does not take part in the step."""
    import time

    from vime.errors import VimeError

    rollout = batch()
    with trainer(settings, rank, world_size, port) as made:
        data = train_data(rollout, log_probs(made, rollout))
        try:
            if rank == 0:
                made.step(data)
            else:
                time.sleep(2 * settings.train.step_timeout_seconds)
        except VimeError as error:
            return error.message
    return "no error"


def unreadable(rank: int, world_size: int, port: int, settings: Config) -> list[str]:
    """Messages for a sample beyond the context, and for a token beyond the vocabulary (131 of 131, padded to 132)."""
    from vime.errors import VimeError

    said = []
    wrong = batch(vocab=131)
    wrong.token_ids_T[wrong.offsets[2] + 4] = 131
    with trainer(settings, rank, world_size, port) as made:
        for rollout in (batch((20, 600)), wrong):
            for call in (
                lambda rollout=rollout: made.log_probs(rollout),
                lambda rollout=rollout: made.step(train_data(rollout, np.zeros(rollout.num_tokens))),
            ):
                try:
                    call()
                except VimeError as error:
                    said.append(error.message)
    return said


def first_answer_token(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """Case T13: a prompt of 3 and an answer of 2 tokens."""
    sample = Sample(0, 0, np.array([5, 6, 7, 8, 9]), 3, np.array([0, 0, 0, 1, 1]), np.zeros(5))
    rollout = RolloutBatch.from_samples(0, [sample])
    with trainer(settings, rank, world_size, port) as made:
        scored = log_probs(made, rollout)
        shifted = scored + np.array([9, 9, 9, 0.01, 0.02], np.float32)
        ones, away = np.ones(5, np.float32), shifted - scored
        first = train_data(rollout, scored, advantages_T=ones, old_log_probs_T=shifted, ref_log_probs_T=scored)
        stats = made.step(first)
        again = log_probs(made, rollout)
        constant = train_data(rollout, again, advantages_T=ones, old_log_probs_T=again + away, ref_log_probs_T=again)
        constant.loss_weight_T, constant.normalizer = constant.loss_weight_T / 8, 1.0
        return {"scored": scored, "stats": stats, "constant": made.step(constant)}


def held_and_exported(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """Names of what this rank holds, and the whole model as it is exported."""
    from vime.backends.megatron.weights import named_parameters

    with trainer(settings, rank, world_size, port) as made:
        return {
            "held": [name for name, _ in named_parameters(made.policy)],
            "exported": arrays(made.named_weights()),
        }


def export(rank: int, world_size: int, port: int, settings: Config, path: str) -> np.ndarray:
    """One step, then a Hugging Face folder; returns the policy's log-probs."""
    rollout = batch(vocab=131)
    with trainer(settings, rank, world_size, port) as made:
        made.step(train_data(rollout, log_probs(made, rollout)))
        made.export(path)
        return log_probs(made, rollout)


def bare(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Pure checks that need megatron imported: fix-ups, derived keys, layer maps, offload mechanism, log-probs."""
    import dataclasses

    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vime.backends.megatron import cpu_redirect, derived, offload

    unknown = {}
    for cls, keys in (
        (TransformerConfig, derived.DERIVED_TRANSFORMER),
        (OptimizerConfig, derived.DERIVED_OPTIMIZER),
        (DistributedDataParallelConfig, derived.DERIVED_DDP),
    ):
        unknown[cls.__name__] = sorted(keys.keys() - {f.name for f in dataclasses.fields(cls)})
    from megatron.core import jit
    from megatron.core.tensor_parallel import random as megatron_random

    for module in (jit, megatron_random):
        cpu_redirect.apply_fixup(module)  # raises where a target is gone
    base = torch.arange(12.0)
    views, buffer = [base[:4], base[6:]], torch.ones(5)
    off = offload.empty(views, [buffer])
    num_bytes, emptied = off.num_bytes, base.untyped_storage().size() + buffer.untyped_storage().size()
    offload.refill(off)
    return {
        "unknown": unknown,
        "num_bytes": num_bytes,
        "emptied": emptied,
        "refilled": (base.tolist(), views[1].tolist(), buffer.tolist()),
        "torch_untouched": torch.cuda.is_available.__module__,
    }


def layer_offsets(rank: int, world_size: int, port: int, cases: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    """Megatron's own layer ids per [pp rank][virtual stage]."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    out = []
    for num_layers, layout_ in cases:
        made = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=layout_["pp"],
            virtual_pipeline_model_parallel_size=layout_.get("vpp"),
            num_layers_in_first_pipeline_stage=layout_.get("num_layers_in_first_stage"),
            num_layers_in_last_pipeline_stage=layout_.get("num_layers_in_last_stage"),
            pipeline_dtype=torch.float32,
        )
        stages = [None] if layout_.get("vpp") is None else list(range(layout_["vpp"]))
        placed = []
        for pp_rank in range(layout_["pp"]):
            chunks = []
            for stage in stages:
                at = get_transformer_layer_offset(made, vp_stage=stage, pp_rank=pp_rank)
                count = get_num_layers_to_build(made, vp_stage=stage, pp_rank=pp_rank)
                chunks.append(list(range(at, at + count)))
            placed.append(chunks)
        out.append(placed)
    return out


def vocab_parallel(rank: int, world_size: int, port: int, temperature: float) -> dict[str, Any]:
    """Log-probs, entropy and gradient of 37 entries over the ranks (the last rank padded), as arrays of this rank."""
    import torch
    import torch.distributed as dist

    from vime.backends.megatron import log_probs as log_probs_module
    from vime.backends.megatron.log_probs import log_probs_and_entropy

    at_once = log_probs_module._ELEMENTS_AT_ONCE
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        rows, vocab = 9, 37
        width = -(-vocab // world_size)
        log_probs_module._ELEMENTS_AT_ONCE = 4 * width  # three chunks, the last one short
        generator = torch.Generator().manual_seed(0)
        full = torch.randn(rows, width * world_size, generator=generator) * 4
        target = torch.randint(0, vocab, (rows,), generator=generator)
        weights = torch.randn(2, rows, generator=generator)
        mine = full[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        kept = mine.detach().clone()
        lp, entropy = log_probs_and_entropy(mine, target, dist.group.WORLD, temperature, vocab, True)
        (weights[0] * lp + weights[1] * entropy).sum().backward()
        without = log_probs_and_entropy(mine.detach(), target, dist.group.WORLD, temperature, vocab, False)[0]
        exact = full[:, :vocab].double().requires_grad_()
        log_p = (exact / temperature).log_softmax(-1)
        want = log_p.gather(1, target[:, None])[:, 0]
        want_entropy = -(log_p.exp() * log_p).sum(-1)
        (weights[0] * want + weights[1] * want_entropy).sum().backward()
        grad = torch.nn.functional.pad(exact.grad, (0, width * world_size - vocab))
        grad = grad[:, rank * width : (rank + 1) * width]
        return {
            "log_probs": (lp - want).abs().max().item(),
            "entropy": (entropy - want_entropy).abs().max().item(),
            "gradient": (mine.grad - grad).abs().max().item(),
            "untouched": torch.equal(mine.detach(), kept),
            "same_without_entropy": torch.equal(without, lp.detach()),
        }
    finally:
        log_probs_module._ELEMENTS_AT_ONCE = at_once
        dist.destroy_process_group()


def silent(rank: int, world_size: int, port: int) -> None:
    import time

    time.sleep(60)
