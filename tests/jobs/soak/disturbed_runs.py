"""Runs that are disturbed until all is done, and compared with undisturbed ones."""

import itertools
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from disturbances import Life, Phase, choose
from lives import Ended, Launcher, live
from small_run import (
    Standing,
    difference,
    is_mapped,
    is_trained,
    make_scene,
    map_command,
    stands,
    train_command,
    wrong,
)
from tally import Tally

__all__ = ["DisturbedRuns"]

STEADY = 2, 1, 3, 2, 1, 4  # ranks of the runs that keep them, by turns
MOST_KILLS = 12  # of a run and its map, before they may end in peace
APART = 1e-10  # that runs on other ranks may be, of the largest value
# What Slurm's plug-in says of ranks' first messages that are too long for it; the step never began.
GARBLED = "mpi/pmi2: invalid client request"
STOPPED = 75


class DisturbedRuns:
    """Runs under one launcher, until enough was done to them."""

    def __init__(self, launcher: Launcher, folder: Path, seed: int, most_ranks: int) -> None:
        self.launcher, self.folder, self.seed, self.most_ranks = launcher, folder, seed, most_ranks
        self.tally, self.references = Tally(), dict[int, Path]()
        self.most_kills = MOST_KILLS
        folder.mkdir()
        make_scene(folder)

    def run(self, kills: int, runs: int, until: float) -> Tally:
        """Kill so often, in two runs at least and in `runs` at most; none begins after `until`."""
        self.most_kills = min(MOST_KILLS, -(-kills // 2))
        for number in range(runs):
            left = kills - self.tally.kills.total()
            if left <= 0 or time.monotonic() > until:
                break
            # By turns runs that keep their ranks and runs that change them
            steady = STEADY[number // 2 % len(STEADY)] if number % 2 == 0 else None
            steady = steady and min(steady, self.most_ranks)
            run = self.folder / f"run{number}"
            try:
                self.disturbed_run(run, steady, left)
            except Exception:  # what nobody expected a run to leave
                self._fault(run, traceback.format_exc())
        return self.tally

    def disturbed_run(self, run: Path, ranks: int | None, kills: int) -> None:
        """One run and its map."""
        most = min(kills, self.most_kills)
        run.mkdir()
        began, faults = self.tally.kills.total(), len(self.tally.faults)
        keys = (f"{self.seed},{self.launcher.name},{run.name},{i}" for i in itertools.count())
        # Of a run's kills a third is for its map.
        shares: dict[Phase, int] = {"train": most - most // 3, "map": most}
        for phase, share in shares.items():
            self._phase(phase, run, ranks, keys, began + share)
            if len(self.tally.faults) > faults:
                return  # what it left is kept, with its logs
        reference = self.reference(ranks or 2)
        apart = difference(run, reference)
        if isinstance(apart, str):
            self._fault(run, apart)
        elif ranks is not None and apart > 0:
            self._fault(run, f"not equal to the last bit to the undisturbed run: {apart:.3g}")
        elif ranks is None and not apart <= APART:
            self._fault(run, f"apart from the undisturbed run by {apart:.3g}")
        elif ranks is not None:
            self.tally.same_bits += 1
        else:
            self.tally.same_to_rounding += 1
            self.tally.furthest = max(self.tally.furthest, apart)

    def reference(self, ranks: int) -> Path:
        """A run that nothing disturbs."""
        if ranks not in self.references:
            run = self.folder / f"undisturbed{ranks}"
            run.mkdir()
            for command in (train_command, map_command):
                ended = live(
                    self.launcher, Life(ranks, None), command(self.folder, run), run, self._log(run)
                )
                if GARBLED in ended.said:
                    return self.reference(ranks)
                if ended.code:
                    raise RuntimeError(ended.said)
            self.references[ranks] = run
        return self.references[ranks]

    def _phase(
        self, phase: Phase, run: Path, ranks: int | None, keys: Iterator[str], kills: int
    ) -> None:
        """Lives, until all is done; after `kills` in all they are left in peace."""
        is_done = is_trained if phase == "train" else is_mapped
        command = (train_command if phase == "train" else map_command)(self.folder, run)
        faults = len(self.tally.faults)
        while len(self.tally.faults) == faults:
            life, before = choose(next(keys), phase, ranks, self.most_ranks), stands(run)
            if self.tally.kills.total() >= kills:
                life = replace(life, disturbance=None)
            ended = live(self.launcher, life, command, run, self._log(run))
            after = stands(run)
            self.tally.add(life, ended, before, after)
            self._say(run, life, ended, before, after)
            self._check(run, life, ended, before, after, finished=is_done(run))
            if ended.code == 0 and is_done(run):
                return

    def _check(
        self,
        run: Path,
        life: Life,
        ended: Ended,
        before: Standing,
        after: Standing,
        *,
        finished: bool,
    ) -> None:
        if GARBLED in ended.said:
            self.tally.never_began += 1
            return
        found = wrong(run)
        if ended.hung:
            found.append("hung")
        if ended.left:
            found.append(f"{ended.left} processes were left")
        if ended.code == 0 and not finished:
            found.append("exit code 0, with work left to do")
        if ended.code == STOPPED and after.rows != after.saved:
            found.append(f"exit code 75, with {after.rows} steps made and {after.saved} saved")
        if ended.code and not ended.done:
            found.append(f"exit code {ended.code}, with nothing done to it")
        if after.saved < before.saved:
            found.append(f"saved were {before.saved} steps, now {after.saved}")
        if not after.mapped and before.tiles - after.tiles:
            found.append(f"tiles of the map are lost: {sorted(before.tiles - after.tiles)}")
        for one in found:
            self._fault(run, f"{one}; {life}\n{ended.said[-3000:]}")

    def _log(self, run: Path) -> Path:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return logs / f"{run.name}-{len(list(logs.glob(f'{run.name}-*')))}.log"

    def _fault(self, run: Path, fault: str) -> None:
        self.tally.faults.append(f"{self.launcher.name}, seed {self.seed}, {run.name}: {fault}")
        print(f"FAULT {self.tally.faults[-1]}", file=sys.stderr, flush=True)

    def _say(self, run: Path, life: Life, ended: Ended, before: Standing, after: Standing) -> None:
        todo, what = life.disturbance, "in peace"
        if todo is not None:
            where = "" if todo.rank is None else f" ({todo.rank})"
            moment = todo.moment
            what = f"{todo.kind}{where}, {moment.after} {moment.count} + {moment.seconds:.3f} s"
            what += "" if ended.done else ": too late"
        tiles = f", tiles {len(after.tiles)}" if after.tiles or before.tiles else ""
        name = f"{self.launcher.name} {run.name} on {life.ranks}"
        print(
            f"{self.tally.kills.total():3} {name}: {what}; "
            f"exit {ended.code}, {ended.seconds:.1f} s; "
            f"rows {before.rows} to {after.rows}, saved {before.saved} to {after.saved}{tiles}",
            file=sys.stderr,
            flush=True,
        )
