"""Save and load the learner: weights, optimizer, schedule, random states, and the run's own state.

Megatron's distributed checkpoint (torch_dist): the same layout resumes bitwise, another one reshards. The model
and the kind of optimizer (plain or distributed) must be the same.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from vime.backends.megatron import manifest
from vime.backends.megatron.step import Learner
from vime.errors import VimeError, first_line

_LAYOUT_OF_RNG = ("tp", "pp")


def save(learner: Learner, path: str, state: dict[str, Any]) -> None:
    """Write a checkpoint folder; ``state`` is plain JSON data. All ranks must see the same file system.

    It is written next to ``path`` and renamed when every file is on disk and listed in the manifest. Raises VimeError
    if it cannot be written.
    """
    learner.gather_parameters()
    final = Path(path)
    writing = final.with_name(f".{final.name}.writing")
    _on_first_rank(lambda: _make(manifest.temporary(final)))
    _write_in_process()
    _write(_sharded(learner, is_loading=False, with_rng=True), writing)
    dist.barrier()

    def complete() -> None:
        manifest.write_json(writing / manifest.STATE, {"state": state, **_facts(learner)})
        manifest.write_manifest(writing)
        manifest.put_in_place(writing, final)

    _on_first_rank(complete)


def load(learner: Learner, path: str) -> dict[str, Any]:
    """Restore the learner from a checkpoint and return the ``state`` it was saved with.

    Raises VimeError if a file is missing or damaged, or if the checkpoint is of another model or optimizer.
    """
    _on_first_rank(lambda: manifest.verify(path))
    saved = manifest.read_state(path)
    _check_facts(learner, saved, path)
    with_rng = all(saved["layout"][key] == getattr(learner.config.parallel, key) for key in _LAYOUT_OF_RNG)
    loaded = _read(_sharded(learner, is_loading=True, with_rng=with_rng), path)
    for number, module in enumerate(learner.model.modules):
        module.load_state_dict(loaded[f"model{number}"], strict=True)
    learner.optimizer.load_state_dict(loaded["optimizer"])
    learner.num_steps_done = saved["num_steps_done"]
    if with_rng:
        _set_rng(loaded["rng"])
    return saved["state"]


def _read(sharded: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(sharded, path)
    except (CheckpointException, CheckpointingException) as error:  # the first is a BaseException
        raise VimeError(f"{path}: cannot be loaded into this model and layout ({first_line(error)})") from error


def _sharded(learner: Learner, *, is_loading: bool, with_rng: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # fully_sharded_model_space, the default of 0.16.1, cannot be saved; dp_reshardable only changes dp.
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    out: dict[str, Any] = {}
    for number, module in enumerate(learner.model.modules):
        out[f"model{number}"] = module.sharded_state_dict(metadata=metadata)
    _begin_adam(learner)
    with _true_offsets(learner):
        out["optimizer"] = learner.optimizer.sharded_state_dict(dict(out), is_loading=is_loading, metadata=metadata)
    _count_from_zero(learner, out["optimizer"])
    if with_rng:
        out["rng"] = _rng_entry()
    return out


@contextmanager
def _true_offsets(learner: Learner) -> Iterator[None]:
    """Keep the padding between buckets in the distributed optimizer's flat state while it is cut into parameters.

    Megatron 0.16.1 drops that padding but cuts at offsets that count it: with a tied model and a pipeline (the shared
    embedding has a bucket of its own), or with several buckets, all states behind the first bucket are saved shifted,
    with no more than a warning. Delete when ``get_parameter_state_dp_zero`` keeps offsets.
    """
    if not learner.config.parallel.distributed_optimizer:
        yield
        return
    for optimizer in learner.optimizers:
        optimizer.get_parameter_state_dp_zero = partial(_padded_state, optimizer, optimizer.get_parameter_state_dp_zero)
    try:
        yield
    finally:
        for optimizer in learner.optimizers:
            del optimizer.get_parameter_state_dp_zero


def _padded_state(optimizer: Any, compact_state: Callable[..., Any], **options: Any) -> Any:
    state = compact_state(**options)
    for number, buffer in enumerate(optimizer.buffers):
        for tensors in state[number].values():
            for key in ("param", "exp_avg", "exp_avg_sq"):
                tensors[key] = _spread(tensors[key], buffer)
    return state


def _spread(compact: Tensor, buffer: Any) -> Tensor:
    """Move each bucket's part to the offset that the bucket has in the buffer."""
    spread = torch.zeros(buffer.numel, dtype=compact.dtype, device=compact.device)
    at = 0
    for bucket in buffer.buckets:
        spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[at : at + bucket.numel_unpadded]
        at += bucket.numel_unpadded
    return spread


