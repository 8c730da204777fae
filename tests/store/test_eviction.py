"""Spec row S7: policies against slow models, and against what they are there for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvloom.store.eviction import POLICIES, EvictionPolicy, Lru, S3Fifo

Steps = list[tuple[str, int]]
steps = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "remove", "evict"]), st.integers(0, 9)), max_size=120
)


class SlowLru:
    """Keys with the time of their last use."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}

    def step(self, now: int, step: str, key: int) -> int | None:
        if step == "add":
            self.used.setdefault(key, now)
        elif step == "touch" and key in self.used:
            self.used[key] = now
        elif step == "remove":
            self.used.pop(key, None)
        elif step == "evict" and self.used:
            oldest = min(self.used, key=lambda k: self.used[k])
            del self.used[oldest]
            return oldest
        return None


class SlowS3Fifo:
    """The paper's queues as plain lists of [key, uses], the oldest first."""

    def __init__(self) -> None:
        self.small: list[list[int]] = []
        self.main: list[list[int]] = []
        self.ghost: list[int] = []

    def step(self, now: int, step: str, key: int) -> int | None:
        entry = next((e for e in self.small + self.main if e[0] == key), None)
        if step == "add" and entry is None:
            if key in self.ghost:
                self.ghost.remove(key)
                self.main.append([key, 0])
            else:
                self.small.append([key, 0])
        elif step == "touch" and entry is not None:
            entry[1] = min(entry[1] + 1, 3)
        elif step == "remove" and entry is not None:
            (self.small if entry in self.small else self.main).remove(entry)
        elif step == "evict":
            return self.evict()
        return None

    def evict(self) -> int | None:
        while self.small or self.main:
            total = sum(size(e[0]) for e in self.small + self.main)
            small = sum(size(e[0]) for e in self.small)
            if self.small and (not self.main or 10 * small >= total):
                key, uses = self.small.pop(0)
                if uses:
                    self.main.append([key, 0])
                    continue
                self.ghost.append(key)
            else:
                key, uses = self.main.pop(0)
                if uses:
                    self.main.append([key, uses - 1])
                    continue
            keep = max(len(self.small) + len(self.main), 1)
            self.ghost = self.ghost[-keep:]
            return key
        return None


def size(key: int) -> int:
    return 1 + key % 3


def name(key: int) -> bytes:
    return bytes([key])


def follow(policy: EvictionPolicy, model: SlowLru | SlowS3Fifo, todo: Steps) -> None:
    for now, (step, key) in enumerate(todo):
        expected = model.step(now, step, key)
        if step == "add":
            policy.add(name(key), size(key))
        elif step == "touch":
            policy.touch(name(key))
        elif step == "remove":
            policy.remove(name(key))
        else:
            assert policy.evict() == (None if expected is None else name(expected))


@given(steps)
def test_lru_is_what_its_name_says(todo: Steps) -> None:
    follow(Lru(), SlowLru(), todo)


@given(steps)
def test_s3fifo_is_the_papers_queues(todo: Steps) -> None:
    follow(S3Fifo(), SlowS3Fifo(), todo)


@given(steps, steps)
def test_s3fifo_goes_on_from_what_it_saved(before: Steps, after: Steps) -> None:
    model = SlowS3Fifo()
    policy, resumed = S3Fifo(), S3Fifo()
    follow(policy, model, before)
    sizes = {name(entry[0]): size(entry[0]) for entry in model.small + model.main}
    assert resumed.restore(policy.queues(), sizes) == set(sizes)
    follow(resumed, model, after)


@given(steps, st.sampled_from(sorted(POLICIES)), st.sets(st.integers(0, 9)))
def test_what_is_spared_stays_and_all_else_can_go(
    todo: Steps, policy_name: str, spared: set[int]
) -> None:
    policy = POLICIES[policy_name]()
    held: set[bytes] = set()
    for step, key in todo:
        if step == "add":
            policy.add(name(key), size(key))
            held.add(name(key))
        elif step == "touch":
            policy.touch(name(key))
        elif step == "remove":
            policy.remove(name(key))
            held.discard(name(key))
    spare = {name(key) for key in spared}
    gone = set()
    while (key := policy.evict(spare.__contains__)) is not None:
        gone.add(key)
    assert gone == held - spare
    rest = set()
    while (key := policy.evict()) is not None:
        rest.add(key)
    assert rest == held & spare


def test_a_long_read_of_things_used_once_leaves_s3fifo_what_is_used() -> None:
    """LRU forgets everything in such a scan; that is what S3-FIFO is for."""
    kept = {}
    for policy_name, make in POLICIES.items():
        policy = make()
        for key in range(100):
            policy.add(b"hot %d" % key, 1)
            policy.touch(b"hot %d" % key)
        for key in range(1000):
            policy.evict()
            policy.add(b"once %d" % key, 1)
        left = set()
        while (found := policy.evict()) is not None:
            left.add(found)
        kept[policy_name] = sum(item.startswith(b"hot") for item in left)
    assert kept["lru"] == 0
    assert kept["s3fifo"] >= 89
