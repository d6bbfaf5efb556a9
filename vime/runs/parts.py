"""Pick and start the parts of a run, and end every one of them, whatever happens."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vime.align.examine import Examiner
from vime.align.planting import foreign_template
from vime.backends.vllm.remote import RemoteEngines
from vime.cluster import colocated
from vime.cluster.colocated import ColocatedRollouts, ColocatedTrainer, ColocatedTransport
from vime.cluster.engines import RayEngines
from vime.cluster.placement import Placement, place
from vime.cluster.session import RaySession
from vime.cluster.trainer import RayTrainer
from vime.config.load import Loaded, to_toml
from vime.config.schema import Config
from vime.data.prompts import PromptSource
from vime.data.tokenizer import chat_template_digest, load_tokenizer, tokenizer_digest
from vime.debug.leftovers.user_modules import user_leftovers
from vime.debug.stop.hold import while_stopped
from vime.errors import VimeError
from vime.log import Progress
from vime.loop import Evaluate, Parts
from vime.models import load_spec
from vime.observe import Observer
from vime.protocols import Rollouts
from vime.record.recorded import RecordedRollouts
from vime.record.template import training_template
from vime.record.training import write_training
from vime.record.writer import RecordWriter
from vime.reward.breakpoints import ignore
from vime.reward.pool import RewardPool
from vime.reward.registry import needs_label
from vime.rollout.eval import eval_data, evaluate
from vime.rollout.live import LiveRollouts
from vime.rollout.prefix_cache import CountedRollouts
from vime.run_folder import versions
from vime.runs.external import introduce_servers, with_servers
from vime.runs.introduce import introduce_engines, introduce_sampling, introduce_trainer
from vime.runs.trace import Trace, TracedTrainer, TracedTransport
from vime.runs.watched import explaining
from vime.types import RolloutBatch, RolloutHeader
from vime.weights.manifest import manifest_digest
from vime.weights.transport import ShmTransport

logger = logging.getLogger(__name__)
WRONG_TEMPLATE = "wrong-chat-template"


@contextmanager
def started(loaded: Loaded, observer: Observer, session: RaySession | None = None) -> Iterator[Parts]:
    """All parts of the run, ready. On leaving, every process that was started has ended, in bounded time.

    ``session``: one of the caller's, which goes on, instead of one of this run's.
    """
    config, say = loaded.config, observer.progress
    if config.needs_engines and config.rollout.engines:
        with _asked(loaded, observer) as parts:
            yield parts
        return
    with ExitStack() as stack:
        with say.phase("starting"), explaining(observer):
            begun = begin(config, observer, stack, session)
            engines, prompts = begun.engines, begun.prompts
            is_shared = config.cluster.colocate and engines is not None and config.needs_trainer
            infos: list[dict[str, Any]] = []
            if engines is not None and is_shared:  # the devices hold one side at a time
                infos = up(engines, say, stack)
                colocated.begin(engines.engines, config)
            trainer = begun.new_trainer() if config.needs_trainer else None
            if trainer is not None:
                introduce_trainer(say, trainer.start())
            prompts.result()  # bad prompts end the run before it waits for the engines
            if engines is not None and not is_shared:
                infos = up(engines, say, stack)
        transport = transport_of(config, trainer, engines, say, stack)
        rollouts, evaluation = rollouts_of(loaded, prompts.result(), engines, infos, transport, observer, stack)
        parts = Parts(rollouts, trainer, transport, evaluation)
        parts = _colocated(parts, trainer, engines) if is_shared else parts
        with explaining(observer), while_stopped(say.warn):
            yield _recorded(config, parts, trainer, stack)


@dataclass(frozen=True)
class Begun:
    """A Ray session in which the engines come up, while the driver reads the prompts. No engine has answered yet."""

    config: Config
    session: RaySession
    placement: Placement
    engines: RayEngines | None
    prompts: Future[Prompts | None]

    def new_trainer(self) -> RayTrainer:
        """Its processes; they build nothing before ``start``."""
        return RayTrainer(self.config, self.session, self.placement.trainer_options)


def begin(
    config: Config,
    observer: Observer,
    stack: ExitStack,
    session: RaySession | None = None,
    with_engines: bool = True,
) -> Begun:
    """``session``: one of the caller's, which goes on after ``stack``, instead of one that ends with it."""
    if session is None:
        session = RaySession.start(config, observer.roster)
        stack.callback(session.close)
    else:
        stack.callback(session.end_actors)
    placement = place(config, session.resources())
    for text in placement.warnings:
        observer.progress.warn(text)
    # What only the driver does goes on while trainer and engines come up. Not while Ray does, which all else waits for:
    # importing transformers in a second thread takes processor time from its start.
    reader = stack.enter_context(ThreadPoolExecutor(1))
    engines = None
    if config.needs_engines and with_engines:
        engines = RayEngines(config, session, placement.engine_options)
        engines.begin()
    return Begun(config, session, placement, engines, reader.submit(read_prompts, config))


