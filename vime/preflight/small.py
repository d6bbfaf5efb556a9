"""The settings that ``vime align-check`` wants: a rollout small enough to look at, nothing beside it.

What is checked stays the user's: model, types, layout, kernels, sampling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vime.config.load import Loaded, value_of
from vime.config.message import short
from vime.config.schema import Config
from vime.errors import UsageError

_SIZE = re.compile(r"(\d+)x(\d+)x(\d+)")
_SHOWN = ("rollout.", "train.", "algo.", "run.num_rollouts")


@dataclass(frozen=True)
class Size:
    """At most so many prompts, samples of each, and tokens of a response; the run's own numbers if they are smaller."""

    prompts: int = 4
    samples: int = 4
    tokens: int = 64

    @classmethod
    def of(cls, text: str) -> Size:
        """``4x4x64``. UsageError for anything else."""
        found = _SIZE.fullmatch(text.strip())
        if found is None or "0" in found.groups():
            raise UsageError(f"--size {text}: is not PROMPTSxSAMPLESxTOKENS", "for example --size 4x4x64")
        return cls(*map(int, found.groups()))


def small_walk(config: Config, size: Size, recorded: int | None = None) -> dict[str, Any]:
    """Dotted path -> value, for ``vime.config.load.read(derived=...)``. ``recorded``: this rollout is, and no other."""
    own = config.rollout
    generates = {} if recorded is not None else {"debug.train_only": False, "debug.load_rollout_data": None}
    return generates | {
        "run.num_rollouts": 2 if recorded is None else recorded + 1,
        "rollout.rollout_batch_size": min(own.rollout_batch_size, size.prompts),
        "rollout.num_samples_per_prompt": min(own.num_samples_per_prompt, size.samples),
        "rollout.sampling.max_response_len": min(own.sampling.max_response_len, size.tokens),
        "rollout.sampling.min_response_len": min(own.sampling.min_response_len, size.tokens),
        "rollout.group_filter": "none",
        "rollout.serve_openai": False,
        "train.num_steps_per_rollout": 1,
        "train.global_batch_size": None,
        "train.num_warmup_steps": 0,
        "train.lr_schedule": "constant",
        "train.min_lr": 0.0,
        "train.nan_policy": "stop",  # a gradient that is no number is a finding, and no step to be left out
        "algo.log_ref": True,
        "eval.interval": 0,
        "eval.prompts": [],
        "eval.sets": {},
        "checkpoint.save_interval": 0,
        "checkpoint.export_hf": False,
        "weights.verify": "full",
        "log.show_samples": 0,
        "log.tensorboard": False,
        "log.wandb_project": None,
        "debug.rollout_only": False,
        "debug.save_rollout_data": None,
    }


def changed(before: Loaded, after: Loaded, derived: Iterable[str]) -> list[str]:
    """``rollout.rollout_batch_size 16 -> 4`` of every setting that the walk has otherwise and numbers depend on."""
    found = []
    for path in derived:
        old, new = (value_of(each.config, path) for each in (before, after))
        if old != new and path.startswith(_SHOWN):
            found.append(f"{path} {short(old)} -> {short(new)}")
    return found
