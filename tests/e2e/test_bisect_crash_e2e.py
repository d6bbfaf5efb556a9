"""`vime rollout --bisect-crash` with crashes planted inside the real engine worker: the process is really lost."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Command, vime

LONG = ("rollout.sampling.ignore_stop=true", "rollout.sampling.max_response_len=16")


def bisect(workspace: Path, name: str, *arguments: object, **environment: str) -> Command:
    own = (f"run.dir={workspace / name}", *LONG)
    (workspace / name).mkdir()
    page = ("--html", workspace / name / "page.html")
    return vime("rollout", workspace / "run.toml", *own, "--bisect-crash", *page, *arguments, **environment)


def result_of(command: Command) -> dict:
    """The JSON among the lines of talk."""
    start = command.lines.index("{")
    return json.loads("\n".join(command.lines[start : command.lines.index("}") + 1]))


GUILTY = "segfault if prefix_caching and chunked_prefill and request 0 and request 6"
SEARCHES: dict[str, tuple[object, ...]] = {
    "crash": (  # two settings and two of 32 requests; four of each prompt, which differ by their seeds
        "rollout.rollout_batch_size=8",
        *("--only", "prefix_caching", "--only", "chunked_prefill", "--only", "eager", "--runs", 1, "--json"),
        *("--inject", GUILTY),
    ),
    "crossed": (
        "vllm.enforce_eager=false",
        "vllm.compilation_config={mode=0}",  # which takes no time
        'vllm.speculative_config={method="ngram",num_speculative_tokens=2,prompt_lookup_max=3}',
        *("--runs", 1, "--max-attempts", 4, "--only", "eager", "--only", "speculative", "--json"),
        *("--inject", "exception if speculative and not eager"),
    ),
    "none": ("--runs", 2),
    "hang": ("--runs", 1, "--max-attempts", 1, "--attempt-timeout", 10, "--json", "--inject", "hang if batch > 1"),
}
ENVIRONMENT = {"crossed": {"CUDA_LAUNCH_BLOCKING": "1"}}


@pytest.fixture(scope="module")
def searches(workspace) -> Iterator[dict[str, Future[Command]]]:
    """All of them, two at a time: each waits for processes to come up most of the time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(bisect, workspace, name, *arguments, **ENVIRONMENT.get(name, {}))
            for name, arguments in SEARCHES.items()
        }


@pytest.fixture(scope="module")
def found(searches) -> dict:
    command = searches["crash"].result()
    assert command.process.returncode == 1, command.text
    assert "32 requests, at most 100 engine starts" in command.text
    return result_of(command)


@pytest.mark.slow
def test_the_two_settings_and_the_two_requests_of_32_are_found(found):
    assert found["verdict"] == "CRASH"
    assert found["crash"] == {"cause": "SIGSEGV in the engine core", "phase": "serving"}
    assert found["removed_by"] == ["prefix_caching", "chunked_prefill"]
    assert found["requests"] == ["0/0", "1/2"]
    assert found["is_minimal"]
    assert found["num_engine_starts"] == len(found["attempts"]) <= 1 + 2 + 19 + 1
    assert found["stopped"] == ""


@pytest.mark.slow
def test_toggles_are_read_back_in_the_worker_and_recorded(found, workspace):
    read = {tuple(a["changed"]): a["read_back"] for a in found["attempts"]}
    assert read[()]["enable_prefix_caching"]
    assert not read[("prefix_caching",)]["enable_prefix_caching"]
    assert read[("prefix_caching",)]["enable_chunked_prefill"]
    assert not read[("chunked_prefill",)]["enable_chunked_prefill"]
    toggles = {t["name"]: t for t in found["toggles"]}
    assert toggles["eager"]["verdict"] == "SKIP"
    assert "its worker reads enforce_eager = True" in toggles["eager"]["reason"]
    assert "planted_segfault" in (workspace / "crash" / "page.html").read_text()


@pytest.mark.slow
def test_the_last_attempt_has_the_stack_and_the_variables_of_a_core_dump(found):
    assert found["stack"][0].startswith("planted_segfault (") or "string_at" in found["stack"][0]
    assert any("execute_model" in frame for frame in found["stack"])
    last = found["attempts"][-1]
    assert last["purpose"] == "last"
    assert last["read_back"]["env CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert found["core_dump"]["skipped"] == "there is no CUDA device, so that no driver writes a core dump"
    assert found["core_dump"]["variables"]["CUDA_COREDUMP_FILE"].endswith("cuda_coredump_%h.%p.%t")


@pytest.mark.slow
def test_the_printed_line_shows_the_crash_again(found, workspace):
    words = shlex.split(found["reproduce"])
    assert words[:2] == ["vime", "rollout"]
    assert not any(word.startswith("rollout.") for word in words)  # the record holds them
    assert len(words) < 16
    again = vime(*words[1:], "--json")
    assert again.process.returncode == 1, again.text
    result = result_of(again)
    assert result["folder"] == str(workspace / "crash" / "again")  # the search's own result is not lost
    assert json.loads((workspace / "crash" / "report.json").read_text()) == found
    assert (result["num_crashed"], result["num_requests"], result["num_engine_starts"]) == (1, 2, 1)
    assert result["stopped"] == "--max-attempts 1 reached"


@pytest.mark.slow
def test_graphs_and_speculation_are_crossed_first_and_settings_reach_the_worker(searches):
    """Case D21: asked for on the command line and in the environment, read back from the engine's worker."""
    command = searches["crossed"].result()
    assert command.process.returncode == 1, command.text
    found = result_of(command)
    assert [a["changed"] for a in found["attempts"][:3]] == [[], ["eager"], ["speculative"]]
    assert found["removed_by"] == ["eager", "speculative"]
    first, eager, plain = (a["read_back"] for a in found["attempts"][:3])
    assert {r["env CUDA_LAUNCH_BLOCKING"] for r in (first, eager, plain)} == {"1"}
    assert (first["enforce_eager"], first["speculative"]) == (False, "ngram")
    assert (eager["enforce_eager"], eager["speculative"]) == (True, "ngram")
    assert (plain["enforce_eager"], plain["speculative"]) == (False, None)
    assert "illegal memory access" in found["crash"]["cause"]
    assert found["stopped"] == "--max-attempts 4 reached"


@pytest.mark.slow
def test_no_crash_is_said_to_be_none(searches):
    command = searches["none"].result()
    assert command.process.returncode == 0, command.text
    assert "NOT REPRODUCED: not reproduced in 2 runs" in command.text
    assert "2 of at most 100" in command.text


@pytest.mark.slow
def test_a_hang_is_ended_and_says_where(searches):
    command = searches["hang"].result()
    assert command.process.returncode == 1, command.text
    found = result_of(command)
    assert found["attempts"][0]["outcome"] == "hung"
    assert "no end within 10 s in planted_hang" in found["crash"]["cause"]
    stacks = Path(found["attempts"][0]["folder"]) / "stacks.txt"
    assert "execute_model" in stacks.read_text()
