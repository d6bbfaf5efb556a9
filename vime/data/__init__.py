"""Prompts: rows of JSONL or parquet files, rendered, tokenised, in a reproducible order."""

from vime.data.prompts import PromptSource
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
