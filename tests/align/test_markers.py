"""Chat markers: those that are missing, those of somebody else, and those that were never trained."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.align.markers import ChatMarkers, embedding_rows
from vime.align.planting import CHATML, LLAMA_3, foreign_template, pretrained_copy
from vime.data.tokenizer import load_tokenizer
from vime.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.tiny.make_model import make_tiny_model

EMBEDDING = "model.embed_tokens.weight"
VOCABULARY = {"<|im_start|>": 1, "<|im_end|>": 2}
OWN = ChatMarkers(VOCABULARY, "<|im_start|>user\nquestion<|im_end|>\n", VOCABULARY)
LLAMA_2 = ChatMarkers({"<s>": 1}, "<s>[INST] question [/INST] answer", {"<s>": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("markers") / "model", steps=0)


def test_markers_of_another_family_are_found_where_most_prompts_have_them():
    assert OWN.foreign_in(["<|im_start|>user\nhi<|im_end|>"] * 3) == []
    assert OWN.foreign_in(["[INST] hi [/INST]"] * 3) == ["[/INST]", "[INST]"]
    assert OWN.foreign_in(["<|im_start|>what is [INST]?<|im_end|>", "<|im_start|>hi<|im_end|>"]) == []


def test_markers_that_a_template_writes_as_text_are_its_own():
    """Llama 2's [INST] is no token in its own vocabulary either."""
    assert LLAMA_2.foreign_in(["<s>[INST] hi [/INST]"]) == []


def test_a_template_that_was_not_applied_is_found():
    assert OWN.absent_from(["<|im_start|>user\nhi<|im_end|>"] * 2) == []
    assert OWN.absent_from(["hi", "[INST] hi [/INST]"]) == ["<|im_start|>", "<|im_end|>"]
    assert ChatMarkers({}, "", {}).absent_from(["hi"]) == []


def test_the_markers_of_a_folder_and_that_they_were_trained(folder):
    found = ChatMarkers.of(load_tokenizer(str(folder)), str(folder))
    assert found.own == {"<bos>": 1, "<eos>": 2}
    assert found.untrained == ()


def test_a_tokenizer_without_a_template_has_no_markers(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = None
    assert ChatMarkers.of(tokenizer, str(folder)).own == {}


def test_a_template_that_refuses_an_answer_is_asked_with_the_question_alone(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}<bos>"
    assert ChatMarkers.of(tokenizer).own == {"<bos>": 1}


@pytest.mark.parametrize(
    ("break_row", "reason"),
    [
        (lambda w: w[3], "the embedding of <bos> is that of <unk>"),
        (lambda w: torch.zeros_like(w[1]), "the embedding of <bos> is zero"),
        (lambda w: w[4:].mean(0) * 1.001, "the embedding of <bos> is that of the mean of all others"),
    ],
)
def test_a_row_that_is_not_its_own_was_never_trained(folder, tmp_path, break_row, reason):
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING][1] = break_row(weights[EMBEDDING])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert ChatMarkers.of(load_tokenizer(str(folder)), str(tmp_path)).untrained == (reason,)


def test_rows_of_the_embedding_and_their_mean(folder):
    weights = load_file(folder / "model.safetensors")[EMBEDDING]
    rows = embedding_rows(str(folder), [0, 99, 100])
    assert sorted(rows) == [-1, 0, 99]  # 100 is outside the vocabulary
    assert torch.equal(rows[99], weights[99])
    assert torch.allclose(rows[-1], weights[1:99].mean(0), atol=1e-7)


def test_a_pretrained_copy_differs_in_the_markers_alone_and_is_removed(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder))
    before = load_file(folder / "model.safetensors")
    with pretrained_copy(str(folder), tokenizer, tmp_path) as copy:
        assert {f.name for f in Path(copy).iterdir()} == {f.name for f in folder.iterdir()}
        after = load_file(Path(copy) / "model.safetensors")
        assert [name for name in before if not torch.equal(before[name], after[name])] == [
            "lm_head.weight",
            EMBEDDING,
        ]
        changed = (before[EMBEDDING] != after[EMBEDDING]).any(1)
        assert changed.nonzero()[:, 0].tolist() == [1, 2]
        assert len(ChatMarkers.of(tokenizer, copy).untrained) == 2
        assert json.loads((Path(copy) / "config.json").read_text())["vocab_size"] == 100
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(load_file(folder / "model.safetensors")[EMBEDDING], before[EMBEDDING])


def test_a_model_without_markers_cannot_be_made_a_base_model(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{{ messages }}"
    with (
        pytest.raises(UsageError, match="writes no special token"),
        pretrained_copy(str(folder), tokenizer, tmp_path),
    ):
        pass


def test_the_foreign_template_is_never_the_models_own():
    assert foreign_template(CHATML) == LLAMA_3
    assert foreign_template(LLAMA_3) == CHATML
