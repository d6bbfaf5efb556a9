"""The settings that a crash may hang on, under the names of vLLM 0.32: one small entry each.

``Facts`` are what the engine's worker says of itself (``vime.backends.vllm.crash_facts``), the device alone where it
did not come up: an entry is applied only if it reads back so; where the run has the value already, or the platform has
no such thing, it is SKIP with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.errors import UsageError

Facts = Mapping[str, Any]
LEADING = ("cuda_graph", "eager"), "speculative"
"""The pair to cross first, the first graph axis that can be changed with speculative decoding: most reports of illegal
memory accesses need both (rows that a graph is padded with, read by the drafter)."""
ATTENTION = ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION")
SPECULATIVE = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


@dataclass(frozen=True)
class Toggle:
    """One change of the run's settings.

    axis         what it belongs to; the first toggle of an axis is the strongest, the others narrow it down
    about        what it takes away
    arguments    vLLM's engine arguments to set; tables are merged
    drops        engine arguments to leave out
    environment  variables of the engine's processes
    reads        fact -> value that proves it inside the worker
    skip         why it says nothing here; empty: it can be tried
    """

    name: str
    axis: str
    about: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    drops: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    reads: Facts = field(default_factory=dict, hash=False)
    skip: str = ""
    is_narrow: bool = False

    def unread(self, facts: Facts) -> str:
        """What the worker reads otherwise than was asked; empty: the change is in force."""
        wrong = [
            f"{name} = {facts.get(name)!r}"
            for name, value in self.reads.items()
            if name not in facts or facts[name] != value
        ]
        asked = ", ".join(f"{name} = {value!r}" for name, value in self.reads.items())
        return f"asked for {asked}; the worker reads {', '.join(wrong)}" if wrong else ""


def toggles(facts: Facts, num_requests: int) -> list[Toggle]:
    """Every toggle for an engine that reads ``facts`` as it is configured, in the order in which they are tried."""
    found = [_skipped(toggle, facts, reason) for toggle, reason in _entries(facts, num_requests)]
    return [toggle for toggle in found if not (toggle.is_narrow and toggle.skip)]


def axes() -> list[str]:
    """Their names, in order."""
    return list(dict.fromkeys(toggle.axis for toggle, _ in _entries({}, 2)))


def chosen(found: Sequence[Toggle], only: Sequence[str], skip: Sequence[str]) -> list[Toggle]:
    """Those of the axes asked for."""
    return [t for t in found if (not only or t.axis in only) and t.axis not in skip]


def check_axes(names: Sequence[str], option: str) -> None:
    """UsageError for a name that is no axis."""
    if unknown := [name for name in names if name not in axes()]:
        raise UsageError(f"{option} {unknown[0]}: is no axis", f"known: {', '.join(axes())}")


def overlaid(arguments: Mapping[str, Any], changed: Sequence[Toggle]) -> dict[str, Any]:
    """Engine arguments with ``changed``; nested tables are merged key by key."""
    found = {name: value for name, value in arguments.items() if not any(name in t.drops for t in changed)}
    for toggle in changed:
        for name, value in toggle.arguments.items():
            both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
            found[name] = {**found[name], **value} if both else value
    return found


def environment_of(changed: Sequence[Toggle]) -> dict[str, str]:
    return {name: value for toggle in changed for name, value in toggle.environment.items()}


def _skipped(toggle: Toggle, facts: Facts, reason: str) -> Toggle:
    if not reason and not toggle.unread(facts):
        read = ", ".join(f"{name} = {value!r}" for name, value in toggle.reads.items())
        reason = f"the run has it so already: its worker reads {read}"
    return Toggle(**{**{n: getattr(toggle, n) for n in Toggle.__dataclass_fields__}, "skip": reason})


# ---- the entries -----------------------------------------------------------------------------------------------------

Entry = tuple[Toggle, str]
"""A toggle, and why it cannot be tried here, if it cannot."""
_NO_CUDA = "there is no CUDA device: "


def _entries(facts: Facts, num_requests: int) -> Iterator[Entry]:
    yield from _graphs(facts)
    yield _plain("eager", "no graphs, no torch.compile", "enforce_eager", True)
    yield (
        Toggle("speculative", "speculative", "no speculative decoding", drops=SPECULATIVE, reads={"speculative": None}),
        "",
    )
    yield _compile()
    yield _variable(facts, "launch_blocking", "each kernel waits for the one before it", "CUDA_LAUNCH_BLOCKING", "1")
    yield _plain("prefix_caching", "no prefix is taken from the cache", "enable_prefix_caching", False)
    yield _plain("chunked_prefill", "a prompt is computed in one piece", "enable_chunked_prefill", False)
    yield _plain("cascade_attention", "no cascade attention over common prefixes", "disable_cascade_attn", True)
    yield _plain("async_scheduling", "no step is scheduled before the one before it ends", "async_scheduling", False)
    yield from _parallel(facts)
    yield from _attention(facts)
    yield from _batch_sizes(facts, num_requests)
    yield from _cache(facts)
    yield from _kernels(facts)


def _plain(axis: str, about: str, argument: str, value: Any, reason: str = "") -> Entry:
    """An engine argument that the worker reads back under the axis's name, as the argument says it."""
    return Toggle(axis, axis, about, {argument: value}, reads={argument: value}), reason