@contextmanager
def _asked(loaded: Loaded, observer: Observer) -> Iterator[Parts]:
    """The parts of a run over ``rollout.engines``: no process is started but the reward's, and no Ray session."""
    config, say = loaded.config, observer.progress
    with ExitStack() as stack:
        with say.phase("starting"):
            prompts = read_prompts(config)
        assert prompts is not None
        engines, infos = stack.enter_context(engines_alone(config, say, prompts.tokenizer))
        rollouts, evaluation = rollouts_of(loaded, prompts, engines, infos, None, observer, stack)
        with explaining(observer), while_stopped(say.warn):
            yield Parts(rollouts, None, None, evaluation)


@contextmanager
def engines_alone(
    config: Config, say: Progress, tokenizer: Any
) -> Iterator[tuple[RayEngines | RemoteEngines, list[dict[str, Any]]]]:
    """Engines, of our own or of ``rollout.engines``, with their descriptions; ended on leaving."""
    with ExitStack() as stack:
        with say.phase("starting"):
            if config.rollout.engines:
                remote = RemoteEngines(config, tokenizer)
                infos = remote.start()
                introduce_servers(say, infos)
                introduce_sampling(say, infos[0])
                found: RayEngines | RemoteEngines = remote
            else:
                session = RaySession.start(config)
                stack.callback(session.close)
                placement = place(config, session.resources())
                for text in placement.warnings:
                    say.warn(text)
                found = RayEngines(config, session, placement.engine_options)
                found.begin()
                infos = up(found, say, stack)
        yield found, infos


def up(engines: RayEngines, say: Progress, stack: ExitStack) -> list[dict[str, Any]]:
    """Wait for the engines, see to their end, introduce them."""
    infos = engines.wait()
    stack.enter_context(_ended(engines))
    introduce_engines(say, infos)
    if engines.config.rollout.serve_openai:
        for engine, url in zip(engines.engines, engines.serve_openai(), strict=True):
            say.note(f"{engine.name} serves the OpenAI API at {url}/v1")
    return infos


@contextmanager
def _ended(engines: RayEngines) -> Iterator[None]:
    """The engines end in order. What goes wrong with that after a failure does not hide the first cause."""
    try:
        yield
    except BaseException:
        try:
            engines.shutdown()
        except VimeError as later:
            logger.warning("after the failure: %s", later)
        raise
    engines.shutdown()


def _colocated(parts: Parts, trainer: RayTrainer | None, engines: RayEngines | None) -> Parts:
    assert trainer is not None
    assert engines is not None
    assert parts.transport is not None
    return replace(
        parts,
        rollouts=ColocatedRollouts(parts.rollouts, engines.engines, trainer),
        trainer=ColocatedTrainer(trainer, engines.engines),
        transport=ColocatedTransport(parts.transport, engines.engines, trainer),
    )


def _recorded(config: Config, parts: Parts, trainer: RayTrainer | None, stack: ExitStack) -> Parts:
    """Beside each record of a rollout, what the trainer did with it."""
    template = config.debug.save_rollout_data
    if template is None or trainer is None or parts.trainer is None or parts.transport is None:
        return parts
    name = training_template(template)
    writer = RecordWriter(name, overwrite=config.run.overwrite, write=write_training)
    trace = Trace(config, trainer.sample_losses, stack.enter_context(writer).save)
    traced = TracedTrainer(parts.trainer, trace)
    return replace(parts, trainer=traced, transport=TracedTransport(parts.transport, trace))


@dataclass(frozen=True)
class Prompts:
    """What the driver reads itself."""

    tokenizer: Any
    source: PromptSource
    evaluation: dict[str, PromptSource]  # by the name of the set


def read_prompts(config: Config) -> Prompts | None:
    """None where rollouts are recorded. UsageError for bad rows, all at once."""
    if not config.needs_engines:
        return None
    tokenizer = load_tokenizer(config.model.path)
    if WRONG_TEMPLATE in config.debug.inject:
        tokenizer.chat_template = foreign_template(tokenizer.chat_template)
    options: dict[str, Any] = {
        "seed": config.run.seed,
        "context_len": config.rollout.max_context_len or load_spec(config.model.path).max_position_embeddings,
        "needs_label": needs_label(config.reward),
    }
    source = PromptSource(config.data, tokenizer, **options)
    evaluation = {name: PromptSource(eval_data(config, name), tokenizer, **options) for name in config.evaluation_sets}
    return Prompts(tokenizer, source, evaluation)


