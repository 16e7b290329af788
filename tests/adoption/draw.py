"""The choices that a seed makes."""

import random
from typing import Any

__all__ = ["Draw"]


class Draw:
    """Choices of one seed; `words` names those of the part at hand.

    Modules of every other seed take rare parts and forms too. Of many rare parts one is refused
    almost always, so that nothing would be compared.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.words: list[str] = []
        self.bold = seed % 2 == 1

    def of(self, name: str, *choices: Any, rare: tuple[Any, ...] = ()) -> Any:
        """One of the choices, noted under a name."""
        choice = self.random.choice(choices + rare if self.bold else choices)
        self.words.append(f"{name}={choice}")
        return choice

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability
