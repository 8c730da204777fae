"""What the service is asked and answers over HTTP: API v1 and v2 as one table of endpoints.

v1 is what vLLM's built-in client speaks, a view of the namespace ``default``. It knows no writers,
leases or generations, so the service fills them in: the writer is the client's host, and a page
that v1 is told of, to read it or to write it anew, is under a read lease. v2 is the whole contract
(``kvloom.hf3fs.metadata.base``), for any namespace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvloom.hf3fs.metadata.base import (
    DEFAULT_NAMESPACE,
    MAX_KEY_LENGTH,
    Allocation,
    AuditReport,
    Limits,
    Location,
    MetadataError,
    MetadataStore,
    NamespaceStats,
    UnknownNamespaceError,
    Written,
)

MAX_KEYS = 65_536  # a prompt of a million tokens in blocks of 16

_KeyName = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_LENGTH)]
_Keys = Annotated[list[_KeyName], Meta(max_length=MAX_KEYS)]
_Number = Annotated[int, Meta(ge=0, le=2**53)]
_Writer = Annotated[str, Meta(min_length=1, max_length=128)]


class NoBody(Struct, forbid_unknown_fields=True):
    pass


# v1


class InitializeV1(Struct):
    num_pages: int = 0
    role: Literal["worker", "scheduler"] = "worker"


class AllocateV1(Struct):
    rank: _Number
    keys: Annotated[list[tuple[_KeyName, Any]], Meta(max_length=MAX_KEYS)]


class ConfirmV1(Struct):
    rank: _Number
    confirmations: Annotated[list[Written], Meta(max_length=MAX_KEYS)]
    pages_to_release: Annotated[list[_Number], Meta(max_length=MAX_KEYS)] = []


class ExistsV1(Struct):
    keys: _Keys


class LocationsV1(Struct):
    rank: _Number
    keys: _Keys


class Message(Struct):
    message: str


class PagesV1(Struct):
    rank: int
    results: list[tuple[str, int]]


class LocationsAnswerV1(Struct):
    locations: list[int | None]


# v2


class Initialize(Struct, forbid_unknown_fields=True):
    num_pages: int
    world_size: int


class Allocate(Struct, forbid_unknown_fields=True):
    rank: _Number
    writer: _Writer
    keys: _Keys


class Pages(Struct, forbid_unknown_fields=True):
    rank: _Number
    writer: _Writer
    written: Annotated[list[Written], Meta(max_length=MAX_KEYS)]


class Exists(Struct, forbid_unknown_fields=True):
    keys: _Keys
    lease: bool = False


class Locations(Struct, forbid_unknown_fields=True):
    rank: _Number
    keys: _Keys


class Keys(Struct, forbid_unknown_fields=True):
    keys: _Keys


class Leases(Struct):
    write_lease_s: float
    read_lease_s: float


class Allocations(Struct):
    results: list[Allocation]
    lease_s: float


class Confirmed(Struct):
    confirmed: list[bool]


class Released(Struct):
    released: int


class Existing(Struct):
    exists: list[bool]


class Located(Struct):
    locations: list[Location | None]
    lease_s: float


class Touched(Struct):
    touched: int
    lease_s: float


class Deleted(Struct):
    deleted: int


class Names(Struct):
    namespaces: list[str]


class Problem(Struct):
    detail: str


@dataclass(frozen=True, slots=True)
class Call:
    """A request beside its body: what the path names, and who asks."""

    store: MetadataStore
    limits: Limits
    world_size_v1: int
    namespace: str
    rank: int
    client: str


Handler = Callable[[Call, Any], Awaitable[Struct | None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path. An answer of None is "204 No Content".

    Attributes:
        kind: "lookup" changes no page; "change" is one of those engines make all the time.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    name: str
    handler: Handler
    request: type[Struct]
    answer: type[Struct] | None
    kind: Literal["lookup", "change", ""] = ""

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip()


def _writer_v1(call: Call) -> str:
    # Ports change when a client connects anew to ask again; a host's engines share its pages.
    return f"v1/{call.client}"


async def _initialize_v1(call: Call, body: InitializeV1) -> Message:
    """Make a rank's page file known; nothing for role "scheduler"."""
    if body.role == "scheduler":
        return Message("a scheduler needs no initialization")
    await call.store.initialize(DEFAULT_NAMESPACE, call.rank, body.num_pages, call.world_size_v1)
    return Message(f"rank {call.rank} has {body.num_pages} pages")


