"""Tiny models with peaked distributions, and a tokenizer whose token i reads "<i>"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 512
CONTEXT = 128
MODEL_EOS = 1
TOKENIZER_EOS = 5

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": MODEL_EOS,
    "bos_token_id": 2,
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model: qwen3, llama or qwen3_moe."""
    import torch
    import transformers

    shape = {**SHAPE, "tie_word_embeddings": False, **changes}
    if kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**experts, **shape}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean, std = (0.0, 0.08) if parameter.ndim > 1 else (1.0, 0.1)
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


def save(model: Any, folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=f"<{TOKENIZER_EOS}>", pad_token="<0>", unk_token="<0>"
    )
    tokenizer.chat_template = "{% for m in messages %}<7> {{ m['content'] }} {% endfor %}<8>"
    tokenizer.save_pretrained(folder)
    return str(folder)
