"""The Redis backend: the state in one Redis or Valkey server, for services on several hosts.

The state machine is a script (``redis.lua``), which the server runs atomically, so any number of
services can stand before one server, and one that is killed takes nothing with it. What an answer
outlives is the server's business: run it with ``appendonly yes``, and with a replica for high
availability. Not for Redis Cluster: all keys must be on one node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvloom.hf3fs.metadata.base import (
    Allocation,
    AuditReport,
    ConflictError,
    Limits,
    Location,
    MetadataError,
    MetadataStore,
    NamespaceStats,
    StorageError,
    UnknownNamespaceError,
    Written,
    check_geometry,
    check_namespace,
)

logger = logging.getLogger(__name__)

_ERRORS = {
    "unknown": UnknownNamespaceError,
    "conflict": ConflictError,
    "metadata": MetadataError,
}
_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class _Answer(msgspec.Struct):
    ok: msgspec.Raw = msgspec.Raw()
    error: str = ""
    text: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Answer).decode


class RedisStore(MetadataStore):
    """A backend in a Redis server of version 7, or Valkey.

    Args:
        url: ``redis://user:password@host:port/database``, or ``rediss://`` for TLS.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self._limits = limits
        self._redis: Redis = Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )
        source = files(__package__).joinpath("redis.lua").read_text()
        self._script = self._redis.register_script(source)
        self._write_lease = int(limits.write_lease_s * 1e6)
        self._read_lease = int(limits.read_lease_s * 1e6)
        self._warned = False

    async def initialize(self, namespace: str, rank: int, num_pages: int, world_size: int) -> None:
        check_namespace(namespace)
        check_geometry(rank, num_pages, world_size)
        await self._warn_of_forgetting()
        limits = self._limits.max_pages, self._limits.max_namespaces
        await self._run(bool, "initialize", namespace, rank, num_pages, world_size, *limits)

    async def allocate(
        self,
        namespace: str,
        rank: int,
        writer: str,
        keys: Sequence[str],
        lease_existing: bool = False,
    ) -> list[Allocation]:
        leases = self._write_lease, self._read_lease
        return await self._run(
            list[Allocation], "allocate", namespace, rank, writer, keys, lease_existing, *leases
        )

    async def confirm(
        self, namespace: str, rank: int, writer: str, written: Sequence[Written]
    ) -> list[bool]:
        return await self._run(
            list[bool], "confirm", namespace, rank, writer, written, self._write_lease
        )

    async def release(
        self, namespace: str, rank: int, writer: str, written: Sequence[Written]
    ) -> int:
        return await self._run(int, "release", namespace, rank, writer, written)

    async def exists(self, namespace: str, keys: Sequence[str], lease: bool = False) -> list[bool]:
        return await self._run(list[bool], "exists", namespace, keys, lease, self._read_lease)

    async def locations(
        self, namespace: str, rank: int, keys: Sequence[str]
    ) -> list[Location | None]:
        # Lua has no list with holes: false stands for None.
        found = await self._run(
            list[Location | bool], "locations", namespace, rank, keys, self._read_lease
        )
        return [None if isinstance(where, bool) else where for where in found]

    async def touch(self, namespace: str, keys: Sequence[str]) -> int:
        return await self._run(int, "touch", namespace, keys, self._read_lease)

    async def delete(self, namespace: str, keys: Sequence[str]) -> int:
        return await self._run(int, "delete", namespace, keys)

    async def clear(self, namespace: str) -> None:
        await self._run(bool, "clear", namespace)

    async def namespaces(self) -> list[str]:
        return await self._run(list[str], "namespaces")

    async def stats(self, namespace: str) -> NamespaceStats:
        raw = await self._run(dict[str, Any], "stats", namespace)
        raw["ranks"] = [rank or None for rank in raw["ranks"]]
        return msgspec.convert(raw, NamespaceStats)

    async def audit(self, namespace: str) -> AuditReport:
        return await self._run(AuditReport, "audit", namespace)

    async def check(self) -> None:
        try:
            await self._redis.ping()
        except (RedisError, OSError) as error:
            raise StorageError(f"Redis: {error}") from None

    async def sweep(self) -> None:
        await self._run(bool, "sweep")

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, kind: type[_T], operation: str, *arguments: object) -> _T:
        try:
            packed: bytes = await self._script(args=[operation, _encode(arguments)])
        except (RedisError, OSError) as error:
            raise StorageError(f"Redis: {error}") from None
        answer = _decode(packed)
        if answer.error:
            raise _ERRORS[answer.error](answer.text)
        return msgspec.msgpack.decode(answer.ok, type=kind)

    async def _warn_of_forgetting(self) -> None:
        if self._warned:
            return
        self._warned = True
        try:
            setting = await self._redis.config_get("appendonly")
        except (RedisError, OSError):
            return  # managed servers don't tell
        if "yes" not in str(setting.get("appendonly")):
            logger.warning(
                "kvloom: this Redis runs without `appendonly yes`: it forgets answered changes "
                "when it is killed"
            )
