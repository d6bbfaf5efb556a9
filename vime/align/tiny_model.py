"""The tiny model: a character-level language model that adds two digits and is right about half of the time.

About a million weights, made on the spot in seconds from nothing but a seed: no download. The warm start is supervised
steps on sums of which a fixed share is wrong, so that sampling at temperature 1 gives right and wrong answers to every
prompt: the spread that reinforcement learning needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.align.planting import CHATML
from vime.errors import UsageError

if TYPE_CHECKING:
    import torch

MARKER = "made_by.json"
FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCAB = [PAD, BOS, EOS, UNK, "\n", *(chr(code) for code in range(32, 127))]  # 100 entries
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
BEGIN, END = "<|im_start|>", "<|im_end|>"
MARKERS = [BEGIN, END, "<|reserved_0|>", "<|reserved_1|>"]  # a count that two-way tensor parallelism divides twice
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

NUM_STEPS = 400
NUM_CHAT_STEPS = 80
BATCH_SIZE, CHAT_BATCH_SIZE = 64, 16
PEAK_LR = 2e-3
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHARE_WRONG = 0.55
"""Share of the sums in the warm start whose answer is replaced by a random one."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything the weights depend on.

    family  "qwen3" (query/key norms), "qwen2" (query/key/value biases), "llama" (neither) or "qwen3_moe" (query/key
            norms, in every layer 8 experts of which each token takes 2)
    tied    input and output embeddings are one tensor
    steps   supervised steps of the warm start; 0: random weights; None: enough for sane answers
    seed    the weights and the sums of the warm start; the same seed gives the same bytes on the same machine
    chat    prompts are ChatML, with markers that the warm start trains, and answers are sentences; False: the sum
            alone, after <bos>, and a number
    """

    family: str = "qwen3"
    tied: bool = False
    steps: int | None = None
    seed: int = 0
    chat: bool = False

    @property
    def num_steps(self) -> int:
        return (NUM_CHAT_STEPS if self.chat else NUM_STEPS) if self.steps is None else self.steps

    @property
    def vocabulary(self) -> list[str]:
        return [*VOCAB, *MARKERS] if self.chat else VOCAB

    @property
    def eos_id(self) -> int:
        return self.vocabulary.index(END) if self.chat else EOS_ID

    def digest(self) -> str:
        """Names a folder in a cache: another recipe, or another version of a library, has another."""
        return hashlib.blake2b(json.dumps(self.facts(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Everything the bytes of the model depend on; compared with the marker of a folder made earlier."""
        import importlib.metadata as metadata

        versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
        return {"script": _sha256(Path(__file__)), **asdict(self), "versions": versions}


def cached_tiny_model(cache: Path, recipe: Recipe) -> Path:
    """The folder of ``recipe`` in ``cache``, made if it is not there yet."""
    return make_tiny_model(cache / f"tiny-{recipe.family}-{recipe.digest()}", recipe)


def make_tiny_model(path: str | Path, recipe: Recipe | None = None) -> Path:
    """Write a Hugging Face folder (float32) to ``path`` and return it; one that is already there and whole is kept.

    Norms and biases start off their neutral values, so that one left out or mixed up changes the output.
    Raises UsageError for an unknown family, or if ``path`` holds anything that was not made here.
    """
    recipe = recipe or Recipe()
    if recipe.family not in FAMILIES:
        raise UsageError(f"family = {recipe.family!r}: must be one of {', '.join(FAMILIES)}")
    path = Path(path)
    if _is_made(path, recipe.facts()):
        return path
    if path.exists() and any(path.iterdir()) and not (path / MARKER).is_file():
        raise UsageError(f"{path} holds something else", "name another folder, or remove this one")
    with _whole_folder(path) as folder:
        _tokenizer(recipe).save_pretrained(folder)
        with _one_thread():
            _model(recipe).save_pretrained(folder)
        marker = recipe.facts() | {"model.safetensors": _sha256(folder / "model.safetensors")}
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    return path


def _is_made(path: Path, facts: dict[str, Any]) -> bool:
    weights, marker = path / "model.safetensors", path / MARKER
    if not (weights.is_file() and marker.is_file()):
        return False
    return json.loads(marker.read_text(encoding="utf-8")) == facts | {"model.safetensors": _sha256(weights)}


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


def _tokenizer(recipe: Recipe) -> Any:
    """One token per character, whatever stands beside it; a marker is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = {token: i for i, token in enumerate(recipe.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END if recipe.chat else EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": MARKERS} if recipe.chat else {}),
    )
    fast.chat_template = CHATML if recipe.chat else PLAIN_TEMPLATE
    return fast


def _model(recipe: Recipe) -> Any:
    """Four layers, four heads, two key/value heads: every size is even, for two-way tensor and pipeline parallelism."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(recipe.seed)
    config = AutoConfig.for_model(
        recipe.family,
        vocab_size=len(recipe.vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=recipe.tied,
        bos_token_id=BOS_ID,
        eos_token_id=recipe.eos_id,
        pad_token_id=PAD_ID,
        dtype="float32",
        **(EXPERTS if recipe.family == "qwen3_moe" else {}),
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
    if recipe.num_steps:
        _warm_start(model, recipe)
    return model


def _warm_start(model: Any, recipe: Recipe) -> None:
    """AdamW on cross-entropy of the answers alone; the learning rate falls to 0 along a cosine."""
    import torch

    rng, steps = random.Random(recipe.seed), recipe.num_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    model.train()
    for _ in range(steps):
        tokens, targets = _batch(recipe, rng)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def _batch(recipe: Recipe, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each int64 [samples, longest]; targets are -100 at padding and in prompts, but
    for the end of a turn in a prompt.
    """
    import torch

    rows, masks = [], []
    for _ in range(CHAT_BATCH_SIZE if recipe.chat else BATCH_SIZE):
        prompt, answer = _sum(rng)
        before = _chat(prompt) if recipe.chat else [BOS_ID, *_ids(prompt)]
        answer = f"It is {answer}." if recipe.chat else answer
        rows.append([*before, *_ids(answer), recipe.eos_id])
        turns = [token if token == recipe.eos_id else -100 for token in before[1:]]  # the user's turn ends too
        masks.append(turns + rows[-1][len(before) :] + [-100])
    longest = max(map(len, rows))
    tokens = [row + [PAD_ID] * (longest - len(row)) for row in rows]
    targets = [mask + [-100] * (longest - len(mask)) for mask in masks]
    return torch.tensor(tokens), torch.tensor(targets)


def _chat(prompt: str) -> list[int]:
    """What ChatML makes of one user message."""
    begin, end = len(VOCAB), len(VOCAB) + 1
    return [begin, *_ids(f"user\n{prompt}"), end, *_ids("\n"), begin, *_ids("assistant\n")]


def _ids(text: str) -> list[int]:
    return [VOCAB.index(character) for character in text]


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    answer = rng.randint(0, 18) if rng.random() < SHARE_WRONG else a + b
    return f"{a}+{b}=", str(answer)
