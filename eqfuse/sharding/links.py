"""What an exchange takes: the α-β model of collectives over a link between ranks.

With n ranks, a latency α and β seconds for a byte, of S bytes on every rank (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005):

    all-gather   α log2 n + (n - 1) S β
    all-reduce   2 (α log2 n + (n - 1)/n S β)
    all-to-all   α + (n - 1)/n S β
    by pairs     2 log2 n (α + S β)
    ring         (n - 1) max(a step's computation, α + S β)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from eqfuse.cache.files import cache_home, made, write_whole
from eqfuse.errors import EqfuseError, did_you_mean


@dataclass(frozen=True)
class Link:
    """What ranks exchange through: the seconds that a message takes, and a byte of it; `of` says where these are from."""

    name: str
    latency: float
    byte: float
    of: str = ""

    def all_gather(self, n: int, size: float) -> float:
        return self._rounds(n) * self.latency + (n - 1) * size * self.byte

    def all_reduce(self, n: int, size: float) -> float:
        return 2 * (self._rounds(n) * self.latency + (n - 1) / n * size * self.byte) if n > 1 else 0.0

    def all_to_all(self, n: int, size: float) -> float:
        return self.latency + (n - 1) / n * size * self.byte if n > 1 else 0.0

    def tree(self, n: int, size: float) -> float:
        return 2 * self._rounds(n) * (self.latency + size * self.byte)

    def ring(self, n: int, size: float, step: float) -> float:
        return (n - 1) * max(step, self.latency + size * self.byte)

    def _rounds(self, n: int) -> int:
        return ceil(log2(n)) if n > 1 else 0


LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink", 22e-6, 3.4e-12, "two H200 of one host, NCCL"),
        Link("infiniband", 35e-6, 2.2e-11, "nominal: 400 Gb/s for each GPU, at nine tenths"),
        Link("gloo", 2e-4, 1.2e-9, "two processes of one host"),
    )
}


def _measured() -> dict[str, dict[str, float]]:
    """What `eqfuse bench link` has measured on this machine."""
    try:
        with open(cache_home() / "links.json", encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_measured(name: str, latency: float, byte: float) -> None:
    """Keeps the seconds of a message and of a byte of a link, for all later processes of this machine."""
    rows = {**_measured(), name: {"latency": latency, "byte": byte}}
    made(cache_home())
    write_whole(cache_home() / "links.json", json.dumps(rows))


def link_named(name: str) -> Link:
    """A link by name, as `eqfuse bench link` measured it here where it did. Raises EqfuseError for a name that is none."""
    found = LINKS.get(name) if isinstance(name, str) else None
    if found is None:
        raise EqfuseError(
            f"link is {name!r}", hint=did_you_mean(str(name), LINKS) or f"one of {', '.join(LINKS)}"
        )
    try:
        row = _measured()[name]
        return Link(name, float(row["latency"]), float(row["byte"]), "measured here")
    except (KeyError, TypeError, ValueError):
        return found
