import sys

import pytest

from vime.config import native
from vime.config.load import load
from vime.errors import VimeError

BASE = ["model.path=m", "data.prompts=['a.jsonl']"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package with one dataclass that inherits across files, as the real ones do; it must never be imported."""
    (tmp_path / "shelf" / "core").mkdir(parents=True)
    (tmp_path / "shelf" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "shelf" / "base.py").write_text("class Base:\n    width: int = 1\n    label: str | None = None\n")
    (tmp_path / "shelf" / "core" / "config.py").write_text(
        "from typing import ClassVar, Optional\nfrom ..base import Base\nimport other\n"
        "class Config(Base):\n    depth: Optional[float] = None\n    ready: bool = False\n    kind: Kind = 1\n"
        "    count: ClassVar[int] = 0\n    made: int = field(init=False)\n    _plain = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    target = native.Target("shelf", "core/config.py", "Config")
    monkeypatch.setattr(native, "TARGETS", {"vllm": target, "megatron.ddp": native.Target("nonesuch", "a.py", "A")})
    return target


def check(*overrides, derived=None):
    return native.check(load([], [*BASE, *overrides]), derived or {})


def test_fields_of_bases_are_found_without_importing(library):
    found = native.fields(native.find_package("shelf"), library)
    assert found == {"width": "int", "label": "str | None", "depth": "Optional[float]", "ready": "bool", "kind": "Kind"}
    assert "shelf" not in sys.modules


def test_unknown_derived_and_wrongly_typed_names(library):
    found, _ = check("vllm.widht=2", "vllm.ready=1", "vllm.depth=true", "vllm.made=1", "vllm.label=x",
                     derived={"vllm": {"label": "comes from model.path"}})  # fmt: skip
    assert found == [
        "vllm.widht = 2 (command line): Config has no such field; did you mean vllm.width?",
        "vllm.ready = 1 (command line): must be true or false",
        "vllm.depth = true (command line): must be a number",
        "vllm.made = 1 (command line): Config has no such field",
        'vllm.label = "x" (command line): is set by vime and cannot be given: comes from model.path',
    ]


def test_what_the_library_must_judge_is_left_to_it(library):
    assert check("vllm.kind=anything", "vllm.depth=1", "vllm.width=2") == ([], [])


def test_a_library_that_is_not_installed_is_a_warning(library):
    assert check("megatron.ddp.x=1") == ([], ["[megatron.ddp]: not checked, nonesuch is not installed"])
    assert check() == ([], [])


def test_a_version_that_moved_its_files_is_refused(library, monkeypatch):
    monkeypatch.setitem(native.TARGETS, "vllm", native.Target("shelf", "gone.py", "Config"))
    with pytest.raises(VimeError, match=r"gone\.py is not there"):
        check("vllm.x=1")


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("megatron.transformer", "moe_permute_fusion"),
        ("megatron.transformer", "tensor_model_parallel_size"),  # of the base class, in another file
        ("megatron.optimizer", "adam_beta1"),
        ("megatron.ddp", "overlap_grad_reduce"),
        ("vllm", "max_num_seqs"),
        ("vllm", "enable_log_requests"),  # of AsyncEngineArgs itself
    ],
)
def test_the_real_libraries(table, name):
    target = native.TARGETS[table]
    package = native.find_package(target.package)
    if package is None:
        pytest.skip(f"{target.package} is not installed")
    assert name in native.fields(package, target)
