"""Runs the service: uvicorn, loopback unless there is a token."""

from __future__ import annotations

import ipaddress
import resource
import socket

import uvicorn

from kvloom.hf3fs.metadata.app import Service
from kvloom.hf3fs.metadata.shortcut import protocol_of

_GRACEFUL_S = 5
_FILES = 64  # beside the connections


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
    _allow_files(service.settings.max_connections + _FILES)
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
        timeout_keep_alive=int(service.settings.keep_alive_s),
        timeout_graceful_shutdown=_GRACEFUL_S,
    )
    return uvicorn.Server(config)


def _allow_files(count: int) -> None:
    """Let this process have so many open files, if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
