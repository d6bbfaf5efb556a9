"""The import hook that lets megatron run without a GPU, and that an upgrade or a wrong order is loud."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import jobs
import pytest

import vime
from vime.backends.megatron import cpu_redirect
from vime.errors import VimeError


def _redirected(source: str) -> str:
    return ast.unparse(cpu_redirect.redirect(source, "x.py"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.cuda.current_device()", "__vime_cpu__.current_device()"),
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("x.cuda()", "x.cpu()"),
        ("x.cuda(non_blocking=True)", "x.cpu()"),
        ("x.pin_memory()", "x"),
        ("torch.empty(1, pin_memory=True)", "torch.empty(1, pin_memory=False)"),
        ("t == 'torch.cuda.FloatTensor'", "t == 'torch.FloatTensor'"),
        ("f'{a} cuda'", "f'{a} cuda'"),
        ("other.cuda_thing", "other.cuda_thing"),
    ],
)
def test_rule(source, expected):
    assert _redirected(source) == expected


def test_line_numbers_are_those_of_the_file():
    tree = cpu_redirect.redirect("\n\nx = torch.cuda.device_count()\n", "x.py")
    assert tree.body[0].lineno == 3


def test_fixups_fit_the_installed_megatron_and_the_keys_exist(pool):
    found = pool.run(1, jobs.bare)[0]
    assert found["unknown"] == {"TransformerConfig": [], "OptimizerConfig": [], "DistributedDataParallelConfig": []}
    assert found["torch_untouched"] == "torch.cuda"
    assert found["num_bytes"] == 12 * 4 + 5 * 4
    assert found["emptied"] == 0
    assert found["refilled"] == ([float(i) for i in range(12)], [float(i) for i in range(6, 12)], [0.0] * 5)


def test_a_fixup_whose_target_is_gone_is_named():
    module = types.ModuleType("megatron.core.optimizer.distrib_optimizer")
    module.DistributedOptimizer = type("DistributedOptimizer", (), {})
    with pytest.raises(VimeError, match=r"DistributedOptimizer\._set_main_param_and_optimizer_states"):
        cpu_redirect.apply_fixup(module)


def test_a_fixup_whose_module_is_gone_is_named(tmp_path):
    (tmp_path / "jit.py").touch()
    with pytest.raises(VimeError, match=r"megatron\.core\.tensor_parallel\.random"):
        cpu_redirect.check_fixup_modules(str(tmp_path))


def test_importing_megatron_first_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, cpu_redirect._Finder)])
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setattr(cpu_redirect, "_has_cuda", lambda: False)
    with pytest.raises(VimeError, match=r"megatron\.core was imported before"):
        cpu_redirect.install()
    monkeypatch.setattr(cpu_redirect, "_has_cuda", lambda: True)
    cpu_redirect.install()
    finder = sys.meta_path[0]
    assert finder.find_spec("megatron.core", None) is None  # inert with a GPU


def test_the_package_imports_neither_torch_nor_megatron():
    code = "import sys, vime.backends.megatron.derived, vime.backends.megatron.manifest as m; print(sorted("
    code += "{'torch', 'megatron', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_only_two_files_name_cuda():
    root = Path(vime.__file__).parent
    named = re.compile(r'["\'.]cuda\b(?!-)')  # the device; not cuda_graphs, a feature, nor cuda-gdb
    found = {str(f.relative_to(root)) for f in root.rglob("*.py") if named.search(f.read_text())}
    assert found - {"device.py", "backends/megatron/cpu_redirect.py"} == set()
