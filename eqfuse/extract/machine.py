"""The CPU that is here: what the system says of it, and what `eqfuse doctor --measure` has measured once.

Rates that were not measured are scaled from those of the reference machine by cores and lanes of a vector.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from eqfuse.cache import entries
from eqfuse.cache.entries import Key
from eqfuse.cache.files import Unfit
from eqfuse.errors import EqfuseError
from eqfuse.extract.devices import DEVICES, Device

USUAL_CACHE = 1 << 20
"""Bytes of a core's second-level cache where the system does not say."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPUINFO = Path("/proc/cpuinfo")

OWN_SHARE = 4
"""How much of a third-level cache is taken to be a core's own, in second-level caches: a virtual machine is told of all
of the cache, which it shares with others."""

REFERENCE_LANES, REFERENCE_CORES = 16, 2
"""Of the machine whose rates `DEVICES["cpu"]` has, of calls of torch, and `compiled`, of C++."""

TRIP = 2e-7
"""Seconds of a trip of a loop, and of beginning a block, in compiled C++; a call of torch takes twenty times as long."""

POSITION = 5e-9
"""Seconds of an operation in a loop over single positions, in compiled C++: nothing but the operation is in it."""

KIND = "machine"
"""The folder of what was measured, in the cache's."""


@dataclass(frozen=True)
class Rates:
    """Of all cores together: `bandwidth` and `cache_bandwidth` (of second-level caches) in bytes/s, products of matrices in
    float32, additions and multiplications of vectors, and exponentials in operations/s; `launch` is the time of a call that
    wakes all threads, `step` that of an operation of torch on a few elements, in seconds."""

    bandwidth: float
    cache_bandwidth: float
    matrix: float
    elementwise: float
    special: float
    launch: float
    step: float


@lru_cache
def cache_levels() -> Mapping[int, int]:
    """Bytes of the caches for data by level, as far as the system says."""
    found: dict[int, int] = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            found[int(level)] = int(size[:-1]) << 10
    return found


def cores() -> int:
    return os.cpu_count() or 1


def cache_bytes() -> int:
    """Bytes of a core's second-level cache."""
    return cache_levels().get(2, USUAL_CACHE)


def past_caches() -> int:
    """Bytes of an output from which on it does not stay in the caches anyway."""
    own = OWN_SHARE * cache_bytes() * cores()
    return min(own, cache_levels().get(3, own))


@lru_cache
def features() -> str:
    """The names of the processor's instruction sets, as the system lists them."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def lanes() -> int:
    """Elements of a vector of float32."""
    names = features().split()
    return 16 if "avx512f" in names else 8 if "avx" in names else 4


def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: `$CXX`, which may have arguments, or g++, clang++ or c++; None where there is none."""
    return _command(os.environ.get("CXX", ""))


@lru_cache
def _command(wanted: str) -> tuple[str, ...] | None:
    try:
        commands = [shlex.split(wanted)] if wanted.strip() else [["g++"], ["clang++"], ["c++"]]
    except ValueError:  # a quotation that does not end
        return None
    for program, *arguments in commands:
        path = shutil.which(program)
        if path is not None:
            return path, *arguments
    return None


def compiled() -> Rates:
    """What C++ does on the reference machine, two cores with vectors of 16 elements. Of 52 benchmark programs 45 are predicted to
    take between half and twice of what they take there, 30 within 1.5; most off are distances, whose sums stay in registers
    (6.1), and a single query of many heads (0.35)."""
    return Rates(28e9, 250e9, 300e9, 40e9, 12e9, 5e-6, TRIP)


def assumed() -> Rates:
    """What a machine of so many cores and lanes does, as the reference machine does: in C++, or in calls of torch where there is
    no compiler."""
    torch = DEVICES["cpu"]
    parts = (torch.bandwidth, torch.cache_bandwidth, torch.matrix_float, torch.elementwise, torch.special)
    here = Rates(*parts, torch.launch, torch.step) if compiler() is None else compiled()
    memory = cores() / REFERENCE_CORES
    vectors = memory * lanes() / REFERENCE_LANES
    return replace(
        here,
        bandwidth=here.bandwidth * memory,
        cache_bandwidth=here.cache_bandwidth * memory,
        matrix=here.matrix * vectors,
        elementwise=here.elementwise * vectors,
        special=here.special * vectors,
    )


def _key() -> Key:
    """What this machine's rates are found by: another processor has others."""
    return {"machine": f"{platform.machine()} {cores()} {features()} {sorted(cache_levels().items())}"}


def measured() -> Rates | None:
    """What was measured here; None where nothing was, or what is there cannot be read."""
    try:
        path = entries.place(KIND, _key())
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache
def _read(path: Path, _changed: int) -> Rates | None:
    try:
        found = entries.read_file(path, _key()) or {}
        rates = Rates(**{field.name: float(found[field.name]) for field in fields(Rates)})
    except (Unfit, ValueError, TypeError, KeyError):
        return None
    return rates if all(0 < rate < float("inf") for rate in asdict(rates).values()) else None


def keep(rates: Rates) -> Path:
    """Keeps what was measured for later processes. Raises OSError where the folder cannot be written."""
    entries.keep(KIND, _key(), asdict(rates))
    return entries.place(KIND, _key())


def cpu_device() -> Device:
    """The CPU that is here, as the cost model takes it, with a C++ compiler or without; with `EQFUSE_CPU=reference` the one of `DEVICES`, so that plans are
    the same on every machine. Raises EqfuseError for another setting."""
    wanted = os.environ.get("EQFUSE_CPU", "here")
    if wanted not in ("here", "reference"):
        raise EqfuseError(f"EQFUSE_CPU is {wanted!r}", hint="choose one of here, reference")
    if wanted == "reference":
        return DEVICES["cpu"]
    rates = measured() or assumed()
    if compiler() is None:
        return _device(rates)
    return _device(replace(rates, step=min(TRIP, rates.step)), compiled=True)


def known_device(name: str) -> Device | None:
    """The device of a name, the CPU that is here among them; None where there is none, as of another machine's CPU."""
    here = cpu_device()
    return here if here.name == name else DEVICES.get(name)


@lru_cache
def _device(rates: Rates, compiled: bool = False) -> Device:
    half = cache_bytes() // 2
    text = f"{rates} {half} {past_caches()} {cores()}"
    return Device(
        name=f"cpu-{cores()}x{lanes()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
        kind="cpu",
        bandwidth=rates.bandwidth,
        cache_bandwidth=rates.cache_bandwidth,
        cache=2 * past_caches(),
        matrix_half=rates.matrix,
        matrix_float=rates.matrix,
        elementwise=rates.elementwise,
        special=rates.special,
        launch=rates.launch,
        step=rates.step,
        sms=cores(),
        tile=half,
        shared=half,
        position=min(1.0, POSITION / rates.step) if compiled else 1.0,
    )