async def _allocate_v1(call: Call, body: AllocateV1) -> PagesV1:
    """Pages to write keys to; -1 where there is none to be had now."""
    keys = [key for key, _ in body.keys]
    answers = await call.store.allocate(
        DEFAULT_NAMESPACE, body.rank, _writer_v1(call), keys, lease_existing=True
    )
    pages = dict(zip(keys, (answer.page for answer in answers), strict=True))
    return PagesV1(body.rank, list(pages.items()))


async def _confirm_v1(call: Call, body: ConfirmV1) -> None:
    """Pages that are written, and pages to take back."""
    writer = _writer_v1(call)
    if body.confirmations:
        await call.store.confirm(DEFAULT_NAMESPACE, body.rank, writer, body.confirmations)
    if body.pages_to_release:
        pages = [Written("", page) for page in body.pages_to_release]
        await call.store.release(DEFAULT_NAMESPACE, body.rank, writer, pages)


async def _exists_v1(call: Call, body: ExistsV1) -> Existing:
    """Which keys are complete: written by all ranks."""
    try:
        return Existing(await call.store.exists(DEFAULT_NAMESPACE, body.keys))
    except UnknownNamespaceError:
        # The scheduler may ask before the first worker has initialized.
        return Existing([False] * len(body.keys))


async def _locations_v1(call: Call, body: LocationsV1) -> LocationsAnswerV1:
    """Pages of complete keys of a rank; null for the others."""
    return LocationsAnswerV1(await call.store.pages(DEFAULT_NAMESPACE, body.rank, body.keys))


async def _clear_v1(call: Call, _: NoBody) -> None:
    """Forget all keys and page files of the default namespace."""
    with contextlib.suppress(UnknownNamespaceError):
        await call.store.clear(DEFAULT_NAMESPACE)


async def _initialize(call: Call, body: Initialize) -> Leases:
    """Make a rank's page file known, with its pages and the size of its world."""
    await call.store.initialize(call.namespace, call.rank, body.num_pages, body.world_size)
    return Leases(call.limits.write_lease_s, call.limits.read_lease_s)


async def _allocate(call: Call, body: Allocate) -> Allocations:
    """Pages to write keys to, under a write lease: [status, page, generation] for each key."""
    answers = await call.store.allocate(call.namespace, body.rank, body.writer, body.keys)
    return Allocations(answers, call.limits.write_lease_s)


async def _confirm(call: Call, body: Pages) -> Confirmed:
    """Pages that are written; false for those that were no longer the writer's."""
    return Confirmed(await call.store.confirm(call.namespace, body.rank, body.writer, body.written))


async def _release(call: Call, body: Pages) -> Released:
    """Pages that could not be written are given back."""
    if not all(item.key for item in body.written):
        raise MetadataError("written: a key may not be empty")
    return Released(await call.store.release(call.namespace, body.rank, body.writer, body.written))


async def _exists(call: Call, body: Exists) -> Existing:
    """Which keys are complete; with "lease" those found are kept for a read lease."""
    return Existing(await call.store.exists(call.namespace, body.keys, body.lease))


async def _locations(call: Call, body: Locations) -> Located:
    """[page, generation] of complete keys, under a read lease; null for the others."""
    found = await call.store.locations(call.namespace, body.rank, body.keys)
    return Located(found, call.limits.read_lease_s)


async def _touch(call: Call, body: Keys) -> Touched:
    """Renew the read leases of complete keys."""
    return Touched(await call.store.touch(call.namespace, body.keys), call.limits.read_lease_s)


async def _delete(call: Call, body: Keys) -> Deleted:
    """Forget complete keys."""
    return Deleted(await call.store.delete(call.namespace, body.keys))


