"""``pip install vime`` without extras: typer, pydantic and rich, nothing else."""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

import vime

ROOT = Path(vime.__file__).parents[1]


def closure(names):
    """The distributions that ``names`` need, without extras."""
    found, left = {}, list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        found[name] = distribution(name)
        needed = [line for line in requires(name) or [] if ";" not in line]
        left += [line.split(" ")[0].split("[")[0].rstrip("<>=!~0123456789.,") for line in needed]
    return found.values()


@pytest.fixture
def light(tmp_path_factory):
    """A folder with links to what a light install has, and the call of ``vime`` in it."""
    site = tmp_path_factory.mktemp("site")
    for found in closure(["typer", "pydantic", "rich"]):
        for top in {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(found.locate_file(top))))
    for package in ("vime", "vime_cli"):
        (site / package).symlink_to(ROOT / package)

    def run(*arguments):
        code = "from vime_cli.app import main; main()"
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, "-S", "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    return run


def test_help_and_version(light):
    assert light("--help").returncode == 0
    assert light("--version").stdout.startswith("vime ")


def test_dry_run_says_what_was_not_checked(inputs, light):
    done = light("train", "run.toml", "--dry-run", "--json", "vllm.max_num_seqs=4", "parallel.pp=2")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["layers"]) == 2
    assert "warning: [vllm]: not checked, vllm is not installed" in done.stderr
    assert "prompt files and records: not checked, numpy is not installed" in done.stderr
    assert "warning: vime train needs torch, vllm, ray" in done.stderr


def test_a_run_names_the_extra_to_install(inputs, light):
    done = light("train", "run.toml")
    assert done.returncode == 2
    assert "error: vime train needs torch, vllm, ray" in done.stderr
    assert "Run: pip install 'vime[cpu]'" in done.stderr


def test_problems_are_found_without_the_libraries(inputs, light):
    done = light("train", "run.toml", "parallel.tp=3", "train.lrr=1", "model.path=nowhere")
    assert done.returncode == 2
    for text in ("did you mean train.lr?", "no such folder"):
        assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["align-check", "--list"], "the list of checks needs numpy"),
        (["align-check", "--self-test"], "align-check --self-test needs torch, vllm, ray"),
        (["align-check", "run.toml"], "vime align-check needs torch, vllm, ray"),
        (["dump-weights", "run.toml"], "vime dump-weights needs numpy"),
        (["dump-weights", "--diff", "a", "b"], "comparing weights needs numpy, blake3, torch"),
    ],
)
def test_commands_on_weights_name_the_extra_to_install(inputs, light, arguments, message):
    done = light(*arguments)
    assert done.returncode == 2, done.stderr
    assert f"error: {message}" in done.stderr
    assert "pip install 'vime[cpu]'" in done.stderr


def test_what_needs_no_library_runs_without(inputs, light):
    done = light("dump-weights", "run.toml", "--map")
    assert done.returncode == 0, done.stderr
    assert "every rank's names are a bijection" in done.stdout
    assert light("align-check", "run.toml", "--dry-run").returncode == 0


def test_looking_at_records_names_the_extra_to_install(light):
    done = light("replay", "--inspect", "data_{rollout_id}.pt", "--where", "reward < 1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: reading records needs numpy\nhint: pip install 'vime[cpu]'")
    assert "did you mean reward?" in light("replay", "--inspect", "x.pt", "--where", "rewrd < 1").stderr
