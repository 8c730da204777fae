"""The fault campaign (spec rows S8, S9): ``python -m tests.chaos``, or ``make chaos``.

Every kind of fault is done to a real store in real files, again and again, at random places drawn
from a seed. Four things are counted: loads that gave other bytes than were stored, processes (or
calls) that died of it, bytes that nobody can use any more afterwards, and the longest time from the
end of a fault until the store stored and served again. The first three must be 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvloom.store.block_format import decode_header
from kvloom.store.contract import NAMESPACE, PART, PARTS, make_block
from kvloom.store.janitor import Janitor
from kvloom.store.layout import Listing, block_path
from kvloom.store.posix import Posix
from kvloom.store.survey import verify

from ..store.disks import put_in_the_way, remove

SIZE = PART * PARTS
FILE = 20480
DEADLINE_S = 10.0
NOBODY = 65534
MNT_DETACH = 2

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.chaos.campaign"])  # or each process imports all of it

HANGING_READS = """
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>
typedef ssize_t (*reading)(int, const struct iovec *, int, off_t);
static void hang(void) {
    const char *while_there = getenv("KVLOOM_HANG");
    while (while_there && access(while_there, F_OK) == 0) usleep(1000);
}
ssize_t preadv64(int fd, const struct iovec *to, int count, off_t at) {
    hang();
    return ((reading)dlsym(RTLD_NEXT, "preadv64"))(fd, to, count, at);
}
ssize_t preadv(int fd, const struct iovec *to, int count, off_t at) {
    hang();
    return ((reading)dlsym(RTLD_NEXT, "preadv"))(fd, to, count, at);
}
typedef ssize_t (*reading2)(int, const struct iovec *, int, off_t, int);
ssize_t preadv64v2(int fd, const struct iovec *to, int count, off_t at, int flags) {
    hang();
    return ((reading2)dlsym(RTLD_NEXT, "preadv64v2"))(fd, to, count, at, flags);
}
ssize_t preadv2(int fd, const struct iovec *to, int count, off_t at, int flags) {
    hang();
    return ((reading2)dlsym(RTLD_NEXT, "preadv2"))(fd, to, count, at, flags);
}
"""


@dataclass
class Outcome:
    """What a kind of fault did. ``skipped`` says why it could not be done here."""

    fault: str
    rounds: int = 0
    wrong: int = 0
    deaths: int = 0
    lost: int = 0
    recovery_s: float = 0.0
    skipped: str = ""

    @property
    def survived(self) -> bool:
        return not (self.wrong or self.deaths or self.lost)


class CannotDoError(Exception):
    """This machine does not allow a fault."""


class Scene:
    """A store and what happens to it."""

    def __init__(self, root: Path, outcome: Outcome, seed: int, within_s: float) -> None:
        self.ends = time.monotonic() + within_s
        self.root = root
        self.outcome = outcome
        self.random = random.Random(seed)

    @contextmanager
    def store(self, **options: object) -> Iterator[Posix]:
        store = Posix(NAMESPACE, [self.root], "none", 2, **options)  # type: ignore[arg-type]
        try:
            yield store
        finally:
            store.close()

    def dump(self, store: Posix, number: int) -> bool:
        header, payload = make_block(number)
        return store.dump([header], [payload]).wait(DEADLINE_S)[0]

    def load(self, store: Posix, number: int, deadline_s: float = DEADLINE_S) -> bool:
        """Whether a block is served; served wrong, it is counted."""
        header, payload = make_block(number)
        buffer = memoryview(bytearray(SIZE))
        (done,) = store.load([header.key], [None], [buffer]).wait(deadline_s)
        self.outcome.wrong += done and buffer != payload
        return done

    def path(self, number: int) -> Path:
        return block_path(self.root / NAMESPACE, make_block(number)[0].key)

    def recovers(self, store: Posix, number: int, looked_up: bool = False) -> None:
        """Time from now, the end of the fault, until a block is stored and served, and perhaps
        found by a lookup."""
        began = time.monotonic()
        key = make_block(number)[0].key
        while not (
            self.dump(store, number)
            and self.load(store, number)
            and (not looked_up or store.lookup([key])[0])
        ):
            if time.monotonic() - began > 60:
                self.outcome.deaths += 1  # it never came back: as good as dead
                return
            time.sleep(0.01)
        self.outcome.recovery_s = max(self.outcome.recovery_s, time.monotonic() - began)

    def settle(self, limit_bytes: int | None = None) -> None:
        """After the faults: every file is a whole, right block, or counted as lost or wrong."""
        janitor = Janitor(self.root, limit_bytes, "s3fifo", None)
        janitor.sweep(quarantine_s=0)
        listing = Listing(self.root)
        self.outcome.wrong += len(verify(listing.blocks).bad)
        self.outcome.lost += listing.size - sum(block.size for block in listing.blocks)
        if limit_bytes is not None:
            self.outcome.lost += abs(janitor.limit.level().used - listing.size)


def write_for_ever(
    root: Path, first: int, last: int, limit_bytes: int | None, told: Connection
) -> None:
    try:
        store = Posix(NAMESPACE, [root], "none", 2, limit_bytes=limit_bytes)
        told.send("writing")
        for number in range(first, last):
            header, payload = make_block(number)
            store.dump([header], [payload]).wait(DEADLINE_S)
        store.close()
    except Exception:  # noqa: BLE001  (told, for the process may be killed before it ends)
        told.send(traceback.format_exc())


@contextmanager
def writer(
    scene: Scene, first: int, last: int, limit_bytes: int | None = None
) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that writes blocks; it is up when this is entered."""
    ours, theirs = processes.Pipe()
    process = processes.Process(
        target=write_for_ever,
        args=(scene.root, first, last, limit_bytes, theirs),
        daemon=True,
    )
    process.start()
    theirs.close()
    up = ours.recv()
    if up != "writing":
        raise RuntimeError(f"a writing process died: {up}")
    try:
        yield process
    finally:
        process.join(60)
        with suppress(EOFError):
            print(ours.recv(), file=sys.stderr)
            scene.outcome.deaths += 1
        process.close()