async def _clear(call: Call, _: NoBody) -> None:
    """Forget a namespace: keys, leases and page files."""
    await call.store.clear(call.namespace)


async def _namespaces(call: Call, _: NoBody) -> Names:
    """Names of all namespaces."""
    return Names(await call.store.namespaces())


async def _stats(call: Call, _: NoBody) -> NamespaceStats:
    """A namespace in numbers: pages by state, hits, evictions, ages."""
    return await call.store.stats(call.namespace)


async def _audit(call: Call, _: NoBody) -> AuditReport:
    """Look at every page of a namespace and count; may take a second for a million pages."""
    return await call.store.audit(call.namespace)


_V2 = "/v2/namespaces/{namespace}"

ENDPOINTS = (
    Endpoint(
        "POST", "/rank/{rank}/initialize", "v1.initialize", _initialize_v1, InitializeV1, Message
    ),
    Endpoint(
        "POST", "/keys/batch_allocate", "v1.allocate", _allocate_v1, AllocateV1, PagesV1, "change"
    ),
    Endpoint("POST", "/keys/confirm_write", "v1.confirm", _confirm_v1, ConfirmV1, None, "change"),
    Endpoint("POST", "/keys/batch_exists", "v1.exists", _exists_v1, ExistsV1, Existing, "lookup"),
    Endpoint(
        "POST",
        "/keys/get_locations",
        "v1.locations",
        _locations_v1,
        LocationsV1,
        LocationsAnswerV1,
        "lookup",
    ),
    Endpoint("POST", "/clear", "v1.clear", _clear_v1, NoBody, None),
    Endpoint(
        "POST", f"{_V2}/ranks/{{rank}}/initialize", "initialize", _initialize, Initialize, Leases
    ),
    Endpoint("POST", f"{_V2}/allocate", "allocate", _allocate, Allocate, Allocations, "change"),
    Endpoint("POST", f"{_V2}/confirm", "confirm", _confirm, Pages, Confirmed, "change"),
    Endpoint("POST", f"{_V2}/release", "release", _release, Pages, Released, "change"),
    Endpoint("POST", f"{_V2}/exists", "exists", _exists, Exists, Existing, "lookup"),
    Endpoint("POST", f"{_V2}/locations", "locations", _locations, Locations, Located, "lookup"),
    Endpoint("POST", f"{_V2}/touch", "touch", _touch, Keys, Touched, "lookup"),
    Endpoint("POST", f"{_V2}/delete", "delete", _delete, Keys, Deleted),
    Endpoint("DELETE", _V2, "clear", _clear, NoBody, None),
    Endpoint("GET", f"{_V2}/stats", "stats", _stats, NoBody, NamespaceStats),
    Endpoint("GET", f"{_V2}/audit", "audit", _audit, NoBody, AuditReport),
    Endpoint("GET", "/v2/namespaces", "namespaces", _namespaces, NoBody, Names),
)


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description of the endpoints, from their types."""
    types = {each for e in ENDPOINTS for each in (e.request, e.answer) if each is not None}
    ordered = sorted(types | {Problem}, key=lambda each: each.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    of = dict(zip(ordered, schemas, strict=True))

    def content(of_type: type[Struct]) -> dict[str, Any]:
        return {"application/json": {"schema": of[of_type]}}

    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        answers: dict[str, Any] = {
            "4XX": {"description": "The request can't be done.", "content": content(Problem)},
            "503": {"description": "Changes can't be stored now.", "content": content(Problem)},
        }
        if endpoint.answer is None:
            answers["204"] = {"description": "Done."}
        else:
            answers["200"] = {"description": "Done.", "content": content(endpoint.answer)}
        about: dict[str, Any] = {
            "operationId": endpoint.name,
            "summary": endpoint.summary,
            "parameters": [
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "schema": {"type": "integer" if name == "rank" else "string"},
                }
                for name in ("namespace", "rank")
                if f"{{{name}}}" in endpoint.path
            ],
            "responses": answers,
        }
        if endpoint.request is not NoBody:
            about["requestBody"] = {"required": True, "content": content(endpoint.request)}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = about
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvloom metadata service", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
