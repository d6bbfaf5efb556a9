"""The multi-turn example: its prompts, its tool, and a dialogue with a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from vime.config.load import load
from vime.rollout.live import load_generate
from vime.types import Prompt, Sample, Status


@pytest.fixture(scope="module")
def tool(script) -> ModuleType:
    return script("multi_turn/tool.py")


class Characters:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


class Dialogue:
    """An engine that says its lines, one after the other, to each sample."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.tokenizer, self.prompts = lines, Characters(), []

    async def generate(self, prompt: Prompt, seeds: list[int], sampling: dict) -> list[Sample]:
        (seed,) = seeds
        self.prompts.append(self.tokenizer.decode(prompt.token_ids.tolist(), True))
        line = self.lines[self.prompts[-1].count("result:")]
        p, n = len(prompt.token_ids), len(line)
        ids = np.concatenate([prompt.token_ids, self.tokenizer.encode(line, False)])
        mask = np.arange(p + n) >= p
        return [Sample(prompt.group_id, 0, ids, p, mask, np.where(mask, -0.5, 0.0), text=line, seed=seed)]


def ask(tool: ModuleType, engine: Dialogue, num_samples: int = 1) -> list[Sample]:
    prompt = Prompt(5, np.array([ord(c) for c in "2 + 3?"], dtype=np.int32), "2 + 3?", "5")
    return asyncio.run(tool.generate(engine, prompt, list(range(num_samples)), {"max_response_len": 100}))


def test_the_function_is_found_beside_run_toml(examples: Path) -> None:
    loaded = load([examples / "multi_turn/run.toml"])
    assert load_generate(loaded.config, [str(loaded.base_dir)]) is not None


def test_prompts_regenerate_byte_for_byte(examples: Path, tmp_path: Path, script) -> None:
    script("multi_turn/make_prompts.py").write(tmp_path)
    assert (tmp_path / "prompts.jsonl").read_bytes() == (examples / "multi_turn/prompts.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("text", "result"),
    [("calc(2 + 3)", 5), ("calc(7*8) and calc(1+1)", 56), ("so calc(3 - 12)", -9), ("2 + 3", None), ("calc(2)", None)],
)
def test_calculator(tool: ModuleType, text: str, result: int | None) -> None:
    assert tool.calculate(text) == result


def test_a_dialogue(tool: ModuleType) -> None:
    engine = Dialogue("calc(2 + 3)", "2 + 3 = 5")
    samples = ask(tool, engine, 2)
    said = "\n<|im_start|>user\nresult: 5<|im_end|>\n<|im_start|>assistant\n"
    for index, sample in enumerate(samples):
        assert (sample.index, sample.text, sample.status) == (index, "2 + 3 = 5", Status.COMPLETED)
        assert "".join(map(chr, sample.token_ids)) == f"2 + 3?calc(2 + 3){said}2 + 3 = 5"
        sampled = "".join(map(chr, sample.token_ids[sample.loss_mask]))
        assert sampled == "calc(2 + 3)2 + 3 = 5"  # nothing of what the calculator said
    assert sorted(engine.prompts) == ["2 + 3?"] * 2 + [f"2 + 3?calc(2 + 3){said}"] * 2


def test_the_calculator_is_called_a_few_times_only(tool: ModuleType) -> None:
    (sample,) = ask(tool, Dialogue(*["calc(1 + 1)"] * 9))
    assert sample.metadata["num_turns"] == tool.MAX_TURNS
    (sample,) = ask(tool, Dialogue("5"))
    assert (sample.text, sample.metadata["num_turns"], sample.response_len) == ("5", 1, 1)