def killed(scene: Scene, limit_bytes: int | None) -> None:
    """A writing process is killed at a random instant, while another one reads."""
    first = 1_000_000
    with scene.store(limit_bytes=limit_bytes) as store:
        for _ in track_rounds(scene):
            with writer(scene, first, first + 100_000, limit_bytes) as process:
                ends = time.monotonic() + scene.random.uniform(0, 0.03)
                while time.monotonic() < ends:
                    scene.load(store, first + scene.random.randrange(8))
                process.kill()
                process.join(60)
                scene.outcome.deaths += process.exitcode != -signal.SIGKILL
            for number in range(first, first + 40):
                scene.load(store, number)
            first += 100_000
        scene.recovers(store, 1)
    scene.settle(limit_bytes)


def killed_without_limit(scene: Scene) -> None:
    """kill -9 while writing."""
    killed(scene, None)


def killed_at_the_limit(scene: Scene) -> None:
    """kill -9 while writing and evicting."""
    killed(scene, 12 * FILE)


def flipped_bits(scene: Scene) -> None:
    """One bit flipped in each region of a file."""
    with scene.store() as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            path = scene.path(number)
            data = bytearray(path.read_bytes())
            stored = decode_header(data)
            tokens_at = 108
            sizes_at = tokens_at + 4 * len(stored.block.token_ids)
            sums_at, zeros_at = sizes_at + 8 * PARTS, sizes_at + 16 * PARTS
            end = stored.payload_offset
            regions = [
                (0, 8),  # magic
                (8, 44),  # version, sizes, position, time
                (44, tokens_at),  # digests
                (tokens_at, sizes_at),
                (sizes_at, sums_at),
                (sums_at, zeros_at),
                (zeros_at, end - 8),
                (end - 8, end),  # the header's checksum
                (end, end + PART),
                (end + PART, len(data) - 1),
                (len(data) - 1, len(data)),
            ]
            at = scene.random.randrange(*regions[number % len(regions)])
            data[at] ^= 1 << scene.random.randrange(8)
            path.write_bytes(data)
            scene.outcome.wrong += scene.load(store, number)  # harmed, it must not be served
            scene.recovers(store, number)
    scene.settle()


