"""Tiny random models, written as Hugging Face folders by transformers itself, and its log-probs as the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make(folder: Path, family: str, *, is_tied: bool = False, vocab_size: int = 128, seed: int = 1, **changes) -> Path:
    """Four layers of width 64, 4 heads, 2 key/value heads; every norm weight and bias random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    options = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": is_tied,
        "eos_token_id": 2,
        "rope_parameters": LLAMA3_ROPE if family == "llama" else {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**options, **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    return folder


def rewrite(source: Path, folder: Path, edit) -> Path:
    """A copy of a folder whose tensors went through ``edit(dict) -> dict``."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(edit(load_file(source / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def config_json(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def hf_log_probs(folder: Path, sequences: list[np.ndarray], temperature: float = 1.0) -> np.ndarray:
    """float32 [T]: each sequence alone through transformers, 0.0 at its first token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.no_grad():
        for ids in sequences:
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            log_p = (model(tokens).logits[0].float() / temperature).log_softmax(-1)
            picked = log_p[:-1].gather(1, tokens[0, 1:, None])[:, 0]
            out.append(np.concatenate([[0.0], picked.numpy()]))
    return np.concatenate(out).astype(np.float32)
