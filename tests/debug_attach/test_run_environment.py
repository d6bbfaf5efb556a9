"""What a debug run sets in processes and jobs: exact values, the job's own win, nothing of the user's is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.debug.launch import environment
from vime.debug.launch.environment import SETUP_HOOK, SITE, job_config, of_a_job, of_a_process, post_mortem_name
from vime.debug.stop.spec import Point, Spec
from vime.debug.stop.worker import without_collisions

SPEC = Spec(
    "d-1", (Point("p0", "a.py:1", "/w/a.py", 1, condition="'$HOME' in {x: '}'}[y]"),), folder="/r", wait_seconds=900.0
)
HOLD = "14400"
HEADER = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
RAISED = {
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": HOLD,
    "VLLM_ENGINE_READY_TIMEOUT_S": HOLD,
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": HOLD,
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
OURS = {"VIME_DEBUG_SPEC", "PYTHONBREAKPOINT", "PYTHONPATH", *RAISED}


def test_a_process_keeps_its_environment_and_gets_ours():
    """Case D13: 500 variables, one with newlines and braces."""
    before = {f"MANY_{i}": str(i) for i in range(500)} | {"ODD": '{"a": "\n$HOME}"', "PYTHONPATH": "/mine:/yours"}
    found = of_a_process(before, SPEC, False).value
    assert {name: found[name] for name in before if name != "PYTHONPATH"} == {
        name: value for name, value in before.items() if name != "PYTHONPATH"
    }
    assert found["PYTHONPATH"] == f"{SITE}:/mine:/yours"
    assert set(found) - set(before) == OURS - {"PYTHONPATH"}
    assert Spec.loads(found["VIME_DEBUG_SPEC"]) == SPEC
    assert found.items() >= RAISED.items()
    assert of_a_process({}, SPEC, False).value["PYTHONPATH"] == str(SITE)
    assert (SITE / "sitecustomize.py").is_file()


def test_a_job_gets_the_named_variables_alone_and_keeps_its_own(monkeypatch):
    """Cases D09 and D13: whatever this process has in its environment stays here."""
    monkeypatch.setenv("ODD", "{\n}")
    job = {"working_dir": "/w", "pip": ["x"], "env_vars": {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/mine"}}
    merged = of_a_job(job, SPEC, False)
    assert {k: v for k, v in merged.value.items() if k != "env_vars"} == {
        "working_dir": "/w", "pip": ["x"], "worker_process_setup_hook": SETUP_HOOK
    }  # fmt: skip
    env = merged.value["env_vars"]
    assert set(env) == OURS | {"NCCL_DEBUG", "VIME_DEBUG_RAISED"}
    assert (env["NCCL_DEBUG"], env["PYTHONPATH"]) == ("INFO", f"{SITE}:/mine")
    assert "$" not in env["VIME_DEBUG_SPEC"]  # Ray would expand it
    assert Spec.loads(env["VIME_DEBUG_SPEC"]) == SPEC
    assert job["env_vars"] == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/mine"}  # untouched
    assert of_a_job({}, SPEC, False).value["env_vars"]["PYTHONPATH"] == f"{SITE}:${{PYTHONPATH}}"


def test_the_jobs_value_wins_and_is_said_once():
    """Case D09."""
    job = {"env_vars": {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "100", "VLLM_ENGINE_READY_TIMEOUT_S": "99999"}}
    merged = of_a_job(job, SPEC, False)
    assert merged.value["env_vars"].items() >= job["env_vars"].items()
    said = "\n".join(merged.notes)
    assert said.count("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=100 of the job is kept, shorter than --wait 15m") == 1
    assert said.count("VLLM_ENGINE_READY_TIMEOUT_S=99999 of the job is kept\n") == 0
    assert "VLLM_ENGINE_READY_TIMEOUT_S=99999 of the job is kept" in said
    assert "raised to 4h (--hold)" in said


def test_the_jobs_own_setup_hook_is_called_as_well():
    merged = of_a_job({"worker_process_setup_hook": "mine.prepare"}, SPEC, False)
    assert merged.value["worker_process_setup_hook"] == SETUP_HOOK
    assert merged.value["env_vars"]["VIME_DEBUG_SETUP_HOOK"] == "mine.prepare"
    assert any("mine.prepare is called as well" in note for note in merged.notes)


def test_the_programs_own_ray_init_never_collides_with_the_debug_run():
    """Case D09: Ray refuses to start where job and program set the same key; of ours none is left in both."""
    job = of_a_job({"env_vars": {"NCCL_DEBUG": "INFO"}}, SPEC, False).value
    program = {
        "env_vars": {"PYTHONPATH": "/mine", "VLLM_ENGINE_READY_TIMEOUT_S": "5", "NCCL_DEBUG": "WARN"},
        "worker_process_setup_hook": "mine.prepare",
    }
    ours, own = without_collisions(job, program)
    assert set(ours["env_vars"]) & set(own["env_vars"]) == {"NCCL_DEBUG"}  # theirs, with or without a debug run
    assert own["env_vars"]["PYTHONPATH"] == f"{SITE}:/mine"
    assert own["env_vars"]["VLLM_ENGINE_READY_TIMEOUT_S"] == "5"
    assert (ours["worker_process_setup_hook"], own.get("worker_process_setup_hook")) == (SETUP_HOOK, None)
    assert ours["env_vars"]["VIME_DEBUG_SETUP_HOOK"] == "mine.prepare"
    assert program["env_vars"]["PYTHONPATH"] == "/mine"
    ours, own = without_collisions(job, {"worker_process_setup_hook": lambda: None})
    assert "worker_process_setup_hook" not in ours
    assert callable(own["worker_process_setup_hook"])
    assert without_collisions(job, {}) == (job, {})


def test_a_job_config_that_is_there_is_merged_key_by_key():
    before = {"runtime_env": {"env_vars": {"A": "1"}, "working_dir": "/w"}, "metadata": {"who": "me"}, "code": [1]}
    found = json.loads(job_config(json.dumps(before), SPEC, False).value["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert found["metadata"] == {"who": "me"}
    assert found["code"] == [1]
    assert found["runtime_env"]["working_dir"] == "/w"
    assert found["runtime_env"]["env_vars"].items() >= {"A": "1", "PYTHONPATH": f"{SITE}:${{PYTHONPATH}}"}.items()
    empty = json.loads(job_config("", SPEC, False).value["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert empty["metadata"] == {}


@pytest.mark.parametrize(
    ("here", "job", "name"),
    [
        ({"RAY_DEBUG_POSTMORTEM": "1"}, {}, "RAY_DEBUG_POSTMORTEM"),
        ({}, {"env_vars": {"RAY_DEBUG_POSTMORTEM": "1"}}, "RAY_DEBUG_POSTMORTEM"),
        ({"RAY_DEBUG_POST_MORTEM": "1"}, {}, "RAY_DEBUG_POST_MORTEM"),
        ({"RAY_DEBUG_POSTMORTEM": "0"}, {"env_vars": {"RAY_DEBUG_POSTMORTEM": ""}}, ""),
        ({}, {}, ""),
    ],
)
def test_the_guides_spelling_is_understood(here, job, name):
    """Case D02."""
    assert post_mortem_name(here, job) == name


def test_rays_own_variables_are_set_only_where_they_are_asked_for():
    names = {"RAY_DEBUG", "RAY_DEBUG_POST_MORTEM"}
    assert not names & set(of_a_job({}, SPEC, False).value["env_vars"])
    assert of_a_job({}, SPEC, True).value["env_vars"]["RAY_DEBUG_POST_MORTEM"] == "1"
    assert of_a_process({}, SPEC, True).value["RAY_DEBUG_POST_MORTEM"] == "1"
    spec = Spec("d-1", is_ray_debugger=True)
    assert of_a_job({}, spec, False).value["env_vars"]["RAY_DEBUG"] == "1"


@pytest.mark.parametrize(
    ("job", "wrong"),
    [
        ([], "is no JSON object"),
        ({"env_vars": [1]}, "env_vars is no JSON object"),
        ({"env_vars": {"A": 1}}, "env_vars.A = 1: must be a string"),
        ({"worker_process_setup_hook": 3}, "worker_process_setup_hook = 3"),
        ({"env_vars": {"A": "1"}}, None),
    ],
)
def test_what_is_wrong_with_a_runtime_environment(job, wrong):
    found = list(environment.problems(job, "--runtime-env-json"))
    assert found == [] if wrong is None else (len(found) == 1 and wrong in found[0])


def test_the_time_outs_that_are_raised_are_those_that_libraries_read():
    """vLLM's from its table of variables, torch's from its header: a renamed one would be set in vain."""
    import torch
    import vllm.envs

    text = Path(torch.__file__).with_name("include").joinpath(HEADER).read_text()
    for name in RAISED:
        assert name in vllm.envs.environment_variables if name.startswith("VLLM_") else f'"{name}"' in text
