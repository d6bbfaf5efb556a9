"""The bench of ``vime align-check`` with real processes: what the first check asks for is done once and kept."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from vime.align.bench import Learned, OneProcess, Resumed, Unavailable
from vime.config.load import Loaded
from vime.config.schema import Config
from vime.data.tokenizer import load_tokenizer
from vime.debug.stop.hold import held
from vime.errors import VimeError
from vime.models import ModelSpec, load_spec
from vime.observe import Observer
from vime.protocols import Rollouts
from vime.runs import injection
from vime.runs.injection import Injection
from vime.runs.introduce import introduce_trainer
from vime.runs.parts import Begun, Prompts, begin, rollouts_of, transport_of, up
from vime.runs.sides import HEALTH_SECONDS, Devices, Life, LiveEngine, LiveTrainer, ending
from vime.types import RolloutBatch, WeightManifest
from vime.weights.checkpoint import checkpoint_manifest
from vime.weights.transport import ShmTransport

Fact = TypeVar("Fact")
ROLLOUTS, FIRST_PROMPTS = "the rollouts", "the first prompts"
STARTED = (
    "the start",
    "the tokenizer",
    "reading the prompts",
    "the start of the trainer",
    "the start of the engines",
    "the way of the weights",
    ROLLOUTS,
    FIRST_PROMPTS,
    "one process",
)
"""Facts that outlast a walk."""
MESSAGE_WIDTH = 100
"""Of an error that is told once more; the check that met it shows all of it."""
UNTOLD = ""
"""In place of the check that met a failure first: none did, yet."""


@dataclass
class LiveBench:
    """``vime.align.bench.Bench``. Everything that is started ends with ``stack``.

    folder         scratch, of the caller, who removes it
    wants_engines  False: no check asks for an engine, so none is started beside the trainer
    check          the check that runs at this moment: where a fact failed first
    serves_many    walks follow one another: what is slow to start is kept between them
    injection      the faults that are planted at this moment
    """

    loaded: Loaded
    folder: Path
    observer: Observer
    stack: ExitStack
    wants_engines: bool = True
    check: str = ""
    is_live: bool = True
    serves_many: bool = False
    injection: Injection = field(default_factory=Injection)
    _facts: dict[str, Any] = field(default_factory=dict)
    _failures: dict[str, tuple[VimeError, str]] = field(default_factory=dict)
    _num_wrong: int | None = None
    """Tensors that the latest sync left different; None before the first."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.config.model.path)

    @cached_property
    def devices(self) -> Devices:
        return Devices(is_shared=self.config.cluster.colocate and self.wants_engines)

    def say(self, text: str) -> None:
        self.observer.progress.note(text)

    # ------------------------------------------------------------ facts, each once

    def fact(self, name: str, make: Callable[[], Fact]) -> Fact:
        """What ``make`` returns, kept under ``name``. Its VimeError is raised once; later callers get Unavailable."""
        if name in self._facts:
            return cast(Fact, self._facts[name])
        if name in self._failures:
            error, check = self._failures[name]
            if check in (UNTOLD, self.check):
                self._failures[name] = (error, self.check)
                raise error
            why = textwrap.shorten(error.message.splitlines()[0], MESSAGE_WIDTH, placeholder=" ...")
            raise Unavailable(f"{name} failed in check {check}: {why}")
        try:
            self._facts[name] = found = make()
        except Unavailable:
            raise
        except VimeError as error:
            self._failures[name] = (error, self.check)
            raise
        return found

    def _attempt(self, name: str, ask: Callable[[], object]) -> VimeError | None:
        """Ask for a fact without which one can go on; if it fails, the check that asks for it next is told why."""
        try:
            ask()
        except VimeError as error:
            if name in self._failures and self._failures[name][0] is error:
                self._failures[name] = (error, UNTOLD)
            return error
        return None

    @contextmanager
    def replaced(self, facts: Mapping[str, Any], without: Sequence[str]) -> Iterator[None]:
        """In here ``facts`` are those, and those of ``without`` are asked for anew; after it, all are as before."""
        names = (*facts, *without)
        before = {name: self._facts.pop(name) for name in names if name in self._facts}
        self._facts |= facts
        yield
        for name in names:
            self._facts.pop(name, None)
        self._facts |= before

    def plant(self, fault: str) -> str:
        """Plant a fault of ``vime.align.faults`` where it belongs, see ``injection.plant``."""
        return injection.plant(self, fault)

    def begin_again(self) -> None:
        """For another walk: faults are healed, every process is as at its start, nothing else is known."""
        injection.heal(self)
        kept = {name: fact for name, fact in self._facts.items() if name in STARTED}
        self._facts, self._failures = kept, {}
        if ROLLOUTS in kept:
            kept[ROLLOUTS].load_state_dict(kept[FIRST_PROMPTS])

    @property
    def begun(self) -> Begun:
        """The Ray session; engines, where they are wanted, come up in it."""
        return self.fact("the start", self._begin)

    def _begin(self) -> Begun:
        return begin(self.config, self.observer, self.stack, with_engines=self.wants_engines)

    @property
    def tokenizer(self) -> Any:
        """The model's own, whatever prompts were rendered with."""
        return self.fact("the tokenizer", lambda: load_tokenizer(self.config.model.path))

    @property
    def prompts(self) -> Prompts:
        def read() -> Prompts:
            found = self.begun.prompts.result()
            assert found is not None, "a live walk has prompts"
            return found

        return self.fact("reading the prompts", read)

    @property
    def trainer(self) -> LiveTrainer:
        return self.fact("the start of the trainer", self._start_trainer)

    def _start_trainer(self) -> LiveTrainer:
        # Where devices are shared the engines come first, as in a colocated run, and make room.
        if self.devices.is_shared and self._attempt("the start of the engines", lambda: self.engine) is None:
            self.devices.to_trainer()
        with self.observer.phase("starting the trainer"):
            ray = self.begun.new_trainer()
            about = ray.start(keeps_initial=True)
        introduce_trainer(self.observer.progress, about)
        self.devices.trainer = ray
        ping = Life("the trainer", lambda: self.check, lambda: ray.ping(held(HEALTH_SECONDS)))
        return LiveTrainer(ray, about, self.devices, ping)

    @property
    def engine(self) -> LiveEngine:
        return self.fact("the start of the engines", self._start_engine)

    def _start_engine(self) -> LiveEngine:
        ray = self.begun.engines
        if ray is None:
            raise VimeError("no engine was started: the checks that were asked for need none")
        life = Life("an engine", lambda: self.check, lambda: ray.ping(held(HEALTH_SECONDS)))
        ends = self.stack.enter_context(ending(life, self.observer.progress))
        with self.observer.phase("starting the engines"):
            infos = up(ray, self.observer.progress, ends)
        self.devices.engines = ray
        self._infos = infos
        return LiveEngine(self.config, ray, self.devices, life, about=infos[0])

    # ------------------------------------------------------------ weights

    @property
    def checkpoint(self) -> WeightManifest:
        dtypes = dict.fromkeys(self.spec.tensors(), self.config.model.dtype)
        return self.fact("reading the checkpoint", lambda: checkpoint_manifest(self.config.model.path, dtypes))

    @property
    def transport(self) -> ShmTransport:
        """Not strict: engines go on with what they hold, and the checks compare."""

        def make() -> ShmTransport:
            trainer, engine = self.trainer, self.engine
            found = transport_of(
                self.config, trainer.ray, engine.ray, self.observer.progress, self.stack, is_strict=False
            )
            assert found is not None
            engine.transport = found
            return found

        return self.fact("the way of the weights", make)

    @property
    def synced(self) -> WeightManifest:
        return self.fact("the first weight sync", self.sync)

    def sync(self) -> WeightManifest:
        """Said where it tells something: the first one, and one that leaves other tensors different than the last."""
        transport, trainer, engine = self.transport, self.trainer, self.engine
        lines: list[str] = []
        transport.report = lines.append
        with trainer.life.required(), engine.life.required(), self.observer.phase("sync"):
            self.devices.to_both()
            sent = transport.sync(trainer.num_steps)
        done = sent.verification
        if done is not None and done.num_compared - done.num_equal != self._num_wrong:
            self._num_wrong = done.num_compared - done.num_equal
            for line in lines:
                self.say(line)
        self.injection.synced(self)
        return sent

    # ------------------------------------------------------------ the rollout and what the trainer says of it

    @property
    def rollouts(self) -> Rollouts:
        return self.fact(ROLLOUTS, self._rollouts)

    def _rollouts(self) -> Rollouts:
        engine = self.engine
        transport = self._facts.get("the way of the weights")
        found = rollouts_of(self.loaded, self.prompts, engine.ray, self._infos, transport, self.observer, self.stack)[0]
        self._facts[FIRST_PROMPTS] = found.state_dict()
        return found

    def produce(self, rollout_id: int) -> RolloutBatch:
        """One rollout with the weights that the engines hold."""
        engine, rollouts = self.engine, self.rollouts
        with engine.turn(), self.observer.phase("generate"):
            return self.injection.answered(rollouts.produce(rollout_id))

    @property
    def batch(self) -> RolloutBatch:
        return self.fact("the rollout", self._first_rollout)

    def _first_rollout(self) -> RolloutBatch:
        self.engine  # noqa: B018 - where there is none, there is no rollout either
        error = self._attempt("the first weight sync", lambda: self.synced)
        if error is not None:
            text = error.message.splitlines()[0]
            self.observer.progress.warn(f"no weights were synced, the engines go on with what they hold: {text}")
        return self.produce(0)

    @property
    def log_probs_T(self) -> np.ndarray:
        return self.fact("log-probs of the policy", lambda: self.trainer.log_probs(self.batch))

    @property
    def ref_log_probs_T(self) -> np.ndarray | None:
        if not self.config.uses_reference:
            return None
        return self.fact("log-probs of the reference", lambda: self.trainer.log_probs(self.batch, "ref"))

    # ------------------------------------------------------------ steps

    @property
    def first(self) -> Learned:
        from vime.runs import bench_steps

        return self.fact("the first step", lambda: bench_steps.first(self))

    @property
    def second(self) -> Learned:
        from vime.runs import bench_steps

        return self.fact("the second step", lambda: bench_steps.second(self))

    def reference_gradients(self) -> OneProcess:
        from vime.runs import bench_steps

        return self.fact("gradients of one process", lambda: bench_steps.reference_gradients(self))

    def resumed(self) -> Resumed:
        from vime.runs import bench_steps

        return self.fact("resuming", lambda: bench_steps.resumed(self))