def _begin_adam(learner: Learner) -> None:
    """Give torch's Adam the state of its first step: without it the distributed optimizer cannot list its entries, and
    what a plain one saves before its first step, or while all steps are skipped, cannot be loaded.
    """
    for optimizer in learner.optimizers:
        inner = optimizer.optimizer
        if isinstance(inner, torch.optim.Adam) and not inner.state:
            for parameter in optimizer.get_parameters():
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **zeros}


def _count_from_zero(learner: Learner, sharded: dict[Any, Any]) -> None:
    """Megatron 0.16.1 leaves a step of 0 out of what it saves (``if step:``), and torch's Adam loads nothing without.
    Delete when it tells 0 from None.
    """
    if learner.config.parallel.distributed_optimizer:
        return
    for part in sharded.values() if len(learner.optimizers) > 1 else [sharded]:
        part.get("optimizer", part)["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))


# ---------------------------------------------------------------- facts that must agree


def _facts(learner: Learner) -> dict[str, Any]:
    spec, config = learner.model.spec, learner.config
    return {
        "layout": config.parallel.model_dump(),
        "num_steps_done": learner.num_steps_done,
        "model": {
            "family": spec.family,
            "num_layers": spec.num_layers,
            "num_parameters": spec.num_parameters,
            "vocab_size": spec.vocab_size,
            "dtype": config.model.dtype,
        },
    }


def _check_facts(learner: Learner, saved: dict[str, Any], path: str) -> None:
    ours = _facts(learner)
    for name, value in ours["model"].items():
        if saved["model"][name] != value:
            raise VimeError(
                f"{path}: checkpoint of a model with {name} = {saved['model'][name]!r}, this one has {value!r}"
            )
    key = "distributed_optimizer"
    if saved["layout"][key] != ours["layout"][key]:
        raise VimeError(
            f"{path}: saved with parallel.{key} = {saved['layout'][key]}, this run has {ours['layout'][key]}",
            f"resume with parallel.{key} = {str(saved['layout'][key]).lower()}; their optimizer states differ in form",
        )


# ---------------------------------------------------------------- random states


def _rng_entry() -> ShardedObject:
    """One state per (pp, tp): only the same tp x pp can take it back."""
    pp, tp = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    states = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    return ShardedObject("rng", states, shape, (pp, tp), replica_id=replica)


def _set_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


# ---------------------------------------------------------------- writing


def _write(sharded: dict[str, Any], folder: Path) -> None:
    """What torch says of a full disk is "unexpected pos 704 vs 598", so the room that is left is said too."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    try:
        dist_checkpointing.save(sharded, str(folder), strategy)
    except (CheckpointException, RuntimeError, OSError) as error:  # the first is a BaseException
        cause = (str(error) or type(error).__name__).strip().splitlines()[-1]
        free = shutil.disk_usage(folder.parent).free / 1e6
        raise VimeError(
            f"{folder.parent}: the checkpoint could not be written, {free:.0f} MB are free there ({cause.strip()})",
            "make room, or set checkpoint.keep",
        ) from error


def _make(folder: Path) -> None:
    folder.mkdir(parents=True)


def _write_in_process() -> None:
    """Results of a synchronous save come back in this process: no need for megatron's spawned queue server.

    The server costs two seconds and imports ``__main__`` again.
    """
    if not hasattr(filesystem_async, "_results_queue"):
        raise VimeError(
            "the installed megatron-core has no filesystem_async._results_queue", "install the pinned version"
        )
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _on_first_rank(act: Callable[[], None]) -> None:
    """Run on rank 0 while the others wait; its error is raised everywhere."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            act()
        except (VimeError, OSError) as error:
            outcome = [error if isinstance(error, VimeError) else VimeError(str(error))]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
