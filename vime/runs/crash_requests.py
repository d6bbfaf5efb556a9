"""The requests of ``vime rollout --bisect-crash``: of a rollout record, or those that rollout 0 would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vime.config.load import Loaded
from vime.config.schema import Config, Sampling
from vime.config.sources import COMMAND_LINE
from vime.data.tokenizer import load_tokenizer, tokenizer_digest
from vime.debug.crash.report import Request
from vime.errors import UsageError
from vime.record.files import record_files
from vime.record.names import sample_id
from vime.record.reader import read
from vime.record.writer import write
from vime.rollout.seeds import seed_for
from vime.runs.parts import read_prompts
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

FROM_RECORD = "--from-record"


@dataclass(frozen=True)
class Requests:
    """``samples``: one per request, whose prompt, seed and place count. ``options``: sampling options of each."""

    samples: Sequence[Sample]
    options: Sequence[Mapping[str, Any]]
    header: RolloutHeader

    @property
    def names(self) -> list[str]:
        return [sample_id(s.group_id, s.index) for s in self.samples]

    def described(self) -> list[Request]:
        pairs = zip(self.names, self.samples, strict=True)
        return [Request(name, s.prompt_len, s.seed, s.prompt_text) for name, s in pairs]

    def as_rows(self) -> list[list[Any]]:
        """[name, token ids, seed, options] of each."""
        return [
            [name, s.token_ids[: s.prompt_len].tolist(), s.seed, dict(options)]
            for name, s, options in zip(self.names, self.samples, self.options, strict=True)
        ]

    def save(self, which: Sequence[int], path: Path) -> None:
        """As a rollout record, which ``--from-record`` takes, with the options of the first."""
        batch = RolloutBatch.from_samples(0, [self.samples[i] for i in which], self.header)
        options = self.options[which[0]] if which else {}
        sampling = {**self.header.sampling, **Sampling.model_validate(dict(options)).model_dump()}
        write(path, replace(batch, header=replace(self.header, sampling=sampling)), overwrite=True)

    def longest(self, config: Config) -> Config:
        """``config`` with room for the longest answer that is asked for."""
        own = config.rollout.sampling
        length = max((int(o.get("max_response_len", own.max_response_len)) for o in self.options), default=0)
        sampling = own.model_copy(update={"max_response_len": max(length, 1)})
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"sampling": sampling})})


def requests_of(loaded: Loaded, template: str | None, ids: str | None) -> Requests:
    """UsageError where there are none, or a record is not of this model."""
    found = _own(loaded.config) if template is None else _recorded(loaded, template, ids)
    if not found.samples:
        raise UsageError(f"{template or 'rollout.rollout_batch_size'}: there is no request in it")
    return found


def _own(config: Config) -> Requests:
    prompts = read_prompts(config)
    assert prompts is not None
    samples = [
        _request(p.group_id, i, p.token_ids, p.text, seed_for(config.run.seed, 0, p.group_id, i))
        for p in prompts.source.take(config.rollout.rollout_batch_size)
        for i in range(config.rollout.num_samples_per_prompt)
    ]
    options = config.rollout.sampling.model_dump()
    digest = tokenizer_digest(prompts.tokenizer)
    model = {"path": config.model.path, "tokenizer_digest": digest}
    return Requests(samples, [options] * len(samples), RolloutHeader(model=model, sampling=options))


def _request(group_id: int, index: int, token_ids: np.ndarray, text: str, seed: int) -> Sample:
    """A question without its answer."""
    num = len(token_ids)
    empty = np.zeros(num, bool), np.zeros(num, np.float32)
    return Sample(group_id, index, token_ids, num, *empty, prompt_text=text, seed=seed, status=Status.ABORTED)


def _recorded(loaded: Loaded, template: str, ids: str | None) -> Requests:
    digest = tokenizer_digest(load_tokenizer(loaded.config.model.path))
    own = loaded.config.rollout.sampling
    given = [n for n in Sampling.model_fields if loaded.origin(f"rollout.sampling.{n}") == COMMAND_LINE]
    overrides = {name: getattr(own, name) for name in given}
    samples: list[Sample] = []
    options: list[Mapping[str, Any]] = []
    header = RolloutHeader()
    files = record_files(template, ids, FROM_RECORD)
    for file in files:
        batch = read(file.path, tokenizer_digest=digest)
        header = batch.header
        found = [_only_prompt(sample) for sample in batch.samples()]
        samples += found
        options += [_options(file.path, header, own) | overrides] * len(found)
    if len(files) > 1:  # names of several rollouts must not meet
        samples = [replace(s, group_id=s.group_id, index=i) for i, s in enumerate(samples)]
    return Requests(samples, options, header)


def _only_prompt(s: Sample) -> Sample:
    return _request(s.group_id, s.index, s.token_ids[: s.prompt_len], s.prompt_text, s.seed)


def _options(path: Path, header: RolloutHeader, own: Sampling) -> dict[str, Any]:
    """Of a record; of upstream's dumps, which have none, the run's."""
    recorded = {name: header.sampling[name] for name in Sampling.model_fields if name in header.sampling}
    if "temperature" not in recorded:
        return own.model_dump()
    try:
        return Sampling.model_validate(recorded).model_dump()
    except ValidationError as error:
        bad = "; ".join(f"sampling.{e['loc'][0]} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UsageError(f"{path} cannot be asked again: {bad}", "its header was changed, or is damaged") from error
