"""Make the prompts of the tiny example: every sum of two digits, for training and for evaluation alike.

A hundred prompts are all there is: the evaluation measures how often each is answered rightly, not what carries over.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 0


def rows() -> list[dict[str, str]]:
    """{prompt, label} of every sum, in a fixed order."""
    found = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    random.Random(SEED).shuffle(found)
    return found


def write(folder: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows())
    for name in ("prompts.jsonl", "eval.jsonl"):
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
