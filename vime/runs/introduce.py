"""What trainer and engines are, in notes at the start of a run."""

from __future__ import annotations

from typing import Any

from vime.log import Progress


def introduce_trainer(say: Progress, about: dict[str, Any]) -> None:
    say.note(
        f"trainer: {about['family']}, {about['num_parameters'] / 1e6:.1f} M parameters, {about['layout']}, "
        f"{about['dtype']} on {about['device']}; {about['layers']}; attention: {about['attention']}"
    )
    for model, lines in about["tensors"].items():
        for line in lines:
            say.note(f"trainer: {model}: {line}")


def introduce_engines(say: Progress, infos: list[dict[str, Any]]) -> None:
    about = infos[0]
    say.note(
        f"engines: {len(infos)} x vLLM {about['vllm_version']}, context {about['max_model_len']}, "
        f"KV cache {about['kv_tokens']} tokens each"
    )
    introduce_sampling(say, about)
    for text in about["warnings"]:
        say.warn(text)


def introduce_sampling(say: Progress, about: dict[str, Any]) -> None:
    origins = "; ".join(f"{i} from {', '.join(where)}" for i, where in about["stop_origins"].items())
    options = " ".join(f"{name}={value}" for name, value in about["sampling"].items() if name != "stop_token_ids")
    say.note(f"sampling, sent with every request: {options}")
    say.note(f"stop ids: {origins or 'none: every sample runs to the length limit'}")
