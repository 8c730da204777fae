"""A port before the service where its answers can be made late, wrong or none."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Trouble = Callable[[socket.socket], None]
"""Called with a client's connection after its first bytes; closed when it returns."""


class Front:
    """Passes bytes to and fro; while ``trouble`` is set, nothing passes and that answers."""

    def __init__(self, service_port: int) -> None:
        self._service_port = service_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._trouble: Trouble | None = None
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._cut()

    @contextlib.contextmanager
    def troubled(self, trouble: Trouble) -> Iterator[None]:
        self._trouble = trouble
        self._cut()
        try:
            yield
        finally:
            self._trouble = None
            self._cut()

    def _cut(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        with client, contextlib.suppress(OSError):
            if self._trouble is not None:
                client.recv(65536)
                self._trouble(client)
            else:
                with socket.create_connection(("127.0.0.1", self._service_port)) as service:
                    back = threading.Thread(target=_pump, args=(service, client), daemon=True)
                    back.start()
                    _pump(client, service)
                    back.join()
        self._open.discard(client)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
