"""The tiny model: small, the same each time, kept when whole, refused where it would overwrite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from vime.align import tiny_model
from vime.align.markers import ChatMarkers
from vime.align.tiny_model import FAMILIES, Recipe, cached_tiny_model, make_tiny_model
from vime.errors import UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", Recipe(steps=2))


def test_the_same_arguments_give_the_same_bytes(model: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", Recipe(steps=2))
    other = make_tiny_model(tmp_path / "other", Recipe(steps=2, seed=1))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (model / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_the_callers_generator_and_thread_count_are_left_alone(tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    make_tiny_model(tmp_path / "model", Recipe(steps=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_fewer_than_a_million_weights_and_sizes_that_can_be_split(model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    assert sum(t.numel() for t in load_file(model / "model.safetensors").values()) < 1_000_000
    assert config["num_hidden_layers"] == 4
    assert config["num_attention_heads"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["vocab_size"] % 4 == 0


def test_tokenizer_is_one_token_a_character_and_renders_prompts_as_trained(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "3+4= I don't\n"
    assert len(tokenizer(text).input_ids) == len(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "3+4="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<bos>3+4="
    turns = [*messages, {"role": "assistant", "content": "7"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<bos>3+4=7<eos>"
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_variants_load_in_transformers_with_their_own_tensors(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", Recipe(family, tied, steps=0))
    names = set(load_file(folder / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tied
    assert any("q_norm" in name for name in names) is family.startswith("qwen3")
    assert any("q_proj.bias" in name for name in names) is (family == "qwen2")
    experts = {name.split("experts.")[1].split(".")[0] for name in names if "experts." in name}
    assert len(experts) == (8 if family == "qwen3_moe" else 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.model_type == family


def test_norms_and_biases_are_off_their_neutral_values(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", Recipe("qwen2", steps=0))
    flat = {name: t for name, t in load_file(folder / "model.safetensors").items() if t.ndim == 1}
    assert len(flat) == 4 * (2 + 3) + 1
    assert [name for name, t in flat.items() if t.std() < 0.05] == []


def test_a_whole_folder_is_kept_and_a_changed_one_is_made_again(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", Recipe(steps=0))
    weights = folder / "model.safetensors"
    first, before = weights.stat().st_ino, weights.read_bytes()
    make_tiny_model(folder, Recipe(steps=0))
    assert weights.stat().st_ino == first
    weights.write_bytes(before[:-4] + b"\0\0\0\0")
    make_tiny_model(folder, Recipe(steps=0))
    assert weights.read_bytes() == before


def test_a_folder_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(UsageError, match="something else"):
        make_tiny_model(tmp_path, Recipe(steps=0))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "_model", fail)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "model", Recipe(steps=0))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("chat") / "model", Recipe(steps=30, chat=True))


def test_chat_prompts_are_chatml_with_markers_of_one_token_that_were_trained(chat: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat)
    messages = [{"role": "user", "content": "3+4="}]
    text = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert tokenizer(text).input_ids == tiny_model._chat("3+4=")
    assert tokenizer.eos_token == "<|im_end|>"
    markers = ChatMarkers.of(tokenizer, str(chat))
    assert markers.own == {"<|im_start|>": 100, "<|im_end|>": 101}
    assert markers.untrained == ()


def test_chat_answers_begin_as_sentences(chat: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat), AutoTokenizer.from_pretrained(chat)
    ids = torch.tensor([tiny_model._chat("3+4=")])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    assert tokenizer.decode(answer[0, ids.shape[1] :]).startswith("It is ")


def test_a_cache_has_a_folder_for_each_recipe_and_keeps_it(tmp_path: Path) -> None:
    first = cached_tiny_model(tmp_path, Recipe(steps=0))
    inode = (first / "model.safetensors").stat().st_ino
    assert cached_tiny_model(tmp_path, Recipe(steps=0)) == first
    assert (first / "model.safetensors").stat().st_ino == inode
    assert cached_tiny_model(tmp_path, Recipe(steps=0, tied=True)) != first


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="family = 'gpt2'"):
        make_tiny_model(tmp_path / "model", Recipe(family="gpt2"))


@pytest.mark.slow
def test_the_full_warm_start_is_right_about_half_of_the_time(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    share_sampled, share_greedy = 0.0, 0
    for a in range(10):
        for b in range(10):
            prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer(f"{a}+{b}=").input_ids]])
            answer = [*tokenizer(str(a + b)).input_ids, tokenizer.eos_token_id]
            with torch.no_grad():
                logits = model(torch.cat([prompt, torch.tensor([answer])], 1)).logits[0, prompt.shape[1] - 1 : -1]
            log_probs = torch.log_softmax(logits.double(), -1)[range(len(answer)), answer]
            share_sampled += log_probs.sum().exp().item() / 100
            share_greedy += logits.argmax(-1).tolist() == answer
    assert 0.3 < share_sampled < 0.6
    assert share_greedy > 80
