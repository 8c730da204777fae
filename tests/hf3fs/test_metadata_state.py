"""Any order of requests, clocks and restarts: the state machine's promises, by hypothesis."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.hf3fs.metadata.base import Limits, Location, Status, Written
from kvloom.hf3fs.metadata.state import Namespace, Operation
from kvloom.hf3fs.metadata.tables import COOLING, FREE

PAGES = 3
LIMITS = Limits(write_lease_s=10.0, read_lease_s=4.0)
keys_ = st.lists(st.sampled_from([f"k{i}" for i in range(6)]), min_size=2, max_size=4, unique=True)
writers = st.sampled_from(["a", "b"])


class Machine(RuleBasedStateMachine):
    """Follows what callers were told, and holds the state machine to it."""

    @initialize(world=st.integers(1, 2))
    def start(self, world: int) -> None:
        self.now = 1000.0
        self.numbers = itertools.count(1)
        self.world = world
        self.journal: list[Operation] = []
        self.grants: dict[tuple[int, int], tuple[str, str, int, float]] = {}  # rank, page -> ...
        self.reading: dict[tuple[int, int], tuple[int, float]] = {}  # generation, until
        self.generations: set[int] = set()
        self.state = self.new(0.0)
        for rank in range(world):
            self.journal += self.state.initialize(rank, PAGES)

    def new(self, grace_until: float) -> Namespace:
        return Namespace(
            self.world,
            LIMITS,
            lambda count: [next(self.numbers) for _ in range(count)],
            monotonic=lambda: self.now,
            wall=lambda: self.now,
            grace_until=grace_until,
        )

    @rule(keys=keys_, writer=writers, rank=st.integers(0, 1), existing=st.booleans())
    def allocate(self, keys: list[str], writer: str, rank: int, existing: bool) -> None:
        self.grant(keys, writer, rank % self.world, existing)

    def grant(self, keys: list[str], writer: str, rank: int, existing: bool) -> None:
        answers, operations = self.state.allocate(rank, writer, keys, existing)
        self.journal += operations
        for key, answer in zip(keys, answers, strict=True):
            if answer.status != Status.WRITE:
                continue
            place = rank, answer.page
            old = self.grants.get(place)
            until = self.now + LIMITS.write_lease_s
            if old is not None and old[:3] == (writer, key, answer.generation):
                self.grants[place] = (*old[:3], until)
                continue
            assert answer.generation not in self.generations, "a number came twice"
            self.generations.add(answer.generation)
            assert old is None or old[3] <= self.now, "a leased page was given to another"
            read = self.reading.pop(place, None)
            assert read is None or read[1] <= self.now, "a page under a read lease was given away"
            self.grants[place] = writer, key, answer.generation, until

    @rule(keys=keys_, writer=writers)
    def save(self, keys: list[str], writer: str) -> None:
        for rank in range(self.world):
            self.grant(keys, writer, rank, False)
        self.settle(writer, True)

    @rule(writer=writers, all_=st.booleans())
    def confirm(self, writer: str, all_: bool) -> None:
        self.settle(writer, all_)

    def settle(self, writer: str, all_: bool) -> None:
        for rank in range(self.world):
            mine = [
                (page, grant)
                for (at, page), grant in self.grants.items()
                if at == rank and grant[0] == writer
            ]
            items = [Written(grant[1], page, grant[2]) for page, grant in mine]
            items = items if all_ else items[:1]
            done, operations = self.state.confirm(rank, writer, items)
            self.journal += operations
            for item, kept in zip(items, done, strict=True):
                grant = self.grants.pop((rank, item.page))
                assert kept or grant[3] <= self.now, "a page was lost within its lease"

    @rule(writer=writers)
    def release(self, writer: str) -> None:
        for (rank, page), grant in list(self.grants.items()):
            if grant[0] == writer:
                item = Written(grant[1], page, grant[2])
                count, operations = self.state.release(rank, writer, [item])
                self.journal += operations
                assert count or grant[3] <= self.now
                del self.grants[rank, page]
                return

    @rule(keys=keys_, rank=st.integers(0, 1))
    def read(self, keys: list[str], rank: int) -> None:
        rank %= self.world
        there = self.state.exists(keys, lease=False)
        found = self.state.locations(rank, keys)
        assert [where is not None for where in found] == there
        for where in found:
            if isinstance(where, Location):
                until = self.now + LIMITS.read_lease_s
                self.reading[rank, where.page] = where.generation, until
        # A read lease is the key's: it holds its pages of every rank.
        for other in range(self.world):
            for where in self.state.locations(other, keys):
                if where is not None:
                    until = self.now + LIMITS.read_lease_s
                    self.reading[other, where.page] = where.generation, until

    @rule(keys=keys_)
    def delete(self, keys: list[str]) -> None:
        _, operations = self.state.delete(keys)
        self.journal += operations
        assert self.state.exists(keys, lease=False) == [False] * len(keys)

    @rule(rank=st.integers(0, 1), page=st.integers(0, PAGES - 1))
    def tear(self, rank: int, page: int) -> None:
        rank %= self.world
        _, operations = self.state.release(rank, "nobody", [Written("", page)])
        self.journal += operations

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.journal += self.state.expire()

    @rule(renew=st.booleans())
    def restart(self, renew: bool) -> None:
        """Killed and replayed; from a journal that was written anew, or the whole one."""
        self.journal += self.state.save_use()
        if renew:
            self.journal = [("file", rank, PAGES) for rank in range(self.world)]
            for rank in range(self.world):
                self.journal += [
                    self.state.describe(rank, first, 2) for first in range(0, PAGES, 2)
                ]
        names = [f"k{i}" for i in range(6)]
        before = [self.state.locations(rank, names) for rank in range(self.world)]
        audit = self.state.audit()
        self.state = self.new(self.now + LIMITS.read_lease_s)
        for operation in self.journal:
            self.state.apply(operation)
        self.state.replayed()
        for place, grant in self.grants.items():
            if grant[3] > self.now:
                self.grants[place] = (*grant[:3], self.now + LIMITS.write_lease_s)
        after = self.state.audit()
        assert (after.allocated, after.confirmed, after.free) == (
            audit.allocated,
            audit.confirmed,
            audit.free,
        )
        assert [self.state.locations(rank, names) for rank in range(self.world)] == before

    @precondition(lambda self: hasattr(self, "state"))
    @invariant()
    def pages_add_up(self) -> None:
        self.journal += self.state.expire()
        audit = self.state.audit()
        assert (audit.leaked, audit.twice) == (0, 0)
        assert audit.free + audit.allocated + audit.confirmed + audit.cooling == audit.pages
        for file, counted in zip(self.state.files, self.state.stats().ranks, strict=True):
            assert file is not None
            assert counted is not None
            assert counted.free == (file.rows == FREE).sum()
            assert counted.cooling == (file.rows == COOLING).sum()
            assert counted.confirmed == file.confirmed.sum()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
