"""The CPU that is here: what is detected, what was measured, and what the cost model makes of it."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import needs
import pytest
from rich.console import Console

import eqfuse as eq
from eqfuse import doctor
from eqfuse.devices import device_named
from eqfuse.extract import machine
from eqfuse.extract.devices import DEVICES
from eqfuse.extract.machine import Rates
from eqfuse.tile.native import rates
from eqfuse.tile.native.nodes import NotNative

MEASURED = Rates(1e10, 2e10, 3e10, 4e10, 5e9, 6e-6, 7e-7)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EQFUSE_CPU", "here")
    return tmp_path


def test_what_was_measured_is_what_plans_are_priced_with(own_cache: Path) -> None:
    assert machine.measured() is None
    before = device_named("cpu")
    path = machine.keep(MEASURED)
    assert path.is_relative_to(own_cache / "eqfuse") and machine.measured() == MEASURED
    after = device_named("cpu")
    assert (after.bandwidth, after.special) == (1e10, 5e9)
    assert after.name != before.name and machine.known_device(after.name) == after
    assert machine.known_device(before.name) is None
    other = replace(MEASURED, bandwidth=5e10)
    machine.keep(other)
    assert machine.measured() == other


def test_steps_are_those_of_what_runs(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of C++ begin sooner than calls of torch."""
    machine.keep(MEASURED)
    monkeypatch.setenv("CXX", "no-such-compiler")
    without = device_named("cpu")
    monkeypatch.setenv("CXX", sys.executable)
    assert without.step == 7e-7 and device_named("cpu").step == machine.TRIP
    assert device_named("cpu").name != without.name


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bandwidth": "fast"}', '{"bandwidth": -1}'])
def test_what_cannot_be_read_was_not_measured(text: str, own_cache: Path) -> None:
    path = machine.keep(MEASURED)
    path.write_text(text)
    assert machine.measured() is None and device_named("cpu").bandwidth == machine.assumed().bandwidth


@pytest.mark.parametrize("command", [sys.executable, "no-such-compiler"])
def test_rates_follow_cores_and_lanes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of C++ where there is a compiler, else of calls of torch."""
    monkeypatch.setenv("CXX", command)
    reference = DEVICES["cpu"] if command == "no-such-compiler" else machine.compiled()
    for cores, names, factor in ((2, "flags: avx512f", 1.0), (8, "flags: avx avx2", 2.0), (1, "sse", 0.125)):
        monkeypatch.setattr(machine, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(machine, "features", lambda names=names: names)
        found = machine.assumed()
        assert found.elementwise == factor * reference.elementwise
        assert found.bandwidth == cores / 2 * reference.bandwidth


def test_caches_are_those_that_the_system_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = (
        ("1", "Data", "32K"),
        ("1", "Instruction", "64K"),
        ("2", "Unified", "512K"),
        ("3", "Unified", "4096K"),
    )
    for place, values in enumerate(levels):
        (tmp_path / f"index{place}").mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (tmp_path / f"index{place}" / name).write_text(f"{value}\n")
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    machine.cache_levels.cache_clear()
    try:
        assert machine.cache_levels() == {1: 32 << 10, 2: 512 << 10, 3: 4 << 20}
        assert machine.cache_bytes() == 512 << 10 and machine.past_caches() == 4 << 20
        monkeypatch.setattr(machine, "cores", lambda: 1)
        assert machine.past_caches() == 2 << 20  # its share of a cache that others use too
    finally:
        machine.cache_levels.cache_clear()


def test_a_wrong_setting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_CPU", "fastest")
    with pytest.raises(eq.EqfuseError, match="EQFUSE_CPU is 'fastest'"):
        device_named("cpu")


@needs.cxx
def test_every_rate_is_measured(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "LARGE", 4 << 20)
    monkeypatch.setattr(rates, "REPEATS", 1)
    found = rates.measure()
    assert all(0 < rate < float("inf") for rate in asdict(found).values())


def test_measuring_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Rates:
        raise NotNative("there is no C++ compiler")

    monkeypatch.setattr(rates, "measure", refuse)
    with pytest.raises(eq.EqfuseError, match="nothing is measured"):
        doctor.doctor(Console(file=StringIO()), measure=True)
