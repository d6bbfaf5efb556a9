"""The record file: what goes in comes out, and nothing damaged, foreign or hostile gets through."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

from vime.errors import EXIT_USAGE, UsageError, VimeError
from vime.record import RecordWriter, read, write
from vime.types import RolloutBatch, RolloutHeader, Sample


def sample(group_id=0, index=0, tokens=(1, 2, 3), prompt_len=1, **changes):
    mask = [i >= prompt_len for i in range(len(tokens))]
    log_probs = [-0.5 if m else 0.0 for m in mask]
    return Sample(group_id, index, np.array(tokens), prompt_len, np.array(mask), np.array(log_probs), **changes)


def batch_of(*samples, rollout_id=0, **header):
    return RolloutBatch.from_samples(rollout_id, samples, RolloutHeader(**header))


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    arrays = [n for n in RolloutBatch.__slots__ if isinstance(getattr(a, n), np.ndarray)]
    is_same = all(
        getattr(a, n).dtype == getattr(b, n).dtype and getattr(a, n).tobytes() == getattr(b, n).tobytes()
        for n in arrays
    )
    return is_same and a.rows == b.rows and a.rollout_id == b.rollout_id and asdict(a.header) == asdict(b.header)


def test_opens_with_plain_torch_load_and_holds_only_plain_data_on_cpu(tmp_path):
    """Cases P01 and P09."""
    write(tmp_path / "x.pt", batch_of(sample(text="日本 \U0001f600"), sample(index=1, tokens=(4,), prompt_len=1)))
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    assert content["format"] == "vime-rollout"
    assert content["schema_version"] == 2
    assert bytes(content["arrays"]["text_utf8"]).decode() == "日本 \U0001f600"
    assert content["arrays"]["token_ids_low_T"].tolist() == [1, 2, 3, 4]
    assert {str(t.device) for t in content["arrays"].values()} == {"cpu"}
    assert b"cuda" not in (tmp_path / "x.pt").read_bytes()


def test_loads_a_file_whose_tensors_carry_a_device_tag(tmp_path, monkeypatch):
    """Case P09: as if another program had saved the same content from a GPU."""
    write(tmp_path / "x.pt", batch_of(sample()))
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(content, tmp_path / "y.pt")
    monkeypatch.undo()
    assert b"cuda:0" in (tmp_path / "y.pt").read_bytes()
    assert same(read(tmp_path / "y.pt"), read(tmp_path / "x.pt"))


def test_numpy_in_metadata_becomes_plain(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample(metadata={"a": np.float32(0.5), "b": np.arange(2), "c": (1, 2)})))
    assert read(tmp_path / "x.pt").rows[0]["metadata"] == {"a": 0.5, "b": [0, 1], "c": [1, 2]}


def test_metadata_that_is_not_plain_is_refused_by_key_path(tmp_path):
    with pytest.raises(VimeError, match=r"sample 7/2 metadata\.deep\[0\]: object is not plain data"):
        write(tmp_path / "x.pt", batch_of(sample(7, 2, metadata={"deep": [object()]})))
    assert not (tmp_path / "x.pt").exists()


def test_existing_file_is_kept_unless_overwriting_is_asked_for(tmp_path):
    """Case P03."""
    path = tmp_path / "x.pt"
    write(path, batch_of(sample(text="first")))
    with pytest.raises(UsageError, match="exists already"):
        write(path, batch_of(sample(text="second")))
    assert read(path).rows[0]["text"] == "first"
    write(path, batch_of(sample(text="second")), overwrite=True)
    assert read(path).rows[0]["text"] == "second"
    assert os.listdir(tmp_path) == ["x.pt"]


def refusal(path) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    return caught.value.message


def test_missing_file(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.pt")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(tmp_path, share):
    path = tmp_path / "x.pt"
    write(path, batch_of(sample()))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "cut short" in refusal(path)


def test_flipped_bits_are_refused_or_harmless(tmp_path):
    """Every flip either raises the one error or, in bytes without meaning (padding), changes nothing."""
    path = tmp_path / "x.pt"
    batch = batch_of(*[sample(g, i, text=f"answer {g}{i}") for g in range(3) for i in range(3)])
    write(path, batch)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    num_refused = 0
    for position in rng.choice(len(content) * 8, 400, replace=False):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        try:
            assert same(read(path), batch)
        except UsageError:
            num_refused += 1
    assert num_refused > 100


def test_every_flipped_bit_of_the_tokens_is_found(tmp_path):
    path = tmp_path / "x.pt"
    tokens = list(range(1_000_000, 1_000_050))
    write(path, batch_of(sample(tokens=tokens)))
    content = path.read_bytes()
    at = content.index(np.array(tokens).astype(np.int16).tobytes())
    for position in range(at, at + 100, 7):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        assert "damaged" in refusal(path)


def rewrite(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def test_newer_schema_is_refused(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample()))
    rewrite(tmp_path / "x.pt", lambda c: c.update(schema_version=3))
    assert "schema version 3, this vime reads up to 2" in refusal(tmp_path / "x.pt")


def test_changed_reward_is_found_by_the_checksum(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample(reward=1.0)))
    rewrite(tmp_path / "x.pt", lambda c: c["arrays"]["rewards_N"].fill_(0.0))
    assert "checksum differs" in refusal(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["arrays"].pop("seeds_N"),
        lambda c: c["arrays"].pop("offsets"),
        lambda c: c["arrays"].update(offsets=c["arrays"]["offsets"].float()),
        lambda c: c.update(header=[]),
        lambda c: c["header"].update(surprise=1),
        lambda c: c.update(rollout_id="0"),
    ],
)
def test_wrong_structure_is_named(tmp_path, change):
    write(tmp_path / "x.pt", batch_of(sample()))
    rewrite(tmp_path / "x.pt", change)
    assert "is not a rollout record of schema 2" in refusal(tmp_path / "x.pt")


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB_TARGET"],)


def test_hostile_files_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB_TARGET", str(tmp_path / "exploded"))
    torch.save({"format": "vime-rollout", "x": Bomb()}, tmp_path / "zip.pt")
    torch.save({"format": "vime-rollout", "x": Bomb()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb()))
    assert "posix.mkdir" in refusal(tmp_path / "zip.pt")
    refusal(tmp_path / "old.pt")
    refusal(tmp_path / "raw.pt")
    assert not (tmp_path / "exploded").exists()


def test_foreign_files_are_refused(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "weights.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("{}")
    np.savez(tmp_path / "x.npz", a=np.zeros(2))
    for name in ("weights.pt", "list.pt", "text.pt", "x.npz"):
        refusal(tmp_path / name)


def test_another_tokenizer_is_refused(tmp_path):
    write(tmp_path / "x.pt", batch_of(sample(), model={"tokenizer_digest": "aaaa", "path": "models/a"}))
    assert len(read(tmp_path / "x.pt", tokenizer_digest="aaaa")) == 1
    with pytest.raises(UsageError, match="another tokenizer"):
        read(tmp_path / "x.pt", tokenizer_digest="bbbb")


def test_writer_thread_writes_all_and_raises_late_errors(tmp_path):
    with RecordWriter(str(tmp_path / "r_{rollout_id}.pt")) as writer:
        for i in range(3):
            writer.save(batch_of(sample(), rollout_id=i))
    assert sorted(os.listdir(tmp_path)) == ["r_0.pt", "r_1.pt", "r_2.pt"]
    writer = RecordWriter(str(tmp_path / "r_{rollout_id}.pt"))
    writer.save(batch_of(sample(), rollout_id=1))
    with pytest.raises(UsageError, match=r"r_1\.pt exists already"):
        writer.close()


def test_a_record_that_cannot_be_written_does_not_hide_why_the_run_failed(tmp_path):
    (tmp_path / "r_1.pt").touch()

    def failing_run():
        with RecordWriter(str(tmp_path / "r_{rollout_id}.pt")) as writer:
            writer.save(batch_of(sample(), rollout_id=1))
            raise RuntimeError("engine 0 died")

    with pytest.raises(RuntimeError, match="engine 0 died"):
        failing_run()


def test_a_disk_that_takes_no_more_is_said_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.pt"
    write(path, batch_of(sample(text="first")))
    code = f"""
