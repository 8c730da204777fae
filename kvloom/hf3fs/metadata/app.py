"""The HTTP app: who may ask, how much, and what is answered when a request can't be done.

The path of a request: token, content type and size are checked, the path finds an ``Endpoint``, its
body is decoded into the endpoint's type, the handler asks the backend, and the answer is encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvloom import __version__
from kvloom.hf3fs.metadata.base import (
    ConflictError,
    Limits,
    MetadataError,
    MetadataStore,
    StorageError,
    UnknownNamespaceError,
)
from kvloom.hf3fs.metadata.endpoints import ENDPOINTS, Call, Endpoint, NoBody, Problem, openapi

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_SWEEP_S = 1.0
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a service is run.

    Attributes:
        token: the bearer token that every request but ``/healthz`` must carry; None: none.
        max_body: bytes of a request's body.
        world_size_v1: world size of the default namespace; v1 clients don't tell theirs.
        request_s: seconds from a request's first byte to its last.
        keep_alive_s: seconds that a connection may be without a request.
        max_connections: at a time; more are closed at once.
    """

    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    max_body: int = 8 * 1024 * 1024
    world_size_v1: int = 1
    request_s: float = 30.0
    keep_alive_s: float = 75.0
    max_connections: int = 4096


class RequestError(Exception):
    """A request that is refused before it reaches the backend."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Service:
    """A backend behind HTTP; ``app`` is the ASGI application, whose end closes the backend."""

    def __init__(self, store: MetadataStore, settings: Settings) -> None:
        self.store = store
        self.settings = settings
        self.metrics = _Metrics()
        self._token = None if settings.token is None else b"Bearer " + settings.token.encode()
        routes = [Route(e.path, _EndpointApp(self, e), methods=[e.method]) for e in ENDPOINTS]
        routes += [
            Route("/healthz", self._health),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._openapi),
        ]
        starlette = Starlette(routes=routes, lifespan=self._lifespan)
        self.app: ASGIApp = _Guard(self, starlette)

    def check_headers(self, path: str, method: str, headers: Headers) -> None:
        """
        Raises:
            RequestError: the token is missing or wrong, or the body is too long or not JSON.
        """
        token, length, kind, host = b"", b"0", b"", b""
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"content-type":
                kind = value
            elif name == b"authorization":
                token = value
            elif name == b"host":
                host = value
        if self._token is None:
            if not _is_local(host):
                raise RequestError(403, "without a token the host is an IP address or localhost")
        elif path != "/healthz" and not hmac.compare_digest(token, self._token):
            raise RequestError(401, "this service needs its token: Authorization: Bearer ...")
        if not length.isdigit() or int(length) > self.settings.max_body:
            raise RequestError(413, f"a body may have {self.settings.max_body} bytes")
        # A web page can make a browser on this machine post plain text, but not JSON.
        if kind != b"application/json":
            kind = kind.partition(b";")[0].strip().lower()
        if method == "POST" and kind != b"application/json" and length != b"0":
            raise RequestError(415, "a body is JSON: Content-Type: application/json")

    async def answer(
        self, endpoint: Endpoint, params: dict[str, str], client: str, body: bytes
    ) -> tuple[int, bytes]:
        """(status, JSON) of a request; never raises."""
        began = time.perf_counter()
        try:
            request = _decode(endpoint, body)
            call = Call(
                self.store,
                self.settings.limits,
                self.settings.world_size_v1,
                params.get("namespace", ""),
                _rank(params),
                client,
            )
            answer = await endpoint.handler(call, request)
            status, content = (204, b"") if answer is None else (200, _encode(answer))
        except (RequestError, MetadataError) as error:
            status, content = _status(error), _encode(Problem(str(error)))
        except Exception:
            logger.exception("kvloom: %s failed", endpoint.name)
            status, content = 500, _encode(Problem("the service failed; its log says why"))
        self.metrics.count(endpoint.name, status, time.perf_counter() - began)
        return status, content

    async def _health(self, request: Request) -> Response:
        try:
            await self.store.check()
        except StorageError as error:
            return JSONResponse({"status": "failing", "detail": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(await self.metrics.show(self.store), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(__version__))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await self.store.close()

    async def _sweep(self) -> None:
        away = False
        while True:
            try:
                await self.store.sweep()
                away = False
            except StorageError as error:
                if not away:
                    logger.warning("kvloom: %s; requests are refused until that ends", error)
                away = True
            except Exception:
                logger.exception("kvloom: ended leases could not be freed")
            await asyncio.sleep(_SWEEP_S)


@lru_cache(64)
def _is_local(host: bytes) -> bool:
    """Whether a ``Host`` header is an IP address or localhost, or there is none.

    A name's owner can let it stand for 127.0.0.1 while a browser shows its page (DNS rebinding).
    """
    name = host.decode("latin-1").lower().removesuffix(".")
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{name}").hostname or ""
        return name in ("", "localhost") or bool(ipaddress.ip_address(name))
    return False


_DECODERS = {e.name: msgspec.json.Decoder(e.request) for e in ENDPOINTS if e.request is not NoBody}


def _decode(endpoint: Endpoint, body: bytes) -> Any:
    if endpoint.request is NoBody:
        return None
    try:
        return _DECODERS[endpoint.name].decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"not JSON: {error}") from None


def _rank(params: dict[str, str]) -> int:
    text = params.get("rank", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise RequestError(422, f"rank {text[:50]!r}: a number")
    return int(text)


def _status(error: RequestError | MetadataError) -> int:
    match error:
        case RequestError():
            return error.status
        case UnknownNamespaceError():
            return 404
        case ConflictError():
            return 409
        case StorageError():
            return 503
    return 422


async def _send(send: Send, status: int, content: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), *more]
    if status != 204:
        headers.append((b"content-length", b"%d" % len(content)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class _Guard:
    """Checks each request's headers before anything else happens."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        self._service = service
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._service.check_headers(scope["path"], scope["method"], scope["headers"])
            except RequestError as error:
                more = [(b"connection", b"close")]
                if error.status == 401:
                    more.append((b"www-authenticate", b"Bearer"))
                await _send(send, error.status, _encode(Problem(str(error))), *more)
                return
        await self._app(scope, receive, send)


