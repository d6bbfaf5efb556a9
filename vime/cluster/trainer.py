"""The trainer as Ray actors: one per rank, driven as one ``Trainer``."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vime.align.bench import AS_THE_RUN, Forward, LoadedParameter, Routing, joined_routing
from vime.cluster.session import RaySession
from vime.cluster.waiting import gather
from vime.config.schema import Config
from vime.debug.everywhere import this_node
from vime.debug.processes import Member
from vime.debug.stop.identity import introduce
from vime.errors import VimeError
from vime.forks import forking_dies_with_parent
from vime.log import answer_stack_requests
from vime.reward.breakpoints import ignore_in_worker
from vime.train.packing import token_index
from vime.types import RolloutBatch, StepStats, TensorEntry, TrainData, WeightManifest


class TrainerActor:
    """One rank in its own process. The backend is imported here, so the driver never loads Megatron."""

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        introduce("trainer", rank)
        ignore_in_worker()
        os.environ["OMP_NUM_THREADS"] = str(config.cluster.threads_per_trainer)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.config, self.rank, self.world_size = config, rank, world_size
        answer_stack_requests()

    def address(self) -> tuple[str, int, Member]:
        """(host, free port, this process): where rank 0 can be met."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1], Member.here("trainer", self.rank, node=this_node())

    def start(self, host: str, port: int, keeps_initial: bool) -> dict[str, Any]:
        from vime.backends.megatron.rank import MegatronRank

        self.backend = MegatronRank(self.config, self.rank, self.world_size, host, port, keeps_initial)
        return self.backend.describe()

    def call(self, method: str, *args: Any) -> Any:
        with forking_dies_with_parent():  # a checkpoint is written by forks
            return getattr(self.backend, method)(*args)

    def write_weights(self, plan: Any) -> Any:
        """Rank 0 writes whole tensors into the shared buffer; the others take part in the collectives."""
        from vime.weights.shm import write_weights

        if self.rank == 0:
            return write_weights(plan, self.backend.named_weights())
        for _ in self.backend.named_weights():
            pass
        return None

    def dump_weights(self, rows: list[list[Any]], folder: str | None, progress: str | None) -> dict[str, Any]:
        """Rank 0 records the tensors of ``rows`` (name, shape, dtype), see ``vime.weights.dump``, as plain data."""
        from vime.weights.dump import record_stream, tell_progress

        tensors = self.backend.named_weights()
        if self.rank != 0:
            for _ in tensors:
                pass
            return {}
        entries = [TensorEntry(name, tuple(shape), dtype) for name, shape, dtype in rows]
        records = record_stream(tensors, entries, None if folder is None else Path(folder), tell_progress(progress))
        return {name: record.as_dict() for name, record in records.items()}

    def write_tensors(self, of: str, folder: str | None, version: int) -> WeightManifest | None:
        """Rank 0 digests whole tensors (``of``: weights, gradients) and writes them below ``folder``, where given."""
        from vime.weights.manifest import build_manifest
        from vime.weights.shards import written

        tensors = getattr(self.backend, f"named_{of}")()
        if self.rank == 0:
            stream = tensors if folder is None else written(Path(folder), tensors)
            return build_manifest(version, f"trainer, {of}", stream)
        for _ in tensors:
            pass
        return None


