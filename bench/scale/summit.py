"""What does the performance model say of the paper's runs on Summit?

Nothing here was measured by us. The closed form behind `tilenet plan` is given a machine's
published figures, below, and asked for the runs of S. Seal, S.-H. Lim, D. Wang, J.
Hinkle, D. Lunga, A. Tsaris, "Toward Large-Scale Image Segmentation on Summit", ICPP 2020: 100
images of 10 000² × 4 in 8 × 8 tiles with ε = 92 px, each tile a sample of its own, one per GPU and
step. Its abstract has near-linear strong scaling to 256 nodes; 12 s an epoch on 1 200 GPUs and 1
740 s on a DGX-1 are taken as given. Which network and which batch ran there it does not say: here
the small preset, and one tile per GPU and step, so that 1 200 GPUs take 6 steps, a DGX-1 800, and
no model has a ratio above 133 (145 was measured). One factor on all computing, from the DGX-1's
epoch, then predicts Summit's. Gradients are summed by each rank over its share of the node's
network, as tilenet does over MPI; sums within the node first would move a sixth of that.

Then what tilenet's balances would make of a node's pipeline. Seconds suffice: --quick changes
nothing.

Makers' peaks, rates of one direction:

- V100: NVIDIA, "Tesla V100 GPU architecture" (WP-08608-001, 2017): 15.7 TFLOP/s, 900 GB/s.
- Node of Summit: OLCF, "Summit User Guide" (2019): 6 GPUs, NVLink 2 with 50 GB/s, dual-rail EDR.
- Network: C. Zimmer, S. Atchley, R. Pankajakshan and others, "An Evaluation of the CORAL
  Interconnects", SC19 (2019): 100 Gb/s a rail, fat tree without taper.
- File system: S. Oral, S. Vazhkudai, F. Wang and others, "End-to-end I/O Portfolio for the Summit
  Supercomputing Ecosystem", SC19 (2019): Alpine, Spectrum Scale, 2.5 TB/s.
- DGX-1: NVIDIA, "DGX-1 with Tesla V100 System Architecture" (WP-08437-002, 2017): 8 GPUs, PCIe 3,
  4 × EDR, 4 SSDs.

Assumed: what a kernel's launch from Python takes, a message from device memory through the host's
and its way; and 12.5 GB/s at which a node reads files.
"""

from dataclasses import replace
from typing import Any

from bench.report import Claim, Found, at_least, at_most
from bench.speed.balance import PAPER
from tilenet.geometry.unet import PRESETS, UNetOptions
from tilenet.planning.estimate import Estimator
from tilenet.planning.machines.machine import Machine
from tilenet.planning.machines.read import machine
from tilenet.planning.plan import Layout, Question
from tilenet.planning.search import Search

FILE_SYSTEM = 2.5e12  # bytes/s of all nodes together
SUMMIT = replace(
    machine("summit"), latency_s=1.5e-6, message_s=2e-5, kernel_s=1e-5, file_bandwidth=12.5e9
)
DGX_1 = replace(
    SUMMIT, name="dgx-1", devices_per_node=8, host_bandwidth=16e9, network_bandwidth=50e9,
    file_bandwidth=2e9,
)  # fmt: skip
TILES, TILE_PX, EPSILON_PX = 6400, 1434, 92
NODE = (3 * 1250, 4 * 1250)  # own pixels of a node's 12 tiles, in the middle of an image
MEASURED = {"dgx_1": 1740.0, "summit": 12.0}
SMALL = PRESETS["small"]
ALONE = Layout((1, 1), 1, 1, "never")


