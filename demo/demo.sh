#!/usr/bin/env bash
# Makes a scene, trains a network on it over several MPI ranks, maps it, and judges the map on the
# part of the scene that no rank saw labels of. Each command is printed before it runs.
#
# SIZE: rows and columns of the scene (2048; at least 1024, for smaller land may lack a class).
# RANKS: MPI processes (4); they may share cores, and the result does not depend on their number.
set -euo pipefail
cd "$(dirname "$0")/.."

SIZE=${SIZE:-2048}
RANKS=${RANKS:-4}
OUT=demo/out
export OMP_NUM_THREADS=1 # one thread per rank: the ranks are what runs side by side

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

run_into() {
    local file=$1
    shift
    printf '\n$ %s > %s\n' "$*" "$file"
    "$@" >"$file"
}

mkdir -p "$OUT"
run python demo/make_scene.py "$OUT" --size "$SIZE"
run mpiexec -n "$RANKS" tilenet train -c demo/run.yaml --overwrite
run mpiexec -n "$RANKS" tilenet predict "$OUT/run" "$OUT/scene.tif" "$OUT/map.tif" --overwrite
run_into "$OUT/scores.json" tilenet evaluate "$OUT/map.tif" "$OUT/labels_test.tif" --json
run python demo/baseline.py "$OUT" "$OUT/yardsticks.json"
run python demo/preview.py "$OUT" "$OUT/preview.png"
run python demo/judge.py "$OUT/scores.json" "$OUT/yardsticks.json"
printf '\nThe map is %s, the preview %s (image, labels, map); %d seconds.\n' \
    "$OUT/map.tif" "$OUT/preview.png" "$SECONDS"
