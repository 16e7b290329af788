"""`tilenet report`: one page that says how a run went."""

from pathlib import Path

from tilenet.cli.options.arguments import Arguments, command
from tilenet.errors import printable
from tilenet.report.page import write_report


@command("report")
def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Arguments(
        prog="tilenet report",
        description="Write one HTML page about a training run: curves, scores, times, memory "
        "and places with errors. It needs no network and no other file.",
    )
    parser.add_argument("run", help="folder of a training run")
    parser.add_argument(
        "--map", metavar="MAP", help="class map of one of its images: places with most errors"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="default: report.html in the folder")
    options = parser.parse_args(arguments)
    out = None if options.out is None else Path(options.out)
    print(printable(str(write_report(Path(options.run), out, options.map))))
