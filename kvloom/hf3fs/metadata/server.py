"""Runs the service: uvicorn, loopback unless there is a token."""

from __future__ import annotations

import ipaddress
import socket

import uvicorn

from kvloom.hf3fs.metadata.app import Service
from kvloom.hf3fs.metadata.shortcut import protocol_of

_GRACEFUL_S = 5
_KEEP_ALIVE_S = 75
_MAX_CONNECTIONS = 4096


class UnsafeAddressError(ValueError):
    """A service without a token would listen beyond this machine."""


def is_loopback(host: str) -> bool:
    """Whether every address that a host name stands for is this machine's own."""
    try:
        infos = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in infos)


def make_server(service: Service, host: str, port: int) -> uvicorn.Server:
    """A server to ``run()``; it ends gracefully on SIGTERM and SIGINT: answers what it has begun.

    Raises:
        UnsafeAddressError: the host is not loopback, and the service has no token.
    """
    if service.settings.token is None and not is_loopback(host):
        raise UnsafeAddressError(
            f"host {host!r} is reachable from other machines: give a token, or use 127.0.0.1"
        )
    config = uvicorn.Config(
        service.app,
        host=host,
        port=port,
        loop="uvloop",
        http=protocol_of(service),
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_S,
    )
    return uvicorn.Server(config)
