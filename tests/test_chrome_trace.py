"""Traces as torch's profiler writes them are read, whole or not at all."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tilenet.errors import TilenetError
from tilenet.parallel.health.trace import TraceEvent, pack_trace, read_trace

# What Kineto writes of a GPU: a copy, a kernel, and events that take no time.
GPU = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "a GPU", "totalGlobalMem": 17}],
    "traceEvents": [
        {"ph": "M", "name": "process_name", "ts": 1.5, "pid": 0, "args": {"name": "python"}},
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoH (Device -> Pinned)",
            "pid": 1,
            "tid": 22,
            "ts": 4434634608898.25,
            "dur": 1500.5,
            "args": {"device": 1, "stream": 22, "bytes": 4096, "memory bandwidth (GB/s)": 2.7},
        },
        {"ph": "s", "id": 2, "pid": 0, "tid": 7, "ts": 3.0, "cat": "ac2g", "name": "ac2g"},
        {
            "ph": "X",
            "cat": "kernel",
            "name": 'void f<"x">(int)',
            "pid": 3,
            "tid": 7,
            "ts": 4434634609000.5,
            "dur": 7,
            "args": {"device": 3, "grid": [1, 2, 3]},
        },
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 9, "tid": 9, "ts": 5.0},
    ],
}


def test_copies_and_kernels_are_read_with_their_device_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(GPU))
    copy, kernel, op = read_trace(path)
    start, stop = 4434634608898.25e-6, 4434634608898.25e-6 + 1500.5e-6
    assert (copy.kind, copy.name) == ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)")
    assert (copy.device, copy.num_bytes) == (1, 4096)
    assert copy.start == pytest.approx(start, rel=0, abs=1e-9)
    assert copy.stop == pytest.approx(stop, rel=0, abs=1e-9)
    assert (kernel.kind, kernel.device, kernel.num_bytes) == ("kernel", 3, None)
    assert kernel.stop - kernel.start == pytest.approx(7e-6, rel=0, abs=1e-9)
    assert op == TraceEvent("cpu_op", "aten::add", 5e-6, 5e-6)


def test_what_the_profiler_of_this_torch_writes_is_read(tmp_path: Path) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    recorded = profile(activities=[ProfilerActivity.CPU])
    with recorded, record_function("the first step"):
        (x @ x).square().sum().backward()  # type: ignore[no-untyped-call]
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    events = read_trace(path)
    ops = [event.name for event in events if event.kind == "cpu_op"]
    marks = [event for event in events if event.kind == "user_annotation"]
    assert ops.count("aten::mm") == 3  # one in forward, two in backward
    assert set(ops) >= {"aten::matmul", "aten::sum", "MmBackward0"}
    assert [mark.name for mark in marks] == ["the first step"]
    for event in events:
        if event.kind == "cpu_op":
            assert marks[0].start <= event.start <= event.stop <= marks[0].stop


@pytest.mark.parametrize("text", ["", '{"traceEvents": [{"ph"', "[]", '{"events": []}'])
def test_a_trace_that_is_not_whole_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TilenetError, match="must be a whole JSON file") as raised:
        read_trace(path)
    assert "\n" not in str(raised.value)


def test_a_packed_trace_has_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(GPU) * 1000)
    pack_trace(path, tmp_path / "trace.json.gz")
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["trace.json", "trace.json.gz"]


def test_a_trace_that_cannot_be_packed_leaves_the_one_before(tmp_path: Path) -> None:
    before = tmp_path / "trace.json.gz"
    before.write_bytes(b"of an earlier run")
    with pytest.raises(OSError, match="nowhere"):
        pack_trace(tmp_path / "nowhere.json", before)
    assert before.read_bytes() == b"of an earlier run"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        pack_trace(before, tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["folder", "trace.json.gz"]
