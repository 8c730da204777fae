"""``kvloom bench store``: its figures are there, and of what they say (spec rows S10, S11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.bench import store as bench


def test_a_small_run_measures_all_rows_and_leaves_nothing(tmp_path: Path) -> None:
    report = bench.run(
        tmp_path, blocks=3, parts=2, part_bytes=1000, threads=2, repeats=1, chunks=300
    )
    values = {figure.name: figure.value for figure in report.figures}
    for stage, plain in (("posix", ("write", "read")), ("cache", ("copy", "copy"))):
        for what, of in zip(("dump", "load"), plain, strict=True):
            ratio = values[f"store.{stage}.{what}_of_{of}"]
            speeds = (
                values[f"store.{stage}.{what}_gb_per_s"],
                values[f"store.{stage}.{what}_plain_gb_per_s"],
            )
            assert ratio == pytest.approx(speeds[0] / speeds[1])
    assert values["store.chunks"] == 300
    assert 0 < values["store.index_memory_bytes_a_chunk"] < 10_000
    assert values["store.index_other_engine_ms"] < 20_000
    assert not list(tmp_path.iterdir())
