"""Hf3fsClient over files and over the stand-in for 3FS's rings (spec rows H2-H4, H8)."""

from __future__ import annotations

import ast
import errno
import inspect
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.hf3fs import client as client_module
from kvloom.hf3fs.client import GeometryError, Hf3fsClient
from kvloom.hf3fs.page import page_bytes, seal, verify
from kvloom.hf3fs.usrbio import UsrbioIO

from .usrbio_stand_in import Ioring, StandIn

PAGE = 4096
PAGES = 16


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    library = StandIn(tmp_path / "mount")
    monkeypatch.setattr(client_module, "load_library", lambda: library)
    return library


@pytest.fixture(params=["posix", "usrbio"])
def client(
    request: pytest.FixtureRequest, library: StandIn, tmp_path: Path
) -> Iterator[Hf3fsClient]:
    path = tmp_path / "mount" / "space" / "rank-0.pages"
    client = Hf3fsClient(str(path), PAGES * PAGE, PAGE, entries=4, io=request.param)
    assert client.io == request.param
    yield client
    client.close()
    client.close()
    assert client.batch_read([0], [tensor()]) == [-errno.EBADF]
    assert not library.registered
    assert library.alive == 0


def tensor(seed: int = 0, size: int = PAGE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def test_what_was_written_is_read(client: Hf3fsClient) -> None:
    offsets = [i * PAGE for i in (3, 0, 15, 7, 8, 9, 1)]  # more than the ring has entries
    written = [tensor(i) for i in range(7)]
    assert client.batch_write(offsets, written) == [PAGE] * 7
    client.flush()
    read = [torch.zeros(PAGE, dtype=torch.uint8) for _ in offsets]
    assert client.batch_read(offsets, read) == [PAGE] * 7
    assert all(torch.equal(a, b) for a, b in zip(read, written, strict=True))
    assert client.get_size() == PAGES * PAGE


def test_any_dtype_and_part_of_a_page(client: Hf3fsClient) -> None:
    values = torch.arange(96, dtype=torch.float32).reshape(2, 3, 16)
    assert client.batch_write([PAGE], [values]) == [values.nbytes]
    read = torch.empty_like(values)
    assert client.batch_read([PAGE], [read]) == [values.nbytes]
    assert torch.equal(read, values)


def test_a_write_waits_for_what_fills_its_tensors(client: Hf3fsClient) -> None:
    data = tensor(1)

    class Event:
        def synchronize(self) -> None:
            data.fill_(7)

    assert client.batch_write([0], [data], Event()) == [PAGE]
    read = torch.zeros(PAGE, dtype=torch.uint8)
    client.batch_read([0], [read])
    assert (read == 7).all()


def test_a_bad_argument_fails_that_entry_alone(client: Hf3fsClient) -> None:
    good = tensor(2)
    bad = [
        (-1, tensor()),
        (PAGES * PAGE - 1, tensor()),
        (0, tensor(size=PAGE + 1)),
        (0, torch.zeros(8, 8).t()),
        (0, torch.empty(0)),
    ]
    offsets = [PAGE, *(offset for offset, _ in bad), 2 * PAGE]
    results = client.batch_write(offsets, [good, *(data for _, data in bad), good])
    assert results == [PAGE, *[-errno.EINVAL] * len(bad), PAGE]
    assert client.batch_read([0, PAGE], [good]) == [-errno.EINVAL] * 2
    assert client.batch_read([2 * PAGE], [torch.empty_like(good)]) == [PAGE], "it lives on"


def test_reading_beyond_what_the_file_has_is_short(client: Hf3fsClient, tmp_path: Path) -> None:
    (path,) = tmp_path.rglob("*.pages")
    os.truncate(path, PAGE + 100)
    assert client.batch_read([PAGE], [tensor()]) == [100]


@pytest.mark.parametrize(("size", "page"), [(8 * PAGE, PAGE), (PAGES * PAGE, 2 * PAGE)])
def test_a_file_of_another_geometry_is_never_cut(tmp_path: Path, size: int, page: int) -> None:
    path = tmp_path / "rank-0.pages"
    first = Hf3fsClient(str(path), PAGES * PAGE, PAGE, entries=4, io="posix")
    first.batch_write([15 * PAGE], [tensor(5)])
    with pytest.raises(GeometryError, match="never cut"):
        Hf3fsClient(str(path), size, page, entries=4, io="posix")
    read = torch.zeros(PAGE, dtype=torch.uint8)
    assert first.batch_read([15 * PAGE], [read]) == [PAGE]
    assert torch.equal(read, tensor(5))
    first.close()


def test_auto_takes_the_rings_where_they_are_and_says_why(library: StandIn, tmp_path: Path) -> None:
    on_mount = Hf3fsClient(str(tmp_path / "mount" / "a"), PAGE, PAGE, entries=1)
    elsewhere = Hf3fsClient(str(tmp_path / "b"), PAGE, PAGE, entries=1)
    assert (on_mount.io, elsewhere.io) == ("usrbio", "posix")
    assert "3FS mount" in on_mount.why
    assert "3FS mount" in elsewhere.why
    with pytest.raises(OSError, match="3FS mount"):
        Hf3fsClient(str(tmp_path / "c"), PAGE, PAGE, entries=1, io="usrbio")
    on_mount.close()
    elsewhere.close()


class TestRings:
    """What rings can do to us."""

    @pytest.fixture
    def ring(self, library: StandIn, tmp_path: Path) -> Iterator[UsrbioIO]:
        path = tmp_path / "mount" / "file"
        path.parent.mkdir()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, PAGES * PAGE)
        ring = UsrbioIO(library, str(path), descriptor, bytes_per_page=PAGE, entries=4, wait_s=0.1)
        yield ring
        ring.close()
        os.close(descriptor)

    def test_errors_and_short_results_are_those_of_their_entries(
        self, ring: UsrbioIO, library: StandIn
    ) -> None:
        def answer(read: bool, offset: int, size: int) -> int | None:
            return {PAGE: -errno.EIO, 2 * PAGE: 17}.get(offset)

        library.answer = answer
        buffers = [memoryview(bytearray(PAGE)) for _ in range(3)]
        assert ring.read([0, PAGE, 2 * PAGE], buffers) == [PAGE, -errno.EIO, 17]
        assert ring.write([0, PAGE, 2 * PAGE], buffers) == [PAGE, -errno.EIO, 17]

    def test_a_full_ring_fails_what_found_no_room(self, ring: UsrbioIO, library: StandIn) -> None:
        ring.close()
        library.room = 2
        library.registered.add(ring._descriptor)
        buffers = [memoryview(bytearray(PAGE)) for _ in range(3)]
        assert ring.read([0, PAGE, 2 * PAGE], buffers) == [PAGE, PAGE, -errno.EAGAIN]

    def test_a_ring_that_does_not_answer_is_never_used_again(
        self, ring: UsrbioIO, library: StandIn
    ) -> None:
        made, library.mute = library.rings, True
        buffer = memoryview(bytearray(PAGE))
        assert ring.read([0], [buffer]) == [-errno.ETIMEDOUT]
        assert ring.read([0], [buffer]) == [-errno.ETIMEDOUT]
        library.mute = False
        assert ring.read([0], [buffer]) == [PAGE]
        assert library.rings == made + 2
        assert ring.write([0], [buffer]) == [PAGE], "the other ring was not touched"


