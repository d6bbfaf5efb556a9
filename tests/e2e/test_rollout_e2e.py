"""`vime rollout` for real: a trained model, evaluation sets, what is printed. Megatron cannot be imported here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, vime

from vime.metrics import read_jsonl
from vime.record import read

LONG = "+".join("1" * 70) + "="  # 140 characters, as many tokens: more than a block of the prefix cache
RUN = """
[run]
name = "sums"
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
shuffle = false
[rollout]
rollout_batch_size = 4
num_samples_per_prompt = 4
sampling = {{ max_response_len = 4 }}
[eval.sets.greedy]
prompts = ["sums.jsonl"]
[eval.sets.warm]
prompts = ["sums.jsonl"]
temperature = 1.0
num_samples_per_prompt = 4
max_prompts = 30
[vllm]
kv_cache_memory_bytes = 33554432
"""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory, trained_model: Path) -> Path:
    """A folder with run.toml of a trained model, and a package ``megatron`` that cannot be imported."""
    folder = tmp_path_factory.mktemp("sums")
    questions = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(5)]
    for name, rows in (("sums.jsonl", questions), ("prompts.jsonl", [*questions[:3], (LONG, "70")])):
        lines = [json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows]
        (folder / name).write_text("".join(lines))
    (folder / "run.toml").write_text(RUN.format(model=trained_model))
    (folder / "absent" / "megatron").mkdir(parents=True)
    (folder / "absent" / "megatron" / "__init__.py").write_text("raise ImportError('megatron is absent')\n")
    return folder


def rollout(folder: Path, *arguments: object) -> Command:
    command = vime("rollout", folder / "run.toml", *arguments, PYTHONPATH=str(folder / "absent"))
    assert command.process.returncode == 0, command.text
    assert "Traceback" not in command.text
    return command


@pytest.mark.slow
def test_rollout_prints_what_it_came_to_and_saves_it(sums):
    """Case R20: reward mean and spread, lengths, ends, groups without spread; without Megatron."""
    run_dir, record = sums / "one", sums / "data_{rollout_id}.pt"
    command = rollout(sums, "-n", 1, "--save", record, f"run.dir={run_dir}", "--json")
    found = json.JSONDecoder().raw_decode(command.text, command.text.index("{\n"))[0]
    total = found["statistics"]["total"]
    assert (total["num_samples"], total["num_groups"]) == (16, 4)
    assert total["reward"]["num_scored"] == 16
    assert sum(b["count"] for b in total["histogram"]) == 16
    assert set(total["status"]) == {"completed", "truncated", "aborted", "failed"}
    assert sum(total["status"].values()) == 16
    assert (total["dropped_groups"], total["prompt_len"]["max"]) == ({}, len(LONG) + 1)
    assert total["tokens_per_second"] > 0
    cache = total["prefix_cache"]
    assert cache["num_prompt_tokens"] == 4 * (3 * 5 + len(LONG) + 1)
    assert cache["num_cached_tokens"] == 3 * 128  # the long prompt's only whole block, once it was computed
    assert found["statistics"]["sampling"]["max_response_len"] == {"value": 4, "origin": "rollout.sampling"}
    assert found["statistics"]["stop_token_ids"]
    counts = read(str(record).format(rollout_id=0)).header.counts
    assert counts == {f"status_{status}": n for status, n in total["status"].items() if n}
    greedy, warm = (found["evaluations"][name]["0"] for name in ("greedy", "warm"))
    assert (greedy["num_samples"], warm["num_samples"], warm["num_prompts"]) == (50, 120, 30)
    assert greedy["reward"] > 0.9
    assert 0.1 < warm["reward"] < 0.9
    assert warm["reward"] == pytest.approx(warm["pass_at_1"])
    assert warm["pass_at_1"] < warm["pass_at_2"] < warm["pass_at_4"] <= 1.0
    row = read_jsonl(run_dir / "metrics.jsonl")[0]
    assert (row["eval/greedy/reward"], row["eval/warm/pass_at_4"]) == (greedy["reward"], warm["pass_at_4"])
    header = read(run_dir / "eval" / "eval_000000_greedy.pt").header
    assert (header.sampling["temperature"], header.sampling_origin["temperature"]) == (0.0, "eval.temperature")
    assert len(read(run_dir / "eval" / "eval_000000_warm.pt")) == 120
