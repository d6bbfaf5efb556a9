"""Files that are no records, or that want something else than to be read: one clear line, and nothing happens."""

import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from test_record_file import Bomb, batch_of, refusal, sample
from test_record_upstream import dump, row
from typer.testing import CliRunner

from vime.errors import UsageError
from vime.record import read, write
from vime.record.archive import load_plain
from vime_cli.app import app


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "x.pt"
    write(
        path, batch_of(sample(3, 0, text="one", prompt_text="p", label="4"), sample(3, 1, text="two", prompt_text="p"))
    )
    return path


def archive(path, pickled: bytes, *storages: bytes, compression=zipfile.ZIP_STORED):
    """A file as ``torch.save`` lays it out, around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for i, data in enumerate(storages):
            file.writestr(f"archive/data/{i}", data)
    return path


def test_a_file_cut_anywhere_is_refused(record):
    content = record.read_bytes()
    for length in range(0, len(content), 17):
        record.write_bytes(content[:length])
        assert "cut short" in refusal(record) or "damaged" in refusal(record)


def test_a_file_with_something_before_or_after_it_is_refused_or_the_same(record):
    content = record.read_bytes()
    for damaged in (b"\0" * 64 + content, content + b"\0" * 64, content + content[: len(content) // 2]):
        record.write_bytes(damaged)
        try:
            assert read(record).token_ids_T.tolist() == [1, 2, 3, 1, 2, 3]
        except UsageError:
            refusal(record)


def foreign_files(folder):
    """Name -> a file that other programs write."""
    (folder / "empty.pt").write_bytes(b"")
    (folder / "picture.pt").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 100)
    (folder / "text.pt").write_text('{"rollout_id": 0, "samples": []}')
    (folder / "noise.pt").write_bytes(np.random.default_rng(0).bytes(5000))
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "safetensors.pt").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with tarfile.open(folder / "tar.pt", "w") as file:
        file.add(folder / "text.pt", "text")
    with zipfile.ZipFile(folder / "zip.pt", "w") as zipped:
        zipped.writestr("readme.txt", "hello")
    with zipfile.ZipFile(folder / "no-members.pt", "w"):
        pass
    np.savez(folder / "npz.npz", a=np.zeros(2))
    torch.save({"a": torch.zeros(2)}, folder / "weights.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({"format": "vime-training", "schema_version": 1}, folder / "other.pt")
    torch.save({"rollout_id": 0, "samples": [{}]}, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "pickle.pt").write_bytes(pickle.dumps({"rollout_id": 0, "samples": []}))
    (folder / "folder.pt").mkdir()
    os.mkfifo(folder / "pipe.pt")
    return {
        "empty.pt": "cut short or not", "picture.pt": "cut short or not", "text.pt": "cut short or not",
        "noise.pt": "cut short or not", "safetensors.pt": "cut short or not", "tar.pt": "cut short or not",
        "zip.pt": "without data.pkl", "no-members.pt": "without data.pkl", "npz.npz": "without data.pkl",
        "weights.pt": "is not a rollout record", "list.pt": "is not a rollout record",
        "other.pt": "is not a rollout record", "legacy.pt": "cut short or not", "pickle.pt": "cut short or not",
        "folder.pt": "is a folder", "pipe.pt": "is no regular file", "missing.pt": "no such file",
    }  # fmt: skip


def test_foreign_files_are_refused_in_one_line(tmp_path):
    for name, message in foreign_files(tmp_path).items():
        assert message in refusal(tmp_path / name), name


def test_the_command_says_so_and_ends_with_exit_code_2(tmp_path, record, monkeypatch):
    """Case P01: no traceback, no file made by the bomb."""
    monkeypatch.setenv("BOMB_TARGET", str(tmp_path / "exploded"))
    torch.save({"rollout_id": 0, "samples": [row(metadata={"x": Bomb()})]}, tmp_path / "bomb.pt")
    record.write_bytes(record.read_bytes()[:-50])
    for path, message in {
        tmp_path / "bomb.pt": "holds the Python object posix.mkdir",
        record: "is cut short",
        **{tmp_path / name: message for name, message in foreign_files(tmp_path).items() if name != "folder.pt"},
    }.items():
        result = CliRunner().invoke(app, ["replay", "--inspect", str(path)])
        assert result.exit_code == 2, path
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert [line.partition(" ")[0] for line in lines] in (["error:"], ["error:", "hint:"]), lines
        assert message in lines[0] or "no such file" in lines[0]
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_the_system_does_not_give_is_refused(record, monkeypatch):
    """As root, file modes refuse nothing."""
    assert "cannot be read: " in refusal(Path("/proc/self/mem")) or "cut short" in refusal(Path("/proc/self/mem"))

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    message = refusal(record)
    monkeypatch.undo()
    assert message == f"{record} cannot be read: Permission denied"


class Reduce:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Subclass(OrderedDict):
    pass


def test_objects_are_named_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB_TARGET", str(tmp_path / "exploded"))
    hidden = {"k": [Reduce(OrderedDict, [("a", Bomb())])]}
    for what, name in {
        "posix.mkdir": Bomb(),
        "posix.system": Reduce(os.system, f"touch {tmp_path / 'exploded'}"),
        "__builtin__.eval": Reduce(eval, f"open({str(tmp_path / 'exploded')!r}, 'w')"),
        "__builtin__.getattr": Reduce(getattr, Reduce(Path, "x"), "touch"),
        "test_record_hostile.Subclass": Subclass(a=1),
        "pathlib.PosixPath": Path("x"),
        "__builtin__.bytearray": bytearray(b"x"),
        "torch._utils._rebuild_parameter": torch.nn.Parameter(torch.zeros(1)),
        "torch._utils._rebuild_sparse_tensor": torch.zeros(3).to_sparse(),
        "numpy.dtype('O8')": np.array([Bomb()], dtype=object),
    }.items():
        for where in ({"format": "vime-rollout", "header": name}, {"rollout_id": 0, "samples": [row(metadata=name)]}):
            torch.save(where, tmp_path / "x.pt")
            assert f"holds the Python object {what};" in refusal(tmp_path / "x.pt"), what
    torch.save(hidden, tmp_path / "x.pt")
    assert "holds the Python object posix.mkdir" in refusal(tmp_path / "x.pt")
    assert not (tmp_path / "exploded").exists()


def test_the_bomb_itself_explodes_elsewhere(tmp_path, monkeypatch):
    """Else the test above could pass with a dud."""
    monkeypatch.setenv("BOMB_TARGET", str(tmp_path / "exploded"))
    torch.save(Bomb(), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "exploded").is_dir()


def glob(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def short(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def num(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def storage(kind: str, key: str, count: int) -> bytes:
    return b"(" + short("storage") + glob(f"torch.{kind}Storage") + short(key) + short("cpu") + num(count) + b"tQ"


def tensor(count: int, stride: int = 1, offset: int = 0, stored: int = 1) -> bytes:
    shape = num(count) + b"\x85" + num(stride) + b"\x85"
    rebuild = glob("torch._utils._rebuild_tensor_v2") + b"(" + storage("Float", "0", stored) + num(offset) + shape
    return rebuild + b"\x89" + glob("collections.OrderedDict") + b")RtR"


STEPS = [(bytes([i]), bytes([i + 1])) for i in range(60)]
LISTS = b"]q\x00" + b"".join(b"]h" + i + b"ah" + i + b"aq" + j for i, j in STEPS)
TUPLES = b")q\x00" + b"".join(b"h" + i + b"\x86q" + j for i, j in STEPS)
CRAFTED = {
    "a tensor of 10^12 numbers in one": (tensor(10**12, stride=0), "a tensor of shape"),
    "a tensor that claims 10^12 stored numbers": (tensor(10**12, stored=10**12), "a storage of 1000000000000 numbers"),
    "a tensor that begins beyond its storage": (tensor(1, offset=5), "ends at 5"),
    "a tensor that begins before its storage": (tensor(1, offset=-5), "not a tensor of numbers"),
    "a tensor that goes backwards": (tensor(1, stride=-1), "not a tensor of numbers"),
    "a tensor of 2^62 x 0 numbers": (tensor(2**62), "not a tensor of numbers"),
    "lists that double 60 times": (LISTS, "unfolds to more than 16 times its size"),
    "a list in itself": (b"]q\x00h\x00a", "nests containers more than 200 levels deep"),
    "100,000 lists in each other": (b"]" * 100_000 + b"a" * 99_999, "nests containers more than 200 levels"),
    "a key of tuples that double": (b"}" + TUPLES + b"Ns", "the Python object tuple as a key"),
    "a key of 100,000 tuples": (b"})" + b"\x85" * 100_000 + b"Ns", "the Python object tuple as a key"),
    "a byte array of 10^10 bytes": (b"\x96" + struct.pack("<Q", 10**10), "damaged"),
    "a string of 10^10 bytes": (b"\x8d" + struct.pack("<Q", 10**10) + b"abc", "damaged|not a rollout record"),
    "a frame of 10^10 bytes": (b"\x95" + struct.pack("<Q", 10**10) + b"N", "not a rollout record"),
    "a place in the memo of 2^32 - 1": (b"Nr" + b"\xff" * 4, "not a rollout record"),
    "a number of 10^6 digits": (b"L" + b"9" * 1_000_000 + b"L\n", "damaged"),
    "a slow codec": (glob("_codecs.encode") + short("a" * 10**6) + short("punycode") + b"\x86R", "codec 'punycode'"),
    "numpy objects": (glob("numpy.dtype") + short("O8") + b"\x89\x88\x87R", r"the Python object numpy\.dtype\('O8'\)"),
    "a call of what is not a function": (short("a") + b")R", "no function"),
    "a state of a dict": (b"}" + b"}b", "a state for something that has none"),
    "items of a list": (b"]NNs", "items of something that is no dict"),
    "an instance the old way": (b"(ios\nmkdir\n", "damaged"),
    "a name with a line break": (b"\x8c\x02os\x8c\x05a\nb\nc\x93", r"the Python object os.a\?b\?c"),
    "an extension": (b"\x82\x01", "damaged"),
    "a class behind a doted name": (b"\x8c\x05torch\x8c\x0bnn.Module.x\x93", "the Python object torch.nn.Module.x"),
    "no end": (b"]" * 10, "damaged"),
    "nothing": (b"", "damaged"),
    "a byte order": (short("a") + b".", "is not a rollout record"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_pickles_cost_nothing_and_do_nothing(tmp_path, case):
    body, message = CRAFTED[case]
    end = b"" if case in ("no end", "nothing") else b"."
    start = time.process_time()
    archive(tmp_path / "x.pt", b"\x80\x02" + body + end if body else b"", b"\0" * 4)
    assert re.search(message, refusal(tmp_path / "x.pt"))
    archive(tmp_path / "x.pt", b"\x80\x02}" + short("rollout_id") + b"K\x00s" + short("samples") + body + b"s" + end)
    refusal(tmp_path / "x.pt")
    assert time.process_time() - start < 20  # unfolding would take years


def test_compressed_members_are_refused(record, tmp_path):
    """A zip bomb: 100 MB of zeros in 100 kB."""
    path = archive(tmp_path / "z.pt", b"\x80\x02.", b"\0" * 100_000_000, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    assert "member archive/data.pkl is compressed or encrypted" in refusal(path)


def test_a_member_that_claims_more_than_the_file_is_refused(tmp_path):
    path = archive(tmp_path / "z.pt", b"\x80\x02N.", b"\0" * 4)
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    content[at + 20 : at + 28] = struct.pack("<II", 2**31, 2**31)
    path.write_bytes(content)
    assert "damaged" in refusal(path)


def test_memory_stays_near_the_size_of_the_file(tmp_path):
    """In a process that may use little more than what imports take."""
    archive(tmp_path / "a.pt", b"\x80\x02" + tensor(10**12, stride=0) + b".", b"\0" * 4)
    archive(tmp_path / "b.pt", b"\x80\x02" + LISTS + b".")
    dump(tmp_path / "c.pt", *[row(tokens=[5] * 200_000)] * 1000)  # one list, a thousand times
    code = f"""