def test_the_stand_in_has_the_published_signatures() -> None:
    """H4: against the source of ``hf3fs-py-usrbio`` on PyPI, which can't be built here."""
    try:
        releases = httpx.get("https://pypi.org/simple/hf3fs-py-usrbio/", timeout=20).text
        url = releases.split('href="')[1].split('"')[0].split("#")[0]
        package = io.BytesIO(httpx.get(url, timeout=20).content)
    except (httpx.HTTPError, IndexError) as error:
        pytest.skip(f"the published package can't be had: {error}")
    with tarfile.open(fileobj=package) as archive:
        name = next(name for name in archive.getnames() if name.endswith("hf3fs_fuse/io.py"))
        source = archive.extractfile(name)
        assert source is not None
        tree = ast.parse(source.read())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in ("make_iovec", "make_ioring"):
        published = functions[function].args
        ours = inspect.signature(getattr(StandIn, function)).parameters
        assert [argument.arg for argument in published.args] == list(ours)[1:]
        defaults = [ast.literal_eval(default) for default in published.defaults]
        assert defaults == [p.default for p in ours.values() if p.default is not p.empty]
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {"register_fd", "deregister_fd", "extract_mount_point"} <= imported
    rings = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ioring")
    methods = {node.name for node in rings.body if isinstance(node, ast.FunctionDef)}
    assert {"prepare", "submit", "wait"} <= methods & set(vars(Ioring))


class TestPage:
    @given(st.binary(min_size=1, max_size=9000), st.integers(0, 2**40), st.integers(0, 10**6))
    def test_any_flipped_bit_is_seen(self, payload: bytes, generation: int, where: int) -> None:
        page = bytearray(page_bytes(len(payload)))
        page[: len(payload)] = payload
        seal(memoryview(page), len(payload), "key", generation)
        assert len(page) % 4096 == 0
        assert verify(memoryview(page), len(payload), "key", generation)
        page[where % (len(payload) + 64)] ^= 1 << where % 8
        assert not verify(memoryview(page), len(payload), "key", generation)

    def test_another_key_or_generation_is_not_ours(self) -> None:
        page = memoryview(bytearray(page_bytes(100)))
        seal(page, 100, "key", 3)
        assert not verify(page, 100, "other", 3)
        assert not verify(page, 100, "key", 4)
        assert not verify(memoryview(bytearray(len(page))), 100, "key", 0)
