"""Types of values in machines.toml, each with its rule in words."""

import re
from typing import Annotated

PRECISIONS = ("float32", "tf32", "float64", "bfloat16", "float16")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LARGEST = 1e30  # beyond any machine; products of whole numbers stay within floats

# Each with its rule in words and a test of the rule.
Count = Annotated[int, "a positive whole number", lambda n: 0 < n < LARGEST]
Rate = Annotated[float, "a positive number", lambda x: 0 < x < LARGEST]
Share = Annotated[float, "a share above 0 and at most 1", lambda x: 0 < x <= 1]
Seconds = Annotated[float, "a number of seconds, at least 0", lambda x: 0 <= x < LARGEST]
# A line break would begin a line of its own in a script.
Line = Annotated[str, "a text without line breaks", str.isprintable]
Lines = Annotated[tuple[Line, ...], "a list of texts without line breaks", lambda _: True]
Command = Annotated[Lines, "a list of at least one text without line breaks", bool]
Folder = Annotated[Line, "an absolute path", lambda path: path[:1] in ("", "/")]
GpuOption = Annotated[
    Line,
    "--gpus-per-node= or --gres=gpu:, and after it a type and a colon where the site has types",
    re.compile(r"(--gpus-per-node=|--gres=gpu:)([\w.-]+:)?").fullmatch,
]
Numbers = Annotated[tuple[int, ...], "a list of whole numbers", lambda _: True]
Variables = Annotated[
    dict[str, Line],
    "names of variables and their values, as texts",
    lambda table: all(map(NAME.fullmatch, table)),
]
Peaks = Annotated[
    dict[str, Rate],
    f"operations per second, positive, by precision (of {', '.join(PRECISIONS)})",
    lambda table: table and set(table) <= set(PRECISIONS),
]