def cut_short(scene: Scene) -> None:
    """Files cut off at, or grown to, any length."""
    with scene.store() as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            length = scene.random.randrange(FILE + 4096)
            if length == scene.path(number).stat().st_size:
                continue
            os.truncate(scene.path(number), length)
            scene.outcome.wrong += scene.load(store, number)
            scene.recovers(store, number)
    scene.settle()


def disk_full(scene: Scene) -> None:
    """A file system that others fill."""
    with mounted(scene.root), scene.store(limit_bytes=1 << 40) as store:
        others = scene.root / "others"
        for number in track_rounds(scene):
            scene.dump(store, number)
            fill(others)
            for other in range(1000 + 10 * number, 1006 + 10 * number):
                scene.dump(store, other)
                scene.load(store, other)
            scene.load(store, number)
            others.unlink()
            scene.recovers(store, 5000 + number)
        scene.settle()


def fill(path: Path) -> None:
    """Write a file until the file system has no page left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):
            while True:
                os.write(descriptor, bytes(4096))
    finally:
        os.close(descriptor)


def read_only(scene: Scene) -> None:
    """A file system that becomes read-only."""
    with mounted(scene.root), scene.store() as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            remount(scene.root, "ro")
            scene.outcome.wrong += scene.dump(store, 1000 + number)
            scene.outcome.wrong += not scene.load(store, number)  # it can still be read
            remount(scene.root, "rw")
            scene.recovers(store, 2000 + number)
        scene.settle()


def directory_removed(scene: Scene) -> None:
    """The directory removed under the store, or a file in its place."""
    with scene.store() as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            if number % 2:
                put_in_the_way(scene.root)
                scene.outcome.wrong += scene.dump(store, number)
                scene.outcome.wrong += scene.load(store, number)
                scene.root.unlink()
            else:
                remove(scene.root)
                scene.outcome.wrong += scene.load(store, number)
            scene.recovers(store, number)
    scene.settle()


def without_permission(scene: Scene) -> None:
    """The directory's permissions taken away from a process that is not root."""
    if os.geteuid():
        raise CannotDoError("only root can become somebody else")
    os.chmod(scene.root.parent, 0o755)
    scene.root.mkdir()
    os.chown(scene.root, NOBODY, NOBODY)
    ours, theirs = processes.Pipe()
    process = processes.Process(target=be_nobody, args=(scene.root, theirs), daemon=True)
    process.start()

    def ask(what: str, number: int) -> tuple[bool, int, float]:
        ours.send((what, number))
        if not ours.poll(90):
            raise TimeoutError("the process does not answer")
        answer: tuple[bool, int, float] = ours.recv()
        scene.outcome.wrong += answer[1]
        return answer

    for number in track_rounds(scene):
        ask("dump", number)
        os.chmod(scene.root, 0)
        scene.outcome.wrong += ask("dump", 1000 + number)[0] + ask("load", number)[0]
        os.chmod(scene.root, 0o700)
        scene.outcome.deaths += not ask("recovers", number)[0]
        scene.outcome.recovery_s = max(scene.outcome.recovery_s, ask("time", 0)[2])
    ours.send(("end", 0))
    process.join(60)
    scene.outcome.deaths += process.exitcode != 0
    scene.settle()


def be_nobody(root: Path, told: Connection) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    logging.disable()
    outcome = Outcome("")
    scene = Scene(root, outcome, 0, within_s=600.0)
    with scene.store() as store:
        while True:
            what, number = told.recv()
            done, outcome.wrong = True, 0
            if what == "end":
                return
            if what == "dump":
                done = scene.dump(store, number)
            elif what == "load":
                done = scene.load(store, number)
            elif what == "recovers":
                scene.recovers(store, number)
                done = not outcome.deaths
            told.send((done, outcome.wrong, outcome.recovery_s))


