"""What was seen of the lives of disturbed jobs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from disturbances import KINDS, Life
from lives import Ended
from small_run import Standing

__all__ = ["Tally"]


@dataclass
class Tally:
    """What was seen under a launcher."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    exits: dict[str, Counter[int]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    after_s: dict[str, float] = field(default_factory=dict)
    linger_s: float = 0.0
    lives: int = 0
    too_late: int = 0
    never_began: int = 0
    same_bits: int = 0
    same_to_rounding: int = 0
    furthest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def add(self, life: Life, ended: Ended, before: Standing, after: Standing) -> None:
        """Count a life."""
        self.lives += 1
        self.linger_s = max(self.linger_s, ended.linger_s)
        todo = life.disturbance
        if todo is None:
            return
        if not ended.done:
            self.too_late += 1
            return
        self.kills[todo.kind] += 1
        self.moments[todo.moment.after] += 1
        self.exits.setdefault(todo.kind, Counter())[ended.code] += 1
        self.after_s[todo.kind] = max(self.after_s.get(todo.kind, 0.0), ended.after_s)
        if after.rows > before.rows:
            self.lost.append(after.rows - after.saved)

    def figures(self) -> dict[str, Any]:
        """As they are kept."""
        kinds = [kind for kind in KINDS if self.kills[kind]]
        return {
            "kills": {kind: self.kills[kind] for kind in kinds},
            "moments": dict(self.moments),
            "exits": {kind: dict(sorted(self.exits[kind].items())) for kind in kinds},
            "seconds to the end, at most": {k: round(self.after_s[k], 1) for k in kinds},
            "lives": self.lives,
            "too late": self.too_late,
            "never began": self.never_began,
            "steps lost": {
                "lives": len(self.lost),
                "max": max(self.lost, default=0),
                "mean": round(sum(self.lost) / max(len(self.lost), 1), 2),
            },
            "processes ended after their launcher, seconds, at most": round(self.linger_s, 1),
            "runs equal to the last bit": self.same_bits,
            "runs on changing ranks": self.same_to_rounding,
            "largest difference of those": self.furthest,
            "faults": self.faults,
        }