def samples(options: UNetOptions, facts: Machine, nodes: int, slower: float = 1) -> dict[str, Any]:
    """An epoch in which every tile is a sample, one per GPU and step."""
    gpus = nodes * facts.devices_per_node
    # The norms of the paper's runs knew their own tile only
    local = replace(options, norm_scope="tile")
    machine = replace(
        facts,
        flops={name: value / slower for name, value in facts.flops.items()},
        memory_bandwidth=facts.memory_bandwidth / slower,
        file_bandwidth=min(facts.file_bandwidth, FILE_SYSTEM / nodes),
    )
    size = (TILE_PX, TILE_PX)
    asked = Question(local, 0, size, machine, nodes, TILES, gpus, grid=(1, 1), halo=0, partitions=1)
    estimator = Estimator(replace(asked, halo="exact"))
    balance = (len(estimator.layers),)
    step_s, tile_s, sum_s = estimator.step_s(ALONE, balance)
    steps = -(-TILES // gpus)
    return {
        "machine": facts.name,
        "GPUs": gpus,
        "steps": steps,
        "step_s": step_s,
        "tile_s": tile_s,
        "sum_s": sum_s,
        "read_s": estimator.read_s(ALONE),
        "epoch_s": steps * step_s,
        "of a step computing": tile_s / step_s,
    }


def balances() -> list[dict[str, Any]]:
    """Seconds per tile of a node's pipeline with the paper's balances and with ours."""
    rows = []
    for name, balance in PAPER.items():
        options = replace(PRESETS[name], norm_scope="tile")
        asked = Question(
            options, EPSILON_PX, NODE, SUMMIT, halo="epsilon", grid=(3, 4),
            partitions=6, micro_batches=12, checkpointing="except_last",
        )  # fmt: skip
        search = Search(asked)
        layout = next(iter(search.layouts()))
        # Memory aside: what only balance makes of it
        endless = replace(search.question, machine=replace(SUMMIT, memory_bytes=10**15))
        ours = Search(endless).plan(layout)
        assert ours is not None
        papers = search.estimator.step_s(layout, balance)[0]
        rows.append(
            {
                "model": name,
                "paper's balance, s per tile": papers / 12,
                "tilenet's, s per tile": ours.step_s / 12,
                "gain": papers / ours.step_s,
            }
        )
    return rows


def bench(quick: bool) -> Found:
    """Predict all."""
    dgx, summit = samples(SMALL, DGX_1, 1), samples(SMALL, SUMMIT, 200)
    slower = MEASURED["dgx_1"] / dgx["epoch_s"]
    fitted = samples(SMALL, SUMMIT, 200, slower)
    paper = [
        {"run": "DGX-1, 8 GPUs", "measured_s": MEASURED["dgx_1"], "roofline_s": dgx["epoch_s"],
         "with the DGX-1's factor_s": MEASURED["dgx_1"]},
        {"run": "Summit, 1200 GPUs", "measured_s": MEASURED["summit"],
         "roofline_s": summit["epoch_s"], "with the DGX-1's factor_s": fitted["epoch_s"]},
    ]  # fmt: skip
    curve = [samples(SMALL, SUMMIT, nodes, slower) for nodes in (1, 16, 128, 256)]
    balanced = balances()
    figures: dict[str, Any] = {
        "factor on all computing that the DGX-1's run asks for": slower,
        "the paper's runs": paper,
        "strong scaling with that factor": curve,
        "balance, six V100": balanced,
    }
    ratio = dgx["epoch_s"] / summit["epoch_s"]
    wanted = MEASURED["dgx_1"] / MEASURED["summit"]
    claims: list[Claim] = [
        at_most("roofline alone: error of the DGX-1's epoch", abs(1 - 1 / slower), 0.2),
        at_most("Summit's epoch from the DGX-1's: error",
                abs(fitted["epoch_s"] / MEASURED["summit"] - 1), 0.2),
        at_most("DGX-1 over Summit (measured 145): error", abs(ratio / wanted - 1), 0.2),
        at_least("256 nodes: share of a step in which GPUs compute",
                 curve[-1]["of a step computing"], 0.9),
        at_least("balance: tilenet's gain over the paper's, least",
                 min(row["gain"] for row in balanced), 1.0),
    ]  # fmt: skip
    return figures, claims
