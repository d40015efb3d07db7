"""The benchmark of copies at a small size: every way moves the job's bytes, all take turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from banyan.tiers.ops import CopyBlock, CopyJob, CopyKind, OpId
from banyan.tiers.threaded import ThreadedCopyEngine
from benchmarks import copies
from benchmarks.copies import Row, engine_call, kv_spec, make_stack, measure, taking_turns

SMALL = kv_spec(2, 1, 4, "float32", 4)


def test_the_ways_take_turns_and_the_first_turn_is_not_counted() -> None:
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = taking_turns(ways, 3)
    assert order == ["a", "b"] * 4
    assert set(times) == {"a", "b"} and all(s > 0 for s in times.values())


@pytest.mark.parametrize("kind", CopyKind)
def test_a_call_of_the_engine_returns_when_the_bytes_are_there(kind: CopyKind) -> None:
    stack = make_stack(SMALL)
    pool, host = stack.device[0], stack.host[0]
    pool.write_records(np.array([3], np.int32), np.full((1, pool.record_bytes), 9, np.uint8))
    host.data[7] = 8
    src, dst = (3, 7) if kind is CopyKind.BACKUP else (7, 3)
    block = CopyBlock(0, np.array([src], np.int32), np.array([dst], np.int32))
    engine = ThreadedCopyEngine(stack, clock=lambda: 0.0)
    engine_call(engine, CopyJob(OpId(1), kind, (block,)), 1)()
    engine.close()
    there = np.uint8(9 if kind is CopyKind.BACKUP else 8)
    assert (host.data[7] == int(there)).all()
    assert (pool.read_records(np.array([3], np.int32)) == there).all()


def test_a_row_for_each_way_and_order_of_slots() -> None:
    rows = measure("pages", SMALL, 3, 0.8)
    assert [(r.slots, r.way) for r in rows] == [
        (slots, way) for slots in ("contiguous", "scattered") for way in ("to host", "to device")
    ]
    record = 2 * 2 * 4 * 4 * 4
    assert all(r.megabytes == copies.PAGES * record / 1e6 for r in rows)
    assert all(min(r.plain, r.mover, r.engine) > 0 for r in rows)


def test_the_ratio_is_of_the_engine_over_the_plain_copy() -> None:
    row = Row("p", "contiguous", "to host", 1.0, 10.0, 9.0, 8.0, target=0.8)
    assert (row.ratio, row.met) == (0.8, True)
    assert replace(row, engine=7.9).met is False and replace(row, target=None).met is None


def test_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "kv_spec", lambda *shape: SMALL)
    threads = torch.get_num_threads()
    app, out = Typer(), tmp_path / "out" / "copies.json"
    app.command()(copies.main)
    done = CliRunner().invoke(app, ["--json", str(out)])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert [r["target"] for r in rows] == [0.8] * 4 + [None] * 4
