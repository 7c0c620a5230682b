"""How a setting is declared: its default, its help text, and in its annotation the numbers that it may have."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any


def setting(default: Any, help: str, repr: bool = True) -> Any:
    """Return the field of a setting; a list or dictionary is copied for each object."""
    value = {"default_factory": default.copy} if isinstance(default, (list, dict)) else {"default": default}
    return field(**value, repr=repr, metadata={"help": help})


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, without the ends where it is open."""

    least: float
    most: float = math.inf
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        if self.is_open:
            return self.least < value < self.most
        return self.least <= value <= self.most

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least:g}"
        if self.most < math.inf:
            return f"between {self.least:g} and {self.most:g}{', both left out' if self.is_open else ''}"
        return f"above {self.least:g}" if self.is_open else f"at least {self.least:g}"


Count = Annotated[int, Range(1)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, is_open=True)]
Fraction = Annotated[float, Range(0, 1)]