class _EndpointApp:
    """An endpoint as an ASGI application."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._service.settings.max_body
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > limit:  # a chunked body tells no length
                problem = _encode(Problem(f"a body may have {limit} bytes"))
                await _send(send, 413, problem, (b"connection", b"close"))
                return
        client = scope["client"][0] if scope.get("client") else ""
        status, content = await self._service.answer(
            self._endpoint, scope["path_params"], client, b"".join(parts)
        )
        await _send(send, status, content)


class _Metrics(Collector):
    """Prometheus metrics: requests as they come, namespaces when somebody asks.

    A request is two list entries; prometheus_client's own counters would take a tenth of its time.
    """

    def __init__(self) -> None:
        self._times = {e.name: [0] * (len(_BUCKETS) + 1) for e in ENDPOINTS}
        self._seconds = dict.fromkeys(self._times, 0.0)
        self._answers = Counter({(name, 200): 0 for name in self._times})

    def count(self, name: str, status: int, seconds: float) -> None:
        self._times[name][bisect_left(_BUCKETS, seconds)] += 1
        self._seconds[name] += seconds
        self._answers[name, 200 if status < 300 else status] += 1

    def collect(self) -> Iterator[Metric]:
        times = HistogramMetricFamily(
            "kvloom_metadata_request_seconds", "Time in the service.", labels=["operation"]
        )
        bounds = [*map(str, _BUCKETS), "+Inf"]
        for name, counts in self._times.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            times.add_metric([name], buckets, self._seconds[name])
        yield times
        answers = CounterMetricFamily(
            "kvloom_metadata_requests",
            "Requests by their HTTP status.",
            labels=["operation", "status"],
        )
        for (name, status), count in self._answers.items():
            answers.add_metric([name, "2xx" if status == 200 else str(status)], count)
        yield answers

    async def show(self, store: MetadataStore) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        labels = ["namespace", "rank", "state"]
        pages = Gauge("kvloom_metadata_pages", "Pages by state.", labels, registry=registry)
        gauges = {
            name: Gauge(f"kvloom_metadata_{name}", text, ["namespace"], registry=registry)
            for name, text in _GAUGES.items()
        }
        for namespace in await store.namespaces():
            stats = await store.stats(namespace)
            for name, gauge in gauges.items():
                gauge.labels(namespace).set(getattr(stats, name))
            for rank, counts in enumerate(stats.ranks):
                states = {} if counts is None else msgspec.structs.asdict(counts)
                for state, count in states.items():
                    if state != "pages":
                        pages.labels(namespace, str(rank), state).set(count)
        return generate_latest(registry)


_GAUGES = {
    "complete": "Keys that can be read.",
    "incomplete": "Keys that are not written by all ranks.",
    "hits": "Keys whose location was asked and known.",
    "misses": "Keys whose location was asked and not known.",
    "evicted": "Keys evicted.",
    "evicted_unread": "Keys evicted that nobody ever read.",
    "evicted_idle_s": "Seconds since its last use of the key evicted last.",
    "least_recent_use_s": "Seconds since the least recently used key was used.",
    "expired": "Pages that came back because a write lease ended.",
    "refused": "Confirmations of pages that were no longer the writer's.",
}
