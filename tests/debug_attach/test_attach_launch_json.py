"""launch.json: our entries are added and replaced, and nothing of the user's is ever lost."""

import json

import pytest
from stops import a_stop

from vime.debug.attach.launch_json import ALL, NotPlain, merge, path_mappings, snippet, text
from vime.errors import UsageError

MINE = {"name": "Python: train", "type": "debugpy", "request": "launch", "args": ["ä"]}
ONE, TWO = a_stop("trainer0-aaaa", rank=0, port=4001), a_stop("trainer1-bbbb", port=4002)
WITH_COMMENTS = b'{\n  // mine\n  "version": "0.2.0",\n  "configurations": [],\n}\n'


def test_one_entry_for_each_stop_and_one_for_all():
    found = snippet([ONE, TWO], ports={"trainer1-bbbb": 9})
    first, second = found["configurations"]
    assert first == {
        "name": "vime: trainer 0 (trainer0-aaaa)",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": 4001},
        "justMyCode": False,
        "subProcess": False,
        "pathMappings": [],
    }
    assert second["connect"]["port"] == 9
    assert found["compounds"] == [{"name": ALL, "configurations": [first["name"], second["name"]]}]
    assert "compounds" not in snippet([ONE])


def test_a_copy_of_the_code_is_mapped_to_the_folder_here():
    """Case D18."""
    copied = a_stop(local_root="/home/me/work", remote_root="/tmp/ray/session/copy")
    assert path_mappings(copied) == [{"localRoot": "/home/me/work", "remoteRoot": "/tmp/ray/session/copy"}]
    assert snippet([copied])["configurations"][0]["pathMappings"] == path_mappings(copied)
    assert path_mappings(a_stop(local_root="/w", remote_root="/w")) == path_mappings(a_stop()) == []


def test_a_new_file(tmp_path):
    file = tmp_path / ".vscode" / "launch.json"
    merge(file, snippet([ONE]))
    assert file.read_text() == text(snippet([ONE]))
    assert file.read_text().startswith('{\n    "version"')


def test_only_entries_of_ours_are_replaced(tmp_path):
    file = tmp_path / "launch.json"
    compound = {"name": "both", "configurations": ["Python: train"]}
    old = {"version": "0.2.0", "inputs": [{"id": "x"}], "configurations": [MINE], "compounds": [compound]}
    file.write_text(json.dumps(old))
    merge(file, snippet([ONE, TWO]))
    merge(file, snippet([TWO]))
    found = json.loads(file.read_text())
    assert found["inputs"] == [{"id": "x"}]
    assert [entry["name"] for entry in found["configurations"]] == ["Python: train", "vime: trainer 1 (trainer1-bbbb)"]
    assert found["compounds"] == [compound]
    assert list(found) == list(old)
    assert "ä" in file.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["launch.json"]


def test_a_compound_of_ours_goes_with_its_stops(tmp_path):
    file = tmp_path / "launch.json"
    merge(file, snippet([ONE, TWO]))
    merge(file, snippet([ONE]))
    assert json.loads(file.read_text()).get("compounds", []) == []


@pytest.mark.parametrize(
    "content",
    [
        WITH_COMMENTS,
        b'{"configurations": [], }',
        b'{"configurations": [] /* none */}',
        b"\xef\xbb\xbf{}",
        b"",
        b"\xff",
        b"[]",
        b'{"configurations": {}}',
        b'{"configurations": [], "configurations": [1]}',
    ],
)
def test_what_is_no_plain_json_stays_byte_for_byte(tmp_path, content):
    file = tmp_path / "launch.json"
    file.write_bytes(content)
    before = file.stat().st_mtime_ns
    with pytest.raises(NotPlain):
        merge(file, snippet([ONE]))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (content, before)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "launch.json").symlink_to(tmp_path / "real.json")
    merge(tmp_path / "launch.json", snippet([ONE]))
    assert (tmp_path / "launch.json").is_symlink()
    assert "vime: " in (tmp_path / "real.json").read_text()


def test_where_it_cannot_lie_is_said(tmp_path):
    folder, file = tmp_path / "launch.json", tmp_path / "file"
    folder.mkdir()
    file.touch()
    for target, why in ((folder, "Is a directory"), (file / "launch.json", "File exists|Not a directory")):
        with pytest.raises(UsageError, match=f"({why}): .* is not written") as raised:
            merge(target, snippet([a_stop()]))
        assert "--launch-json -" in raised.value.hint
