"""Prompts: rows of JSONL or parquet files, rendered, tokenised, in a reproducible order."""

from typing import Any

from vime.data.rows import check_files, read_rows
from vime.data.tokenizer import chat_template_digest, load_tokenizer, tokenizer_digest

__all__ = [
    "PromptSource",
    "chat_template_digest",
    "check_files",
    "load_tokenizer",
    "read_rows",
    "tokenizer_digest",
]


def __getattr__(name: str) -> Any:
    if name == "PromptSource":  # needs numpy, which checking the files does not
        from vime.data.prompts import PromptSource

        return PromptSource
    raise AttributeError(name)
