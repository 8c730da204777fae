"""The test suite that every metadata backend passes (spec rows H6-H10).

    class TestMyBackend(MetadataContract):
        def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
            return MyBackend(...)

``make_store`` is called again on the same folder for a restart: what was answered must be there.
Needs pytest and anyio, which the ``dev`` extra brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvloom.hf3fs.metadata.base import (
    ConflictError,
    Limits,
    Location,
    MetadataError,
    MetadataStore,
    Status,
    UnknownNamespaceError,
    Written,
)

NS = "contract"
LIMITS = Limits(write_lease_s=1.0, read_lease_s=0.5, max_pages=10_000, max_namespaces=4)
LONG = Limits(write_lease_s=60.0, read_lease_s=60.0, max_pages=10_000, max_namespaces=4)


def names(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


async def save(
    store: MetadataStore, keys: Sequence[str], rank: int = 0, writer: str = "w"
) -> list[Location]:
    """Write keys as an engine does; all must be granted."""
    answers = await store.allocate(NS, rank, writer, keys)
    assert {answer.status for answer in answers} <= {Status.WRITE}
    written = [
        Written(key, answer.page, answer.generation)
        for key, answer in zip(keys, answers, strict=True)
    ]
    assert await store.confirm(NS, rank, writer, written) == [True] * len(keys)
    return [Location(item.page, item.generation) for item in written]


class MetadataContract:
    """Override ``make_store``."""

    def make_store(self, folder: Path, limits: Limits) -> MetadataStore:
        raise NotImplementedError

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[MetadataStore]:
        store = self.make_store(tmp_path, LIMITS)
        yield store
        await store.close()

    @pytest.fixture
    async def one(self, store: MetadataStore) -> MetadataStore:
        """One rank of 16 pages."""
        await store.initialize(NS, 0, 16, 1)
        return store

    # Keys and worlds

    @pytest.mark.anyio
    async def test_a_confirmed_key_is_found_where_it_was_written(self, one: MetadataStore) -> None:
        where = await save(one, names(5))
        assert len({location.page for location in where}) == 5
        assert len({location.generation for location in where}) == 5
        assert await one.exists(NS, ["k3", "no", "k0"]) == [True, False, True]
        assert await one.locations(NS, 0, ["k3", "no", "k0"]) == [where[3], None, where[0]]

    @pytest.mark.anyio
    async def test_an_allocated_key_is_not_there_yet(self, one: MetadataStore) -> None:
        await one.allocate(NS, 0, "w", ["k"])
        assert await one.exists(NS, ["k"]) == [False]
        assert await one.locations(NS, 0, ["k"]) == [None]

    @pytest.mark.anyio
    async def test_a_key_is_complete_when_every_rank_of_its_world_confirmed(
        self, store: MetadataStore
    ) -> None:
        for rank in (0, 2, 1):
            await store.initialize(NS, rank, 8, 3)
        for rank in (1, 0, 2):
            assert await store.exists(NS, ["k"]) == [False]
            await save(store, ["k"], rank)
        assert await store.exists(NS, ["k"]) == [True]
        pages = [(await store.locations(NS, rank, ["k"]))[0] for rank in range(3)]
        assert None not in pages

    @pytest.mark.anyio
    async def test_ranks_that_have_not_registered_count_too(self, store: MetadataStore) -> None:
        await store.initialize(NS, 0, 8, 2)
        await save(store, ["k"])
        assert await store.exists(NS, ["k"]) == [False]
        await store.initialize(NS, 1, 8, 2)
        assert await store.exists(NS, ["k"]) == [False]

    @pytest.mark.anyio
    async def test_initialize_again_changes_nothing_and_other_numbers_are_refused(
        self, one: MetadataStore
    ) -> None:
        where = await save(one, ["k"])
        await one.initialize(NS, 0, 16, 1)
        assert await one.locations(NS, 0, ["k"]) == where
        for pages, world in ((8, 1), (32, 1), (16, 2)):
            with pytest.raises(ConflictError, match=r"16 pages|world size 1"):
                await one.initialize(NS, 0, pages, world)
        assert await one.locations(NS, 0, ["k"]) == where

    @pytest.mark.anyio
    @pytest.mark.parametrize(
        ("rank", "pages", "world"),
        [(0, 0, 1), (0, -1, 1), (1, 8, 1), (-1, 8, 1), (0, 8, 0), (0, 10**12, 1), (0, 8, 10**9)],
    )
    async def test_numbers_that_make_no_sense_are_refused(
        self, store: MetadataStore, rank: int, pages: int, world: int
    ) -> None:
        with pytest.raises(MetadataError):
            await store.initialize(NS, rank, pages, world)
        assert await store.namespaces() == []

    @pytest.mark.anyio
    async def test_namespaces_are_bounded_and_know_nothing_of_each_other(
        self, store: MetadataStore
    ) -> None:
        for i in range(LIMITS.max_namespaces):
            await store.initialize(f"n{i}", 0, 8, 1)
        with pytest.raises(MetadataError, match="limit"):
            await store.initialize("more", 0, 8, 1)
        await store.allocate("n0", 0, "w", ["k"])
        assert (await store.audit("n0")).allocated == 1
        assert (await store.audit("n1")).allocated == 0
        assert await store.namespaces() == ["n0", "n1", "n2", "n3"]

    @pytest.mark.anyio
    async def test_unknown_namespaces_and_ranks_are_an_error(self, one: MetadataStore) -> None:
        with pytest.raises(UnknownNamespaceError):
            await one.exists("nobody", ["k"])
        with pytest.raises(UnknownNamespaceError):
            await one.allocate("nobody", 0, "w", ["k"])
        for rank in (1, -1, 99):
            with pytest.raises(UnknownNamespaceError):
                await one.allocate(NS, rank, "w", ["k"])
            with pytest.raises(UnknownNamespaceError):
                await one.locations(NS, rank, ["k"])

    # Writers

    @pytest.mark.anyio
    async def test_asking_again_gives_the_same_page(self, one: MetadataStore) -> None:
        first = await one.allocate(NS, 0, "w", names(3))
        assert await one.allocate(NS, 0, "w", names(3)) == first
        assert (await one.audit(NS)).allocated == 3

    @pytest.mark.anyio
    async def test_a_key_twice_in_a_request_has_one_page(self, one: MetadataStore) -> None:
        first, second = await one.allocate(NS, 0, "w", ["k", "k"])
        assert first == second
        assert (await one.audit(NS)).allocated == 1

    @pytest.mark.anyio
    async def test_of_two_writers_one_wins_and_no_page_leaks(self, one: MetadataStore) -> None:
        answers = await asyncio.gather(*(one.allocate(NS, 0, f"w{i}", ["k"]) for i in range(8)))
        statuses = [answer[0].status for answer in answers]
        assert sorted(statuses) == [Status.BUSY] * 7 + [Status.WRITE]
        winner = statuses.index(Status.WRITE)
        grant = answers[winner][0]
        item = Written("k", grant.page, grant.generation)
        assert await one.confirm(NS, 0, f"w{(winner + 1) % 8}", [item]) == [False]
        assert await one.exists(NS, ["k"]) == [False]
        assert await one.confirm(NS, 0, f"w{winner}", [item]) == [True]
        again = await one.allocate(NS, 0, "other", ["k"])
        assert [(a.status, a.page) for a in again] == [(Status.EXISTS, grant.page)]
        audit = await one.audit(NS)
        assert (audit.free, audit.allocated, audit.confirmed, audit.leaked) == (15, 0, 1, 0)

    @pytest.mark.anyio
    async def test_confirming_again_is_true_and_changes_nothing(self, one: MetadataStore) -> None:
        where = await save(one, ["k"])
        item = Written("k", where[0].page, where[0].generation)
        assert await one.confirm(NS, 0, "w", [item, item]) == [True, True]
        assert await one.locations(NS, 0, ["k"]) == where

    @pytest.mark.anyio
    async def test_confirmations_of_other_pages_are_refused(self, one: MetadataStore) -> None:
        (grant,) = await one.allocate(NS, 0, "w", ["k"])
        page, generation = grant.page, grant.generation
        wrong = [
            Written("k", (page + 1) % 16, generation),
            Written("k", page, generation + 1),
            Written("other", page, generation),
            Written("k", -1, generation),
            Written("k", 10**9, generation),
        ]
        assert await one.confirm(NS, 0, "w", wrong) == [False] * 5
        assert await one.exists(NS, ["k", "other"]) == [False, False]
        assert (await one.stats(NS)).refused == 5
        assert await one.confirm(NS, 0, "w", [Written("k", page, -1)]) == [True]

    @pytest.mark.anyio
    async def test_pages_of_a_dead_writer_come_back_when_its_lease_ends(
        self, one: MetadataStore
    ) -> None:
        dead = await one.allocate(NS, 0, "dead", names(16))
        assert [a.status for a in await one.allocate(NS, 0, "w", ["new"])] == [Status.FULL]
        assert [a.status for a in await one.allocate(NS, 0, "w", ["k0"])] == [Status.BUSY]
        await asyncio.sleep(LIMITS.write_lease_s + 0.1)
        answers = await one.allocate(NS, 0, "w", ["new", "k0"])
        assert [answer.status for answer in answers] == [Status.WRITE] * 2
        late = [Written(f"k{i}", a.page, a.generation) for i, a in enumerate(dead)]
        assert await one.confirm(NS, 0, "dead", late) == [False] * 16
        await one.sweep()
        audit = await one.audit(NS)
        assert (audit.free, audit.allocated, audit.leaked, audit.twice) == (14, 2, 0, 0)

    @pytest.mark.anyio
    async def test_asking_again_renews_the_lease(self, one: MetadataStore) -> None:
        (grant,) = await one.allocate(NS, 0, "w", ["k"])
        for _ in range(6):
            await asyncio.sleep(LIMITS.write_lease_s / 4)
            await one.sweep()
            assert await one.allocate(NS, 0, "w", ["k"]) == [grant]
        item = Written("k", grant.page, grant.generation)
        assert await one.confirm(NS, 0, "w", [item]) == [True]

    @pytest.mark.anyio
    async def test_ranks_that_never_follow_give_the_confirmed_pages_back(
        self, store: MetadataStore
    ) -> None:
        for rank in range(2):
            await store.initialize(NS, rank, 4, 2)
        await save(store, names(4), rank=0)
        await asyncio.sleep(LIMITS.write_lease_s + 0.1)
        await store.sweep()
        audit = await store.audit(NS)
        assert (audit.free, audit.leaked) == (8, 0)
        await save(store, names(4), rank=1)
        assert await store.exists(NS, names(4)) == [False] * 4

    @pytest.mark.anyio
    async def test_released_pages_are_free_at_once(self, one: MetadataStore) -> None:
        answers = await one.allocate(NS, 0, "w", names(16))
        items = [Written(f"k{i}", a.page, a.generation) for i, a in enumerate(answers)]
        assert await one.release(NS, 0, "other", items) == 0
        assert await one.release(NS, 0, "w", items[:3]) == 3
        assert await one.release(NS, 0, "w", items[:3]) == 0
        assert (await one.audit(NS)).free == 3
        again = await one.allocate(NS, 0, "other", names(3))
        assert [answer.status for answer in again] == [Status.WRITE] * 3
        assert {a.generation for a in again}.isdisjoint({a.generation for a in answers})

    @pytest.mark.anyio
    async def test_a_complete_page_is_not_released_by_its_writer(self, one: MetadataStore) -> None:
        where = await save(one, ["k"])
        item = Written("k", where[0].page, where[0].generation)
        assert await one.release(NS, 0, "w", [item]) == 0
        assert await one.locations(NS, 0, ["k"]) == where

    @pytest.mark.anyio
    async def test_v1_a_failed_rewrite_drops_the_key_and_keeps_its_page_from_others(
        self, one: MetadataStore
    ) -> None:
        where = await save(one, names(16))
        await one.locations(NS, 0, ["k5"])
        assert await one.release(NS, 0, "w", [Written("", where[5].page, -1)]) == 1
        assert await one.exists(NS, ["k5"]) == [False]
        audit = await one.audit(NS)
        assert (audit.free, audit.cooling, audit.leaked) == (0, 1, 0)
        await asyncio.sleep(LIMITS.read_lease_s + 0.1)
        await one.sweep()
        assert (await one.audit(NS)).free == 1

    @pytest.mark.anyio
    async def test_v1_a_failed_rewrite_leaves_the_page_of_another_rank_to_its_writer(
        self, store: MetadataStore
    ) -> None:
        for rank in range(2):
            await store.initialize(NS, rank, 4, 2)
        (torn,) = await save(store, ["k"], rank=0)
        (grant,) = await store.allocate(NS, 1, "w", ["k"])
        assert await store.release(NS, 0, "w", [Written("", torn.page, -1)]) == 1
        await store.sweep()
        others = await store.allocate(NS, 1, "other", names(4, "new"))
        assert grant.page not in {answer.page for answer in others}
        item = Written("k", grant.page, grant.generation)
        assert await store.confirm(NS, 1, "w", [item]) == [True]
        assert await store.exists(NS, ["k"]) == [False]
        assert (await store.audit(NS)).leaked == 0

    @pytest.mark.anyio
    async def test_v1_a_key_that_is_written_anew_is_not_evicted_meanwhile(
        self, one: MetadataStore
    ) -> None:
        where = await save(one, names(16))
        (answer,) = await one.allocate(NS, 0, "v1", ["k0"], lease_existing=True)
        assert (answer.status, answer.page) == (Status.EXISTS, where[0].page)
        await save(one, names(15, "new"))
        assert await one.locations(NS, 0, ["k0"]) == [where[0]]

    # Full

    @pytest.mark.anyio
    async def test_when_full_the_least_recently_used_go(self, one: MetadataStore) -> None:
        await save(one, names(16))
        await one.exists(NS, ["k0", "k1"])
        await save(one, names(4, "new"))
        assert await one.exists(NS, names(6)) == [True, True, True, True, True, True]
        found = await one.exists(NS, names(16))
        assert found.count(False) in (4, 5)
        assert found[:2] == [True, True]
        stats = await one.stats(NS)
        assert stats.evicted == found.count(False) == stats.evicted_unread

    @pytest.mark.anyio
    async def test_the_end_of_a_prompt_goes_before_its_start(self, one: MetadataStore) -> None:
        await save(one, names(16))
        await save(one, ["new"])
        found = await one.exists(NS, names(16))
        assert found[0]
        assert not found[-1]

    @pytest.mark.anyio
    async def test_keys_that_are_read_are_never_evicted(self, one: MetadataStore) -> None:
        where = await save(one, names(16))
        assert await one.locations(NS, 0, names(15)) == where[:15]
        answers = await one.allocate(NS, 0, "w", names(3, "new"))
        assert [a.status for a in answers] == [Status.WRITE, Status.FULL, Status.FULL]
        assert answers[0].page == where[15].page
        assert answers[0].generation not in {location.generation for location in where}
        assert await one.exists(NS, names(15)) == [True] * 15
        await asyncio.sleep(LIMITS.read_lease_s + 0.1)
        answers = await one.allocate(NS, 0, "w", names(3, "later"))
        assert [answer.status for answer in answers] == [Status.WRITE] * 3

    @pytest.mark.anyio
    async def test_touch_and_a_look_up_with_a_lease_hold_keys_too(self, one: MetadataStore) -> None:
        await save(one, names(16))
        assert await one.touch(NS, [*names(8), "no"]) == 8
        assert await one.exists(NS, names(16)[8:], lease=True) == [True] * 8
        (answer,) = await one.allocate(NS, 0, "w", ["new"])
        assert answer.status == Status.FULL

    @pytest.mark.anyio
    async def test_saves_go_on_for_ever(self, one: MetadataStore) -> None:
        """Ten times the file's size goes through it."""
        for i in range(40):
            await save(one, names(4, f"r{i}-"))
        audit = await one.audit(NS)
        assert (audit.leaked, audit.twice) == (0, 0)
        assert audit.free + audit.confirmed == 16
        stats = await one.stats(NS)
        assert stats.complete == audit.confirmed
        assert stats.evicted == 160 - audit.confirmed

    @pytest.mark.anyio
    async def test_evicting_frees_the_pages_of_every_rank(self, store: MetadataStore) -> None:
        for rank in range(2):
            await store.initialize(NS, rank, 8, 2)
        for i in range(10):
            for rank in range(2):
                await save(store, names(4, f"r{i}-"), rank)
        audit = await store.audit(NS)
        assert (audit.leaked, audit.twice, audit.allocated) == (0, 0, 0)

    @pytest.mark.anyio
    async def test_more_than_the_file_holds_is_full_not_an_error(self, one: MetadataStore) -> None:
        answers = await one.allocate(NS, 0, "w", names(20))
        assert [a.status for a in answers] == [Status.WRITE] * 16 + [Status.FULL] * 4

    # Forgetting

    @pytest.mark.anyio
    async def test_deleted_keys_are_gone_and_their_pages_free(self, one: MetadataStore) -> None:
        await save(one, names(4))
        assert await one.delete(NS, ["k1", "k2", "no", "k1"]) == 2
        assert await one.exists(NS, names(4)) == [True, False, False, True]
        assert (await one.audit(NS)).free == 14

    @pytest.mark.anyio
    async def test_the_page_of_a_key_deleted_under_its_reader_waits(
        self, one: MetadataStore
    ) -> None:
        where = await save(one, names(16))
        await one.locations(NS, 0, ["k7"])
        assert await one.delete(NS, ["k7"]) == 1
        assert await one.locations(NS, 0, ["k7"]) == [None]
        await one.locations(NS, 0, names(16))
        (answer,) = await one.allocate(NS, 0, "w", ["new"])
        assert answer.status == Status.FULL
        assert (await one.audit(NS)).cooling == 1
        await asyncio.sleep(LIMITS.read_lease_s + 0.1)
        await one.sweep()
        assert (await one.audit(NS)).free == 1
        (answer,) = await one.allocate(NS, 0, "w", ["new"])
        assert answer.page == where[7].page

    @pytest.mark.anyio
    async def test_a_cleared_namespace_begins_anew_and_gives_no_page_that_is_still_used(
        self, one: MetadataStore
    ) -> None:
        await save(one, ["k"])
        (pending,) = await one.allocate(NS, 0, "w", ["p"])
        await one.locations(NS, 0, ["k"])
        await one.clear(NS)
        with pytest.raises(UnknownNamespaceError):
            await one.exists(NS, ["k"])
        await one.initialize(NS, 0, 4, 1)
        assert await one.exists(NS, ["k"]) == [False]
        late = Written("p", pending.page, pending.generation)
        assert await one.confirm(NS, 0, "w", [late]) == [False]
        assert [a.status for a in await one.allocate(NS, 0, "w", names(4))] == [Status.FULL] * 4
        await asyncio.sleep(LIMITS.write_lease_s + 0.1)
        answers = await one.allocate(NS, 0, "w", names(4))
        assert [a.status for a in answers] == [Status.WRITE] * 4
        assert min(a.generation for a in answers) > pending.generation

    # Figures

    @pytest.mark.anyio
    async def test_stats_count_hits_and_ages(self, one: MetadataStore) -> None:
        await save(one, names(3))
        await one.locations(NS, 0, ["k0", "k1", "no"])
        await asyncio.sleep(0.2)
        stats = await one.stats(NS)
        assert (stats.hits, stats.misses, stats.complete, stats.incomplete) == (2, 1, 3, 0)
        assert stats.least_recent_use_s >= 0.2
        (rank,) = stats.ranks
        assert rank is not None
        assert (rank.pages, rank.free, rank.confirmed, rank.allocated) == (16, 13, 3, 0)

    # Restarts

    @pytest.mark.anyio
    async def test_a_restart_loses_nothing_that_was_answered(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path, LONG)
        for rank in range(2):
            await store.initialize(NS, rank, 16, 2)
        for rank in range(2):
            await save(store, names(5), rank)
        await save(store, ["half"], 0)
        (pending,) = await store.allocate(NS, 1, "w", ["half"])
        where = [await store.locations(NS, rank, names(5)) for rank in range(2)]
        await store.delete(NS, ["k4"])
        audit = await store.audit(NS)
        await store.close()
        store = self.make_store(tmp_path, LONG)
        assert await store.exists(NS, names(5)) == [True] * 4 + [False]
        for rank in range(2):
            assert await store.locations(NS, rank, names(4)) == where[rank][:4]
        assert await store.audit(NS) == audit
        assert [a.status for a in await store.allocate(NS, 1, "other", ["half"])] == [Status.BUSY]
        item = Written("half", pending.page, pending.generation)
        assert await store.confirm(NS, 1, "w", [item]) == [True]
        assert await store.exists(NS, ["half"]) == [True]
        fresh = await store.allocate(NS, 0, "w", names(10, "new"))
        used = {location.page for location in where[0] if location}
        assert used.isdisjoint({a.page for a in fresh})
        assert min(a.generation for a in fresh) > pending.generation
        await store.close()

    @pytest.mark.anyio
    async def test_a_restart_evicts_nothing_that_a_reader_may_still_read(
        self, tmp_path: Path
    ) -> None:
        store = self.make_store(tmp_path, LIMITS)
        await store.initialize(NS, 0, 16, 1)
        await save(store, names(16))
        await store.locations(NS, 0, names(16))
        await store.close()
        store = self.make_store(tmp_path, LIMITS)
        (answer,) = await store.allocate(NS, 0, "w", ["new"])
        assert answer.status == Status.FULL
        await asyncio.sleep(LIMITS.read_lease_s + 0.1)
        (answer,) = await store.allocate(NS, 0, "w", ["new"])
        assert answer.status == Status.WRITE
        await store.close()

    @pytest.mark.anyio
    async def test_a_restart_keeps_the_order_of_use(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path, LIMITS)
        await store.initialize(NS, 0, 16, 1)
        for key in names(16):
            await save(store, [key])
        await asyncio.sleep(0.02)
        await store.exists(NS, ["k0"])
        await store.close()
        store = self.make_store(tmp_path, LIMITS)
        await asyncio.sleep(LIMITS.read_lease_s + 0.1)
        await save(store, ["new"])
        found = await store.exists(NS, names(3))
        assert found[0]
        assert not found[1]
        await store.close()
