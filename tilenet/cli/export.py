"""`tilenet export`: a trained network as a file for other programs."""

from tilenet.cli.options.arguments import Arguments, command
from tilenet.cli.own_network import add_code, module_named
from tilenet.errors import UsageError
from tilenet.export.job import Export, export_network
from tilenet.parallel.health.progress import say


@command("export")
def main(arguments: list[str]) -> None:
    """Run the command."""
    options = vars(_parser().parse_args(arguments))
    code, module_options = options.pop("code"), options.pop("options")
    if code is None and module_options is not None:
        raise UsageError("--options goes with --network; name the module, or leave it out")
    module = None if code is None else module_named(code, module_options, None)
    for sentence in export_network(Export(**options, module=module)):
        say(f"tilenet: {sentence}")


def _parser() -> Arguments:
    parser = Arguments(
        prog="tilenet export",
        description="Write a trained network to a file that other programs run: it takes pixel "
        "values as the run's images hold them.",
    )
    parser.add_argument("network", metavar="checkpoint", help="folder of a run or checkpoint")
    parser.add_argument("out", help="file to write: .pt2 (torch.export) or .onnx")
    parser.add_argument(
        "--output",
        choices=["logits", "probabilities"],
        default="logits",
        help="what it gives (%(default)s)",
    )
    parser.add_argument(
        "--tile",
        dest="tile_px",
        type=int,
        metavar="PX",
        help="side of the windows that it takes, halos and all, where it takes one size alone "
        "(default: 512 or more, as fits its halo)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    add_code(parser)
    return parser
