"""What a derivation runs on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from eqfuse.rules.egraph.extract import Extraction
from eqfuse.rules.egraph.saturate import Saturation, session
from eqfuse.rules.rule import RuleSet


@dataclass(frozen=True)
class Engine:
    """What a derivation runs on: how an e-graph is opened, and who is told of each term that is extracted."""

    session: Callable[[tuple[RuleSet, ...]], AbstractContextManager[Saturation]] = session
    chose: Callable[[str, Extraction, int], None] = lambda name, best, key: None
    """Called with what a term is for ("out0", "update sum_j", "combine sum_j"), its extraction and its class."""


PLAIN = Engine()
