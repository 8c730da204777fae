"""Looking at a store directory from outside, while engines use it (spec row S12).

All that is needed lies in the files: nothing is locked, and what vanishes meanwhile is no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvloom.store.block_file import Scratch, opened, read_header, read_stored
from kvloom.store.block_format import BadBlockError, StoredHeader
from kvloom.store.layout import BlockFile, Listing


@dataclass
class Contents:
    """What lies in one namespace.

    Attributes:
        blocks, size: files of blocks and their bytes.
        payload: bytes of KV that they hold, before any compression.
        tokens: tokens of all of them.
        blended: blocks whose KV was computed on top of a blend; all others are exact.
        unreadable: blocks whose header is damaged, or can't be read.
        oldest_ns, newest_ns: when the first and the last block were written.
        used_ns: when one was used last.
    """

    blocks: int = 0
    size: int = 0
    payload: int = 0
    tokens: int = 0
    blended: int = 0
    unreadable: int = 0
    oldest_ns: int = 0
    newest_ns: int = 0
    used_ns: int = 0


@dataclass(frozen=True)
class Bad:
    """A block that is not what it should be, and what is wrong with it."""

    path: str
    problem: str


@dataclass
class Verified:
    """Outcome of reading blocks from end to end."""

    blocks: int = 0
    size: int = 0
    bad: list[Bad] = field(default_factory=list)


def survey(blocks: Iterable[BlockFile]) -> dict[str, Contents]:
    """Contents by namespace; reads the headers."""
    found: dict[str, Contents] = {}
    for block in blocks:
        contents = found.setdefault(block.namespace, Contents(oldest_ns=block.written_ns))
        try:
            with opened(block.path) as descriptor:
                header = read_header(descriptor, block.namespace, block.key).block
        except FileNotFoundError:
            continue
        except (OSError, BadBlockError):
            contents.unreadable += 1
        else:
            contents.payload += header.payload_size
            contents.tokens += len(header.token_ids)
            contents.blended += header.generation > 0
        contents.blocks += 1
        contents.size += block.size
        contents.oldest_ns = min(contents.oldest_ns, block.written_ns)
        contents.newest_ns = max(contents.newest_ns, block.written_ns)
        contents.used_ns = max(contents.used_ns, block.used_ns)
    return found


def verify(blocks: Iterable[BlockFile]) -> Verified:
    """Read every block from end to end and check all its checksums."""
    verified = Verified()
    for block in blocks:
        try:
            stored = check(block)
        except FileNotFoundError:
            continue
        except (OSError, BadBlockError) as error:
            verified.bad.append(Bad(block.path, str(error)))
        else:
            verified.size += stored.file_size
        verified.blocks += 1
    return verified


def check(block: BlockFile) -> StoredHeader:
    """The header of a block that is whole and right.

    Raises:
        BadBlockError: it is damaged.
        OSError: it can't be read, or (FileNotFoundError) is gone.
    """
    scratch = Scratch()
    with opened(block.path) as descriptor:
        stored = read_header(descriptor, block.namespace, block.key)
        for _ in read_stored(descriptor, stored, 0, len(stored.sizes), scratch):
            pass
    return stored


def listed(root: Path, namespace: str | None) -> Iterator[BlockFile]:
    """Files of blocks of one namespace or of all."""
    return (b for b in Listing(root).blocks if namespace in (None, b.namespace))
