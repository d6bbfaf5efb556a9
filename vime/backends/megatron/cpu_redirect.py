"""Megatron-core on the CPU: an import hook that compiles its own source with every cuda reference redirected.

Megatron-core 0.16.1 names cuda at 582 places in 105 modules, so a rule is needed, not a list of patches. The rule works
on the syntax tree: ``torch.cuda`` becomes a CPU namespace, the string "cuda" becomes "cpu", ``x.cuda()`` becomes
``x.cpu()`` and pinned memory is left out. Only names inside megatron's modules change: torch itself, and so vLLM and
transformers in the same process, are as they were. Line numbers stay, so tracebacks and breakpoints still fit.
Five fix-ups repair what no redirect can (``FIXUPS``). With a CUDA device the hook does nothing.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from vime.errors import VimeError

PACKAGE = "megatron.core"
KNOWN_NOISE = (
    # Said by every rank at import. What is really used is in MegatronRank.describe(); a GPU without them is refused.
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"full scope is deprecated",
    r"When using async grad allreduce it is recommended to set the environment variable",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",  # 0.16.1 reads it to set it to None
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"`torch\.distributed\.\w+` is deprecated",
)
_NAME_IN_MODULE = "__vime_cpu__"


def install() -> None:
    """Put the hook in front of Python's own finders. Idempotent; imports nothing.

    Raises VimeError if megatron was imported before on a machine without a GPU: its modules hold cuda for good.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for message in KNOWN_NOISE:
        warnings.filterwarnings("ignore", message=message, module=r"megatron\.core|torch\.distributed")
    early = sorted(name for name in sys.modules if _is_megatron(name))
    if early and not _has_cuda():
        raise VimeError(
            f"{early[0]} was imported before vime.backends.megatron: without a GPU its source must be redirected first",
            "import vime.backends.megatron before anything that imports megatron",
        )
    sys.meta_path.insert(0, _Finder())