def rollouts_of(
    loaded: Loaded,
    prompts: Prompts | None,
    engines: RayEngines | RemoteEngines | None,
    infos: list[dict[str, Any]],
    transport: ShmTransport | None,
    observer: Observer,
    stack: ExitStack,
) -> tuple[Rollouts, Evaluate | None]:
    config = loaded.config
    if prompts is None or engines is None:
        assert config.debug.load_rollout_data is not None
        digest = tokenizer_digest(load_tokenizer(config.model.path))
        return RecordedRollouts(config.debug.load_rollout_data, tokenizer_digest=digest), None
    introduce_prompts(observer.progress, prompts)
    observer.examine = _examiner(config, prompts, engines, infos[0])
    import_paths = [str(loaded.base_dir)]
    ignored = user_leftovers(config, import_paths).ignored
    ignore(ignored)
    reward = stack.enter_context(RewardPool(config.reward, import_paths, ignored))
    header = with_servers(_header(loaded.asked or config, prompts.tokenizer, infos[0]), infos)
    for engine in engines.engines:
        engine.tokenizer = prompts.tokenizer  # for user functions
    shared: dict[str, Any] = {"header": header, "on_progress": observer.on_progress, "import_paths": import_paths}
    live = LiveRollouts(config, prompts.source, engines.engines, reward, **shared)
    if observer.watchdog is not None:
        observer.watchdog.pending = live.pending
    rollouts: Rollouts = live
    if config.debug.rollout_only:
        rollouts = CountedRollouts(rollouts, engines.engines, observer.on_counted)
    if config.debug.save_rollout_data is not None:
        writer = RecordWriter(config.debug.save_rollout_data, overwrite=config.run.overwrite)
        rollouts = SavedRollouts(rollouts, stack.enter_context(writer), transport)
    evaluation = None
    if prompts.evaluation:
        limits = {name: found.max_prompts for name, found in config.evaluation_sets.items()}
        asked = {name: s.take(min(len(s), limits[name] or len(s))) for name, s in prompts.evaluation.items()}
        evaluation = partial(evaluate, config, asked, engines.engines, reward, **shared)
    return rollouts, evaluation


def _examiner(config: Config, prompts: Prompts, engines: RayEngines | RemoteEngines, info: dict[str, Any]) -> Examiner:
    """Judges every rollout by the model's own chat template, whatever the prompts were rendered with."""
    is_foreign = WRONG_TEMPLATE in config.debug.inject
    return Examiner(
        config,
        load_tokenizer(config.model.path) if is_foreign else prompts.tokenizer,
        engines=engines if isinstance(engines, RayEngines) else None,
        stop_ids=tuple(info["stop_token_ids"]),
        log_probs_mode=info.get("log_probs_mode", "processed_logprobs"),
    )


@dataclass
class SavedRollouts:
    """Rollouts that are also recorded, with the digest of the weights; writing goes on beside the run."""

    inner: Rollouts
    writer: RecordWriter
    transport: ShmTransport | None = None

    def produce(self, rollout_id: int) -> RolloutBatch:
        batch = self.inner.produce(rollout_id)
        if self.transport is not None and self.transport.manifest is not None:
            batch = batch.with_header(manifest_digest=manifest_digest(self.transport.manifest))
        self.writer.save(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def transport_of(
    config: Config,
    trainer: RayTrainer | None,
    engines: RayEngines | None,
    say: Progress,
    stack: ExitStack,
    is_strict: bool = True,
) -> ShmTransport | None:
    if trainer is None or engines is None:
        return None
    transport = ShmTransport(
        trainer.write_weights,
        trainer.weight_specs(),
        engines.engines,
        config.weights.verify,
        config.weights.timeout_seconds,
        say.note,
        is_strict,
    )
    stack.callback(transport.close)
    return transport


def _header(config: Config, tokenizer: Any, info: dict[str, Any]) -> RolloutHeader:
    return RolloutHeader(
        vime_version=versions()["vime"],
        config_digest=_digest(to_toml(config).encode()),
        model={
            "path": config.model.path,
            "family": load_spec(config.model.path).family,
            "config_digest": _digest((Path(config.model.path) / "config.json").read_bytes()),
            "tokenizer_digest": tokenizer_digest(tokenizer),
            "chat_template_digest": chat_template_digest(tokenizer),
        },
        sampling=info["sampling"],
        sampling_origin=info["sampling_origin"],
        stop_token_ids=info["stop_token_ids"],
        library_versions=versions(),
    )


def _digest(content: bytes) -> str:
    """blake2b-128, hex, as the other digests of the header."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def introduce_prompts(say: Progress, prompts: Prompts) -> None:
    first = prompts.source.describe_first()
    say.note(f"prompts: {len(prompts.source)}; first, as the model sees it ({len(first['token_ids'])} tokens):")
    say.note(f"  {first['text']!r}")
    for where, source in {"": prompts.source, **prompts.evaluation}.items():
        if source.dropped:
            shown = ", ".join(str(d) for d in source.dropped[:5])
            of = f" of evaluation set {where}" if where else ""
            say.warn(f"{len(source.dropped)} prompts{of} are too long (over {source.max_prompt_len} tokens): {shown}")
