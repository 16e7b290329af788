"""The table of what composes with what (DESIGN.md, section 7), as far as it is built."""

from dataclasses import replace

import pytest

from tilenet.geometry.networks import UNetOptions, unet_layers
from tilenet.planning.composition import obstacle

PLAIN = UNetOptions(poolings=2, base=4)


@pytest.mark.parametrize(
    ("norm", "scope", "grid", "said"),
    [
        ("none", "image", (1, 1), None),
        ("none", "image", (3, 4), None),
        ("instance", "tile", (3, 4), None),
        ("group", "tile", (1, 2), None),
        ("batch", "tile", (3, 4), None),
        ("instance", "image", (1, 1), None),
        ("group", "image", (1, 1), None),
        ("instance", "image", (1, 2), "instance norm over the whole image"),
        ("group", "image", (5, 1), "group norm over the whole image"),
        ("batch", "image", (1, 1), "batch norm over all images of a step is not built"),
        ("batch", "image", (2, 2), "batch norm over all images of a step is not built"),
    ],
)
def test_the_table(norm: str, scope: str, grid: tuple[int, int], said: str | None) -> None:
    options = replace(PLAIN, norm=norm, norm_scope=scope)  # type: ignore[arg-type]
    found = obstacle(unet_layers(options), grid, (2, 3, 1))
    if said is None:
        assert found is None
        return
    assert found is not None
    assert found.startswith(said)
    assert "\n" not in found
    assert "network.norm_scope: tile" in found
    assert "network.norm: none" in found


def test_the_mesh_that_would_do_has_as_many_ranks() -> None:
    found = obstacle(unet_layers(replace(PLAIN, norm="instance")), (2, 3), (2, 3, 5))
    assert found is not None
    assert "mesh: 2 × 3 × 5" in found
    assert "mesh.replicas: 30, tiles.rows: 1 and tiles.columns: 1" in found