def _is_megatron(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# ---------------------------------------------------------------- what torch.cuda means inside a redirected module


class _Stream:
    """Stands for torch.cuda.Stream and Event: CPU work is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # record_event() -> event, wait_stream(), ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _cpu_namespace() -> types.ModuleType:
    """A module with the parts of torch.cuda that megatron uses; anything else is looked up in torch.cuda itself."""
    import torch

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    namespace: Any = types.ModuleType("vime_cpu")
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "OutOfMemoryError"):
        setattr(namespace, name, getattr(torch, name))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_count"):
        setattr(namespace, name, lambda device=None: 0)
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(namespace, name, nothing)
    namespace.Stream = namespace.Event = _Stream
    namespace.current_stream = namespace.default_stream = lambda device=None: _Stream()
    namespace.stream = lambda stream: contextlib.nullcontext()
    namespace.current_device = lambda: torch.device("cpu")
    namespace.is_available = lambda: False
    namespace.memory_stats = lambda device=None: {}
    namespace.manual_seed = torch.manual_seed
    namespace.get_rng_state = lambda device=None: torch.get_rng_state()
    namespace.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    namespace.random = namespace
    namespace.__getattr__ = lambda name: getattr(torch.cuda, name)
    return namespace


# ---------------------------------------------------------------- the rule


class _Redirect(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAME_IN_MODULE, node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "cuda" and len(node.keywords) < 2:
            to_cpu = ast.copy_location(ast.Attribute(called.value, "cpu", ast.Load()), called)
            return ast.copy_location(ast.Call(to_cpu, [], []), node)
        if isinstance(called, ast.Attribute) and called.attr == "pin_memory" and len(node.keywords) < 2:
            return called.value
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node


def redirect(source: bytes | str, path: str) -> ast.Module:
    """The syntax tree of ``source`` with cuda redirected; line numbers are those of the file."""
    return ast.fix_missing_locations(_Redirect().visit(ast.parse(source, path)))


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if b"cuda" not in source and b"pin_memory" not in source:
            return super().get_code(fullname)  # nothing to redirect: Python's cached bytecode will do
        return compile(redirect(source, path), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == PACKAGE:
            check_fixup_modules(os.path.dirname(self.path))
        setattr(module, _NAME_IN_MODULE, _namespace())
        if module.__name__ == "megatron.core.transformer.moe.moe_utils":
            # 0.16.1 never defines this name without transformer-engine, so that every router forward raises NameError.
            module.te_general_gemm = None  # type: ignore[attr-defined]
        super().exec_module(module)
        if module.__name__ in FIXUPS:
            apply_fixup(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_megatron(fullname) or _has_cuda():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


_cached: list[types.ModuleType] = []


def _namespace() -> types.ModuleType:
    if not _cached:
        _cached.append(_cpu_namespace())
    return _cached[0]


# ---------------------------------------------------------------- what no redirect can repair


def _turn_off_jit_fuser(module: Any) -> None:
    """jit_fuser is torch.compile: seconds of C++ builds for nothing. Decorators read it right after this module."""
    module.disable_jit_fuser()


def _use_torch_rng(module: Any) -> None:
    """These two reach into the CUDA generators by index.

    fork() warns when the CPU generator moves inside it; here that generator is the one it forks.
    """
    import logging

    import torch

    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _convert_split_sizes(module: Any) -> None:
    """All-to-all split sizes must become numpy even when the tensor is on the CPU already."""
    import torch

    module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _exchange_unequal_parts(module: Any) -> None:
    """gloo gathers and reduce-scatters only equal parts; ranks that share an expert hold unequal numbers of its tokens.

    With given sizes, one broadcast a rank, and a sum of which each rank keeps its part.
    """
    import torch
    import torch.distributed as dist

    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_parts(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        parts = [part.new_empty((int(size), *part.shape[1:])) for size in output_split_sizes]
        parts[group.rank()] = part.contiguous()
        for rank, each in enumerate(parts):
            dist.broadcast(each, src=dist.get_global_rank(group, rank), group=group)
        return torch.cat(parts)

    def keep_part(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_parts, keep_part


def _resume_torch_adam(module: Any) -> None:
    """Loading the distributed optimizer's state when Adam is torch's own (Megatron-LM 0.16.1).

    Three faults: "step" is no entry of the sharded state (KeyError), main parameters are leaves (no in-place copy), and
    all parameters share one ``step`` tensor, so that bias correction counts N times per step without any error.
    Delete when upstream's ``_set_main_param_and_optimizer_states`` gives each parameter its own step.
    """
    import torch

    @torch.no_grad()
    def put(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main]
        state["step"] = state["step"].clone()
        for key, target in {"param": main, **state}.items():
            if key in tensors and key != "step":
                target.copy_(tensors[key])

    module.DistributedOptimizer._set_main_param_and_optimizer_states = put


FIXUPS: dict[str, tuple[tuple[str, ...], Callable[[Any], None]]] = {
    "megatron.core.jit": (("disable_jit_fuser",), _turn_off_jit_fuser),
    "megatron.core.tensor_parallel.random": (("_get_cuda_rng_state", "_set_cuda_rng_state"), _use_torch_rng),
    "megatron.core.transformer.moe.moe_utils": (("maybe_move_tensor_to_cpu",), _convert_split_sizes),
    "megatron.core.tensor_parallel.mappings": (
        ("_gather_along_first_dim", "_reduce_scatter_along_first_dim"),
        _exchange_unequal_parts,
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        ("DistributedOptimizer._set_main_param_and_optimizer_states",),
        _resume_torch_adam,
    ),
}
"""Module -> (names that must exist in it, what to do once it has run)."""


def apply_fixup(module: types.ModuleType) -> None:
    """Repair one freshly executed module. Raises VimeError naming the target if upstream has moved it."""
    targets, repair = FIXUPS[module.__name__]
    for target in targets:
        found: Any = module
        for part in target.split("."):
            found = getattr(found, part, None)
            if found is None:
                raise _moved(f"{module.__name__}.{target}")
    repair(module)


def check_fixup_modules(package_dir: str) -> None:
    """Raise VimeError naming the first module of ``FIXUPS`` that the installed megatron-core does not have."""
    for name in FIXUPS:
        path = os.path.join(package_dir, *name.removeprefix(PACKAGE + ".").split("."))
        if not os.path.exists(path + ".py"):
            raise _moved(name)


def _moved(target: str) -> VimeError:
    return VimeError(
        f"the installed megatron-core has no {target}, which the CPU redirect must repair",
        "install the megatron-core version pinned by vime, or adapt FIXUPS in vime/backends/megatron/cpu_redirect.py",
    )
