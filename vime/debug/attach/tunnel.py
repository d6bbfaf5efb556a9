"""From this machine to the port of a stopped process on another node, through Ray itself.

A debug adapter asks nobody who he is, so its port stays on loopback of its node. An actor that needs no CPU is pinned
there and passes bytes, to that one port only; here a listener on loopback takes one client. Both end with the command.
Ray's token authentication is what guards the way.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vime.debug.attach import gcs
from vime.debug.attach.reach import listens
from vime.debug.stop.records import Stop
from vime.errors import VimeError, first_line

START_SECONDS = 60.0
CALL_SECONDS = 30.0
POLL_SECONDS = 5.0
CHUNK = 1 << 16


class FarEnd:
    """The actor: one connection to one port of its own node's loopback; another port cannot be asked for."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._socket: socket.socket | None = None

    def ready(self) -> bool:
        """Whether something listens at the port."""
        return listens(*self._target)

    def is_open(self) -> bool:
        """Whether a client is connected."""
        return self._socket is not None

    def open(self) -> None:
        """A new connection; the one before is closed."""
        self.close()
        self._socket = socket.create_connection(self._target, gcs.CONNECT_SECONDS)

    def send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.sendall(data)

    def receive(self, seconds: float) -> bytes | None:
        """What has come; None where nothing has within ``seconds``; b"" at the end."""
        connection = self._socket
        if connection is None:
            return b""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        try:
            return connection.recv(CHUNK)
        except OSError:
            return b""  # reset by the adapter: the end as well

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass
class Tunnel:
    """``port``: on 127.0.0.1 of this machine. One client at a time; another may come when it has left."""

    port: int
    _listener: socket.socket
    _actor: Any
    _is_over: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def serve(self) -> None:
        """Take clients until ``close``."""
        self._listener.settimeout(0.5)
        while not self._is_over.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            with client:
                self._pass(client)

    def _pass(self, client: socket.socket) -> None:
        import ray

        client.settimeout(None)
        gone = threading.Event()
        try:
            ray.get(self._actor.open.remote(), timeout=CALL_SECONDS)
            back = threading.Thread(target=self._back, args=(client, gone), name="tunnel", daemon=True)
            back.start()
            while not self._is_over.is_set() and (data := client.recv(CHUNK)):
                ray.get(self._actor.send.remote(data), timeout=CALL_SECONDS)
        except (OSError, ray.exceptions.RayError) as error:
            self.error = first_line(error)
        finally:
            gone.set()
            with contextlib.suppress(ray.exceptions.RayError):  # its node may have gone
                ray.get(self._actor.close.remote(), timeout=CALL_SECONDS)

    def _back(self, client: socket.socket, gone: threading.Event) -> None:
        import ray

        try:
            while not gone.is_set():
                data = ray.get(self._actor.receive.remote(POLL_SECONDS), timeout=CALL_SECONDS)
                if data == b"":
                    break
                if data:
                    client.sendall(data)
        except (OSError, ray.exceptions.RayError) as error:
            self.error = first_line(error)
        finally:
            with contextlib.suppress(OSError):  # it may have left
                client.shutdown(socket.SHUT_RDWR)

    def is_gone(self) -> bool:
        """Whether the actor, or its node, has ended."""
        import ray

        try:
            ray.get(self._actor.is_open.remote(), timeout=CALL_SECONDS)
        except ray.exceptions.RayError as error:
            self.error = first_line(error)
            return True
        return False

    def close(self) -> None:
        self._is_over.set()
        self._listener.close()


@contextlib.contextmanager
def tunnel(stop: Stop, address: str, port: int = 0) -> Iterator[Tunnel]:
    """A way to ``stop`` through the cluster at ``address``. ``port``: on this machine; 0: any free one.

    VimeError where the cluster, the node or the port is not there, or ``port`` is taken.
    """
    listener = _listener(port)
    with listener, connected(address):
        import ray

        actor = _far_end(stop, gcs.node_of(stop, gcs.nodes(address)))
        found = Tunnel(listener.getsockname()[1], listener, actor)
        thread = threading.Thread(target=found.serve, name="tunnel-accept", daemon=True)
        try:
            thread.start()
            yield found
        finally:
            found.close()
            ray.kill(actor)
            thread.join(CALL_SECONDS)


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=1)
    except OSError as error:
        why = error.strerror or str(error)
        raise VimeError(
            f"--forward {port}: the port cannot be used: {why}", "--forward alone takes a free one"
        ) from error


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A part in the named cluster, and in no other; with the token that the environment names, if any."""
    import ray

    gcs.client(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", namespace="vime_debug")
    except (ConnectionError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        why = first_line(error)
        raise VimeError(f"no connection to the cluster at {address}: {why}", gcs.TOKEN_HINT) from error
    try:
        yield
    finally:
        ray.shutdown()


def _far_end(stop: Stop, node: str) -> Any:
    if not node:
        raise VimeError(f"{stop.key} is on {stop.hostname}, which is no node of the cluster", "use ssh -N -L there")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 4, "scheduling_strategy": strategy}
    actor = ray.remote(FarEnd).options(**options).remote(stop.host, stop.port)
    try:
        is_there = ray.get(actor.ready.remote(), timeout=START_SECONDS)
    except ray.exceptions.RayError as error:
        ray.kill(actor)
        why = first_line(error)
        raise VimeError(f"no way to {stop.key} on node {stop.address}: {why}", "is vime installed there?") from error
    if not is_there:
        ray.kill(actor)
        raise VimeError(
            f"nothing listens at {stop.host}:{stop.port} of node {stop.address}: {stop.key} is not stopped any more",
            "vime debug-attach list",
        )
    return actor
