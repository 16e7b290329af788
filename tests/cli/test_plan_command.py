"""`tilenet plan`: what it explains, prints as JSON, draws and refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dry_run import dry_run
from zoo import ZOO

from tilenet.adoption.adopt import adopt
from tilenet.cli.plan import main
from tilenet.geometry.halo_rule import halo_rule
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.planning.maps.choose import choose_map
from tilenet.planning.maps.question import MapQuestion
from tilenet.planning.maps.strips import GPU_STRIP_PX
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes
from tilenet.planning.plan import read_plan

Capture = pytest.CaptureFixture[str]
SMALL = ["--poolings", "1", "--convs", "1", "--base", "4", "--machine", "summit"]
TINY = [*SMALL, "--image", "150x110", "--grid", "4x6"]
ONE = [*TINY, "--partitions", "1", "--micro-batches", "1"]


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_the_papers_small_model_on_a_summit_node(capsys: Capture) -> None:
    """8 × 8 tiles fit a V100 without a second partition."""
    paper = ["--preset", "small", "--image", "10000", "--machine", "summit", "--halo", "epsilon"]
    said = printed(capsys, *paper, "--grid", "8x8", "--norm-scope", "tile")
    assert "8 × 8, own 1250 × 1250 px, read 1434 × 1434 px, halo 92 px, overlap" in said
    assert "6 per node, 1 device each" in said
    assert re.search(r"^ +0 +109 +72,301,856 +\d+\.\d\d ", said, re.MULTILINE)
    assert "approximate: the halo (92 px) is narrower than the exact one (192 px)" in said
    assert "pipeline       12 tiles per rank, 1 micro-batch at once" in said
    assert "seconds are the roofline's for NVIDIA V100 SXM2 16 GB" in said


@pytest.mark.parametrize("ranks", [1, 6])
def test_the_map_is_chosen_by_the_rule_of_predict(capsys: Capture, ranks: int) -> None:
    asked = ["--poolings", "3", "--base", "64", "--norm", "none", "--image", "6001x5003"]
    asked += ["--grid", "6x6", "--partitions", "1", "--devices-per-node", str(ranks)]
    said = printed(capsys, *asked, "--machine", "summit")
    strips, work = r"in strips of (\d+) × (\d+) px over (\d+) ranks?", r"work ratio ([\d.]+)"
    found = re.search(rf"swept {strips}, {work}; ([\d.e-]+) GiB", said)
    assert found
    layers = unet_layers(UNetOptions(poolings=3, base=64, norm="none", bands=4))
    budget, rule = 4 << 30, halo_rule("exact", layers)
    question = MapQuestion(
        layers, (6001, 5003), rule, False, None, ranks, 4, budget, 4096, sweep_bytes=budget,
        strip_overhead_px=GPU_STRIP_PX,
    )  # fmt: skip
    plan = choose_map(question)
    assert plan.method == "sweep"
    assert int(found[1]) == max(tile.own.height for tile in plan.tiling.tiles)
    assert int(found[2]) == max(tile.read.width for tile in plan.tiling.tiles)
    assert int(found[3]) == ranks
    assert float(found[4]) == pytest.approx(plan.work_ratio, abs=0.005)
    wanted = swept_bytes(layers, plan.tiling.extended[0], int(found[2]), int(found[1]), 4)
    assert float(found[5]) * 2**30 == pytest.approx(wanted, abs=0.005 * 2**30)


@pytest.mark.parametrize(
    ("more", "swept"),
    [
        (["--partitions", "1"], True),
        (["--partitions", "1", "--halo", "epsilon"], False),
        (["--partitions", "2"], False),
    ],
)
def test_of_maps_by_tiles_nothing_is_said(capsys: Capture, more: list[str], swept: bool) -> None:
    """Tiles of ε depend on where they lie, and partitions take tiles."""
    asked = ["--poolings", "3", "--base", "64", "--norm", "none", "--image", "6001x5003"]
    asked += ["--grid", "6x6", "--machine", "summit", "--devices-per-node", "2", *more]
    assert ("swept" in printed(capsys, *asked)) == swept


def test_the_explanation_names_partitions_and_rivals(capsys: Capture) -> None:
    said = printed(capsys, *TINY, "--devices-per-node", "4")
    plan = json.loads(printed(capsys, *TINY, "--devices-per-node", "4", "--json"))
    answer = plan["answer"]
    parts = re.findall(r"^ +(\d+) +(\d+) +([\d,]+) +([\d.e-]+) ", said, re.MULTILINE)
    assert [int(layers) for _, layers, _, _ in parts] == answer["balance"]
    for (_, _, parameters, gib), part in zip(parts, answer["parts"], strict=True):
        assert int(parameters.replace(",", "")) == part["parameters"]
        assert float(gib) == pytest.approx(part["num_bytes"] / 2**30, rel=0.5)
    instead = re.findall(r"instead of +(.*): ([\d.]+) × the time", said)
    rivals = [one for one in instead if not one[0].startswith("halo_mode ")]
    modes = [layout.split()[1] for layout, _ in instead if layout.startswith("halo_mode ")]
    assert modes == ["exchange,", "sweep,"]
    assert 1 <= len(rivals) <= 2
    assert len({layout for layout, _ in rivals}) == len(rivals)
    assert all(float(slower) >= 1 for _, slower in rivals)
    assert not re.search(r"(?<!× )\b1 (devices|micro-batches|tiles|partitions)\b", said)


def test_a_tile_alone_is_not_called_approximate(capsys: Capture) -> None:
    arguments = [*SMALL, "--image", "64", "--grid", "1x1", "--partitions", "1"]
    assert "approximate" not in printed(capsys, *arguments, "--halo", "0")
    arguments[arguments.index("1x1")] = "2x1"
    assert "approximate: the halo (0 px)" in printed(capsys, *arguments, "--halo", "0")


@pytest.mark.parametrize(
    ("partitions", "halo"), [("1", "halo exchanged between ranks"), ("6", "no halo")]
)
def test_exchange_takes_a_halo_where_there_are_neighbours(
    capsys: Capture, partitions: str, halo: str
) -> None:
    asked = ["--image", "99x70", "--halo-mode", "exchange", "--partitions", partitions]
    assert re.search(rf", {halo}; work ratio 1\.0\d", printed(capsys, *SMALL, *asked))


def tight(capsys: Capture, share: float, *arguments: str) -> list[str]:
    """The arguments, for devices that hold a share of what they take without swapping."""
    needed = json.loads(printed(capsys, *arguments, "--json"))["answer"]["device_bytes"]
    return [*arguments, "--device-gib", f"{share * needed / 0.9 / 2**30:.9f}"]


SWAPPING = [*SMALL, "--base", "8", "--image", "900x700", "--grid", "2x3"]
ALONE = [*SWAPPING, "--partitions", "1", "--micro-batches", "1"]
PIPELINE = [*SWAPPING, "--partitions", "2", "--micro-batches", "4", "--batch-size", "6"]
LINE = re.compile(
    r"^  swap           (.+); (\S+) GiB out and in per mini-batch of a rank, \+(\d+)% time$",
    re.MULTILINE,
)


def said_and_written(
    capsys: Capture, path: Path, *arguments: str
) -> tuple[re.Match[str], dict[str, Any]]:
    """The line about swapping, and the plan, whose answer this checks that line against."""
    (line,) = LINE.finditer(printed(capsys, *arguments, "-o", str(path)))
    plan: dict[str, Any] = json.loads(path.read_text())
    swaps = plan["answer"]["swaps"]
    parts = swaps["partitions"]
    moved = sum(part["swapped_bytes"] for part in parts) / 2**30
    assert moved > 0
    assert float(line[2]) == pytest.approx(moved, rel=0.5)
    assert int(line[3]) == round(100 * plan["answer"]["swap_overhead"])
    assert ("inputs and skips on the host" in line[1]) == swaps["stored"]
    layers = sum(part["layers"] for part in parts)
    if not swaps["stored"]:
        assert line[1] == f"{layers} of {sum(plan['answer']['balance'])} layers swapped"
    assert read_plan(path).keys == plan["run"]
    return line, plan


def test_layers_that_swap_are_said_and_written(
    capsys: Capture, tmp_path: Path, refusal: Any
) -> None:
    asked = tight(capsys, 0.9, *ALONE)
    said = refusal(main, 1, *asked)
    assert re.search(r"\); swap auto: 2 × 3 tiles, 1 partition, .*, swapping take ", said)
    _, plan = said_and_written(capsys, tmp_path / "plan.json", *asked, "--swap", "auto")
    assert plan["run"]["swap"] == plan["asked"]["swap"] == "auto"
    answer = plan["answer"]
    (part,) = answer["swaps"]["partitions"]
    assert 0 < part["layers"] < sum(answer["balance"])
    assert part["device_bytes"] == answer["device_bytes"] < answer["swaps"]["without_bytes"]


def test_a_store_is_said_and_counted(capsys: Capture, tmp_path: Path) -> None:
    asked = [*PIPELINE, "--checkpointing", "always", "--swap", "all"]
    _, plan = said_and_written(capsys, tmp_path / "plan.json", *asked)
    assert plan["run"]["swap"] == "all"
    answer = plan["answer"]
    assert [part["layers"] for part in answer["swaps"]["partitions"]] == [0, 0]
    layers = unet_layers(UNetOptions(poolings=1, convolutions=1, base=8))
    step = layers, tuple(answer["tile_read_px"]), answer["balance"], 4, "always"
    stored, plain = (dry_run(*step, stored=stored).partitions for stored in (True, False))
    assert stored != plain
    for part, num_bytes in zip(answer["parts"], stored, strict=True):
        assert 0.98 * num_bytes <= part["num_bytes"] <= 1.25 * num_bytes


def test_where_nothing_must_nothing_is_swapped(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = printed(capsys, *ALONE, "--swap", "auto", "-o", str(path))
    assert said.count("\n  swap           nothing\n") == 1
    plan = json.loads(path.read_text())
    assert plan["run"]["swap"] == "off"
    assert plan["asked"]["swap"] == "auto"
    assert plan["answer"]["swaps"] is None
    # What runs would do is the same without.
    assert printed(capsys, *ALONE) == said.replace("  swap           nothing\n", "")
    off = json.loads(printed(capsys, *ALONE, "--swap", "off", "--json"))
    assert (off["run"], off["answer"]) == (plan["run"], plan["answer"])
    (line,) = LINE.finditer(printed(capsys, *ALONE, "--swap", "all"))
    assert line[1] == "11 of 11 layers swapped"


def test_a_plan_is_written_for_runs(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = json.loads(printed(capsys, *TINY, "--json", "-o", str(path)))
    assert json.loads(path.read_text()) == said
    assert read_plan(path).keys == said["run"]
    assert said["run"]["tiles"] == {"rows": 4, "columns": 6}


def test_a_node_with_too_little_memory_is_noted(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tilenet").mkdir()
    (tmp_path / "tilenet" / "machines.toml").write_text("[summit]\nhost_bytes = 1_000_000\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "a node's memory is too small for its ranks" in printed(capsys, *TINY)


def test_pictures_are_drawn(capsys: Capture, tmp_path: Path) -> None:
    paths = [tmp_path / "timeline.png", tmp_path / "memory.png"]
    printed(capsys, *TINY, "--plot", str(paths[0]), "--plot", str(paths[1]))
    found = [path.read_bytes() for path in paths]
    assert all(image.startswith(b"\x89PNG") for image in found)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (2, SMALL, "a plan needs --image"),
        (2, [*TINY, "--tile", "5"], "by --grid or by --tile, not both"),
        (2, [*TINY, "--balance", "3,x"], "whole numbers joined by commas (3,x); write L,L"),
        (2, [*TINY, "--device-gib", "nan"], "--device-gib must be above 0"),
        (2, [*TINY, "--devices-per-node", "0"], "--devices-per-node must be above 0"),
        (2, [*TINY, "--colour"], "unrecognized arguments: --colour"),
        (1, [*SMALL, "--image", "99", "--machine", "sumit"], "nearest: summit"),
        (1, [*TINY, "--precision", "bfloat16"], "has no peak for precision bfloat16"),
        (1, [*TINY, "--balance", "3,4"], "must add up"),
        (1, [*TINY, "--balance", "3,4", "--partitions", "3"], "one entry a partition"),
        (1, [*TINY, "--partitions", "0"], "partitions must be at least 1"),
        (1, [*TINY, "--partitions", "7"], "plan with at most 6"),
        (1, [*TINY, "--reserve", "1"], "reserve is a share"),
        (1, [*ONE, "--device-gib", "0.000001"], "a plan must fit its devices (needed: "),
        (1, [*TINY, "--profile", "nowhere.json"], "the profile must be a readable file"),
        (1, [*TINY, "-o", "no/such/folder/plan.json"], "name another file"),
        (1, [*TINY, "--plot", "no/such/folder/a.png"], "no/such/folder"),
        (1, [*TINY, "--halo-mode", "exchange"], "leave the tiles out"),
    ],
)
def test_what_is_impossible_is_said_in_a_sentence(
    refusal: Any, code: int, arguments: list[str], said: str
) -> None:
    assert said in refusal(main, code, *arguments)


# --- somebody's network

OWN = ["--network", "zoo:Residual", "--image", "150x110", "--machine", "summit"]


def test_a_plan_of_a_module(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    said = printed(capsys, *OWN, "--grid", "4x3", "--partitions", "1", "-o", str(path))
    layers = adopt(ZOO["residual"](), 3).layers
    rule = halo_rule("exact", layers)
    tiling = cut(150, 110, Cut(grid=(4, 3)), rule)
    read = tiling.rows[0].read, tiling.cols[0].read
    assert "150 × 110 × 3 px on 1 × 6 NVIDIA V100" in said
    assert f"read {read[0]} × {read[1]} px, halo {rule.halo_px} px, overlap" in said
    (part,) = partition_bytes(layer_bytes(layers, *read), (len(layers),), 1, "never")
    answer = json.loads(path.read_text())["answer"]
    assert answer["device_bytes"] == part.total
    again = printed(capsys, "--replan", str(path), "--nodes", "2", "--json")
    assert json.loads(again)["answer"]["device_bytes"] == part.total
    assert json.loads(again)["run"]["tiles"] == {"rows": 4, "columns": 3}


def test_batch_norm_and_bands_reach_the_module(capsys: Capture, refusal: Any) -> None:
    said = printed(capsys, *OWN, "--batch-norm", "step", "--partitions", "1", "--grid", "6x6")
    assert "6 tiles per rank, 6 in a micro-batch for batch norm, 1 micro-batch at once" in said
    assert "another number of bands" in refusal(main, 1, *OWN, "--bands", "2")


def test_what_is_of_unets_alone_is_refused(refusal: Any) -> None:
    fixed = ["--grid", "4x3", "--partitions", "1"]
    assert "--base describes a U-Net" in refusal(main, 2, *OWN, "--base", "8")
    assert "--options goes with --network" in refusal(main, 2, *TINY, "--options", "a=1")
    assert "or by --network" in refusal(main, 2, *OWN[2:])
    assert "the network is a module" in refusal(main, 1, *OWN, *fixed, "--halo", "epsilon")
    said = refusal(main, 1, *OWN, *fixed, "--plot", "memory.png")
    assert "the bytes of levels are those of a U-Net (network: Residual" in said
    assert "only --nodes, --profile, -o and --json" in refusal(
        main, 2, *OWN, "--replan", "plan.json"
    )


@pytest.mark.parametrize(("scope", "said"), [("image", True), ("tile", False)])
def test_a_plan_of_tiles_off_the_grid_says_that_train_refuses_it(
    capsys: Capture, scope: str, said: bool
) -> None:
    asked = ["--preset", "small", "--base", "4", "--image", "512x640", "--grid", "2x2"]
    found = printed(capsys, *asked, "--halo", "epsilon", "--norm-scope", scope)
    assert ("train refuses this plan as it stands: tiles must lie on" in found) == said
