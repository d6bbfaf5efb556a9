"""Plants the faults that lie outside the engine: in a copy of the checkpoint, and in the rendering of prompts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.align.markers import EMBEDDINGS, ChatMarkers
from vime.errors import UsageError
from vime.weights.checkpoint import shard_files

if TYPE_CHECKING:
    import torch

COPY = ".base-model"
HEADS = ("lm_head.weight",)
LLAMA_3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def foreign_template(own: str) -> str:
    """The chat template of another family than ``own``'s: Llama 3's, or ChatML for a model of that family."""
    return CHATML if "<|start_header_id|>" in own else LLAMA_3


@contextmanager
def pretrained_copy(folder: str, tokenizer: Any, beside: Path) -> Iterator[str]:
    """A copy of a model folder in ``beside`` whose chat markers were never trained; removed at the end.

    Their rows of the input embedding, and of the output head, are the mean of all rows: the tokens are in the
    vocabulary, and mean nothing. Only the weight files that hold these tensors are written; the others are links.
    The copy has one name, so that what a killed run left there goes first.
    UsageError where the chat template writes no special token.
    """
    own = ChatMarkers.of(tokenizer).own
    if not own:
        raise UsageError(f"debug.inject: 'base-model': the chat template of {folder} writes no special token")
    copy = beside / COPY
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir()
    try:
        weights = {file.name for file in shard_files(Path(folder))}
        for file in Path(folder).iterdir():
            if file.name not in weights or not _untrain(file, copy / file.name, sorted(own.values())):
                (copy / file.name).symlink_to(file.resolve())
        yield str(copy)
    finally:
        shutil.rmtree(copy)


def _untrain(source: Path, target: Path, ids: list[int]) -> bool:
    """Write ``target`` with the rows ``ids`` replaced; False, and nothing written, where ``source`` has none."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(source, "pt") as file:
        names = [name for name in (*EMBEDDINGS, *HEADS) if name in file.keys()]  # noqa: SIM118 no mapping
    if not names:
        return False
    tensors: dict[str, torch.Tensor] = load_file(source)
    for name in names:
        rows = tensors[name]
        rows[ids] = rows.float().mean(0).to(rows.dtype)
    save_file(tensors, target, metadata={"format": "pt"})
    return True
