"""`vime align-check` for real on a trained tiny model: a clean walk, a walk of the trainer alone, a planted fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, vime

from vime.align.checks import CHECKS
from vime.record import read

RUN = """
[run]
name = "sums"
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 16
num_samples_per_prompt = 8
sampling = {{ max_response_len = 4 }}
[train]
lr = 1e-3
num_warmup_steps = 10
[eval]
prompts = ["prompts.jsonl"]
interval = 5
[vllm]
kv_cache_memory_bytes = 33554432
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trained_model: Path) -> Path:
    found = tmp_path_factory.mktemp("align")
    rows = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a in range(10) for b in range(2)]
    (found / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (found / "run.toml").write_text(RUN.format(model=trained_model))
    return found


@pytest.fixture(scope="module")
def clean(folder: Path) -> Command:
    return vime("align-check", folder / "run.toml", f"run.dir={folder / 'clean'}")


def json_of(command: Command) -> dict:
    """stdout, which the fixture joins with stderr."""
    text = command.text
    return json.loads(text[text.index("\n{\n") :])


def test_a_clean_run_passes_every_check(clean: Command, folder: Path) -> None:
    assert clean.process.returncode == 0, clean.text
    report = json.loads((folder / "clean" / "report.json").read_text())
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert list(verdicts) == [check.name for check in CHECKS]
    assert set(verdicts.values()) <= {"PASS", "SKIP"}, {k: v for k, v in verdicts.items() if v not in ("PASS", "SKIP")}
    skipped = [name for name, verdict in verdicts.items() if verdict == "SKIP"]
    assert skipped == ["routing", "sleep_levels", "transformer_engine", "cuda_graphs", "fp8"]
    assert (report["verdict"], report["findings"]) == ("PASS", [])
    assert all(check["seconds"] >= 0 for check in report["checks"])
    assert report["environment"]["rollout"] == "4 prompts x 4 samples, at most 4 tokens each"


def test_it_says_what_it_does_and_where_the_report_lies(clean: Command, folder: Path) -> None:
    lines = clean.lines
    assert lines[-1].startswith("PASS: ")
    assert lines[0].startswith("align-check has settings of its own: run.num_rollouts 1 -> 2, ")
    assert "train.num_warmup_steps 10 -> 0" in lines[0]
    for check in CHECKS:
        name = f"{check.step:>3} {check.name}: "
        began, ended = (i for i, line in enumerate(lines) if line.startswith(name))
        assert lines[began] == f"{name}{check.title} ..."
        assert lines[ended].removeprefix(name).startswith(("PASS, ", "SKIP, "))
    kept = folder / "clean"
    page = (kept / "report.html").read_text()
    assert "on_policy" in page
    assert "src=" not in page.split("<body", 1)[0]  # one offline file
    assert len(read(kept / "rollouts" / "data_0.pt")) == 16
    assert not (kept / ".walk").exists()


def test_a_folder_with_a_report_is_not_written_over(clean: Command, folder: Path) -> None:
    again = vime("align-check", folder / "run.toml", f"run.dir={folder / 'clean'}", "--only", "names")
    assert again.process.returncode == 2
    assert "already" in again.text


def test_the_trainer_alone_starts_no_engine(folder: Path) -> None:
    command = vime("align-check", folder / "run.toml", f"run.dir={folder / 'alone'}", "--only", "1,names", "--json")
    assert command.process.returncode == 0, command.text
    found = json_of(command)
    assert [(c["step"], c["verdict"]) for c in found["checks"]] == [("1", "PASS"), ("2", "PASS")]
    assert found["counts"] == {"PASS": 2}
    assert "engine" not in command.text[: command.text.index("\n{\n")]


@pytest.mark.slow
def test_a_tensor_that_is_not_sent_is_found_and_the_walk_goes_on(folder: Path) -> None:
    """Case W19: until the first step the old value is the right one, afterwards it is not."""
    arguments = ("--only", "3,5,8,11a", "--inject", "dropped-tensor", "--html", folder / "page.html")
    command = vime("align-check", folder / "run.toml", f"run.dir={folder / 'dropped'}", *arguments)
    assert command.process.returncode == 1, command.text
    report = json.loads((folder / "dropped" / "report.json").read_text())
    verdicts = {check["name"]: (check["verdict"], check["follows"]) for check in report["checks"]}
    assert verdicts["weights"] == ("FAIL", "")
    assert verdicts["coherence"] == ("PASS", "")
    assert verdicts["engine"] == ("PASS", "")
    assert verdicts["second"][0] == "FAIL"
    assert report["findings"] == ["weights"]
    assert command.lines[-2].startswith("error: check failed: weights")
    assert (folder / "page.html").read_text() == (folder / "dropped" / "report.html").read_text()
