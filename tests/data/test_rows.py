"""Reading prompt files: every bad row is named, all at once."""

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from vime.config.schema import Data
from vime.data.rows import check_files, read_rows, split_slice
from vime.errors import UsageError


def jsonl(path, *rows):
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n")
    return str(path)


def data_of(*paths, **changes):
    return Data(prompts=list(paths), **changes)


def problems_of(*args, **kwargs):
    with pytest.raises(UsageError) as caught:
        read_rows(*args, **kwargs)
    return caught.value.message.splitlines()


def test_strings_messages_parts_labels_and_metadata(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "2+2?", "label": "4", "extra": {"n": 1}},
        {"prompt": [{"role": "user", "content": "x"}], "label": 34},
        b"",
        {"prompt": [{"role": "user", "content": parts}]},
    )
    rows = read_rows(data_of(path, metadata_key="extra"))
    assert [r.prompt for r in rows[:2]] == ["2+2?", [{"role": "user", "content": "x"}]]
    assert rows[2].prompt == [{"role": "user", "content": "ab"}]
    assert [r.label for r in rows] == ["4", "34", None]
    assert [r.metadata for r in rows] == [{"n": 1}, {}, {}]
    assert rows[2].where == f"{path} line 4"


def test_dotted_keys_reach_into_objects_and_parquet(tmp_path):
    rows = [{"prompt": [{"content": "q", "role": "user"}], "reward_model": {"ground_truth": "7"}}] * 3
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = data_of(str(tmp_path / "a.parquet") + "@[1:]", label_key="reward_model.ground_truth")
    got = read_rows(data)
    assert [r.label for r in got] == ["7", "7"]
    assert got[0].where.endswith("a.parquet row 2")
    assert got[0].prompt == [{"content": "q", "role": "user"}]


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("", "01234"),
        ("@[1:3]", "12"),
        ("@[:2]", "01"),
        ("@[3:]", "34"),
        ("@[-2:]", "34"),
        ("@[:-3]", "01"),
        ("@[:]", "01234"),
    ],
)
def test_slices(tmp_path, suffix, expected):
    path = jsonl(tmp_path / "a.jsonl", *[{"prompt": str(i)} for i in range(5)])
    assert "".join(r.prompt for r in read_rows(data_of(path + suffix))) == expected


def test_split_slice():
    assert split_slice("a.jsonl@[2:-1]") == ("a.jsonl", slice(2, -1))
    assert split_slice("a@b.jsonl") == ("a@b.jsonl", slice(None))


def test_every_bad_row_is_named_at_once(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        b'{"prompt": "x"',
        {"question": "x", "label": "1"},
        {"prompt": "", "label": "1"},
        {"prompt": 7, "label": "1"},
        {"prompt": [], "label": "1"},
        {"prompt": [{"role": "user"}], "label": "1"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "label": "1"},
        b"\xff\xfe",
        b"[1]",
        {"prompt": "good", "label": "1"},
        {"prompt": "x", "label": None},
        {"prompt": "x"},
        {"prompt": "x", "label": [1]},
        b'{"prompt": "x", "label": NaN}',
        {"prompt": "x", "label": True},
    )
    got = [line.removeprefix(path) for line in problems_of(data_of(path), needs_label=True)]
    assert got == [
        " line 1: invalid JSON: Expecting ',' delimiter at column 15",
        " line 2: no key 'prompt' (keys: label, question)",
        " line 3: prompt: empty prompt",
        " line 4: prompt: number, expected a string or a list of messages",
        " line 5: prompt: empty list of messages",
        " line 6: prompt[0].content: null, expected a string or a list of text parts",
        " line 7: prompt[0].content[0]: expected {type: 'text', text: string}",
        " line 8: not UTF-8",
        " line 9: list, expected an object",
        " line 11: label: empty label, and the reward needs one",
        " line 12: no key 'label', and the reward needs one",
        " line 13: label: list, expected a string or a number",
        " line 14: label: nan is no label",
        " line 15: label: boolean, expected a string or a number",
    ]
    assert check_files(data_of(path), needs_label=True) == problems_of(data_of(path), needs_label=True)


def test_many_problems_are_capped_and_counted(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *[{"x": 1}] * 50)
    lines = problems_of(data_of(path))
    assert len(lines) == 21
    assert lines[-1] == "... and 30 more (50 in all)"


def test_labels_may_be_missing_where_no_reward_needs_them(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y", "label": None})
    assert [r.label for r in read_rows(data_of(path))] == [None, None]


def test_messages_without_template_are_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "x"}]})
    assert "needs data.apply_chat_template=true" in problems_of(data_of(path, apply_chat_template=False))[0]


def test_paths_are_checked(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    assert check_files(data_of(path)) == []
    assert "no such file" in check_files(data_of(str(tmp_path / "b.jsonl")))[0]
    assert "only .jsonl and .parquet" in check_files(data_of(str(tmp_path / "b.csv")))[0]
    assert "a slice is written path@[a:b]" in check_files(data_of(path + "@[1]"))[0]
    assert "no rows" in check_files(data_of(path + "@[5:]"))[0]


def test_broken_parquet_is_a_problem(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no PAR1")
    assert "not readable as parquet" in problems_of(data_of(str(tmp_path / "a.parquet")))[0]


def test_light_install_reads_jsonl_and_names_the_extra_for_parquet(tmp_path):
    """As if neither pyarrow nor torch nor transformers were installed."""
    jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    parquet.write_table(pa.Table.from_pylist([{"prompt": "x"}]), tmp_path / "a.parquet")
    code = f"""
import sys
sys.modules["pyarrow"] = None
from vime.config.schema import Data
from vime.data.rows import read_rows
assert len(read_rows(Data(prompts=[{str(tmp_path / "a.jsonl")!r}]))) == 1
assert not {{"torch", "transformers"}} & set(sys.modules)
try:
    read_rows(Data(prompts=[{str(tmp_path / "a.parquet")!r}]))
except Exception as error:
    assert error.hint == "pip install 'vime[cpu]'", error
else:
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