class RayTrainer:
    """``protocols.Trainer`` over ``parallel.world_size`` actors."""

    def __init__(self, config: Config, session: RaySession, options: list[dict[str, Any]]) -> None:
        self.config = config
        size = config.parallel.world_size
        self.actors = [
            session.start_actor(TrainerActor, f"trainer rank {r}", own, config, r, size)
            for r, own in enumerate(options)
        ]
        self._session = session
        self._put: tuple[RolloutBatch, Any] | None = None
        self._pids: list[int] = []

    def start(self, keeps_initial: bool = False) -> dict[str, Any]:
        """Build every rank; returns rank 0's description. Raises VimeError with the first cause.

        ``keeps_initial``: digest every parameter before it is loaded, for ``loaded``.
        """
        limit = self.config.cluster.start_timeout_seconds
        met = self._all("address", limit=limit, what="starting the trainer", direct=True)
        self._pids = [member.pid for _, _, member in met.values()]
        self._session.watch(self._pids)
        self._session.introduce(member for _, _, member in met.values())
        host, port, _ = met["trainer rank 0"]
        started = self._all("start", host, port, keeps_initial, limit=limit, what="starting the trainer", direct=True)
        return started["trainer rank 0"]

    def log_probs(self, batch: RolloutBatch, of: str = "policy", how: Forward = AS_THE_RUN) -> np.ndarray:
        import ray

        if self._put is None or self._put[0] is not batch:
            self._put = (batch, ray.put(replace(batch, rows=[])))
        parts = self._all("log_probs", self._put[1], of, how, what=f"log-probs of {of}")
        out = np.full(batch.num_tokens, np.nan, np.float32)
        for part in parts.values():
            if part is not None:
                rows, values = part
                out[token_index(batch.offsets, rows)] = values
        if np.isnan(out).any():
            at = int(np.flatnonzero(np.isnan(out))[0])
            row = int(np.searchsorted(batch.offsets, at, side="right") - 1)
            raise VimeError(
                f"log-probs of {of}: token {at - int(batch.offsets[row])} of sample "
                f"{batch.group_ids_N[row]}/{batch.indices_N[row]} is NaN",
                "the weights or the input hold a non-finite value",
            )
        return out

    def loaded(self) -> list[LoadedParameter]:
        """Every parameter of every rank against the files that it was loaded from, see ``start``. Before any step."""
        limit = self.config.cluster.start_timeout_seconds
        return [
            each for found in self._all("loaded", limit=limit, what="digests of parameters").values() for each in found
        ]

    def outputs(self, token_ids: np.ndarray, points: Sequence[str], of: str = "policy") -> dict[str, np.ndarray]:
        """float32 [L, width] of the named points (``vime.align.points``) in one forward of one sequence."""
        found = self._all("outputs", token_ids, list(points), of, what=f"module outputs of {of}")
        return {name: value for part in found.values() for name, value in (part or {}).items()}

    def routing(self, batch: RolloutBatch) -> Routing:
        """Experts of every token; ranks answer (rows of the batch, their routing by this rank's layers), or nothing."""
        import ray

        parts = self._all("routing", ray.put(replace(batch, rows=[])), what="routing of the tokens")
        return joined_routing(batch, [part for part in parts.values() if part is not None])

    def plant(self, fault: str) -> str:
        """Plant a fault of ``vime.align.faults``; returns in words what was changed."""
        done = self._all("plant", fault, what=f"planting {fault}")
        return next((text for text in done.values() if text), "nothing was changed")

    def heal(self) -> None:
        """Undo what was planted, and begin again."""
        self._all("heal", what="undoing the planted fault")

    def restart(self, path: str) -> None:
        """Weights, reference and optimizer as if every rank had just been started, from the folder ``path``."""
        self._all("restart", path, what=f"loading {path}")

    def step(self, data: TrainData) -> StepStats:
        import ray

        return self._all("step", ray.put(data), what="optimizer step")["trainer rank 0"]

    def weight_specs(self) -> list[TensorEntry]:
        return self._all("weight_specs", what="names of the weights")["trainer rank 0"]

    def write_weights(self, plan: Any) -> Any:
        limit = self.config.weights.timeout_seconds
        return self._all("write_weights", plan, limit=limit, what="export of the weights", direct=True)[
            "trainer rank 0"
        ]

    def dump_weights(self, rows: list[list[Any]], folder: Path | None, progress: Path | None) -> dict[str, Any]:
        """Plain records of the policy's weights by name; ``folder``: written there too; ``progress``: file of bytes."""
        limit = self.config.weights.timeout_seconds
        arguments = (rows, None if folder is None else str(folder), None if progress is None else str(progress))
        answers = self._all("dump_weights", *arguments, limit=limit, what="dump of the weights", direct=True)
        return answers["trainer rank 0"]

    def write_tensors(self, of: str, folder: Path | None, version: int) -> WeightManifest:
        """Digests of the ``weights``, or of the ``gradients`` of the last step; ``folder``: written there too."""
        limit = self.config.weights.timeout_seconds
        arguments = (of, None if folder is None else str(folder), version)
        answers = self._all("write_tensors", *arguments, limit=limit, what=f"writing the {of}", direct=True)
        return answers["trainer rank 0"]

    def sample_losses(self) -> dict[str, tuple[float, int, int]]:
        """Of the last step, sample -> (its share of the loss, trained tokens, data-parallel rank that trained it)."""
        found: dict[str, tuple[float, int, int]] = {}
        for answer in self._all("sample_losses", what="losses of the samples").values():
            dp_rank, samples = answer or (0, {})
            for name, (loss, num_tokens) in samples.items():
                before, tokens_before, _ = found.get(name, (0.0, 0, dp_rank))
                found[name] = (before + loss, tokens_before + num_tokens, dp_rank)
        return found

    def save(self, path: str, state: dict[str, Any]) -> None:
        self._all("save", path, state, what=f"saving {path}")

    def load(self, path: str) -> dict[str, Any]:
        return self._all("load", path, what=f"loading {path}")["trainer rank 0"]

    def export(self, path: str) -> None:
        self._all("export", path, what=f"export to {path}")

    def end(self) -> None:
        """End these processes, while the session goes on."""
        self._session.end(self.actors, self._pids)

    def ping(self, limit: float) -> None:
        """Raises VimeError where a rank does not answer within ``limit`` seconds."""
        self._all("memory", limit=limit, what="a sign of life of the trainer")

    def memory(self) -> dict[str, dict[str, int]]:
        return self._all("memory", what="memory of the trainer")

    def offload(self) -> None:
        self._all("offload", what="offload of the trainer")

    def onload(self) -> None:
        self._all("onload", what="onload of the trainer")

    def _all(
        self, method: str, *args: Any, what: str, limit: float | None = None, direct: bool = False
    ) -> dict[str, Any]:
        """Call every rank; ``direct``: a method of the actor itself, not of its backend."""
        refs = {}
        for rank, actor in enumerate(self.actors):
            refs[f"trainer rank {rank}"] = (
                getattr(actor, method).remote(*args) if direct else actor.call.remote(method, *args)
            )
        return gather(refs, limit or self.config.train.step_timeout_seconds, what)
