"""What a self-test is asked for: all families and faults by default, refused where there is none of a name."""

from __future__ import annotations

import pytest

from vime.align.faults import FAULTS
from vime.errors import UsageError
from vime.runs.self_test import SUBJECTS, Asked, planted_faults


def test_all_families_and_every_fault_that_a_check_is_there_for() -> None:
    asked = Asked()
    assert list(asked.subjects) == ["qwen3", "llama", "qwen3_moe"]
    assert set(FAULTS) - set(asked.names) == {"hung-rank"}


def test_names_are_kept_in_the_order_of_the_list() -> None:
    asked = Asked(("llama",), ("top-p", "bf16-weights"))
    assert list(asked.subjects) == ["llama"]
    assert asked.names == [name for name in planted_faults() if name in ("top-p", "bf16-weights")]


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="--family gpt2: is none of the self-test"):
        Asked(("gpt2",))
    with pytest.raises(UsageError, match="--fault hung-rank: is none of the self-test"):
        Asked((), ("hung-rank",))


def test_every_layout_that_a_fault_needs_is_that_of_a_subject() -> None:
    needed = {fault.needs for name, fault in FAULTS.items() if fault.check and ">=" in fault.needs}
    sizes = [subject.parallel for subject in SUBJECTS.values()]
    assert needed == {"parallel.dp >= 2", "parallel.tp >= 2"}
    assert all(any(parallel.get(name) == 2 for parallel in sizes) for name in ("dp", "tp"))
