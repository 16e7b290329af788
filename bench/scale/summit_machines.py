"""Published figures of the machines that summit.py predicts for; rates are of one direction.

Makers' peaks; what is not published is marked as an assumption.

- V100: NVIDIA, "Tesla V100 GPU architecture" (WP-08608-001, 2017): 15.7 TFLOP/s, 900 GB/s.
- Node of Summit: OLCF, "Summit User Guide" (2019): 6 GPUs, NVLink 2 with 50 GB/s, dual-rail EDR.
- Network: C. Zimmer, S. Atchley, R. Pankajakshan and others, "An Evaluation of the CORAL
  Interconnects", SC19 (2019): 100 Gb/s a rail, fat tree without taper.
- File system: S. Oral, S. Vazhkudai, F. Wang and others, "End-to-end I/O Portfolio for the Summit
  Supercomputing Ecosystem", SC19 (2019): Alpine, Spectrum Scale, 2.5 TB/s.
- DGX-1: NVIDIA, "DGX-1 with Tesla V100 System Architecture" (WP-08437-002, 2017): 8 GPUs, PCIe 3,
  4 × EDR, 4 SSDs.
- H200: NVIDIA, "H200 Tensor Core GPU" data sheet (2024): 67 TFLOP/s, 989 in bfloat16 without
  sparsity, 4.8 TB/s, 141 GB, NVLink 900 GB/s both ways; "DGX H200" data sheet (2024): 8 GPUs, 8
  network ports of 400 Gb/s.
"""

from dataclasses import replace

from tilenet.planning.machines import Machine, machine

__all__ = ["DGX_1", "H200", "SUMMIT", "read_share"]

# Assumptions: a kernel's launch from Python, a message from device memory through the host's, and
# 1.5 µs for its way; a node reads at most 12.5 GB/s from files, all together 2.5 TB/s, for H200 as
# well.
KERNEL_S, MESSAGE_S, LATENCY_S = 1e-5, 2e-5, 1.5e-6
FILE_SYSTEM = 2.5e12

SUMMIT = replace(
    machine("summit"),
    latency_s=LATENCY_S,
    message_s=MESSAGE_S,
    kernel_s=KERNEL_S,
    file_bandwidth=12.5e9,
)
DGX_1 = replace(
    SUMMIT,
    name="dgx-1",
    devices_per_node=8,
    host_bandwidth=16e9,
    network_bandwidth=50e9,
    file_bandwidth=2e9,
)
H200 = replace(
    SUMMIT,
    name="h200",
    device="NVIDIA H200",
    devices_per_node=8,
    memory_bytes=141_000_000_000,
    host_bytes=2_199_023_255_552,
    cores=112,
    memory_bandwidth=4.8e12,
    link_bandwidth=450e9,
    host_bandwidth=64e9,
    network_bandwidth=400e9,
    flops={"float64": 34e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
)


def read_share(facts: Machine, nodes: int) -> float:
    """Bytes/s of files for each of so many nodes that read at once."""
    return min(facts.file_bandwidth, FILE_SYSTEM / nodes)