def fifo_in_its_place(scene: Scene) -> None:
    """A FIFO, a directory or a link in a block's place."""
    with scene.store() as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            path = scene.path(number)
            path.unlink()
            if number % 3 == 0:
                os.mkfifo(path)
            elif number % 3 == 1:
                path.mkdir()
            else:
                path.symlink_to("/dev/zero")
            began = time.monotonic()
            scene.outcome.wrong += scene.load(store, number, deadline_s=2.0)
            scene.outcome.deaths += time.monotonic() - began > 3.0
            scene.recovers(store, number)
    scene.settle()


def hanging_reads(scene: Scene) -> None:
    """Reads that do not return, in a process whose ``preadv`` is replaced."""
    library = scene.root.with_suffix(".so")
    source = library.with_suffix(".c")
    source.write_text(HANGING_READS)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotDoError("no C compiler")
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    hang = scene.root.with_suffix(".hang")
    environment = {**os.environ, "LD_PRELOAD": str(library), "KVLOOM_HANG": str(hang)}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.chaos",
            "--hang",
            str(scene.root),
            str(scene.outcome.rounds),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        scene.outcome.deaths += 1
        print(done.stderr, file=sys.stderr)
        return
    wrong, recovery_s = json.loads(done.stdout.splitlines()[-1])
    scene.outcome.wrong += wrong
    scene.outcome.recovery_s = recovery_s
    scene.settle()


def hang_and_go_on(root: Path, rounds: int) -> None:
    """What ``hanging_reads`` runs: a read that hangs is a miss at its deadline, no later."""
    logging.disable()
    hang = Path(os.environ["KVLOOM_HANG"])
    outcome = Outcome("", rounds)
    scene = Scene(root, outcome, 0, within_s=600.0)
    with scene.store() as store:
        for number in range(rounds):
            assert scene.dump(store, number)
            hang.touch()
            began = time.monotonic()
            for _ in range(4):  # more than there are threads
                assert not scene.load(store, number, deadline_s=0.1), "nothing hung"
            assert time.monotonic() - began < 2.0
            hang.unlink()
            scene.recovers(store, number)
    assert not outcome.deaths
    print(json.dumps([outcome.wrong, outcome.recovery_s]))


def hung_mount(scene: Scene) -> None:
    """A mount whose server does not answer."""
    with scene.store(lookup_timeout_s=0.1) as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            header, payload = make_block(1000 + number)
            with hanging(scene.root):
                began = time.monotonic()
                for _ in range(20):
                    scene.outcome.wrong += any(store.lookup([make_block(number)[0].key]))
                scene.outcome.wrong += scene.load(store, number, deadline_s=0.1)
                scene.outcome.wrong += store.dump([header], [payload]).wait(0.1)[0]
                scene.outcome.deaths += time.monotonic() - began > 2.0
            scene.recovers(store, number, looked_up=True)
    scene.settle()


def same_keys(scene: Scene) -> None:
    """Two processes that write the same keys at once."""
    first = 0
    for _ in track_rounds(scene):
        with (
            writer(scene, first, first + 12) as one,
            writer(scene, first, first + 12) as two,
        ):
            for process in (one, two):
                process.join(60)
                scene.outcome.deaths += process.exitcode != 0
        with scene.store() as store:
            for number in range(first, first + 12):
                scene.outcome.lost += 0 if scene.load(store, number) else FILE
        first += 12
    scene.settle()


def clock_set_back(scene: Scene) -> None:
    """Files written in what is the future now."""
    limit = 10 * FILE
    with scene.store(limit_bytes=limit, ttl_s=1000) as store:
        for number in track_rounds(scene):
            scene.dump(store, number)
            ahead = time.time() + scene.random.uniform(100, 1e9)
            with suppress(FileNotFoundError):  # evicted already
                os.utime(scene.path(number), (ahead, ahead))
            scene.load(store, number)
            scene.recovers(store, 10_000 + number)
    scene.settle(limit)
    stuck = [b for b in Listing(scene.root).blocks if b.used_ns > time.time_ns()]
    scene.outcome.lost += sum(block.size for block in stuck)  # they would never be evicted