def _variable(facts: Facts, axis: str, about: str, name: str, value: str, reads: Facts | None = None) -> Entry:
    reason = f"{_NO_CUDA}{name} changes nothing" if facts.get("device") == "cpu" else ""
    return Toggle(axis, axis, about, environment={name: value}, reads=reads or {f"env {name}": value}), reason


def _graphs(facts: Facts) -> Iterator[Entry]:
    """Off; then, narrower, each mode, and a graph for every batch size, so that none is padded."""
    mode, sizes = facts.get("cudagraph_mode"), facts.get("cudagraph_capture_sizes") or []
    why = "the platform captures no CUDA graphs" if facts.get("device") == "cpu" else ""
    for value in ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL"):
        name = "cuda_graph" if value == "NONE" else f"cuda_graph={value}"
        change = {"compilation_config": {"cudagraph_mode": value}}
        reason = why and f"{why}: its worker reads cudagraph_mode = {mode!r}"
        about = "no CUDA graphs" if value == "NONE" else f"CUDA graphs of mode {value}"
        reads = {"cudagraph_mode": value}
        yield Toggle(name, "cuda_graph", about, change, reads=reads, is_narrow=value != "NONE"), reason
    every = list(range(1, min(max(sizes, default=0), 64) + 1))
    sized = {"compilation_config": {"cudagraph_capture_sizes": every}}
    reason = why or ("" if every else "no graph is captured")
    about = f"a graph for every batch size up to {len(every)}: no padding"
    same = {"cudagraph_capture_sizes": every}
    yield Toggle("cuda_graph=unpadded", "cuda_graph", about, sized, reads=same, is_narrow=True), reason


def _compile() -> Entry:
    change = {"compilation_config": {"mode": 0}}
    return Toggle("compile", "compile", "no torch.compile", change, reads={"compilation_mode": 0}), ""


def _parallel(facts: Facts) -> Iterator[Entry]:
    alone = "one rank per engine: nothing is reduced" if facts.get("world_size") == 1 else ""
    about = "collectives by NCCL alone"
    yield _plain("custom_all_reduce", about, "disable_custom_all_reduce", True, alone)
    is_whole = facts.get("expert_parallel") is False
    alone = "experts are not spread over ranks (enable_expert_parallel)" if is_whole else ""
    about = "experts exchange tokens without DeepEP's kernels"
    yield _plain("all2all", about, "all2all_backend", "allgather_reducescatter", alone)
    yield _plain("dual_batch_overlap", "no two half batches overlap", "enable_dbo", False)


def _attention(facts: Facts) -> Iterator[Entry]:
    here = facts.get("attention_backend")
    is_cpu = facts.get("device") == "cpu"
    reason = f"the CPU platform has one attention backend: its worker reads {here}" if is_cpu else ""
    for i, name in enumerate(name for name in ATTENTION if name != here):
        toggle = f"attention_backend={name}"
        reads = {"attention_backend": name}
        about = f"attention by {name}"
        yield Toggle(toggle, "attention_backend", about, dict(reads), reads=reads, is_narrow=i > 0), reason


def _batch_sizes(facts: Facts, num_requests: int) -> Iterator[Entry]:
    """One request at a time; then, narrower, powers of two and the numbers between them (graphs have the former)."""
    top = min(int(facts.get("max_num_seqs") or num_requests), num_requests)
    reason = "" if top > 1 else "one request at a time already"
    yield _batch(1), reason
    size = 2
    while size < top:
        yield _batch(size, True), ""
        if size + size // 2 < top and size > 2:
            yield _batch(size + size // 2, True), ""
        size *= 2


def _batch(size: int, is_narrow: bool = False) -> Toggle:
    name = f"batch_size={size}"
    reads = {"max_num_seqs": size}
    about = f"at most {size} request{'s' if size > 1 else ''} in a batch"
    return Toggle(name, "batch_size", about, dict(reads), reads=reads, is_narrow=is_narrow)


def _cache(facts: Facts) -> Iterator[Entry]:
    yield _plain("kv_cache_dtype", "keys and values are cached as they are", "kv_cache_dtype", "auto")
    size = facts.get("block_size") or 16
    other = size // 2 if size > 32 else 2 * size
    yield _plain("block_size", f"cache blocks of {other} tokens", "block_size", other)


def _kernels(facts: Facts) -> Iterator[Entry]:
    about = "the model runner of vLLM V1"
    yield _variable(facts, "model_runner", about, "VLLM_USE_V2_MODEL_RUNNER", "0", {"model_runner": "V1"})
    yield _variable(facts, "flashinfer_sampler", "sampling by torch", "VLLM_USE_FLASHINFER_SAMPLER", "0")
    yield _variable(facts, "deep_gemm", "no DeepGEMM kernels", "VLLM_USE_DEEP_GEMM", "0")
