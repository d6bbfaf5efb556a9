"""A rollout engine that somebody else runs: any OpenAI-compatible vLLM server, token ids in, ids and log-probs out.

Nothing is taken on trust. Every sampling option is sent; prompt ids, token ids, log-probs and the reason of the end are
checked in every answer; and at the start one request finds out which log-probs the server reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.backends.vllm.answers import make_sample, response_arrays
from vime.backends.vllm.arguments import max_model_len, read_model_config
from vime.backends.vllm.completions import (
    LOGITS,
    PROBED,
    PROCESSED,
    RAW,
    entries,
    mode_of,
    parse,
    request_body,
    top_log_probs,
)
from vime.backends.vllm.requests import all_or_none, options_within
from vime.backends.vllm.sampling import (
    OPTIONS,
    collect_stop_ids,
    effective_options,
    generation_config_warnings,
    request_options,
    with_changes,
)
from vime.backends.vllm.server import Server
from vime.config.schema import Config, Sampling
from vime.errors import UsageError, VimeError
from vime.types import Prompt, Sample, Status

if TYPE_CHECKING:
    import httpx

MAX_REQUESTS = 256
"""Requests in flight per server; the others wait here, lest the process runs out of sockets."""
COMPLETIONS = "/v1/completions"
WAY_OUT = "raise rollout.max_context_len or the server's --max-model-len, or set data.max_prompt_len"


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says it is. ``log_probs_mode``: which log-probs it reports, as measured."""

    model_id: str
    root: str
    version: str
    max_model_len: int
    log_probs_mode: str


