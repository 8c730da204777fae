"""The one contract of every metadata backend (spec rows H5-H10).

A namespace is a set of page files, one for each rank of its world, and the keys whose pages lie in
them. A page goes through these states, and through no other:

    free --allocate--> allocated --confirm--> confirmed --all ranks confirmed--> complete
     ^                     |                      |                                 |
     |     write lease ended, released            | write lease ended          evicted, deleted
     +---------------------+----------------------+---------------------------------+
                                                       (after its read lease, if it has one)

- **allocated**: given to one writer, under a write lease. The writer may ask again and gets the
  same page; another writer of the key is told ``BUSY``. Every allocation has a generation number of
  its own, which the writer puts in the page's header, so that a page given away meanwhile shows it.
- **confirmed**: its writer said that the page is written. If the other ranks of the world do not
  follow within the lease, the page is freed like one that was never confirmed.
- **complete**: readers may be told the page. Telling takes a read lease; until it ends the page is
  given to nobody. What is used least recently is evicted when pages run out.

Every answer that a page is given, confirmed or freed comes after that is durable. A service that is
killed at any instant restarts with all it answered, with every unconfirmed page under a new write
lease, and evicts nothing until the read leases it may have given have ended.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

DEFAULT_NAMESPACE = "default"
MAX_KEY_LENGTH = 512  # characters
MAX_WORLD_SIZE = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class MetadataError(Exception):
    """A request that can't be done as it is; the text says why and what to do."""


class UnknownNamespaceError(MetadataError):
    """Nobody has initialized the namespace, or this rank of it."""


class ConflictError(MetadataError):
    """The namespace exists with another geometry."""


class StorageError(MetadataError):
    """The backend can't make a change durable now; the caller may try again."""


class Status(str, enum.Enum):
    """What a writer is told about a key."""

    WRITE = "write"  # the page is the writer's until its lease ends
    EXISTS = "exists"  # this rank's page is written already; nothing to do
    BUSY = "busy"  # another writer has it
    FULL = "full"  # no page is free and none can be evicted now


class Allocation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The answer for one key; page and generation are -1 where the status gives none."""

    status: Status
    page: int = -1
    generation: int = -1


class Location(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a complete key's page of one rank lies, and the generation its header must show."""

    page: int
    generation: int


