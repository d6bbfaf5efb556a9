"""Make the prompts of the multi-turn example: sums of two numbers below 100, with one worked dialogue before each."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_PROMPTS = 64
SEED = 0

DIALOGUE = [
    {"role": "system", "content": "You add numbers with a calculator. First write the call, then say the result."},
    {"role": "user", "content": "What is 21 + 34?"},
    {"role": "assistant", "content": "calc(21 + 34)"},
    {"role": "user", "content": "result: 55"},
    {"role": "assistant", "content": "21 + 34 = 55"},
    {"role": "user", "content": "What is 46 + 17?"},
    {"role": "assistant", "content": "calc(46 + 17)"},
    {"role": "user", "content": "result: 63"},
    {"role": "assistant", "content": "46 + 17 = 63"},
]


def rows() -> list[dict[str, object]]:
    """{prompt, label} of every sum, in a fixed order."""
    rng = random.Random(SEED)
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], NUM_PROMPTS)
    return [
        {"prompt": [*DIALOGUE, {"role": "user", "content": f"What is {a} + {b}?"}], "label": str(a + b)}
        for a, b in pairs
    ]


def write(folder: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows())
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