import resource, sys
from vime.record.reader import read
from typer.testing import CliRunner

from vime.errors import UsageError
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
for name in "abc":
    try:
        read({str(tmp_path)!r} + f"/{{name}}.pt")
    except UsageError as error:
        print(error)
    else:
        sys.exit(1)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True)
    assert "MemoryError" not in done.stdout
    assert len(done.stdout.splitlines()) == 3


def test_a_tensor_saved_on_a_gpu_is_read_and_its_record_names_no_device(tmp_path, monkeypatch):
    """Case P09: a dump of upstream with tensors of cuda:0, on this machine, and written again."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    dump(tmp_path / "d.pt", row(tokens=torch.tensor([5, 6, 7, 8]), rollout_log_probs=torch.tensor([-0.5, -1.0])))
    monkeypatch.undo()
    assert b"cuda:0" in (tmp_path / "d.pt").read_bytes()
    write(tmp_path / "r.pt", read(tmp_path / "d.pt"))
    assert b"cuda" not in (tmp_path / "r.pt").read_bytes()
    assert read(tmp_path / "r.pt").token_ids_T.tolist() == [5, 6, 7, 8]


def test_views_and_kinds_of_tensors_come_as_their_numbers(tmp_path):
    """Slices, steps, transposed and empty ones, of any dtype, as torch itself loads them."""
    base = torch.arange(24).reshape(4, 6)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
    tensors = [base[1:, ::2], base.T, base[:, 3], base[:0], torch.tensor(5), torch.tensor([True, False])]
    tensors += [torch.tensor([1.5, -2.0]).to(kind) for kind in kinds] + [torch.tensor([1, 2], dtype=torch.uint8)]
    arrays = [np.arange(6.0).reshape(2, 3).T, np.array([1, 0], bool), np.float32(0.5), np.arange(3, dtype=np.uint16)]
    torch.save([tensors, arrays], tmp_path / "x.pt")
    found, plain = load_plain(tmp_path / "x.pt")
    for ours, theirs in zip(found, tensors, strict=True):
        assert ours.tolist() == theirs.tolist()
    for ours, theirs in zip(plain, arrays, strict=True):
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
