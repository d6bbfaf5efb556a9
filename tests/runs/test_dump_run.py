"""`vime dump-weights --from checkpoint`, which starts nothing: whole or not at all, and nothing is written over."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.tiny.make_model import make_tiny_model
from vime.config.load import Loaded, load
from vime.errors import UsageError, VimeError
from vime.log import Progress
from vime.runs import dump as dumping
from vime.runs.dump import Asked, Dumped, dump_weights
from vime.weights.dump import held_alone
from vime_cli.dump_weights import _own_folder

Take = Callable[..., Dumped]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("dumped")
    make_tiny_model(folder / "model", steps=0)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (folder / "run.toml").write_text('[model]\npath = "model"\n[data]\nprompts = ["prompts.jsonl"]\n')
    return load([folder / "run.toml"])


@pytest.fixture
def take(loaded: Loaded) -> Take:
    def taken(out: Path, **asked) -> Dumped:
        return dump_weights(
            loaded=loaded, console=Progress(stream=io.StringIO()), asked=Asked(("checkpoint",), out, **asked)
        )

    return taken


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_an_interrupted_dump_left_is_cleaned_and_nothing_else(take: Take, tmp_path: Path) -> None:
    for left in (".checkpoint.writing", ".engine-held.writing"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    take(tmp_path)
    assert _names(tmp_path) == ["checkpoint", "checkpoint.manifest.json", "notes.txt"]


@pytest.mark.parametrize("digests_only", [True, False])
def test_nothing_is_written_over(take: Take, tmp_path: Path, digests_only: bool) -> None:
    (tmp_path / "checkpoint.manifest.json").symlink_to(tmp_path / "not there")
    with pytest.raises(UsageError, match=r"checkpoint\.manifest\.json exists already"):
        take(tmp_path, digests_only=digests_only)
    assert _names(tmp_path) == ["checkpoint.manifest.json"]


def test_a_manifest_that_cannot_be_written_takes_its_tensors_with_it(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, dump: object) -> None:
        raise VimeError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(dumping, "write_dump", refuse)
    with pytest.raises(VimeError, match="No space left"):
        take(tmp_path)
    assert _names(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_said_before_the_work(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumping.os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="cannot be written to"):
        take(tmp_path, digests_only=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made: "):
        take(tmp_path / "file" / "out")


def test_two_dumps_into_one_folder_do_not_destroy_each_other(take: Take, tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.writing").mkdir()
    with held_alone(tmp_path), pytest.raises(UsageError, match="another dump writes there"):
        take(tmp_path)
    assert _names(tmp_path) == [".checkpoint.writing"]


def test_the_own_folder_is_a_new_one_or_what_an_interrupted_dump_left(tmp_path: Path) -> None:
    first, second = tmp_path / "run-weights", tmp_path / "run-weights-2"
    assert _own_folder(str(tmp_path / "run")) == first
    (first / ".trainer.writing").mkdir(parents=True)
    assert _own_folder(str(tmp_path / "run")) == first
    (first / "trainer").mkdir()
    assert _own_folder(str(tmp_path / "run")) == second
    second.symlink_to(tmp_path / "not there")
    assert _own_folder(str(tmp_path / "run")) == tmp_path / "run-weights-3"