FAULTS: dict[Callable[[Scene], None], int] = {
    killed_without_limit: 200,
    killed_at_the_limit: 200,
    flipped_bits: 330,
    cut_short: 300,
    disk_full: 20,
    read_only: 20,
    directory_removed: 40,
    without_permission: 40,
    fifo_in_its_place: 60,
    hanging_reads: 20,
    hung_mount: 20,
    same_keys: 20,
    clock_set_back: 60,
}


def run(
    fault: Callable[[Scene], None], rounds: int, seed: int = 0, within_s: float = 600.0
) -> Outcome:
    """Do one kind of fault ``rounds`` times, if there is time, in a directory of its own."""
    outcome = Outcome((fault.__doc__ or "").strip().rstrip("."), rounds)
    folder = Path(tempfile.mkdtemp(prefix="kvloom-chaos-"))
    try:
        fault(Scene(folder / "store", outcome, seed, within_s))
    except CannotDoError as reason:
        outcome.skipped = str(reason)
    except Exception:  # noqa: BLE001  (whatever a store raises is counted as a death)
        outcome.deaths += 1
        traceback.print_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def track_rounds(scene: Scene) -> Iterator[int]:
    """The rounds that there is time for."""
    console = Console(stderr=True)
    rounds: Iterable[int] = range(scene.outcome.rounds)
    if console.is_terminal:
        rounds = track(rounds, scene.outcome.fault, console=console, transient=True)
    scene.outcome.rounds = 0
    for number in rounds:
        if time.monotonic() > scene.ends:
            break
        yield number
        scene.outcome.rounds += 1


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(root)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        raise CannotDoError("no tmpfs may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@contextmanager
def hanging(root: Path) -> Iterator[None]:
    """A mount whose server never answers; when this is left it is gone, as if the server died."""
    libc = ctypes.CDLL(None)
    try:
        server = open("/dev/fuse", "r+b", buffering=0)  # noqa: SIM115  (closing it ends what hangs)
    except OSError as error:
        raise CannotDoError("no FUSE") from error
    options = f"fd={server.fileno()},rootmode=40000,user_id=0,group_id=0"
    rescue = threading.Timer(10.0, server.close)  # a store that waits is found out, not waited for
    try:
        if libc.mount(b"hanging", bytes(root), b"fuse", 0, options.encode()):
            raise CannotDoError("no FUSE may be mounted here")
        rescue.start()
        try:
            yield
        finally:
            libc.umount2(bytes(root), MNT_DETACH)
    finally:
        rescue.cancel()
        server.close()


def remount(root: Path, mode: str) -> None:
    for _ in range(100):  # refused while a file is open for writing
        done = subprocess.run(
            ["mount", "-o", f"remount,{mode}", str(root)], check=False, capture_output=True
        )
        if not done.returncode:
            return
        time.sleep(0.05)
    raise CannotDoError("the file system can't be remounted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=13.0, help="fewer rounds if it takes longer"
    )
    parser.add_argument("--hang", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hang:
        hang_and_go_on(Path(arguments.hang[0]), int(arguments.hang[1]))
        return 0
    logging.disable()  # the store's warnings are expected here
    ends = time.monotonic() + 60 * arguments.minutes
    outcomes = []
    for done, (fault, rounds) in enumerate(FAULTS.items()):
        share = (ends - time.monotonic()) / (len(FAULTS) - done)
        most = 6 if fault is killed_without_limit else 3  # of S9's 200 kills none may be missing
        outcomes.append(run(fault, rounds, arguments.seed, most * share))
    table = Table(title="What the store survives")
    table.add_column("fault")
    for heading in ("times", "wrong bytes", "deaths", "bytes lost", "recovery"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        if outcome.skipped:
            table.add_row(outcome.fault, f"[yellow]skipped: {outcome.skipped}[/]")
            continue
        counts = (outcome.wrong, outcome.deaths, outcome.lost)
        table.add_row(
            outcome.fault,
            f"{outcome.rounds:,}",
            *(f"[red]{count:,}[/]" if count else "0" for count in counts),
            f"{1000 * outcome.recovery_s:,.0f} ms",
        )
    Console(width=110).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=2) + "\n")
    return 0 if all(outcome.survived for outcome in outcomes) else 1
