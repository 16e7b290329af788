"""The bench gpu runs, but for what only a GPU can tell; and what is broken shows."""

from typing import Any

import pytest

from bench.gpu import gpu, gpu_roofline
from bench.swapping.lms_sizes import largest
from tilenet.errors import TilenetError


def test_machines_are_found_by_their_devices() -> None:
    known = {"Tesla V100-SXM2-16GB": "summit", "NVIDIA A100-SXM4-80GB": "slurm"}
    known |= {"NVIDIA A100-PCIE-40GB": "perlmutter", "NVIDIA H100 80GB HBM3": "h100"}
    assert {device: gpu_roofline.machine_of(device).name for device in known} == known
    with pytest.raises(TilenetError, match=r"GeForce.*--machine"):
        gpu_roofline.machine_of("NVIDIA GeForce RTX 4090")


@pytest.mark.parametrize("start", [16, 320, 2000])
def test_the_largest_size_is_found(start: int) -> None:
    found = largest(lambda side: 3 * side**2, 3 * 1000**2, 16, start)
    assert (found.size, found.next_size, found.to_the_end) == (992, 1008, True)
    over = largest(lambda side: 3 * side**2, 3 * 1000**2, 16, start, until=0)
    assert (over.size, over.next_size, over.to_the_end) == (0, None, False)
    assert largest(lambda side: None, 1, 16, start).size == 0


def test_a_part_that_fails_is_a_claim_that_does_not_hold() -> None:
    asked: dict[str, Any] = {"device": "cpu", "machine": "nowhere"}
    figures, (claim,) = gpu.run_part("roofline", asked, 60)
    assert figures == {"failed": claim.claim, "before": []}
    assert "roofline failed: TilenetError: there is no machine named 'nowhere'" in claim.claim
    assert not claim.holds
    figures, (claim,) = gpu.run_part("no part", asked, 60)
    assert claim.claim == "no part failed: its process ended with 1: KeyError: 'no part'"


def test_a_part_whose_time_is_over_is_ended() -> None:
    figures, claims = gpu.run_part("sizes", {"device": "cpu"}, 0.3)
    assert figures == {"failed": "sizes failed: its 0 s were over", "before": []}
    assert not claims[0].holds
