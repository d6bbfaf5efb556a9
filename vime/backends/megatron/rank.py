"""One trainer process: a policy, a reference, and what the loop asks of them. No Ray in here.

Every method is a collective: all ranks call it with the same arguments, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vime import device
from vime.align.bench import AS_THE_RUN, Forward, LoadedParameter, Routing
from vime.backends.megatron import (
    checkpoint,
    faults,
    hf_folder,
    loaded,
    offload,
    outputs,
    parallel,
    spec,
    walk_faults,
    weights,
)
from vime.backends.megatron.build import Model, build_model, check_config
from vime.backends.megatron.forward import Micro, compute_log_probs, make_micro
from vime.backends.megatron.step import build_learner, train_step
from vime.config.schema import Config
from vime.errors import UsageError, VimeError
from vime.models import ModelSpec, layer_of, load_spec, megatron_name
from vime.train.packing import pack_tokens, plan_micro_batches
from vime.types import RolloutBatch, StepStats, TensorEntry, TrainData

GRACE_SECONDS = 60.0


def collective_limit(seconds: float) -> float:
    """For a limit of the driver's wait, which sees all ranks and expires first, that of a collective."""
    return seconds + min(GRACE_SECONDS, seconds / 2)


class MegatronRank:
    """Rank ``rank`` of ``world_size`` trainer processes, which meet at ``master_addr:master_port``.

    Raises ConfigError for a layout this model cannot have, UsageError for a model that is not supported, and VimeError
    if a checkpoint does not hold exactly the model's tensors.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        keeps_initial: bool = False,
    ) -> None:
        """``keeps_initial``: digest every parameter before it is loaded, for ``loaded``."""
        self.config, self.rank = config, rank
        self.spec = load_spec(config.model.path)
        check_config(self.spec, config)
        torch.set_num_threads(config.cluster.threads_per_trainer)
        parallel.init(
            config.parallel,
            rank,
            world_size,
            master_addr,
            master_port,
            collective_limit(config.train.step_timeout_seconds),
            config.run.seed,
        )
        self._offloaded: offload.Offloaded | None = None
        self._undo: list[Callable[[], None]] = []
        self._keeps_initial, self._initial = keeps_initial, dict[str, loaded.Digests]()
        try:
            policy = self._new_model("policy", self.spec)
            self._accounting = {"policy": weights.load(policy, config.model.path)}
            faults.plant_in_weights(policy, config.debug.inject)
            self.learner = build_learner(policy, config)
            faults.plant_in_steps(self.learner, config.debug.inject)
            self.reference = self._build_reference() if config.uses_reference else None
        except BaseException:
            parallel.shutdown()
            raise

    @property
    def policy(self) -> Model:
        return self.learner.model

    def _new_model(self, of: str, model_spec: ModelSpec) -> Model:
        model = build_model(model_spec, self.config)
        self._initial[of] = loaded.digests(model) if self._keeps_initial else {}
        return model

    def _build_reference(self) -> Model:
        """The reference never comes from a checkpoint of the run, so that a resumed run keeps the one it had."""
        path = self.config.model.ref_path or self.config.model.path
        ref_spec = load_spec(path)
        if ref_spec.vocab_size != self.spec.vocab_size:
            raise UsageError(
                f"model.ref_path = {path!r}: vocab_size {ref_spec.vocab_size}, the policy has {self.spec.vocab_size}"
            )
        check_config(ref_spec, self.config)
        reference = self._new_model("ref", ref_spec)
        # Not frozen: torch.matmul takes another kernel for weights without requires_grad (2.9e-6 apart under tp 2), but
        # log-probs of policy and reference must agree bitwise. It only ever runs under no_grad.
        self._accounting["reference"] = weights.load(reference, path)
        return reference

    def describe(self) -> dict[str, Any]:
        """What is really running: layers, attention, layout, sizes, and what became of every checkpoint tensor."""
        backend = self.policy.transformer.attention_backend
        return {
            "layers": spec.effective_spec(),
            "attention": f"transformer-engine, backend {backend.name}"
            if spec.uses_transformer_engine()
            else "torch SDPA",
            "device": device.kind(),
            "dtype": self.config.model.dtype,
            "head_dtype": self.config.model.dtype,  # Megatron's output layer has the type of all weights
            "logits_dtype": self.config.model.dtype,
            "log_softmax_dtype": "float32",  # of ``log_probs``, whatever the logits are
            "layout": parallel.describe(self.config.parallel),
            "family": self.spec.family,
            "num_parameters": self.spec.num_parameters,
            "num_parameters_on_rank": sum(p.numel() for _, p in weights.named_parameters(self.policy)),
            "tensors": {of: accounting.lines() for of, accounting in self._accounting.items()},
        }

    def loaded(self) -> list[LoadedParameter]:
        """Every parameter of policy and reference on this rank against the files of its folder. Before any step."""
        found = list(loaded.compare(self.policy, self.config.model.path, self.rank, "policy", self._initial["policy"]))
        if self.reference is not None:
            path = self.config.model.ref_path or self.config.model.path
            found += loaded.compare(self.reference, path, self.rank, "ref", self._initial["ref"])
        return found

    # ------------------------------------------------------------ learn

    def log_probs(
        self, batch: RolloutBatch, of: str = "policy", how: Forward = AS_THE_RUN
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(rows int64 [n], float32 log-probs of those samples one after the other, 0.0 at each first token).

        Rows are the samples of this data-parallel rank; None on ranks that do not own results.
        """
        model = self._model(of)
        names = [f"{group}/{index}" for group, index in zip(batch.group_ids_N, batch.indices_N, strict=True)]
        self._check_tokens(batch.offsets, batch.token_ids_T, names)
        if of == "policy":
            self.learner.gather_parameters()
        plan, micros = self._micros(batch, how)
        with self._with_others(f"log_probs of {of}"):
            found = compute_log_probs(model, micros, how.temperature or self.config.rollout.sampling.temperature)
        if not parallel.owns_results():
            return None
        used = [i for i, rows in enumerate(plan) if len(rows)]
        rows = np.concatenate([plan[i] for i in used]) if used else np.empty(0, np.int64)
        flat = np.concatenate([found[i] for i in used]) if used else np.empty(0, np.float32)
        return rows.astype(np.int64), flat

    def _micros(self, batch: RolloutBatch, how: Forward) -> tuple[list[np.ndarray], list[Micro]]:
        """The forwards of this data-parallel rank: rows of the batch, and their packs."""
        layout = self.config.parallel
        multiple_of = layout.pp if layout.vpp is not None else 1
        longest = how.max_tokens_per_micro_batch or self.config.train.max_tokens_per_micro_batch
        plan = plan_micro_batches(batch.lengths_N, layout.dp, longest, multiple_of)[parallel.dp_rank()]
        packs = [pack_tokens(batch.offsets, batch.token_ids_T, rows) for rows in plan]
        return plan, [make_micro(i, tokens, ends, layout, None) for i, (tokens, ends) in enumerate(packs)]

    def outputs(self, token_ids: np.ndarray, points: Sequence[str], of: str = "policy") -> dict[str, np.ndarray] | None:
        """float32 [L, width] of the named points (``vime.align.points``) that this pipeline stage computes.

        Every data-parallel rank runs the same sequence; None on ranks that hold nothing but copies.
        """
        model = self._model(of)
        self._check_tokens(np.array([0, len(token_ids)]), token_ids, ["to compare"])
        if of == "policy":
            self.learner.gather_parameters()
        with self._with_others(f"outputs of {of}"):
            found = outputs.compute_outputs(model, token_ids, points)
        return found if parallel.dp_rank() == 0 and parallel.is_first_of_stage() else None

    def routing(self, batch: RolloutBatch) -> tuple[np.ndarray, Routing] | None:
        """(rows of the batch, experts of their tokens in this stage's layers), packed as for log-probs.

        None where there are none of them, or where another rank answers. UsageError for a model without experts.
        """
        if not self.spec.num_experts:
            raise UsageError(f"model.path = {self.config.model.path}: a model without experts routes no tokens")
        self.learner.gather_parameters()
        plan, micros = self._micros(batch, AS_THE_RUN)
        with self._with_others("routing"):
            found = outputs.compute_routing(self.policy, micros)
        if not found or not parallel.is_first_of_stage():
            return None
        pairs = zip(plan, micros, strict=True)  # a micro-batch without rows is a filler
        used = np.concatenate([np.full(len(m.pack.position_T), len(rows) > 0) for rows, m in pairs])
        experts_TMK = np.stack([experts[used] for experts, _ in found.values()], 1)
        margins_TM = np.stack([margins[used] for _, margins in found.values()], 1)
        rows = np.concatenate(plan).astype(np.int64)
        return rows, Routing(tuple(found), experts_TMK, margins_TM)

    def _model(self, of: str) -> Model:
        if of == "policy":
            return self.policy
        if of != "ref" or self.reference is None:
            raise UsageError(
                f"log_probs of {of!r}: this trainer has {'policy and ref' if self.reference else 'policy only'}",
                "algo.log_ref = true keeps a reference model",
            )
        return self.reference

    def _check_tokens(self, offsets: np.ndarray, token_ids_T: np.ndarray, names: list[str]) -> None:
        """Raise VimeError for a sample the model cannot read: neither would raise by itself under every layout."""
        longest = int(np.diff(offsets).max(initial=0))
        if longest > self.spec.max_position_embeddings:
            row = int(np.diff(offsets).argmax())
            raise VimeError(
                f"sample {names[row]}: {longest} tokens, the model has {self.spec.max_position_embeddings} positions",
                "lower rollout.max_context_len",
            )
        is_bad_T = (token_ids_T < 0) | (token_ids_T >= self.spec.vocab_size)
        if is_bad_T.any():
            at = int(is_bad_T.argmax())
            row = int(np.searchsorted(offsets, at, side="right") - 1)
            last = self.spec.vocab_size - 1
            raise VimeError(
                f"sample {names[row]}: token {at - offsets[row]} is {token_ids_T[at]}, outside 0..{last}",
                "the tokenizer, or the recorded rollout, belongs to another model",
            )

    def step(self, data: TrainData) -> StepStats:
        """One optimizer step; the same statistics on every rank. See ``step.train_step`` for what stops or skips it."""
        self._check_tokens(data.offsets, data.token_ids_T, data.sample_ids)
        with self._with_others("step"):
            return train_step(self.learner, data)

    def sample_losses(self) -> tuple[int, dict[str, tuple[float, int]]] | None:
        """Of the last step: (data-parallel rank, sample -> its share of the loss and its trained tokens).

        Context-parallel ranks hold parts of their samples, to be summed; None on ranks that hold no loss.
        """
        if not parallel.is_first_of_last_stage():
            return None
        found = self.learner.sample_losses
        return parallel.dp_rank(), {name: (each.loss, each.num_tokens) for name, each in found.items()}

    @contextmanager
    def _with_others(self, what: str) -> Iterator[None]:
        """Say what was waited for when another rank is late or gone."""
        try:
            yield
        except RuntimeError as error:  # gloo and nccl raise nothing more specific
            reason = str(error)
            limit = self.config.train.step_timeout_seconds
            if "imed out" in reason or "imeout" in reason:
                raise VimeError(
                    f"trainer rank {self.rank}: {what} waited longer than train.step_timeout_seconds = {limit:g} for "
                    "another rank",
                    "look at the stacks of all trainer ranks: one of them hangs, or is not in the same call",
                ) from error
            if "Connection closed" in reason or "Connection reset" in reason or "Broken pipe" in reason:
                raise VimeError(
                    f"trainer rank {self.rank}: another trainer process ended during {what}",
                    "the log of the process that ended first has the reason",
                ) from error
            raise

    # ------------------------------------------------------------ weights

    def weight_specs(self) -> list[TensorEntry]:
        """Name, shape and dtype of every tensor of ``named_weights``, in its order; no digests."""
        shapes = self.spec.tensors()
        return [
            TensorEntry(
                name=name,
                shape=shapes[name],
                dtype=self.config.model.dtype,
                source_name=megatron_name(name, is_moe=self.spec.is_moe),
                layer=layer_of(name),
            )
            for name, _ in weights.order(self.policy)
        ]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor on the CPU, contiguous) in one order on every rank. Iterate to the end."""
        with self._with_others("named_weights"):
            self.learner.gather_parameters()
            yield from weights.export(self.policy)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """float32 gradients of the last step, clipped if it was clipped. Plain optimizer only (it holds whole ones)."""
        if self.config.parallel.distributed_optimizer:
            raise UsageError("named_gradients: parallel.distributed_optimizer = True keeps only shards of the gradient")
        return weights.export(self.policy, value=lambda parameter: parameter.main_grad)

    # ------------------------------------------------------------ planted faults

    def plant(self, fault: str) -> str:
        """Plant a fault of ``vime.align.faults`` in this live rank; returns what was changed, in words. A collective.

        UsageError for a name that is no fault of a trainer, or where model or layout have no place for it.
        """
        said, undo = walk_faults.plant(self, fault)
        self._undo += undo
        return said

    def heal(self) -> None:
        """Undo what was planted, and begin again. A collective."""
        while self._undo:
            self._undo.pop()()
        self.restart()

    def restart(self, path: str | None = None) -> None:
        """Weights, reference and optimizer bitwise as they were at the start; ``path``: another folder of the model,
        which is model.path from now on, until ``heal``. A collective.
        """
        if path is not None and path != self.config.model.path:
            own = self.config
            self._undo.append(lambda: self.use(own))
            self.use(own.model_copy(update={"model": own.model.model_copy(update={"path": path})}))
        model = self.config.model
        self._accounting["policy"] = weights.load(self.policy, model.path)
        self.learner.begin_again()
        if self.reference is not None:
            self._accounting["reference"] = weights.load(self.reference, model.ref_path or model.path)

    def use(self, config: Config) -> None:
        """Go on with another configuration; the layout must be the same."""
        self.config = self.learner.config = config

    # ------------------------------------------------------------ disk and memory

    def save(self, path: str, state: dict[str, Any]) -> None:
        """Write a checkpoint folder, complete or not at all. ``load`` returns ``state``, plain JSON data."""
        with self._with_others("save"):
            checkpoint.save(self.learner, path, state)

    def load(self, path: str) -> dict[str, Any]:
        """Resume: bitwise in the same layout, resharded in another. The reference stays as it was built."""
        with self._with_others("load"):
            return checkpoint.load(self.learner, path)

    def export(self, path: str) -> None:
        """Write a Hugging Face folder of the policy."""
        self.learner.gather_parameters()
        hf_folder.write(self.policy, self.config.model.path, self.config.model.dtype, path)

    def offload(self) -> int:
        """Free device memory of weights, gradients and optimizer; returns the bytes freed. A CPU has none to free."""
        if device.kind() == "cpu" or self._offloaded is not None:
            return 0
        self.learner.gather_parameters()
        self._offloaded = offload.empty(*offload.tensors_of(self.learner, self.reference))
        device.synchronize()
        device.empty_cache()
        return self._offloaded.num_bytes

    def onload(self) -> None:
        """Undo ``offload``: weights and optimizer bitwise as before, gradients zero."""
        if self._offloaded is not None:
            offload.refill(self._offloaded)
            self._offloaded = None

    def memory(self) -> dict[str, int]:
        """Bytes held by this process, see ``device.memory``."""
        return device.memory()

    def close(self) -> None:
        """Leave the process groups."""
        parallel.shutdown()