class Written(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A page that its writer has written, or gives back.

    API v1 knows no generations and gives pages back by number alone: -1 is any generation, and
    ``release`` takes the empty key for any.
    """

    key: str
    page: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    generation: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = -1


class RankStats(msgspec.Struct, frozen=True):
    """Pages of one rank's file, by state. ``cooling`` ones wait for a read lease to end."""

    pages: int
    free: int
    allocated: int
    confirmed: int
    cooling: int


class NamespaceStats(msgspec.Struct, frozen=True):
    """A namespace in numbers; counters start when the namespace was initialized or cleared.

    Attributes:
        hits, misses: keys asked for by ``locations``, found and not found.
        least_recent_use_s: seconds since the least recently used complete key was used.
        evicted_idle_s: seconds since its last use of the key that was evicted last.
        evicted_unread: evicted keys that nobody ever read.
        expired: pages that came back because a write lease ended.
        refused: confirmations of pages that were no longer the writer's.
    """

    world_size: int
    ranks: list[RankStats | None]
    complete: int
    incomplete: int
    hits: int
    misses: int
    least_recent_use_s: float
    evicted: int
    evicted_idle_s: float
    evicted_unread: int
    expired: int
    refused: int


class AuditReport(msgspec.Struct, frozen=True):
    """Every page of a namespace counted by looking at it.

    Attributes:
        leaked: neither free nor of any key; or still held after its lease has ended.
        twice: pages that two keys, or a key and the free list, claim.
    """

    pages: int
    free: int
    allocated: int
    confirmed: int
    cooling: int
    leaked: int
    twice: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service holds at most, and its leases in seconds."""

    write_lease_s: float = 60.0
    read_lease_s: float = 30.0
    max_pages: int = 4_000_000
    max_namespaces: int = 256


def check_namespace(name: str) -> str:
    """The name, if it is one: it becomes part of paths and of the backend's own keys.

    Raises:
        MetadataError: otherwise.
    """
    if _NAME.fullmatch(name) is None:
        raise MetadataError(
            f"namespace {name[:200]!r}: 1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return name


def check_geometry(rank: int, num_pages: int, world_size: int) -> None:
    """
    Raises:
        MetadataError: the numbers make no sense.
    """
    if not 0 <= rank < world_size:
        raise MetadataError(f"rank {rank} is not in a world of {world_size}: 0 <= rank < size")
    if world_size > MAX_WORLD_SIZE:
        raise MetadataError(f"world size {world_size}: at most {MAX_WORLD_SIZE}")
    if num_pages < 1:
        raise MetadataError(f"num_pages = {num_pages}: at least 1")


class MetadataStore(ABC):
    """A backend. Methods are batched; entry i of an answer is of the i-th key.

    Raises:
        UnknownNamespaceError: by every method that names a namespace or rank, if there is none.
        StorageError: by every method that changes pages, if that can't be made durable.

    Attributes:
        lookups_at_once: ``exists``, ``locations`` and ``touch`` end without ever waiting.
        changes_at_once: ``allocate``, ``confirm`` and ``release`` would end so if called now.
    """

    lookups_at_once: bool = False

    @property
    def changes_at_once(self) -> bool:
        return False

    @abstractmethod
    async def initialize(self, namespace: str, rank: int, num_pages: int, world_size: int) -> None:
        """Make a rank's page file known; again with the same numbers it changes nothing.

        Raises:
            ConflictError: it is known with other numbers. A file is never grown or cut here:
                ``clear`` the namespace first, or use another one.
            MetadataError: numbers that make no sense, or go beyond the service's limits.
        """

    @abstractmethod
    async def allocate(
        self,
        namespace: str,
        rank: int,
        writer: str,
        keys: Sequence[str],
        lease_existing: bool = False,
    ) -> list[Allocation]:
        """Pages to write keys to, under a write lease; evicts what is needed.

        Idempotent: while the lease lasts, the same writer gets the same page, and a new lease.

        Args:
            lease_existing: take read leases of keys that are complete. API v1 needs it: its clients
                write them anew.
        """

    @abstractmethod
    async def confirm(
        self, namespace: str, rank: int, writer: str, written: Sequence[Written]
    ) -> list[bool]:
        """The pages are written. False: it was no longer this writer's page; nothing changed."""

    @abstractmethod
    async def release(
        self, namespace: str, rank: int, writer: str, written: Sequence[Written]
    ) -> int:
        """Give back pages that could not be written; how many were this writer's.

        With an empty key the page of a complete key counts too (API v1 wrote it anew): what it
        holds now is unknown, so the key is dropped.
        """

    @abstractmethod
    async def exists(self, namespace: str, keys: Sequence[str], lease: bool = False) -> list[bool]:
        """Which keys are complete; counts as use. ``lease`` takes read leases of those found."""

    @abstractmethod
    async def locations(
        self, namespace: str, rank: int, keys: Sequence[str]
    ) -> list[Location | None]:
        """Pages of complete keys, under a read lease from now; None for the others."""

    async def pages(self, namespace: str, rank: int, keys: Sequence[str]) -> list[int | None]:
        """``locations`` without generations, which API v1 does not know."""
        found = await self.locations(namespace, rank, keys)
        return [None if where is None else where.page for where in found]

    @abstractmethod
    async def touch(self, namespace: str, keys: Sequence[str]) -> int:
        """Renew the read leases of complete keys; how many there were."""

    @abstractmethod
    async def delete(self, namespace: str, keys: Sequence[str]) -> int:
        """Forget complete keys; how many there were. Pages that are read are freed after that."""

    @abstractmethod
    async def clear(self, namespace: str) -> None:
        """Forget the namespace: its keys, leases and page files. For when its files are gone."""

    @abstractmethod
    async def namespaces(self) -> list[str]:
        """Names of all, sorted."""

    @abstractmethod
    async def stats(self, namespace: str) -> NamespaceStats: ...

    @abstractmethod
    async def audit(self, namespace: str) -> AuditReport:
        """Look at every page. May take long: a second for a million pages."""

    @abstractmethod
    async def check(self) -> None:
        """
        Raises:
            StorageError: changes can't be made durable now.
        """

    @abstractmethod
    async def sweep(self) -> None:
        """Free what leases no longer hold; called every second or so. ``allocate`` does not wait
        for it."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was begun and release everything; idempotent."""
