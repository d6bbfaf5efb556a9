"""Files and folders: which are read, in which encoding, and how they are written back."""

import codecs
import os
import stat

import pytest

from vime.debug.leftovers.sources import NO_FILE, check
from vime.errors import UsageError

LEFTOVER = "breakpoint()\n"


def places(found, root):
    return [os.path.relpath(one.file, root) for one in found.leftovers]


def test_folders_are_walked_and_some_are_not_entered(tmp_path):
    for name in ("a.py", "b/c.py", "b/__pycache__/x.py", ".git/x.py", ".venv/x.py", "node_modules/x.py", "build/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LEFTOVER)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "env" / "x.py").write_text(LEFTOVER)
    (tmp_path / "notes.txt").write_text(LEFTOVER)
    found = check([str(tmp_path)])
    assert places(found, tmp_path) == ["a.py", "b/c.py"]
    assert found.num_files == 2
    named = check([str(tmp_path / "build"), str(tmp_path / "notes.txt")])
    assert places(named, tmp_path) == ["build/x.py", "notes.txt"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.py").write_text(LEFTOVER)
    found = check([str(tmp_path / "a.py"), str(tmp_path), str(tmp_path)])
    assert (found.num_files, len(found.leftovers)) == (1, 1)


def test_paths_with_nothing_to_check_are_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.py").write_text(LEFTOVER)
    found = check([str(tmp_path / "a.py"), str(tmp_path / "empty")], fix=True)
    assert found.num_removed == 1
    assert [reason for _, reason in found.not_checked] == [NO_FILE]
    with pytest.raises(UsageError, match="no such file or folder"):
        check([str(tmp_path / "none.py")])
    with pytest.raises(UsageError, match="standard input cannot be written back"):
        check(["-"], b"", fix=True)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"def f(:\n", "no valid Python at line 1"),
        (b"x = '\xff'\n", "its encoding"),
        (b"# coding: nonesuch\n", "its encoding"),
        (codecs.BOM_UTF16_LE + "x".encode("utf-16-le"), "its encoding"),
        (b"a\x00\n", "no valid Python"),
    ],
)
def test_what_cannot_be_read_is_said_and_the_rest_is_checked(tmp_path, raw, reason):
    (tmp_path / "a.py").write_bytes(raw)
    (tmp_path / "b.py").write_text(LEFTOVER)
    found = check([str(tmp_path)], fix=True)
    ((file, said),) = found.not_checked
    assert file == str(tmp_path / "a.py")
    assert reason in said
    assert (tmp_path / "a.py").read_bytes() == raw
    assert found.num_removed == 1


def test_what_is_no_file_is_said(tmp_path):
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").symlink_to(tmp_path / "gone.py")
    found = check([str(tmp_path)])
    assert [reason for _, reason in found.not_checked] == ["is no regular file", "No such file or directory"]


LATIN = "# coding: latin-1\né = 'é'\r\n{}ü\r\n"
WINDOWS = "# -*- coding: cp1252 -*-\n'€'{}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LATIN.format("breakpoint()\r\n").encode("latin-1"), LATIN.format("").encode("latin-1")),
        (codecs.BOM_UTF8 + "é\nbreakpoint()\n\x0cb".encode(), codecs.BOM_UTF8 + "é\n\x0cb".encode()),
        (WINDOWS.format("; breakpoint()").encode("cp1252"), WINDOWS.format("").encode("cp1252")),
        (b"a\rbreakpoint()\rb\r\n", b"a\rb\r\n"),
    ],
)
def test_the_rest_stays_byte_for_byte(tmp_path, before, after):
    file = tmp_path / "a.py"
    file.write_bytes(before)
    assert check([str(file)], fix=True).num_removed == 1
    assert file.read_bytes() == after


def test_a_file_without_leftovers_is_not_written(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("breakpoint()  # vime: keep\n")
    before = file.stat()
    found = check([str(file)], fix=True)
    assert (len(found.kept), found.num_removed) == (1, 0)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_mode_and_links_stay(tmp_path):
    file = tmp_path / "run"
    file.write_text("#!/usr/bin/env python\nbreakpoint()\n")
    file.chmod(0o751)
    (tmp_path / "link.py").symlink_to(file)
    check([str(tmp_path / "link.py")], fix=True)
    assert (tmp_path / "link.py").is_symlink()
    assert file.read_text() == "#!/usr/bin/env python\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o751
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.py", "run"]


def test_a_file_that_cannot_be_written_stays_whole_and_is_reported(tmp_path, monkeypatch):
    file = tmp_path / "a.py"
    file.write_text(LEFTOVER)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = check([str(file)], fix=True)
    assert [found.reasons[one.place] for one in found.leftovers] == [
        "the file cannot be written: No space left on device"
    ]
    assert found.num_removed == 0
    assert file.read_text() == LEFTOVER
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]