class RemoteEngine:
    """Implements ``protocols.RolloutEngine`` over HTTP. No weights are sent: the server generates with its own.

    tokenizer  the policy's; it makes the text of the samples, as everywhere, and user functions may use it
    """

    def __init__(self, config: Config, url: str, index: int, tokenizer: Any) -> None:
        self.config = config
        self.index = index
        self.name = f"engine {index}"
        self.tokenizer = tokenizer
        self.sampling = config.rollout.sampling
        self.server = Server(url.rstrip("/"), config.rollout.timeout_seconds)
        self.max_model_len = 0
        self._served: Served | None = None
        self._stop = collect_stop_ids(config.model.path, tokenizer.eos_token_id, self.sampling.stop_token_ids)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()

    async def start(self) -> dict[str, Any]:
        """Ask the server what it serves, and measure what its log-probs are.

        Returns the same facts as ``VllmEngine.start``, and ``url``, ``model_id``, ``root``, ``log_probs_mode``. Raises
        VimeError if no usable server answers, UsageError if its log-probs would not be those of the distribution
        sampled from.
        """
        about = read_model_config(self.config.model.path)
        async with self.server.client() as client:
            model = self._only_model(await self.server.get(client, "/v1/models"))
            version = await self.server.get(client, "/version")
            mode = await self._measure_mode(client, model["id"], about["vocab_size"])
        longest, version = model.get("max_model_len"), version.get("version") if isinstance(version, dict) else None
        if not isinstance(longest, int) or not isinstance(version, str):
            what = "/v1/models names no max_model_len" if isinstance(version, str) else "/version names no version"
            raise VimeError(f"{self.server.url}{what}", "rollout.engines takes vLLM servers")
        self._served = Served(model["id"], str(model.get("root") or model["id"]), version, longest, mode)
        wanted = max_model_len(self.config, about)
        self.max_model_len = min(longest, wanted)
        self._require_trusted(self.sampling)
        return self._info(self._served, wanted)

    def _info(self, served: Served, wanted: int) -> dict[str, Any]:
        options, origins = effective_options(self.sampling, self._stop)
        warnings = generation_config_warnings(self.config.model.path, self.sampling)
        if served.max_model_len < wanted:
            text = f"its context is {served.max_model_len} tokens, {wanted} are wanted: the longest answers are cut"
            warnings.append(f"{self.server.url}: {text}")
        if not is_same_model(self.config.model.path, served.root, served.model_id):
            text = (
                f"serves {served.model_id!r} (root {served.root!r}); is that model.path = {self.config.model.path!r}?"
            )
            warnings.append(f"{self.server.url} {text}")
        return {
            "engine": self.index,
            "url": self.server.url,
            "model_id": served.model_id,
            "root": served.root,
            "log_probs_mode": served.log_probs_mode,
            "stop_token_ids": options["stop_token_ids"],
            "stop_origins": {i: list(o) for i, o in self._stop.origins.items()},
            "sampling": options,
            "sampling_origin": origins,
            "warnings": warnings,
            "vllm_version": served.version,
            "max_model_len": self.max_model_len,
        }

    async def generate(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """One sample per seed, in order; one request each.

        Raises PromptTooLong for this prompt alone; VimeError where the server does not answer, or its answer is not one
        log-prob per token to the very prompt that was sent; UsageError as in ``start``. Log-probs that are not finite
        are as in ``VllmEngine.generate``: nothing is trained on these samples.
        """
        served = self._require_started()
        options = with_changes(self.sampling, sampling)
        self._require_trusted(options)
        fixed = options_within(prompt, options, self._stop, self.max_model_len, WAY_OUT)
        body = request_body(served.model_id, prompt.token_ids.tolist(), fixed)
        async with self.server.client() as client:
            return await all_or_none([self._one(client, prompt, body, i, seed) for i, seed in enumerate(seeds)])

    async def _one(
        self, client: httpx.AsyncClient, prompt: Prompt, body: dict[str, Any], index: int, seed: int
    ) -> Sample:
        task = asyncio.ensure_future(self._post(client, body | {"seed": seed}))
        self._running.add(task)
        try:
            content = await task
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            return make_sample(prompt, index, seed, response_arrays("", [], []), Status.ABORTED, (0, 0), "")
        finally:
            self._running.discard(task)
            self._aborted.discard(task)
        request_id = f"{self.server.url} {prompt.group_id}/{index}"
        arrays, status = parse(request_id, body, content, must_be_finite=not self.config.debug.rollout_only)
        text = self.tokenizer.decode(arrays[0].tolist(), skip_special_tokens=True)
        return make_sample(prompt, index, seed, arrays, status, (0, 0), text)

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:  # semaphores belong to one loop, a rollout has its own
            self._slots = (loop, asyncio.Semaphore(MAX_REQUESTS))
        async with self._slots[1]:
            return await self.server.post(client, COMPLETIONS, body)

    async def abort(self) -> int:
        """End every request, under way or waiting here; samples return as aborted.

        The server aborts what it no longer must answer.
        """
        running = list(self._running)
        self._aborted |= set(running)
        for task in running:
            task.cancel()
        return len(running)

    async def pause(self) -> None:
        """Refused: the server is not ours to stop, and no weights are ever sent to it."""
        raise VimeError(f"{self.server.url} is run by somebody else: vime does not pause it")

    async def resume(self) -> None:
        """Refused, as ``pause``."""
        raise VimeError(f"{self.server.url} is run by somebody else: vime does not resume it")

    # ---- what the server is --------------------------------------------------------------------------------------

    def _only_model(self, listed: Any) -> dict[str, Any]:
        """The model to ask: the only one, or the one called like ``model.path``."""
        models = [m for m in entries(listed, "data") if isinstance(m.get("id"), str)]
        path = self.config.model.path
        same = [m for m in models if is_same_model(path, str(m.get("root")), m["id"])] if len(models) > 1 else models
        if len(same) == 1:
            return same[0]
        names = ", ".join(repr(m["id"]) for m in models) or "no model"
        raise UsageError(
            f"rollout.engines: {self.server.url} serves {names}; none or several could be model.path = {path!r}",
            "serve one model, or name it as model.path (vllm serve --served-model-name)",
        )

    async def _measure_mode(self, client: httpx.AsyncClient, model_id: str, vocab_size: int) -> str:
        """Which log-probs the server reports: no route tells. See ``mode_of``."""
        body = request_body(model_id, [1, 2, 3], request_options(Sampling(), self._stop))
        body |= {"max_tokens": 1, "seed": 0, "logprobs": 5, "allowed_token_ids": list(PROBED)}
        content = await self.server.post(client, COMPLETIONS, body)
        probe = f"{self.server.url} probe"
        parse(probe, body, content)
        return mode_of(top_log_probs(probe, content), vocab_size)

    def _require_trusted(self, options: Sampling) -> None:
        mode = self._require_started().log_probs_mode
        if mode == PROCESSED or (mode == RAW and not (changed := not_neutral(options))):
            return
        what = "reports logits, not log-probs" if mode == LOGITS else "reports log-probs before sampling options"
        which = "" if mode == LOGITS else f", and {', '.join(changed)}"
        raise UsageError(
            f"rollout.engines: {self.server.url} {what}{which}: they are not those of the distribution sampled from",
            "start the server with --logprobs-mode processed_logprobs" + ("" if mode == LOGITS else _or_neutral()),
        )

    def _require_started(self) -> Served:
        if self._served is None:
            raise VimeError(f"{self.name} ({self.server.url}) was not asked yet what it serves")
        return self._served


class RemoteEngines:
    """The engines of ``rollout.engines``, in order."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config = config
        self.engines = [RemoteEngine(config, url, i, tokenizer) for i, url in enumerate(config.rollout.engines)]

    def start(self) -> list[dict[str, Any]]:
        """The engines' descriptions, in order. Raises as ``RemoteEngine.start``."""

        async def ask() -> list[dict[str, Any]]:
            return await asyncio.gather(*(engine.start() for engine in self.engines))

        return asyncio.run(ask())


def not_neutral(options: Sampling) -> list[str]:
    """Options, as "name = value", under which log-probs before and after them differ. Greedy changes nothing."""
    found = {
        ours: getattr(options, ours) for ours, (_, neutral) in OPTIONS.items() if getattr(options, ours) != neutral
    }
    if found.get("temperature") == 0.0:
        del found["temperature"]
    return [f"rollout.sampling.{name} = {value:g}" for name, value in found.items()]


def _or_neutral() -> str:
    return ", or leave temperature at 1 and every other sampling option neutral"


def is_same_model(path: str, root: str, model_id: str) -> bool:
    """Whether a server's ``root`` or ``model_id`` could be the folder ``path``: one of them is it, or is called so."""
    here = Path(path)
    names = {Path(name) for name in (root, model_id)}
    return here in names or here.resolve() in names or here.resolve().name in {name.name for name in names}
