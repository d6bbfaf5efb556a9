"""A rollout engine that somebody else runs: any OpenAI-compatible vLLM server, token ids in, ids and log-probs out.

Nothing is taken on trust. Every sampling option is sent; prompt ids, token ids, log-probs and the reason of the end are
checked in every answer; and at the start one request finds out which log-probs the server reports.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.backends.vllm.answers import STATUS, make_sample, response_arrays
from vime.backends.vllm.arguments import max_model_len, read_model_config
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
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.types import Prompt, Sample, Status

if TYPE_CHECKING:
    import httpx

MAX_REQUESTS = 256
"""Requests in flight per server; the others wait here, lest the process runs out of sockets."""
COMPLETIONS = "/v1/completions"
PROCESSED, RAW, LOGITS = "processed_logprobs", "raw_logprobs", "logits"
FLOOR = -9999.0
"""What a server sends for a log-prob of minus infinity."""


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
        async with self.server.client() as client:
            model = self._only_model(await self.server.get(client, "/v1/models"))
            version = str((await self.server.get(client, "/version")).get("version", "unknown"))
            mode = await self._measure_mode(client, model["id"])
        longest = model.get("max_model_len")
        if not isinstance(longest, int):
            raise VimeError(f"{self.server.url}/v1/models names no max_model_len", "rollout.engines takes vLLM servers")
        self._served = Served(model["id"], str(model.get("root") or model["id"]), version, longest, mode)
        wanted = max_model_len(self.config, read_model_config(self.config.model.path))
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
        finite log-prob per token to the very prompt that was sent; UsageError as in ``start``.
        """
        served = self._require_started()
        options = with_changes(self.sampling, sampling)
        self._require_trusted(options)
        room = self.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise PromptTooLong(
                f"prompt {prompt.group_id} has {len(prompt.token_ids)} tokens; the context of {self.max_model_len} "
                "leaves no room for a response token",
                "raise rollout.max_context_len or the server's --max-model-len, or set data.max_prompt_len",
            )
        body = request_body(served.model_id, prompt.token_ids.tolist(), request_options(options, self._stop))
        body["max_tokens"] = min(options.max_response_len, room)
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
        async with self.server.client() as client:
            tasks = [asyncio.ensure_future(self._one(client, prompt, body, i, seed)) for i, seed in enumerate(seeds)]
            try:
                return await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

    async def _one(
        self, client: httpx.AsyncClient, prompt: Prompt, body: dict[str, Any], index: int, seed: int
    ) -> Sample:
        async with self._slot():
            task = asyncio.ensure_future(self.server.post(client, COMPLETIONS, body | {"seed": seed}))
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
        arrays, status = parse(request_id, body, content)
        text = self.tokenizer.decode(arrays[0].tolist(), skip_special_tokens=True)
        return make_sample(prompt, index, seed, arrays, status, (0, 0), text)

    def _slot(self) -> asyncio.Semaphore:
        """Semaphores belong to one event loop, and every rollout has its own."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(MAX_REQUESTS))
        return self._slots[1]

    async def abort(self) -> int:
        """End every request under way (the server aborts what it no longer must answer); samples return as aborted."""
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
        models = [m for m in _entries(listed, "data") if isinstance(m.get("id"), str)]
        path = self.config.model.path
        same = [m for m in models if is_same_model(path, str(m.get("root")), m["id"])] if len(models) > 1 else models
        if len(same) == 1:
            return same[0]
        names = ", ".join(repr(m["id"]) for m in models) or "no model"
        raise UsageError(
            f"rollout.engines: {self.server.url} serves {names}; none or several could be model.path = {path!r}",
            "serve one model, or name it as model.path (vllm serve --served-model-name)",
        )

    async def _measure_mode(self, client: httpx.AsyncClient, model_id: str) -> str:
        """Which log-probs the server reports: no route tells. See ``mode_of``."""
        body = request_body(model_id, [1, 2, 3], request_options(Sampling(), self._stop))
        body |= {"max_tokens": 1, "seed": 0, "logprobs": 5, "allowed_token_ids": [0]}
        content = await self.server.post(client, COMPLETIONS, body)
        arrays, _ = parse(f"{self.server.url} probe", body, content)
        top = (content["choices"][0]["logprobs"].get("top_logprobs") or [{}])[0]
        return mode_of(float(arrays[1][0]), list(top.values()))

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


def request_body(model_id: str, ids: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """A request of ``/v1/completions``: ``options`` as for vLLM's own SamplingParams, and that ids come back as ids."""
    ours = {name: value for name, value in options.items() if name not in ("flat_logprobs", "detokenize")}
    return ours | {
        "model": model_id,
        "prompt": ids,
        "stream": False,
        "echo": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def parse(request_id: str, body: Mapping[str, Any], content: Any) -> tuple[tuple[Any, Any], Status]:
    """(int32 [R] ids, float32 [R] log-probs) and status of the answer ``content`` to the request ``body``.

    Raises VimeError (never with the text) where the answer is to another prompt, lacks ids or log-probs, fails
    ``response_arrays``, or ended for a reason that the request does not know.
    """
    choices = _entries(content, "choices")
    if len(choices) != 1:
        raise VimeError(f"request {request_id}: {len(choices)} answers, one was asked for")
    choice = choices[0]
    ids = choice.get("token_ids")
    if ids is None:
        hint = "the server must be a vLLM that knows return_token_ids (0.10.2 and later)"
        raise VimeError(f"request {request_id}: the answer has no token ids", hint)
    _require_prompt(request_id, body["prompt"], choice.get("prompt_token_ids"))
    found = choice.get("logprobs") or {}
    log_probs, names = found.get("token_logprobs"), found.get("tokens")
    if log_probs is not None:
        log_probs = [math.nan if v is None else -math.inf if v <= FLOOR else v for v in log_probs]
    arrays = response_arrays(request_id, ids, log_probs, None if names is None else [_id_of(name) for name in names])
    return arrays, _status(request_id, body, ids, choice.get("finish_reason"))


def _require_prompt(request_id: str, sent: Sequence[int], used: Sequence[int] | None) -> None:
    if used is not None and list(used) != list(sent):
        pairs = enumerate(zip(used, sent, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(used), len(sent)))
        raise VimeError(
            f"request {request_id}: the server answered another prompt: {len(used)} tokens, {len(sent)} were sent; "
            f"they differ from position {at} on"
        )


def _id_of(name: str) -> int:
    """``token_id:7`` is 7; -1 for any other name, which is no token's id."""
    number = name.removeprefix("token_id:")
    return int(number) if number.isdecimal() else -1


def _status(request_id: str, body: Mapping[str, Any], ids: Sequence[int], reason: Any) -> Status:
    hint = "start the server with --generation-config vllm, so that it adds nothing of its own"
    if reason == "stop" and (not ids or ids[-1] not in body["stop_token_ids"]):
        last = ids[-1] if ids else "none"
        raise VimeError(f"request {request_id}: stopped at token {last}, which is no stop id that was sent", hint)
    if reason == "length" and len(ids) != body["max_tokens"]:
        text = f"request {request_id}: cut at {len(ids)} tokens, {body['max_tokens']} were allowed"
        raise VimeError(text, hint)
    if reason not in STATUS:
        raise VimeError(f"request {request_id}: ended for the reason {reason!r}", "see the server's log")
    return STATUS[reason]


def mode_of(allowed: float, top: Sequence[float]) -> str:
    """Which log-probs a server reports, from one token that was the only one allowed.

    After the sampling options its probability is 1 and ``allowed`` exactly 0.0. Otherwise ``top``, the largest values
    at that place, are log-probs before the options, or logits where their probabilities would add up to more than 1.
    """
    if allowed == 0.0:
        return PROCESSED
    values = [allowed, *top]
    return LOGITS if max(values) > 0.0 or sum(map(math.exp, set(values))) > 1.001 else RAW


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


def _entries(content: Any, key: str) -> list[dict[str, Any]]:
    found = content.get(key) if isinstance(content, dict) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
