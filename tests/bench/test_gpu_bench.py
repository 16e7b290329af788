"""bench/gpu/gpu.py runs, but for what only a GPU can tell; and what is broken shows."""

import json
import sys
import time
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import render
from bench.gpu import (
    gpu,
    gpu_exactness,
    gpu_memory,
    gpu_overlap,
    gpu_roofline,
    gpu_sizes,
    gpu_speed,
)
from bench.gpu.gpu_part import Asked
from bench.report import Claim
from bench.swapping.lms_networks import KINDS
from bench.swapping.lms_training import Place
from tilenet.errors import TilenetError
from tilenet.model.skips import Origin
from tilenet.parallel.swap.copies import CopyStreams
from tilenet.planning.machines import machine

CPU = Asked(torch.device("cpu"))
# cases; of the ways to swap, one is for all devices at once
EXACT = {"tiles": 9, "partitions": 15, "swaps": 9 - torch.cuda.is_available()}


@pytest.mark.parametrize("name", EXACT)
def test_nothing_changes_the_result(name: str) -> None:
    figures, claims = getattr(gpu_exactness, name)(CPU)
    assert len(figures["rows"]) == EXACT[name]
    assert len(claims) >= 2
    assert all(claim.holds for claim in claims), claims


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_nothing_changes_the_result_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, torch sees none")
    _, claims = getattr(gpu_exactness, name)(Asked(torch.device("cuda", 0)))
    assert all(claim.holds for claim in claims), claims


def test_a_spoilt_copy_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = CopyStreams.fetch

    def spoilt(self: CopyStreams, host: torch.Tensor, *rest: Any) -> Any:
        flat, arrival = fetch(self, host, *rest)
        values = flat.view(torch.float64)
        if values.abs().max() > 1e-9:  # places of maxima, int64, would be tiny numbers
            values[-1] += 1
        return flat, arrival

    monkeypatch.setattr(CopyStreams, "fetch", spoilt)
    _, claims = gpu_exactness.swaps(CPU)
    assert not claims[1].holds


def test_other_masks_show_in_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_exactness, "Origin", lambda images: Origin((images[0] + 1,)))
    _, claims = gpu_exactness.partitions(replace(CPU, quick=True))
    assert not claims[0].holds
    assert not claims[1].holds


def test_no_number_is_not_passed_over() -> None:
    wanted = {"a": torch.ones(2), "b": torch.ones(2)}
    found = {"a": torch.ones(2), "b": torch.tensor([1.0, nan])}
    row = gpu_exactness.different((1.0, found), (1.0, wanted))
    assert isnan(row["gradients"])
    claims = gpu_exactness._claims("all", [{"loss": 0.0, "gradients": 0.0}, row])
    assert [claim.holds for claim in claims] == [True, False]


def test_memory_is_predicted_and_measured() -> None:
    rows = gpu_memory.memory(CPU)[0]["rows"]
    assert [row["partitions"] for row in rows] == [1, 2]
    assert all(0.5 < row["ratio"] < 2 for row in rows)


def test_speed_has_all_precisions() -> None:
    rows = gpu_speed.speed(CPU)[0]["rows"]
    cases = {(row["precision"], row["channels_last"]) for row in rows}
    assert len(cases) == len(rows) == 8
    assert all(row["s_per_mpx"] > 0 for row in rows)


def test_copies_and_convolutions_are_timed() -> None:
    rows = gpu_overlap.overlap(CPU)[0]["rows"]
    assert len(rows) == 8
    for row in rows:
        assert row["sum_s"] == row["copies_s"] + row["convolutions_s"]
        lower = min(row["copies_s"], row["convolutions_s"])
        assert row["hidden"] == (row["sum_s"] - row["together_s"]) / lower


