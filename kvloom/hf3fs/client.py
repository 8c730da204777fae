"""Hf3fsClient: pages of one file, in batches, by the best I/O there is (spec rows H2, H3)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from kvloom.hf3fs.page_io import PageIO, PosixIO
from kvloom.hf3fs.usrbio import UsrbioIO, load_library

IO = Literal["auto", "usrbio", "posix"]
_GEOMETRY = ".geometry"


class GeometryError(ValueError):
    """The page file exists with another geometry; it is left as it is."""


class Hf3fsClient:
    """Reads and writes pages of a page file; one thread at a time.

    The file is created at its full size, and never truncated: one that exists with another size or
    page size belongs to other settings, whose pages it may hold.

    Args:
        path: the page file; beside it ``<path>.geometry`` says what it was made for.
        size: of the file, in bytes.
        bytes_per_page: most bytes of one entry.
        entries: most entries that are under way at once.
        io: ``usrbio`` (3FS's rings), ``posix``, or ``auto``: usrbio where it can be used.

    Raises:
        GeometryError: the file exists with another geometry.
        OSError: it can't be opened or created; ``io="usrbio"`` and the path is on no 3FS mount.
        ImportError: ``io="usrbio"`` and the package ``hf3fs-py-usrbio`` can't be imported.
    """

    def __init__(
        self, path: str, size: int, bytes_per_page: int, entries: int, io: IO = "auto"
    ) -> None:
        self._size = size
        self._bytes_per_page = bytes_per_page
        self._descriptor = _open(Path(path), size, bytes_per_page)
        try:
            self._io, self.why = _choose(io, path, self._descriptor, bytes_per_page, entries)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._closed = False

    @property
    def io(self) -> str:
        """The I/O engine in use, ``usrbio`` or ``posix``; ``why`` says why that one."""
        return self._io.name

    def batch_read(self, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Fill CPU tensors from the file.

        Returns:
            Bytes read or a negative errno for each entry. A bad entry fails alone (-EINVAL).
        """
        return self._batch(self._io.read, offsets, tensors)

    def batch_write(
        self, offsets: Sequence[int], tensors: Sequence[torch.Tensor], event: Any = None
    ) -> list[int]:
        """Write CPU tensors to the file.

        Args:
            event: what fills the tensors; ``event.synchronize()`` is waited for.

        Returns:
            Bytes written or a negative errno for each entry. A bad entry fails alone (-EINVAL).
        """
        if event is not None:
            event.synchronize()
        return self._batch(self._io.write, offsets, tensors)

    def flush(self) -> None:
        """Make what was written durable.

        Raises:
            OSError: the file system could not.
        """
        if not self._closed:
            os.fsync(self._descriptor)

    def get_size(self) -> int:
        return self._size

    def close(self) -> None:
        """Idempotent; later batches answer -EBADF."""
        if not self._closed:
            self._closed = True
            self._io.close()
            os.close(self._descriptor)

    def _batch(
        self, move: Any, offsets: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> list[int]:
        if len(offsets) != len(tensors):
            return [-errno.EINVAL] * max(len(offsets), len(tensors))
        if self._closed:
            return [-errno.EBADF] * len(offsets)
        results = [-errno.EINVAL] * len(offsets)
        good = [i for i, tensor in enumerate(tensors) if self._allows(offsets[i], tensor)]
        moved = move([offsets[i] for i in good], [_bytes(tensors[i]) for i in good])
        for entry, result in zip(good, moved, strict=True):
            results[entry] = result
        return results

    def _allows(self, offset: int, tensor: torch.Tensor) -> bool:
        size = tensor.nbytes
        return (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and 0 < size <= self._bytes_per_page
            and 0 <= offset <= self._size - size
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    whole: Any = tensor.view(torch.uint8).view(-1).numpy()
    return memoryview(whole)


def _open(path: Path, size: int, bytes_per_page: int) -> int:
    if not 0 < bytes_per_page <= size:
        raise GeometryError(f"{path}: a file of {size} bytes has no page of {bytes_per_page}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    geometry = {"size": size, "bytes_per_page": bytes_per_page}
    _check_geometry(path.with_name(path.name + _GEOMETRY), geometry)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(descriptor).st_size
        if found == 0:
            os.ftruncate(descriptor, size)  # grows: the file is empty
        elif found != size:
            raise GeometryError(
                f"{path} has {found} bytes, the settings ask for {size}: give the settings it was "
                "made with, or another hf3fs_storage_path; it is never cut"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_geometry(path: Path, geometry: dict[str, int]) -> None:
    """Write down what the file is made for; whoever comes first, says."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    temporary.write_text(json.dumps(geometry))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    try:
        known = json.loads(path.read_text())
    except ValueError as error:
        raise GeometryError(f"{path} is damaged ({error}): remove it") from error
    if known != geometry:
        raise GeometryError(
            f"{path} says {known}, the settings ask for {geometry}: give the settings it was made "
            "with, or another hf3fs_storage_path; the file is never cut"
        )


def _choose(
    io: IO, path: str, descriptor: int, bytes_per_page: int, entries: int
) -> tuple[PageIO, str]:
    if io == "posix":
        return PosixIO(descriptor), "hf3fs_io says so"
    try:
        usrbio = UsrbioIO(
            load_library(), path, descriptor, bytes_per_page=bytes_per_page, entries=entries
        )
    except (ImportError, OSError) as error:
        if io == "usrbio":
            raise
        return PosixIO(descriptor), f"no USRBIO: {error}"
    return usrbio, "hf3fs_io says so" if io == "usrbio" else f"{path} is on a 3FS mount"
