"""Records whose checksum is right and whose content contradicts itself: the first contradiction is named."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from test_record_file import batch_of, refusal, sample

from vime.record import read, write
from vime.record.layout import checksum
from vime.record.schema1 import checksum as checksum_1


@pytest.fixture
def record(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample(3, 0, text="one", label="4"), sample(3, 1, text="two")))
    return tmp_path / "x.pt"


def schema_1(record):
    copy = record.parent / "one.pt"
    copy.write_bytes((Path(__file__).parent / "schema1.pt").read_bytes())
    return copy


def checksum_2(content):
    plain = {key: content[key] for key in ("format", "schema_version", "rollout_id", "header")}
    return checksum(plain, content["arrays"])


def forged(path, change, compute=checksum_2):
    """The record with ``change`` made to its content, and the right checksum again."""
    content = torch.load(path, weights_only=True)
    arrays = content["arrays"] = {name: tensor.numpy() for name, tensor in content["arrays"].items()}
    change(content, arrays)
    content["checksum"] = compute(content)
    tensors = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}
    torch.save({**content, "arrays": tensors}, path.parent / "forged.pt")
    return path.parent / "forged.pt"


def test_the_forge_itself_makes_readable_records(record):
    """Else the refusals below could be of the forge."""
    found = read(forged(record, lambda c, a: c["header"].update(vime_version="9")))
    assert found.header.vime_version == "9"
    assert read(forged(schema_1(record), lambda c, a: c.update(rollout_id=9), checksum_1)).rollout_id == 9


def put(name, *values):
    return lambda c, a: a.update({name: np.array(values, dtype=a[name].dtype)})


def put_at(name, place, value):
    return lambda c, a: a[name].__setitem__(place, value)


JSON = "label_and_metadata_json"
CASES = {
    "offsets that fall": (put("offsets", 0, 5, 4), r"arrays\.offsets must rise from 0 to 6"),
    "offsets beyond the tokens": (put("offsets", 0, 3, 7), r"arrays\.offsets must rise"),
    "an empty sample": (put("offsets", 0, 0, 6), r"arrays\.offsets must rise"),
    "offsets near the end of int64": (put("offsets", 0, 2**63 - 1, 6), r"arrays\.offsets must rise"),
    "too few offsets": (put("offsets", 0, 6), r"arrays\.offsets has 2 entries, expected 3"),
    "no offsets": (put("offsets"), r"arrays\.offsets has 0 entries, expected 3"),
    "a prompt longer than its sample": (put("prompt_lens_N", 1, 4), r"arrays\.prompt_lens_N must lie in 1"),
    "no prompt": (put("prompt_lens_N", 0, 1), r"arrays\.prompt_lens_N must lie in 1"),
    "a loss mask in a prompt": (
        lambda c, a: a.update(loss_mask_bits=np.array([0b111111], np.uint8), rollout_log_probs=np.zeros(6, np.float32)),
        "loss_mask_T is True inside a prompt",
    ),
    "too few mask bits": (put("loss_mask_bits"), r"arrays\.loss_mask_bits has 0 entries, expected 1"),
    "too few log-probs": (put("rollout_log_probs", -1.0), r"rollout_log_probs has 1 entries, expected 4 or 6"),
    "a log-prob that is not finite": (put_at("rollout_log_probs", 2, np.nan), "sample 3/1 is completed and has log-pr"),
    "high ids of another length": (put("token_ids_high", 1), "token_ids_high has 1 entries, expected 6 or none"),
    "a reward too many": (put("rewards_N", 1, 2, 3), r"arrays\.rewards_N has 3 entries, expected 2"),
    "an unknown status": (put("status_N", 0, 4), r"arrays\.status_N must lie in 0\.\.3"),
    "texts beyond the bytes": (put("text_offsets", 0, 3, 7), r"arrays\.text_offsets must go from 0 to 6"),
    "texts that overlap": (put("text_offsets", 0, 9, 6), r"arrays\.text_offsets must not fall"),
    "a text too few": (put("text_offsets", 0, 6), r"arrays\.text_offsets has 2 entries, expected 3"),
    "a prompt that is not there": (put("prompt_text_of_N", 0, 1), r"arrays\.prompt_text_of_N must lie in 0\.\.0"),
    "a text that is not UTF-8": (put_at("text_utf8", 0, 255), "is not UTF-8"),
    "broken JSON": (put(JSON, *b'{"label":'), "is not JSON"),
    "deep JSON": (put(JSON, *(b"[" * 100_000)), "is not JSON"),
    "JSON with a huge number": (put(JSON, *(b"9" * 100_000)), "is not JSON"),
    "JSON of something else": (put(JSON, *b"[]"), "is not an object of label and metadata"),
    "a label too few": (put(JSON, *b'{"label":[],"metadata":[{},{}]}'), "label is not a list of 2"),
    "a label that is a number": (
        put(JSON, *b'{"label":[1,null],"metadata":[{},{}]}'),
        "label has an entry of an",
    ),
    "a missing array": (lambda c, a: a.pop("seeds_N"), r"arrays differs in 'seeds_N'"),
    "an array too many": (lambda c, a: a.update(x=np.zeros(1)), r"arrays differs in 'x'"),
    "another dtype": (lambda c, a: a.update(offsets=a["offsets"].astype(float)), r"offsets is not a 1-d int64 tensor"),
    "two dimensions": (lambda c, a: a.update(seeds_N=a["seeds_N"][None]), r"arrays\.seeds_N is not a 1-d int64 tensor"),
    "no header": (lambda c, a: c.update(header=[]), "header is list, expected dict"),
    "a header without a field": (lambda c, a: c["header"].pop("seed"), "header differs in 'seed'"),
    "a model that is a list": (lambda c, a: c["header"].update(model=[]), r"header\.model is list, expected dict"),
    "a digest that is a number": (
        lambda c, a: c["header"].update(model={"a": 1}),
        r"an entry that is not str",
    ),
    "a rollout id that is a text": (lambda c, a: c.update(rollout_id="0"), "rollout_id is str, expected int"),
    "schema 0": (lambda c, a: c.update(schema_version=0), "has no valid schema version"),
    "a schema that is no number": (lambda c, a: c.update(schema_version=True), "has no valid schema version"),
    "a schema far in the future": (lambda c, a: c.update(schema_version=10**9), "this vime reads up to 2"),
    "a schema of 400 digits": (lambda c, a: c.update(schema_version=10**400), "has no valid schema version"),
    "a rollout id of 400 digits": (lambda c, a: c.update(rollout_id=10**400), "rollout_id does not fit 64 bits"),
    "a number as a key": (lambda c, a: c["header"].update(sampling={"a": {1: 2}}), r"header\.sampling is not plain"),
    "schema 2 named 1": (lambda c, a: c.update(schema_version=1), "columns is NoneType, expected dict"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_contradicts_itself_is_named(record, case):
    """The checksum says that nothing was changed by accident, not that the writer was honest."""
    change, message = CASES[case]
    assert re.search(message, refusal(forged(record, change)))


CASES_1 = {
    "a column too short": (lambda c, a: c["columns"]["text"].pop(), r"columns\.text has 1 entries, expected 2"),
    "an entry of another type": (lambda c, a: c["columns"]["seed"].__setitem__(0, "7"), r"columns\.seed\[0\] is str"),
    "an unknown status": (lambda c, a: c["columns"]["status"].__setitem__(1, "x\ny"), r"columns\.status\[1\] is none"),
    "no column": (lambda c, a: c["columns"].pop("label"), "columns differs in 'label'"),
    "a column that is no list": (lambda c, a: c["columns"].update(text="ab"), r"columns\.text is not a list"),
    "a number as a key": (
        lambda c, a: c["columns"].update(metadata=[{"a": {1: 2}}, {}]),
        r"\[0\] is not plain",
    ),
    "a seed of 400 digits": (lambda c, a: c["columns"].update(seed=[10**400, 1]), r"columns\.seed\[0\] is not plain"),
    "a prompt too long": (put_at("prompt_lens_N", 0, 9), "prompt_lens_N must lie in"),
    "a shorter array": (lambda c, a: a.update(loss_mask_T=a["loss_mask_T"][:2]), "loss_mask_T has 2 entries"),
}


@pytest.mark.parametrize("case", CASES_1)
def test_what_contradicts_itself_in_schema_1_is_named(record, case):
    change, message = CASES_1[case]
    assert re.search(message, refusal(forged(schema_1(record), change, checksum_1)))
