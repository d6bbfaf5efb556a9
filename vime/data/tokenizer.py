"""The policy's tokenizer, and digests that tell whether two of them mean the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vime.errors import UsageError, first_line


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a model folder. UsageError if the folder has none; no code of the folder is run."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UsageError(f"model.path: {path} is not a folder")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        reason = first_line(error)
        raise UsageError(f"model.path: no tokenizer in {path}: {reason}", "it needs a whole tokenizer.json") from error


def tokenizer_digest(tokenizer: Any) -> str:
    """blake2b-128, hex, of the vocabulary with added tokens (token -> id): equal digests, equal meaning of every id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return _digest(json.dumps(vocabulary, separators=(",", ":")))


def chat_template_digest(tokenizer: Any) -> str:
    """blake2b-128, hex, of the chat template; "" where the tokenizer has none."""
    template = tokenizer.chat_template
    if not template:
        return ""
    return _digest(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
