"""Chat markers: what a model's own template puts around messages, what prompts hold, and what was never trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vime.weights.checkpoint import shard_files

if TYPE_CHECKING:
    import torch

LOOKS_LIKE_A_MARKER = re.compile(r"<\|[\w.:-]{1,40}\|>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>")
"""Markers of the families in use; what is between <| and |> may be any word."""
PROBE = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "question"},
]
SAME_ROW = 0.02
"""Relative distance of two rows that are one row: bfloat16 rounds by 0.002. Rows that a fine-tuning moved least are
0.14 apart (<|im_start|> and <|im_end|> of SmolLM2-135M-Instruct, whose unused markers are all one row)."""
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")


@dataclass(frozen=True, slots=True)
class ChatMarkers:
    """Of a model folder. ``own``: special tokens that its chat template writes -> id; ``template``: what it writes for
    a short conversation; ``vocabulary``: every token -> id; ``untrained``: those of ``own`` whose embedding is not
    their own, each with the reason.
    """

    own: dict[str, int]
    template: str
    vocabulary: dict[str, int]
    untrained: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, folder: str | None = None) -> ChatMarkers:
        """From the folder's tokenizer and, if ``folder`` is given, its embeddings."""
        template = _rendered(tokenizer)
        special = special_tokens(tokenizer)
        own = {token: i for token, i in special.items() if token in template}
        rows = None if folder is None or not own else embedding_rows(folder, sorted({*special.values()}))
        untrained = () if rows is None else tuple(_untrained(own, special, rows))
        return cls(own, template, tokenizer.get_vocab(), untrained)

    def foreign_in(self, prompts: Sequence[str]) -> list[str]:
        """Markers in most of the prompts that are no token here and not of this model's template."""
        counts: dict[str, int] = {}
        for text in prompts:
            for marker in set(LOOKS_LIKE_A_MARKER.findall(text)):
                counts[marker] = counts.get(marker, 0) + 1
        known = (self.vocabulary, self.template)
        foreign = [m for m, n in counts.items() if 2 * n > len(prompts) and not any(m in where for where in known)]
        return sorted(foreign)

    def absent_from(self, prompts: Sequence[str]) -> list[str]:
        """The template's markers, where most of the prompts hold none of them."""
        without = sum(not any(marker in text for marker in self.own) for text in prompts)
        return list(self.own) if self.own and 2 * without > len(prompts) else []


def _rendered(tokenizer: Any) -> str:
    """What the chat template makes of a short conversation; of the question alone where it refuses an answer."""
    import jinja2

    if not isinstance(tokenizer.chat_template, str):
        return ""
    try:
        return tokenizer.apply_chat_template(PROBE, tokenize=False)
    except jinja2.TemplateError:
        return tokenizer.apply_chat_template(PROBE[:1], tokenize=False)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Added and special tokens -> id."""
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def embedding_rows(folder: str, ids: Sequence[int]) -> dict[int, torch.Tensor] | None:
    """Rows float32 [H] of the input embedding by id; -1 is the mean of all others. None where no file has it."""
    from pathlib import Path

    import torch
    from safetensors import safe_open

    for file in shard_files(Path(folder)):
        with safe_open(file, "pt") as weights:
            for name in EMBEDDINGS:
                if name in weights.keys():  # noqa: SIM118 safe_open is no mapping
                    part = weights.get_slice(name)
                    size = part.get_shape()[0]
                    rows = {i: part[i : i + 1][0].float() for i in ids if i < size}
                    sums = [part[a : a + 8192].sum(0, dtype=torch.float32) for a in range(0, size, 8192)]
                    others = torch.stack(sums).sum(0) - sum(rows.values())
                    return rows | {-1: others / max(1, size - len(rows))}
    return None


def _untrained(own: dict[str, int], special: dict[str, int], rows: dict[int, torch.Tensor]) -> Iterable[str]:
    """Fresh rows are all drawn at one place, or are zero; every step of a training moves each its own way."""
    names = {i: token for token, i in special.items()} | {-1: "the mean of all others"}
    for token, i in own.items():
        if i not in rows:
            continue
        size = float(rows[i].norm())
        others = (j for j in rows if j != i and float((rows[i] - rows[j]).norm()) <= SAME_ROW * max(size, 1e-12))
        if size == 0.0:
            yield f"the embedding of {token} is zero"
        elif (other := next(others, None)) is not None:
            yield f"the embedding of {token} is that of {names[other]}"
