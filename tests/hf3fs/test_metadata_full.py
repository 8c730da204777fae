"""Spec row H9: ten times a file's size goes through it. ``pytest -s`` shows what stays."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvloom.hf3fs.metadata.base import Status, Written
from kvloom.hf3fs.metadata.client import MetadataClient, NoAnswer
from tests.hf3fs.service import running

PAGES, BATCH, PROMPTS, SIZES = 1000, 50, 4, 10
LEASE_S = 0.2


def write(client: MetadataClient, keys: list[str]) -> int:
    """Save keys as an engine does; how often it had to ask again."""
    left, asked = keys, 0
    end = time.monotonic() + 20 * LEASE_S
    while left:
        assert time.monotonic() < end, "a save fails for ever"
        grants = client.allocate(0, left)
        assert not isinstance(grants, NoAnswer)
        pairs = list(zip(left, grants, strict=True))
        written = [
            Written(key, grant.page, grant.generation)
            for key, grant in pairs
            if grant.status == Status.WRITE
        ]
        assert client.confirm(0, written) == [True] * len(written)
        left = [key for key, grant in pairs if grant.status == Status.FULL]
        if left:
            asked += 1
            time.sleep(LEASE_S / 4)
    return asked


def hit_rate(client: MetadataClient, keys: list[str]) -> float:
    found = client.exists(keys)
    assert not isinstance(found, NoAnswer)
    return sum(found) / len(keys)


def test_ten_times_its_size_goes_through_a_file(tmp_path: Path) -> None:
    """Prompts that are asked again and again stay, those asked once go, oldest first."""
    table = Table(title=f"{PAGES} pages; {PROMPTS * BATCH} keys are read again and again")
    for column in ("written", "asked again", "hits: reread", "hits: last half", "hits: all before"):
        table.add_column(column, justify="right")
    for column in ("evicted", "of these unread", "unused, evicted last", "unused, oldest kept"):
        table.add_column(column, justify="right")
    popular = [[f"popular-{prompt}-{i}" for i in range(BATCH)] for prompt in range(PROMPTS)]
    once: list[list[str]] = []
    with running(tmp_path / "state.db", "--read-lease", str(LEASE_S)) as service:
        client = MetadataClient(service.url, "ns", "w", lookup_timeout_s=10.0, timeout_s=30.0)
        client.initialize(0, PAGES, 1)
        asked = sum(write(client, keys) for keys in popular)
        total = sum(len(keys) for keys in popular)
        reread = found = 0
        for size in range(1, SIZES + 1):
            while total < size * PAGES:
                once.append([f"once-{len(once)}-{i}" for i in range(BATCH)])
                asked += write(client, once[-1])
                total += BATCH
                where = client.locations(0, popular[len(once) % PROMPTS])
                assert not isinstance(where, NoAnswer)
                reread += len(where)
                found += len(where) - where.count(None)
            stats = client.stats()
            assert not isinstance(stats, NoAnswer)
            half = PAGES // 2 // BATCH
            last = hit_rate(client, [key for keys in once[-half:] for key in keys])
            before = [key for keys in once[: -2 * half] for key in keys]
            gone = hit_rate(client, before) if before else 1.0
            table.add_row(
                f"{size} x",
                str(asked),
                f"{found / reread:.1%}",
                f"{last:.1%}",
                f"{gone:.1%}" if before else "",
                str(stats.evicted),
                str(stats.evicted_unread),
                f"{stats.evicted_idle_s:.2f} s",
                f"{stats.least_recent_use_s:.2f} s",
            )
            assert (found, last) == (reread, 1.0)
            assert not before or gone < 0.05
        audit = client.audit()
        client.close()
    assert not isinstance(audit, NoAnswer)
    assert (audit.leaked, audit.twice, audit.allocated) == (0, 0, 0)
    assert audit.free + audit.confirmed == PAGES
    assert stats.evicted == SIZES * PAGES - audit.confirmed
    assert stats.evicted_unread == stats.evicted, "nothing that was read is evicted"
    assert stats.least_recent_use_s > 0
    Console(width=140).print(table)
