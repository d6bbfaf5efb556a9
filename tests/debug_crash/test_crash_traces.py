"""What crashed processes write: the first cause, the innermost call first."""

from __future__ import annotations

from vime.debug.crash.core_dump import collect, open_command, variables
from vime.debug.crash.traces import find

SEGFAULT = """INFO something
Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/x/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/x/kernel.py", line 65 in launch
  File "/x/runner.py", line 45 in execute_model

Extension modules: numpy (total: 1)
"""
EXCEPTION = """(EngineCore pid=123) Traceback (most recent call last):
(EngineCore pid=123)   File "/x/core.py", line 10, in step
(EngineCore pid=123)     run()
(EngineCore pid=123)   File "/x/kernel.py", line 5, in run
(EngineCore pid=123)     raise
(EngineCore pid=123)     ^^^^^
(EngineCore pid=123) torch.AcceleratorError: CUDA error: an illegal memory access was encountered
(EngineCore pid=123) CUDA kernel errors might be asynchronously reported
Traceback (most recent call last):
  File "/x/async_llm.py", line 849, in output_handler
    outputs
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_a_signal_is_named_with_the_stack_of_the_thread_that_it_hit():
    found = find(SEGFAULT)
    assert found is not None
    assert (found.what, found.is_signal) == ("SIGSEGV", True)
    assert found.frames == ("launch (/x/kernel.py:65)", "execute_model (/x/runner.py:45)")


def test_an_exception_is_named_and_not_that_the_engine_died_of_it():
    found = find(EXCEPTION)
    assert found is not None
    assert found.what == "AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert found.frames == ("run (/x/kernel.py:5)", "step (/x/core.py:10)")


def test_the_end_of_another_is_no_cause():
    assert find(EXCEPTION[EXCEPTION.index("Traceback", 1) :].split("asynchronously reported")[1]) is None
    assert find("nothing of the kind") is None


def test_a_core_dump_is_skipped_with_the_reason_and_found_where_it_is(tmp_path):
    absent = collect(tmp_path, "cpu")
    assert absent.skipped == "there is no CUDA device, so that no driver writes a core dump"
    assert absent.variables == variables(tmp_path)
    assert absent.variables["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert collect(tmp_path, "cuda").skipped.startswith("the driver wrote no core dump")
    (tmp_path / "cuda_coredump_host.12.34").write_bytes(b"")
    found = collect(tmp_path, "cuda")
    assert found.skipped == ""
    assert found.command == open_command(str(tmp_path / "cuda_coredump_host.12.34"))
    assert found.command.startswith('cuda-gdb -ex "target cudacore ')
