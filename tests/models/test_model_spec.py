"""config.json -> ModelSpec, and the two-way table against what transformers itself saves."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod

import pytest

from vime.errors import UsageError
from vime.models import FAMILIES, TABLE, hf_names, layer_of, load_spec, megatron_name

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def _experts(family):
    return EXPERTS if family == "qwen3_moe" else {}


def _folder(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, **config}))
    return tmp_path


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_transformers_saves(tmp_path, family, is_tied):
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, tie_word_embeddings=is_tied, **SMALL, **_experts(family))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert spec.tensors() == saved
    assert spec.num_parameters == sum(prod(shape) for shape in saved.values())
    assert (spec.family, spec.is_tied, spec.num_layers, spec.head_dim) == (family, is_tied, 2, 8)
    assert spec.rope == {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    assert spec.dtype == "float32"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_table_reads_the_same_in_both_directions(tmp_path, family):
    spec = load_spec(_folder(tmp_path, model_type=family, **_experts(family)))
    for megatron, names in spec.megatron_names().items():
        assert hf_names(megatron) == names
        assert {megatron_name(name, is_moe=spec.is_moe) for name in names} == {megatron}
    assert len({rule.megatron for rule in TABLE}) == len(TABLE)
    assert layer_of("model.layers.11.mlp.up_proj.weight") == 11
    assert layer_of("lm_head.weight") is None


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gates.weight", "decoder.layers.0.mlp.route.weight", ""])
def test_unknown_names_are_key_errors(name):
    with pytest.raises(KeyError):
        megatron_name(name)
    with pytest.raises(KeyError):
        hf_names(name)


def test_old_and_new_spelling_of_rope_are_one(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = _folder(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="bfloat16")
    first = load_spec(old)
    new = _folder(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    assert load_spec(new) == first
    assert first.rope == {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert first.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported"),
        ({"model_type": "mixtral"}, "model_type = 'mixtral' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, config, message):
    with pytest.raises(UsageError, match=message) as refused:
        load_spec(_folder(tmp_path, **config))
    if "model_type =" in message:
        assert refused.value.hint == "supported families: llama, qwen2, qwen3, qwen3_moe"


def test_a_sliding_window_that_is_off_is_no_reason_to_refuse(tmp_path):
    folder = _folder(tmp_path, model_type="qwen2", use_sliding_window=False, sliding_window=32768)
    assert load_spec(folder).has_qkv_bias


def test_broken_folders(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UsageError, match="'num_attention_heads' is missing"):
        load_spec(tmp_path)


def test_import_is_light():
    code = "import sys, vime.models; print(sorted({'torch', 'numpy', 'transformers', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
