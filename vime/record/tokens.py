"""What single token ids say, from the tokenizer that the record was made with, if it is at hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.data.tokenizer import load_tokenizer, tokenizer_digest
from vime.errors import UsageError
from vime.types import RolloutHeader


@dataclass(frozen=True)
class TokenTexts:
    """``problem`` says why only the ids can be shown; empty where the texts are known."""

    tokenizer: Any = None
    problem: str = ""

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id; ``[17]`` where the tokenizer has none, or there is no tokenizer."""
        ids = [int(i) for i in token_ids]
        if self.tokenizer is None:
            return [f"[{i}]" for i in ids]
        known = {i: self._one(i) for i in set(ids)}
        return [known[i] for i in ids]

    def _one(self, token_id: int) -> str:
        if not 0 <= token_id < len(self.tokenizer):
            return f"[{token_id}]"
        raw = self.tokenizer.convert_ids_to_tokens(token_id)
        text = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if raw is None or "\ufffd" in text:  # bytes of a character, which say nothing alone
            return raw or f"[{token_id}]"
        return f" {text}" if raw.startswith("▁") and not text.startswith(" ") else text


def token_texts(header: RolloutHeader) -> TokenTexts:
    """The tokenizer in the model folder that the header names, if its digest is the recorded one."""
    path, digest = header.model.get("path"), header.model.get("tokenizer_digest")
    if not path or not digest:
        return TokenTexts(problem="the record names no tokenizer")
    if not Path(path).is_dir():
        return TokenTexts(problem=f"{path}, the model it was made with, is not on this machine")
    if importlib.util.find_spec("transformers") is None:
        return TokenTexts(problem="transformers is not installed")
    try:
        tokenizer = load_tokenizer(path)
    except UsageError as error:
        return TokenTexts(problem=error.message)
    found = tokenizer_digest(tokenizer)
    if found != digest:
        return TokenTexts(problem=f"the tokenizer in {path} is another one now ({found[:12]}, recorded {digest[:12]})")
    return TokenTexts(tokenizer)
