"""Make the tiny model: a character-level language model that adds two digits and is right about half of the time.

Under a million weights, made on the spot in seconds from nothing but a seed: no download. The warm start is supervised
steps on sums of which a fixed share is wrong, so that sampling at temperature 1 gives right and wrong answers to every
prompt: the spread that reinforcement learning needs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError, VimeError

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).resolve().parent
MARKER = "made_by.json"
FAMILIES = ("qwen3", "qwen2", "llama")

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCAB = [PAD, BOS, EOS, UNK, "\n", *(chr(code) for code in range(32, 127))]  # 100 entries
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

NUM_STEPS = 400
BATCH_SIZE = 64
PEAK_LR = 2e-3
SHARE_WRONG = 0.55
"""Share of the sums in the warm start whose answer is replaced by a random one."""


def make_tiny_model(
    path: str | Path, family: str = "qwen3", tied: bool = False, steps: int = NUM_STEPS, seed: int = 0
) -> Path:
    """Write a Hugging Face folder (float32) to ``path`` and return it; one that is already there and whole is kept.

    family  "qwen3" (query/key norms), "qwen2" (query/key/value biases) or "llama" (neither)
    tied    input and output embeddings are one tensor
    steps   supervised steps of the warm start; 0: random weights
    seed    the weights and the sums of the warm start; the same seed gives the same bytes on the same machine

    Norms and biases start off their neutral values, so that one left out or mixed up changes the output.
    Raises UsageError for an unknown family, or if ``path`` holds anything that was not made here.
    """
    if family not in FAMILIES:
        raise UsageError(f"family = {family!r}: must be one of {', '.join(FAMILIES)}")
    path = Path(path)
    recipe = _recipe(family, tied, steps, seed)
    if _is_made(path, recipe):
        return path
    if path.exists() and any(path.iterdir()) and not (path / MARKER).is_file():
        raise UsageError(f"{path} holds something else", "name another folder, or remove this one")
    with _whole_folder(path) as folder:
        _tokenizer().save_pretrained(folder)
        with _one_thread():
            _model(family, tied, steps, seed).save_pretrained(folder)
        marker = recipe | {"model.safetensors": _sha256(folder / "model.safetensors")}
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    return path


def _recipe(family: str, tied: bool, steps: int, seed: int) -> dict[str, Any]:
    """Everything the bytes of the model depend on; compared with the marker of a folder made earlier."""
    import importlib.metadata as metadata

    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
    return {
        "script": _sha256(Path(__file__)),
        "family": family,
        "tied": tied,
        "steps": steps,
        "seed": seed,
        "versions": versions,
    }


def _is_made(path: Path, recipe: dict[str, Any]) -> bool:
    weights, marker = path / "model.safetensors", path / MARKER
    if not (weights.is_file() and marker.is_file()):
        return False
    return json.loads(marker.read_text(encoding="utf-8")) == recipe | {"model.safetensors": _sha256(weights)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place at the end; an error leaves ``path`` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are split over threads, so the thread count is part of the recipe; the caller's is put back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def _tokenizer() -> Any:
    """One token per character, whatever stands beside it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _model(family: str, tied: bool, steps: int, seed: int) -> Any:
    """Four layers, four heads, two key/value heads: every size is even, for two-way tensor and pipeline parallelism."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(VOCAB),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=tied,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # norms and biases
                weight.add_(torch.randn_like(weight), alpha=0.1)
        # transformers leaves the padding row 0; a policy that samples <pad> would have its gradient blown up there by
        # the first RMSNorm (1 / sqrt(eps) = 1000).
        padding = model.get_input_embeddings().weight[PAD_ID]
        padding.copy_(config.initializer_range * torch.randn_like(padding))
    if steps:
        _warm_start(model, steps, random.Random(seed))
    return model


def _warm_start(model: Any, steps: int, rng: random.Random) -> None:
    """AdamW on cross-entropy of the answers alone; the learning rate falls to 0 along a cosine."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    model.train()
    for _ in range(steps):
        tokens, targets = _batch(rng)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def _batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each int64 [BATCH_SIZE, longest]; targets are -100 at the prompt and at padding."""
    import torch

    rows, masks = [], []
    for _ in range(BATCH_SIZE):
        prompt, answer = _sum(rng)
        rows.append([BOS_ID, *(VOCAB.index(c) for c in prompt + answer), EOS_ID])
        masks.append([-100] * len(prompt) + rows[-1][len(prompt) + 1 :])
    longest = max(map(len, rows))
    tokens = [row + [PAD_ID] * (longest - len(row)) for row in rows]
    targets = [mask + [-100] * (longest - len(mask)) for mask in masks]
    return torch.tensor(tokens), torch.tensor(targets)


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    answer = rng.randint(0, 18) if rng.random() < SHARE_WRONG else a + b
    return f"{a}+{b}=", str(answer)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", nargs="?", type=Path, default=HERE / "model", help="output folder")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="supervised steps; 0: random weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        folder = make_tiny_model(args.path, args.family, args.tied, args.steps, args.seed)
    except VimeError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(f"model ready: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
