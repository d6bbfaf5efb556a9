"""A tiny model folder and a run.toml."""

import json

import numpy as np
from safetensors.numpy import save_file

from vime.models import load_spec
from vime.record import write
from vime.types import RolloutBatch, Sample

TINY = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
}
RUN = """
[run]
num_rollouts = 3
[model]
path = "model"
[data]
prompts = ["prompts.jsonl"]
max_prompt_len = 32
[rollout.sampling]
max_response_len = 32
"""


def make_model(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_weights(folder)
    return folder


def write_weights(folder, without=(), file="model.safetensors", **more):
    tensors = {n: np.zeros(s, np.float32) for n, s in load_spec(folder).tensors().items() if n not in without}
    save_file(tensors | more, folder / file)


def write_record(path, rollout_id, num_samples=64, **changes):
    """A record that can be trained on: groups of 8, two tokens a sample. 64 are what ``RUN`` asks for."""
    common = {"token_ids": [1, 2], "prompt_len": 1, "loss_mask": [False, True], "rollout_log_probs": [0.0, -1.0]}
    samples = [
        Sample(**common | {"group_id": i // 8, "index": i % 8, "reward": float(i % 2)} | changes)
        for i in range(num_samples)
    ]
    write(path, RolloutBatch.from_samples(rollout_id, samples))
