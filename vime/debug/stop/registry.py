"""Where the processes of a debug run say that they have stopped, and are told to go on.

Names are paths: ``SESSION/run``, ``SESSION/stop/KEY``, ``SESSION/release/KEY``, ``SESSION/claim/POINT``,
``SESSION/tally/...``, ``SESSION/note/...``; values are small JSON objects. On one machine it is a folder that only
its user may enter; in a cluster the key-value store of Ray's GCS, which needs no job of ours and keeps Ray's
authentication.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from vime.debug.stop import boot
from vime.debug.stop.spec import Spec
from vime.errors import UsageError, VimeError, first_line

NAMESPACE = b"vime_debug"
SECONDS = 10.0
"""Longest wait for one answer of the key-value store."""
_SUFFIX = ".json"
_NUM_TRIES = 50


class Registry(Protocol):
    """Raises VimeError where it cannot be reached."""

    where: str

    def put(self, name: str, value: dict[str, Any]) -> None: ...

    def claim(self, name: str, value: dict[str, Any]) -> bool:
        """Put it unless somebody has; True for the one who did."""

    def get(self, name: str) -> dict[str, Any] | None: ...

    def delete(self, name: str) -> None:
        """Also what is not there, or not any more."""

    def names(self, prefix: str = "") -> list[str]:
        """In order."""


def root() -> Path:
    """The folder of all debug runs of this user on this machine."""
    return Path(tempfile.gettempdir()) / f"vime-debug-{os.getuid()}"


class FolderRegistry:
    """Files ``NAME.json`` below a folder that nobody else may read: a stopped process runs what its client asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise VimeError(f"{folder} cannot be made: {error}", "is the disk full, or read-only?") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{folder} is not a folder that is yours alone", _OWN_FOLDER)

    def put(self, name: str, value: dict[str, Any]) -> None:
        self._place(name, value, os.replace)

    def claim(self, name: str, value: dict[str, Any]) -> bool:
        try:
            self._place(name, value, os.link)  # fails where it exists, and is never seen half written
        except FileExistsError:
            return False
        return True

    def _place(self, name: str, value: dict[str, Any], move: Callable[[Path, Path], None]) -> None:
        """Write aside, then ``move``. The folder may go between: another process has deleted the last one in it."""
        path = self._path(name)
        aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
        for is_last in (False,) * _NUM_TRIES + (True,):
            try:
                _write(aside, value)
                move(aside, path)
                return
            except FileNotFoundError as error:
                if is_last:
                    raise VimeError(f"{path} cannot be written: {error}", "is the folder still there?") from error
            except FileExistsError:
                raise
            except OSError as error:
                raise VimeError(f"{path} cannot be written: {error}", "is the disk full?") from error
            finally:
                with suppress(OSError):  # its folder has gone, with it
                    aside.unlink(missing_ok=True)

    def get(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self._path(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise VimeError(f"{self._path(name)} cannot be read: {error}", "remove it") from error

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise VimeError(f"{path} cannot be removed: {error}") from error
        with suppress(OSError):  # others are in it still
            while path.parent != self.folder:
                path = path.parent
                path.rmdir()

    def names(self, prefix: str = "") -> list[str]:
        found = []
        for folder, _, files in os.walk(self.folder):  # which passes over what goes away meanwhile
            paths = (Path(folder, file) for file in files if file.endswith(_SUFFIX) and not file.startswith("."))
            found += [path.relative_to(self.folder).as_posix().removesuffix(_SUFFIX) for path in paths]
        return sorted(name for name in found if name.startswith(prefix))

    def _path(self, name: str) -> Path:
        if not name or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"no name for an entry: {name!r}")
        return self.folder / f"{name}{_SUFFIX}"


def _write(path: Path, value: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:  # not the one that says that a name is taken
        kind = NotADirectoryError if path.parent.exists() else FileNotFoundError  # gone again meanwhile
        raise kind(f"{path.parent} is no folder") from error
    path.write_text(json.dumps(value), encoding="utf-8")


class GcsRegistry:
    """The key-value store of the cluster whose GCS listens at ``address`` (HOST:PORT)."""

    def __init__(self, address: str) -> None:
        import ray
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        self.where = address
        check_port(address)
        try:
            self._client = GcsClient(address=address)
        except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
            raise VimeError(f"the cluster at {address} does not answer: {first_line(error)}", _HINT) from error

    def put(self, name: str, value: dict[str, Any]) -> None:
        self._ask("internal_kv_put", name.encode(), json.dumps(value).encode(), True, NAMESPACE, SECONDS)

    def claim(self, name: str, value: dict[str, Any]) -> bool:
        added = self._ask("internal_kv_put", name.encode(), json.dumps(value).encode(), False, NAMESPACE, SECONDS)
        return added == 1

    def get(self, name: str) -> dict[str, Any] | None:
        found = self._ask("internal_kv_get", name.encode(), NAMESPACE, SECONDS)
        return None if found is None else json.loads(found)

    def delete(self, name: str) -> None:
        self._ask("internal_kv_del", name.encode(), False, NAMESPACE, SECONDS)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name.decode() for name in self._ask("internal_kv_keys", prefix.encode(), NAMESPACE, SECONDS))

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return getattr(self._client, method)(*args)
        except (ray.exceptions.RayError, RuntimeError) as error:
            raise VimeError(f"the cluster at {self.where} does not answer: {first_line(error)}", _HINT) from error


def check_port(address: str) -> None:
    """VimeError where nothing listens at HOST:PORT: Ray's client itself tries for 40 s."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
    except (OSError, ValueError) as error:
        raise VimeError(f"the cluster at {address} does not answer: {error}", _HINT) from error


_OWN_FOLDER = "remove it if it is yours; else set TMPDIR to a folder that nobody else may write to"
_HINT = "is it still there? With token authentication set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"


def registry_of(spec: Spec) -> Registry:
    """The registry that a debug run writes to."""
    if spec.folder:
        return FolderRegistry(Path(spec.folder))
    address = spec.gcs or _joined() or os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise VimeError("the debug run names no registry: neither a folder nor a cluster", "start it again")
    if boot.is_forked_beside_ray():
        from vime.debug.stop.relay import RelayedRegistry

        return RelayedRegistry(address)
    return GcsRegistry(address)


def _joined() -> str:
    """Address of the cluster that this process is connected to; "" for none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else ""


_here: dict[tuple[int, str, str], Registry] = {}


def registry_here(spec: Spec) -> Registry:
    """The same, one connection per process. That of a parent stays: to end it here might wait for ever."""
    key = (os.getpid(), spec.folder, spec.gcs)
    if key not in _here:
        _here[key] = registry_of(spec)
    return _here[key]


def rows(registry: Registry, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, value) of all entries below ``prefix``; what goes away meanwhile is left out."""
    for name in registry.names(prefix):
        if (value := registry.get(name)) is not None:
            yield name, value
