"""PromptSource: rendering, lengths, order, resume."""

import itertools
import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vime.config.schema import Data
from vime.data import PromptSource, chat_template_digest, load_tokenizer, tokenizer_digest
from vime.errors import UsageError, VimeError

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad role') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def byte_tokenizer(chat_template=TEMPLATE, specials=("<s>", "</s>")):
    """One token per byte, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(specials))
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def source_of(tmp_path, tokenizer):
    names = itertools.count()

    def make(*prompts, seed=0, context_len=None, tokenizer=tokenizer, labels=None, **changes):
        path = tmp_path / f"{next(names)}.jsonl"
        rows = [{"prompt": p, "label": (labels or prompts)[i]} for i, p in enumerate(prompts)]
        path.write_text("\n".join(json.dumps(r) for r in rows))
        data = Data(**{"prompts": [str(path)], "apply_chat_template": False, **changes})
        return PromptSource(data, tokenizer, seed=seed, context_len=context_len)

    return make


def texts(prompts):
    return "".join(p.text for p in prompts)


def test_chat_template_is_applied_once(source_of, tokenizer):
    source = source_of("hi", apply_chat_template=True)
    (prompt,) = source.take(1)
    assert prompt.text == "<s>user: hi</s><s>assistant: "
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    direct = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompt.token_ids.tolist() == direct
    assert prompt.token_ids.tolist().count(tokenizer.convert_tokens_to_ids("<s>")) == 2
    assert prompt.token_ids.dtype == "int32"


def test_the_first_prompt_is_shown_with_its_special_tokens(source_of):
    """Case A20."""
    shown = source_of("hi", apply_chat_template=True).describe_first()
    assert shown["text"] == "<s>user: hi</s><s>assistant: "
    assert shown["tokens"][0] == "<s>"
    assert len(shown["tokens"]) == len(shown["token_ids"])
    assert shown["where"].endswith("0.jsonl line 1")


def test_strings_are_encoded_as_they_are(source_of, tokenizer):
    (prompt,) = source_of("a b").take(1)
    assert tokenizer.decode(prompt.token_ids) == prompt.text == "a b"
    assert len(prompt.token_ids) == 3


def test_no_chat_template_is_refused_at_the_start(source_of):
    with pytest.raises(UsageError, match="no chat template"):
        source_of("hi", apply_chat_template=True, tokenizer=byte_tokenizer(chat_template=None))


def test_what_the_template_refuses_is_named_by_row(source_of):
    with pytest.raises(UsageError, match="line 2: the chat template refuses it: no bad role"):
        source_of("hi", [{"role": "bad", "content": "x"}], apply_chat_template=True, labels=["1", "2"])


def test_long_prompts_are_dropped_counted_and_named(source_of):
    source = source_of("a", "bbbbb", "c", max_prompt_len=3, shuffle=False)
    assert texts(source.take(4)) == "acac"
    assert len(source) == 2
    assert [name.split("jsonl ")[1] for name in source.dropped] == ["line 2: 5 tokens, limit 3"]


def test_long_prompts_may_be_an_error_and_the_context_limits_too(source_of):
    with pytest.raises(UsageError, match="line 2: 5 tokens, limit 3"):
        source_of("a", "bbbbb", max_prompt_len=3, on_too_long="error")
    assert source_of("a", "bbbbb", context_len=5).max_prompt_len == 4
    assert len(source_of("a", "bbbbb", context_len=6)) == 2
    with pytest.raises(UsageError, match="every prompt is over the limit"):
        source_of("bbbbb", max_prompt_len=3)


def test_batch_larger_than_the_dataset_wraps_to_the_full_count(source_of):
    """Case T29: 4 rows, batch 8."""
    source = source_of(*"abcd")
    prompts = source.take(8)
    assert len(prompts) == 8
    assert sorted(texts(prompts)) == sorted("abcdabcd")
    assert [p.group_id for p in prompts] == list(range(8))
    assert source.epoch == 1


def test_order_is_new_each_epoch_and_derives_from_the_seed(source_of):
    letters = "abcdefghij"
    first, second = (texts(source_of(*letters, seed=s).take(20)) for s in (1, 1))
    assert first == second == "fdihjaecgbfjicdhebag"
    assert sorted(first[:10]) == sorted(first[10:]) == list(letters)
    assert first[:10] != first[10:]
    assert texts(source_of(*letters, seed=2).take(10)) != first[:10]
    assert texts(source_of(*letters, shuffle=False).take(12)) == letters + "ab"


@pytest.mark.parametrize("stop_after", [0, 1, 3, 4, 6, 7])
def test_resumed_order_equals_the_unbroken_one(source_of, stop_after):
    """Case T18; 3 prompts, so 3 and 6 are ends of epochs."""
    whole = source_of(*"abc").take(9)
    first, second = source_of(*"abc"), source_of(*"abc")
    head = first.take(stop_after)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got = head + second.take(9 - stop_after)
    assert [(p.group_id, p.text) for p in got] == [(p.group_id, p.text) for p in whole]


def test_resume_with_other_data_is_refused(source_of):
    """Case T19."""
    source = source_of(*"abcdef")
    source.take(5)
    state = source.state_dict()
    with pytest.raises(VimeError, match="belongs to other prompts: 6 prompts"):
        source_of(*"ab").load_state_dict(state)
    with pytest.raises(VimeError, match="belongs to other prompts"):
        source_of(*"abcdef", labels=list("abcdeX")).load_state_dict(state)
    with pytest.raises(VimeError, match=r"run\.seed is 1"):
        source_of(*"abcdef", seed=1).load_state_dict(state)
    source_of(*"abcdef").load_state_dict(state)


def test_digests_tell_tokenizers_apart(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)
    assert chat_template_digest(loaded) == chat_template_digest(tokenizer)
    other = byte_tokenizer("other", specials=("<s>", "<e>"))
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)
    assert chat_template_digest(other) != chat_template_digest(tokenizer)
    assert chat_template_digest(byte_tokenizer(None)) == ""


def test_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))


def test_import_is_light():
    code = "import sys, vime.data; sys.exit(int(bool({'torch', 'transformers', 'pyarrow'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
