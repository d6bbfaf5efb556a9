"""Make the prompts of the quickstart: one-digit additions in varied wording. Writes prompts.jsonl and eval.jsonl.

The sums of the evaluation never occur in training, in no wording and no order.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED = 0
NUM_TRAIN, NUM_EVAL = 256, 64
NUM_EVAL_SUMS = 9
"""Of the 45 sums of two digits from 1 to 9, order aside."""

SYSTEM = "Answer briefly."  # short, since every token of the prompt is computed too; the template's own is longer
WORDINGS = (
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "How much is {a} plus {b}?",
)


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, eval), each a list of {prompt, label}."""
    rng = random.Random(SEED)
    sums = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    rng.shuffle(sums)
    return _ask(sums[NUM_EVAL_SUMS:], NUM_TRAIN, rng), _ask(sums[:NUM_EVAL_SUMS], NUM_EVAL, rng)


def _ask(sums: list[tuple[int, int]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """``count`` different questions about ``sums``."""
    ordered = sorted({pair for a, b in sums for pair in ((a, b), (b, a))})
    questions = [(wording.format(a=a, b=b), a + b) for a, b in ordered for wording in WORDINGS]
    return [_row(question, answer) for question, answer in rng.sample(questions, count)]


def _row(question: str, answer: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"prompt": messages, "label": str(answer)}


def write(folder: Path) -> None:
    for name, found in zip(("prompts.jsonl", "eval.jsonl"), rows(), strict=True):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
