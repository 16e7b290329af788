"""Train segmentation networks on images far too large for one GPU, exactly.

    run = tilenet.train(net, images="scene.tif", labels="roads.gpkg", classes=["land", "road"],
                        crop_px=512, batch_size=8, epochs=20, output="run")
    tilenet.predict(run, "scene.tif", "map.tif")
    tilenet.evaluate("map.tif", "roads.gpkg").mean_iou

The same script runs alone, in a notebook, and under mpiexec, srun or jsrun.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilenet.adoption.adopt import adopt as adopt
    from tilenet.errors import TilenetError as TilenetError
    from tilenet.library.evaluate import NumberScores as NumberScores
    from tilenet.library.evaluate import Scores as Scores
    from tilenet.library.evaluate import evaluate as evaluate
    from tilenet.library.halo import halo as halo
    from tilenet.library.job import Job as Job
    from tilenet.library.plan import Plans as Plans
    from tilenet.library.plan import plan as plan
    from tilenet.library.predict import Map as Map
    from tilenet.library.predict import predict as predict
    from tilenet.library.run import Run as Run
    from tilenet.library.train import train as train
    from tilenet.parallel.swap.swapping import swapping as swapping

# Imported when they are asked for: the halo calculator answers without torch.
ROOMS = {
    "Job": "library.job",
    "Map": "library.predict",
    "Plans": "library.plan",
    "Run": "library.run",
    "NumberScores": "library.evaluate",
    "Scores": "library.evaluate",
    "TilenetError": "errors",
    "adopt": "adoption.adopt",
    "evaluate": "library.evaluate",
    "halo": "library.halo",
    "plan": "library.plan",
    "predict": "library.predict",
    "swapping": "parallel.swap.swapping",
    "train": "library.train",
}

__all__ = [*ROOMS, "__version__"]

__version__: str


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return getattr(import_module(f"tilenet.{ROOMS[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("tilenet")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
