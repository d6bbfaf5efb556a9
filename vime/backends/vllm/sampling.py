"""What is sent to the engine with each request: every sampling option, and the union of the stop ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config.schema import Sampling
from vime.errors import UsageError

# Our name -> (vLLM's name, neutral value)
OPTIONS: dict[str, tuple[str, Any]] = {
    "temperature": ("temperature", 1.0),
    "top_p": ("top_p", 1.0),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
    "min_response_len": ("min_tokens", 0),
}

# Options of generation_config.json that would change the distribution sampled from, with their neutral values.
GENERATION_CONFIG_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 1.0),
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "min_new_tokens": (None, 0),
}


@dataclass(frozen=True)
class StopIds:
    """The ids that end an answer, and where each comes from."""

    origins: dict[int, tuple[str, ...]]

    @property
    def ids(self) -> list[int]:
        return sorted(self.origins)


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def collect_stop_ids(model_path: str, tokenizer_eos: int | None, extra: list[int]) -> StopIds:
    """The union over config.json, generation_config.json, tokenizer and rollout.sampling.stop_token_ids."""
    folder = Path(model_path)
    config = _read_json(folder / "config.json")
    sources = {
        "config.json": _as_ids(config.get("eos_token_id"))
        + _as_ids((config.get("text_config") or {}).get("eos_token_id")),
        "generation_config.json": _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id")),
        "tokenizer": _as_ids(tokenizer_eos),
        "rollout.sampling.stop_token_ids": list(extra),
    }
    origins: dict[int, tuple[str, ...]] = {}
    for source, ids in sources.items():
        for token_id in dict.fromkeys(ids):
            origins[token_id] = (*origins.get(token_id, ()), source)
    return StopIds(origins)


def generation_config_warnings(model_path: str, sampling: Sampling) -> list[str]:
    """One line per value of generation_config.json that is not neutral and that rollout.sampling overrides.

    A ``do_sample: false`` file is not a sampling option and changes nothing here.
    """
    values = _read_json(Path(model_path) / "generation_config.json")
    lines = []
    for name, neutral in GENERATION_CONFIG_NEUTRAL.items():
        value = values.get(name)
        if value in neutral or value is None:
            continue
        ours = {"min_new_tokens": "min_response_len"}.get(name, name)
        used = getattr(sampling, ours, None)
        if used == value:
            continue
        instead = "it is not used" if used is None else f"rollout.sampling.{ours} = {used} is used"
        lines.append(f"generation_config.json has {name} = {value}; {instead}")
    return lines


def effective_options(sampling: Sampling, stop: StopIds) -> tuple[dict[str, Any], dict[str, str]]:
    """Every option as it is sent, under our names, and the origin of each: set by the user, or the default."""
    options = {name: getattr(sampling, name) for name in OPTIONS}
    options["max_response_len"] = sampling.max_response_len
    options["ignore_stop"] = sampling.ignore_stop
    origin = {n: "rollout.sampling" if n in sampling.model_fields_set else "default" for n in options}
    options["stop_token_ids"] = [] if sampling.ignore_stop else stop.ids
    origin["stop_token_ids"] = (
        "rollout.sampling.ignore_stop"
        if sampling.ignore_stop
        else "; ".join(f"{i}: {' + '.join(o)}" for i, o in sorted(stop.origins.items()))
    )
    return options, origin


def with_changes(sampling: Sampling, changes: Mapping[str, Any] | None) -> Sampling:
    """``sampling`` with single fields replaced. Raises UsageError naming an unknown field or a bad value."""
    if not changes:
        return sampling
    from pydantic import ValidationError

    values = {name: getattr(sampling, name) for name in sampling.model_fields_set}
    try:
        return Sampling.model_validate({**values, **changes})
    except ValidationError as error:
        lines = [f"sampling.{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise UsageError("; ".join(lines), f"known: {', '.join(Sampling.model_fields)}") from error


def request_options(sampling: Sampling, stop: StopIds) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams, all but ``seed`` and ``max_tokens``."""
    options = {theirs: getattr(sampling, ours) for ours, (theirs, _) in OPTIONS.items()}
    return options | {
        "n": 1,
        "stop": [],
        "stop_token_ids": [] if sampling.ignore_stop else stop.ids,
        "ignore_eos": True,  # the model's eos is in our union; nothing else may decide
        "logprobs": 0,  # the sampled token's alone
        "flat_logprobs": True,  # lists instead of one dict per token
        "detokenize": False,
    }