import resource, signal, sys
sys.path.insert(0, "tests/record")
from test_record_file import batch_of, sample, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
write({str(path)!r}, batch_of(sample(tokens=range(200_000))), overwrite=True)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"vime.errors.VimeError: {path} cannot be written: File too large"
    assert os.listdir(tmp_path) == ["x.pt"]
    assert read(path).rows[0]["text"] == "first"


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_beside(path, batch):
    with RecordWriter(str(path), overwrite=True) as writer:
        writer.save(batch)


def test_killed_while_writing_leaves_the_old_file_or_the_new_one(tmp_path):
    """Twenty writers die by SIGKILL, each when a random part of its file is written; what they leave does no harm."""
    path, temporary = tmp_path / "x.pt", tmp_path / ".x.pt.tmp"
    batches = [batch_of(sample(tokens=np.full(400_000, i)), rollout_id=i) for i in range(21)]
    write(path, batches[0])
    size = path.stat().st_size
    found = set()
    for i, share in enumerate(np.random.default_rng(0).uniform(0, 1, 20), start=1):
        before = read(path).rollout_id
        if i % 2:  # else the writer finds what the one before left
            temporary.unlink(missing_ok=True)
        writer = multiprocessing.get_context("fork").Process(target=write_beside, args=(path, batches[i]))
        writer.start()
        while writer.is_alive() and size_of(temporary) <= share * size:
            time.sleep(0.0001)
        writer.kill()
        writer.join(timeout=20)
        after = read(path)
        assert after.rollout_id in (before, i)
        assert (after.token_ids_T == after.rollout_id).all()
        found |= {"new" if after.rollout_id == i else "old", *os.listdir(tmp_path)}
    assert {"old", "x.pt", ".x.pt.tmp"} <= found
    write(path, batch_of(sample()), overwrite=True)
    assert os.listdir(tmp_path) == ["x.pt"]


def test_import_is_light():
    code = "import sys, vime.record; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
