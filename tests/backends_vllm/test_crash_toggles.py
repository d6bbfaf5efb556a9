"""The search for a crash speaks vLLM's own names: arguments that it takes, variables that it reads, its values."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from vime.backends.vllm.crash_facts import VARIABLES, agreed, asked, in_force
from vime.backends.vllm.derived import DERIVED_ENGINE
from vime.debug.crash.planted import SWITCHES
from vime.debug.crash.toggles import SPECULATIVE, environment_of, toggles

vllm = pytest.importorskip("vllm")
FACTS = {
    "device": "cuda",
    "enforce_eager": False,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [1, 2, 4],
    "compilation_mode": 3,
    "speculative": None,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "disable_cascade_attn": False,
    "async_scheduling": True,
    "disable_custom_all_reduce": False,
    "max_num_seqs": 256,
    "env CUDA_LAUNCH_BLOCKING": None,
}
ALL = toggles(FACTS, 32)


def test_every_argument_is_one_of_vllm_and_none_of_those_that_vime_derives():
    fields = set(vllm.AsyncEngineArgs.__dataclass_fields__)
    named = {name for toggle in ALL for name in toggle.arguments} | set(SPECULATIVE)
    assert named <= fields
    assert not named & set(DERIVED_ENGINE)


def test_every_variable_is_one_of_vllm_or_of_cuda():
    import vllm.envs

    named = environment_of(ALL)
    assert {name for name in named if name.startswith("VLLM_")} <= set(vllm.envs.environment_variables)
    assert set(named) <= set(VARIABLES)


def test_every_value_is_one_that_vllm_knows():
    from vllm.config.compilation import CompilationConfig, CUDAGraphMode
    from vllm.config.parallel import All2AllBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    compilation = {f.name for f in dataclasses.fields(CompilationConfig)}
    for toggle in ALL:
        own = toggle.arguments
        assert set(own.get("compilation_config", {})) <= compilation
        mode = own.get("compilation_config", {}).get("cudagraph_mode")
        assert mode is None or mode in CUDAGraphMode.__members__
        assert own.get("attention_backend", "TRITON_ATTN") in AttentionBackendEnum.__members__
        assert own.get("all2all_backend", "allgather_reducescatter") in get_args(All2AllBackend)


def test_switches_as_they_are_and_as_they_were_asked_for():
    """A platform that captures no graphs reads so, whatever was asked."""
    cpu = FACTS | {"cudagraph_mode": "NONE", "async_scheduling": False}
    now = in_force(cpu)
    assert set(now) == set(SWITCHES)
    assert (now["cuda_graph"], now["cascade_attention"], now["async_scheduling"]) == (False, True, False)
    given = asked({"async_scheduling": True, "disable_cascade_attn": True, "speculative_config": {"method": "x"}}, cpu)
    assert set(given) == set(SWITCHES)
    assert (given["cuda_graph"], given["cascade_attention"], given["async_scheduling"]) == (True, False, True)
    assert given["speculative"]
    assert not asked({"enforce_eager": True}, cpu)["cuda_graph"]


def test_a_setting_that_one_worker_does_not_have_is_not_in_force():
    """Case D21: on one rank of two."""
    off = {toggle.name: toggle for toggle in ALL}["launch_blocking"]
    on = {"env CUDA_LAUNCH_BLOCKING": "1", "pid": 1}
    assert off.unread(agreed([on, on | {"pid": 2}])) == ""
    assert "worker reads env CUDA_LAUNCH_BLOCKING = ['1', None]" in off.unread(agreed([on, FACTS | {"pid": 2}]))