def test_shares_of_the_roofline_add_up() -> None:
    table = gpu_roofline.shares(replace(CPU, machine="workstation"))[0]["float32"]
    whole = table.pop("all")
    assert {"conv", "norm", "activation", "pool"} <= set(table)
    for key in ("measured_s", "roofline_s", "planned_s"):
        assert sum(row[key] for row in table.values()) == pytest.approx(whole[key])
    assert whole["share"] == whole["roofline_s"] / whole["measured_s"]
    # the makers' peaks, of which convolutions are planned with 0.6
    assert 0.5 < whole["roofline_s"] / whole["planned_s"] < 0.9


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Tesla V100-SXM2-16GB", "summit"),
        ("NVIDIA A100-SXM4-40GB", "perlmutter"),
        ("NVIDIA A100-SXM4-80GB", "slurm"),
        ("NVIDIA A100-PCIE-40GB", "perlmutter"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_machines_are_found_by_their_devices(device: str, name: str) -> None:
    assert gpu_roofline.machine_of(device).name == name


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(TilenetError, match=r"GeForce.*--machine"):
        gpu_roofline.machine_of("NVIDIA GeForce RTX 4090")


def test_the_largest_size_is_found() -> None:
    found = gpu_sizes.searched(lambda side: 3 * side**2, 3 * 1000**2, KINDS["unet"], 4, nan)
    assert (found["side"], found["next_side"], found["to_the_end"]) == (992, 1008, True)


def test_a_search_whose_time_is_over_says_what_it_knows() -> None:
    sides: list[int] = []

    def peak_of(side: int) -> int | None:
        sides.append(side)
        time.sleep(0.06)
        return side

    found = gpu_sizes.searched(peak_of, 10**6, KINDS["unet"], 4, time.perf_counter() + 0.1)
    assert not found["to_the_end"]
    assert found["side"] == max(sides)
    assert len(sides) <= 2


def test_largest_images_stand_beside_the_planners() -> None:
    figures, _ = gpu_sizes.sizes(replace(CPU, until=time.perf_counter() + 3))
    rows = figures["rows"]
    assert [row["mode"] for row in rows] == ["off", "checkpointing", "swap", "auto"]
    assert rows[0]["side"] >= 64
    assert rows[0]["peak_mib"] * 2**20 <= figures["limit_gib"] * 2**30


def test_what_is_planned_grows_with_the_side_and_shrinks_with_the_mode() -> None:
    place, facts = Place(CPU.device, 8 << 20, 1 << 30, 4), machine("slurm")
    found = {
        (mode, side): gpu_sizes.planned_bytes(place, facts, mode, side)
        for mode in ("off", "checkpointing", "swap")
        for side in (64, 96)
    }
    for mode in ("off", "checkpointing", "swap"):
        assert found[mode, 64] < found[mode, 96]
    assert found["swap", 96] < found["checkpointing", 96] < found["off", 96]


def test_a_part_that_fails_is_a_claim_that_does_not_hold() -> None:
    def part(asked: Asked) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    figures, claims = gpu.read("speed", "shown before\n" + gpu.answer(part, CPU), "", 0)
    sentence = "speed failed: RuntimeError: CUDA error: an illegal memory access"
    assert figures == {"failed": sentence}
    assert claims == [Claim(sentence, 1, 0, False)]
    assert gpu.read("tiles", "", "boom\nSegmentation fault", -11)[1] == [
        Claim("tiles failed: its process ended with -11: Segmentation fault", 1, 0, False)
    ]
    assert gpu.read("compiled", "", "no triton", 1)[1] == []


def test_a_part_whose_time_is_over_is_ended() -> None:
    figures, claims = gpu.run_part("sizes", ["--device", "cpu"], 0.3)
    assert figures == {"failed": "sizes failed: its 0 s were over", "before": []}
    assert not claims[0].holds


def test_the_others_go_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Each in a process of its own."""
    given = ["gpu.py", "--device", "cpu", "--machine", "nowhere", "--parts"]
    monkeypatch.setattr(sys, "argv", [*given, "roofline", "overlap"])
    gpu.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    (claim,) = said["claims"]
    assert claim["claim"] == said["figures"]["roofline"]["failed"]
    assert "no machine named 'nowhere'" in claim["claim"]
    assert not claim["holds"]
    assert len(said["figures"]["overlap"]["rows"]) == 8
    assert set(said["figures"]["seconds"]) == {"roofline", "overlap", "all"}


def test_results_are_shown_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(render, "RESULTS", tmp_path / "results")
    assert render._kept("gpu") == {}
    for device in ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"):
        figures = {"device": device, "date": "2030-01-01", "speed": {"size_px": 7}}
        gpu._keep(figures, [Claim("it is fast", 1.0, 2.0, True)], device)
    kept = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert kept == ["nvidia-h100-80gb-hbm3.json", "tesla-v100-sxm2-16gb.json"]
    text = render._section("gpu")
    assert "On NVIDIA H100 80GB HBM3; " in text
    assert "On Tesla V100-SXM2-16GB; " in text
    assert "([JSON](results/nvidia-h100-80gb-hbm3.json))" in text
    assert text.count("| it is fast | 1 | 2 | yes |") == 2
    assert render._held("gpu") == "2 of 2"
