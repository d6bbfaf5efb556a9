"""The folder registry, what is written there, and the spec in the environment."""

import multiprocessing
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from vime.debug.stop import noted, tracing
from vime.debug.stop.records import (
    ATTACHED,
    Run,
    Stop,
    forget_run,
    forget_stop,
    is_released,
    put_run,
    put_stop,
    release,
    runs,
    stops,
)
from vime.debug.stop.registry import FolderRegistry, registry_of
from vime.debug.stop.spec import Point, Spec, Who, current
from vime.errors import UsageError, VimeError


def a_stop(key: str, since: float = 1.0) -> Stop:
    return Stop(
        key=key,
        session="d-1",
        point="p0",
        reason="breakpoint",
        file="/f.py",
        line=1,
        function="f",
        code="x = 1",
        role="trainer",
        rank=1,
        pid=1,
        hostname="h",
        address="127.0.0.1",
        started=1,
        boot="b",
        thread="MainThread",
        host="127.0.0.1",
        port=1,
        since=since,
        until=2.0,
    )


def test_put_get_claim_delete_names(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "r")
    registry.put("d-1/stop/a", {"x": 1})
    registry.put("d-1/stop/a", {"x": 2})
    assert registry.get("d-1/stop/a") == {"x": 2}
    assert registry.claim("d-1/claim/p0", {"pid": 1}) is True
    assert registry.claim("d-1/claim/p0", {"pid": 2}) is False
    assert registry.get("d-1/claim/p0") == {"pid": 1}
    assert registry.names() == ["d-1/claim/p0", "d-1/stop/a"]
    assert registry.names("d-1/stop/") == ["d-1/stop/a"]
    for name in registry.names():
        registry.delete(name)
        registry.delete(name)
    assert list((tmp_path / "r").iterdir()) == []
    for bad in ("", "../x", "a//b", "a/."):
        with pytest.raises(ValueError, match="no name"):
            registry.get(bad)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    assert stat.S_IMODE(FolderRegistry(tmp_path / "mine").folder.stat().st_mode) == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    with pytest.raises(UsageError, match="yours alone"):
        FolderRegistry(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="yours alone"):
        FolderRegistry(tmp_path / "link")


def test_what_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(VimeError, match="cannot be made"):
        FolderRegistry(Path("/proc/none/x"))
    registry = FolderRegistry(tmp_path / "r")
    (tmp_path / "r" / "d-1").write_text("a file in the place of a folder")
    with pytest.raises(VimeError, match="cannot be written"):
        registry.put("d-1/x", {})


def _contend(folder: str, number: int) -> int:
    registry = FolderRegistry(Path(folder))
    won = 0
    for i in range(100):
        won += registry.claim(f"d-1/claim/{i}", {"by": number})
        registry.put(f"d-1/note/{number}", {"i": i})
        registry.delete(f"d-1/note/{number}")
        assert all(isinstance(registry.get(name), dict | None) for name in registry.names("d-1/note/"))
    return won


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    """Each claim has one winner, and none sees half an entry or loses its folder while it writes."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        won = pool.starmap(_contend, [(str(tmp_path / "r"), n) for n in range(4)])
    assert sum(won) == 100
    assert not list((tmp_path / "r").rglob("*.tmp"))


def test_stops_and_releases(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "r")
    late, early = a_stop("trainer1-0002", 2.0), a_stop("trainer1-0001", 1.0)
    for stop in (late, early):
        put_stop(registry, stop)
    assert stops(registry) == stops(registry, "d-1") == [early, late]
    assert stops(registry, "d-2") == []
    assert early.who == "trainer 1"
    release(registry, [early])
    assert (is_released(registry, early), is_released(registry, late)) == (True, False)
    forget_stop(registry, early)
    assert (stops(registry), is_released(registry, early)) == ([late], False)


def test_runs(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path / "r")
    made = [Run(f"d-{n}", ("train.py", "1"), 1, 1, "b", "h", "/w", float(n), 3.0, 4.0) for n in (2, 1)]
    for run in made:
        put_run(registry, run)
    put_stop(registry, a_stop("x"))
    assert runs(registry) == made[::-1]
    forget_run(registry, "d-1")
    assert registry.names() == ["d-2/run"]


def test_a_spec_survives_the_environment() -> None:
    points = (
        Point("p0", "a.py:1", "/a.py", 1, "sha", condition='x == "$HOME {}"\n', who=Who(("trainer",), (0, 1))),
        Point("p1", "m:f", module="m", qualname="f", who=Who(is_first=True), hit=3, is_every=True),
    )
    spec = Spec(
        "d-1",
        points,
        Who(ranks=(2,)),
        2,
        1.5,
        2.5,
        "127.0.0.1",
        (5000, 5009),
        "/w",
        "/f",
        "h:1",
        True,
        Who(("driver",)),
    )
    text = spec.dumps()
    assert "\n" not in text
    assert Spec.loads(text) == spec
    assert current({"VIME_DEBUG_SPEC": text}) == spec
    assert current({}) is None
    for bad in (
        "{",
        "[]",
        "{}",
        text.replace('"schema_version": 1', '"schema_version": 2'),
        text.replace('"hit"', '"h"'),
    ):
        with pytest.raises(ValueError):
            Spec.loads(bad)


def test_a_run_without_a_registry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(VimeError, match="names no registry"):
        registry_of(Spec("d-1"))
    assert os.getuid() >= 0


def test_the_stop_of_a_client_that_comes_while_the_last_one_is_seen_off_stays_noted(tmp_path, monkeypatch):
    registry = FolderRegistry(tmp_path / "registry")
    state = noted._State(registry=registry)
    monkeypatch.setattr(noted, "_state", state)
    seen = []

    def end_if_alone():
        seen.append([stop.key for stop in stops(registry)])
        if len(seen) == 1:  # the next stop, and its client
            stop = replace(a_stop("new"), state=ATTACHED)
            put_stop(registry, stop)
            state.open[stop.key] = noted._Open(stop, threading.current_thread())

    is_there = iter([False, True, True, False, False])
    monkeypatch.setattr(tracing, "is_client_connected", lambda: next(is_there))
    monkeypatch.setattr(tracing, "end_if_alone", end_if_alone)
    noted._keep_up_to_date()
    assert seen == [[], ["new"]]
    assert stops(registry) == []
    assert state.open == {}
