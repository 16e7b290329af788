#!/usr/bin/env bash
# Write this folder's run files, plans and scripts again: jobs/regenerate.sh [FOLDER], in an environment
# with tilenet. It is also how they were made: `tilenet plan` for the machine, then `python -m launch`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
into=$(realpath "${1:-jobs}")
export PYTHONPATH=$PWD
XDG_CONFIG_HOME=$(mktemp -d) # no machines of your own
export XDG_CONFIG_HOME
trap 'rm -r "$XDG_CONFIG_HOME"' EXIT

# plan PLACE PRESET OPTION…: 4 images of 10 000 × 10 000 × 4, with one of the paper's networks; without
# normalisation, so that the tiles are exact
plan() {
    mkdir -p "$into/$1"
    python -m tilenet plan --preset "$2" --norm none --classes 8 --bands 4 --image 10000 --images 4 \
        --machine "$1" "${@:3}" -o "$into/$1/plan.json" >/dev/null
    cat >"$into/$1/run.yaml" <<RUN
# CHANGE all of it; docs/run-file.md has every key. What is not here, the plan says: ranks, tiles,
# partitions, micro-batches, precision. With another network, other bands, classes or smaller images: plan again.
images: [images/1.tif, images/2.tif, images/3.tif, images/4.tif]
labels: [labels/1.tif, labels/2.tif, labels/3.tif, labels/4.tif]
classes: [background, water, forest, field, meadow, road, building, other]
network: {preset: $2, norm: none}
epochs: 50
checkpoint_every: 20
output: out # of the script, which wins
RUN
}

# script PLACE FILE OPTION…; it warns of images and environments, which these examples have not
script() {
    (cd "$into/$1" && python -m launch plan.json --machine "$1" --script "$2" "${@:3}" >/dev/null)
}

# Tiles that overlap go through six partitions, as in the paper; elsewhere the planner chooses.
plan summit medium-2 --nodes 4 --partitions 6 --halo-mode overlap
script summit job.lsf --account ABC123 --venv venv
plan frontier small --nodes 2
script frontier job.sh --account ABC123 --venv venv
plan perlmutter medium-2 --nodes 2 --partitions 2
script perlmutter job.sh --account m1234_g --venv venv
plan polaris medium-2 --nodes 4 --partitions 2
script polaris job.sh --account ABC123 --venv venv --queue debug-scaling --time 1:00
plan tuolumne small --nodes 4
script tuolumne job.sh --account ABC123 --venv venv
plan slurm medium-1 --nodes 2 --partitions 2
script slurm job.sh
plan workstation small
script workstation job.sh
