"""A real S3 server on the loopback interface, and a proxy before it that can be away in several ways."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lightning_pack.energon import storage

BUCKET = "data"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Proxy:
    """Forwards connections to a port of this machine, until it is told to fail.

    ``"refused"`` accepts no connection, ``"unavailable"``, ``"broken"`` and ``"denied"`` answer with a status, ``"silent"``
    never answers, ``"cut"`` breaks an answer off. What was open is closed when the mode changes.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream, self.port, self.mode = upstream, free_port(), "pass"
        #: Connections by mode, and requests by method.
        self.seen: Counter[str] = Counter()
        #: How many more uploads go through before the next one stands still; None for all.
        self.uploads: int | None = None
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.set_mode("pass")

    def set_mode(self, mode: str) -> None:
        self.mode = mode
        if mode == "refused" and self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                # The other end gets a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
        if mode != "refused" and self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        self.set_mode("refused")

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        # In this order: a mode that is set meanwhile closes it.
        self._open.add(client)
        mode = self.mode
        self.seen[mode] += 1
        with client, contextlib.suppress(OSError):
            answer = {"unavailable": UNAVAILABLE, "broken": BROKEN, "denied": DENIED}.get(mode)
            if answer is not None:
                client.recv(1 << 16)
                client.sendall(answer)
            elif mode == "silent":
                while client.recv(1 << 16):
                    pass
            else:
                with socket.create_connection(("127.0.0.1", self.upstream)) as server:
                    self._open.add(server)
                    answers = threading.Thread(target=self._forward, args=(server, client, mode == "cut"), daemon=True)
                    answers.start()
                    self._forward(client, server, False)
                    answers.join()
                    self._open.discard(server)
        self._open.discard(client)

    def _forward(self, source: socket.socket, target: socket.socket, cut: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                method = data[:8].split(b" ")[0].decode(errors="replace")
                if method in ("GET", "HEAD", "PUT"):
                    self.seen[method] += 1
                if method == "PUT" and self.uploads is not None:
                    if not self.uploads:
                        while self.uploads is not None:
                            time.sleep(0.01)
                        break
                    self.uploads -= 1
                if cut:
                    # Some of the body goes through, if there is one.
                    target.sendall(data[:-1])
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _die_with_parent() -> None:
    """Even a server that a test has stopped, and a parent that was killed meanwhile."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """moto's server in a process of its own, with one empty bucket."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / "moto.log"
        with self.log.open("w") as log:
            command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent)
        deadline = time.monotonic() + 60
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"moto's server does not start: {self.log.read_text()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode())
                if b" 200 " in connection.recv(1 << 16):
                    return
            time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def forget_clients() -> None:
    """Let go of what clients have left open, where that is expected: later it would be held against whatever test runs then."""
    storage._stores.clear()
    gc.collect()


def write_configuration(file: Path, ports: dict[str, int], *, timeouts: dict[str, float]) -> Path:
    """A configuration of the multi-storage client with a profile for every port, some with a read timeout of their own."""
    profiles: dict[str, Any] = {}
    for name, port in ports.items():
        options: dict[str, Any] = {"base_path": "", "region_name": "us-east-1", "endpoint_url": f"http://127.0.0.1:{port}"}
        if name in timeouts:
            options["read_timeout"] = timeouts[name]
        profiles[name] = {
            "storage_provider": {"type": "s3", "options": options},
            "credentials_provider": {"type": "S3Credentials", "options": {"access_key": "test", "secret_key": "test"}},
        }
    # JSON is YAML.
    file.write_text(json.dumps({"profiles": profiles}))
    return file
