"""Processes that share a cache and are killed at random: `python -m bench.killed ROUNDS SEED` prints what came of them, as JSON.

In every round ten children of one process compile a program each and run it; half of them are killed after a random time, with
no chance to clean up. A child that is left alone has to give the right result. The folder is empty at first, and again at random;
in between it holds what earlier rounds have left, finished or not. Now and then a byte of some file is changed, too.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

CHILDREN = 10
SECONDS = 120
"""How long a child may take that nobody kills."""

MOST = 1 << 16
"""Bytes that a child says at most: what a pipe holds."""

PROGRAMS = (
    "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
    "y[i,j] = x[i,j] * rsqrt(mean[j](sq(x[i,j])) + 1e-6)",
    "y[i] = sum[j](x[i,j] * exp(x[i,j] - max[j](x[i,j])))",
    "y[i] = var[j](x[i,j])",
)


def rounds(count: int, seed: int, folder: Path, limit: float = float("inf")) -> dict[str, object]:
    """What came of `count` rounds, or of those that began within `limit` seconds: how many processes ended by themselves, were
    killed, found a kept certificate; and `faults`, of processes that crashed, hung, or computed something else."""
    import torch

    import eqfuse as eq

    torch.manual_seed(seed)
    x = torch.randn(5, 33)
    wanted = [torch.as_tensor(eq.reference(source)(x=x.numpy())) for source in PROGRAMS]

    def work(number: int) -> str:
        """A child's part. The result is told from the exact one by what float32 rounds."""
        kernel = eq.compile(PROGRAMS[number], native="off")
        error = float((kernel(x=x).double() - wanted[number]).abs().max())
        if not kernel.certificate.ok or not error < 1e-4:
            return f"wrong: program {number}, error {error}"
        return "cached" if kernel.certificate.cached else "made"

    _import_beforehand(work)
    shutil.rmtree(folder, ignore_errors=True)
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    faults: list[str] = []
    start, done, usual = time.monotonic(), 0, 1.0
    while done < count and time.monotonic() - start < limit:
        if chance.random() < 0.3:
            shutil.rmtree(folder, ignore_errors=True)
        elif chance.random() < 0.3:
            _damage(folder, chance)
        began = time.monotonic()
        children = [Child(work, chance.randrange(len(PROGRAMS))) for _ in range(CHILDREN)]
        doomed = {child: began + chance.uniform(0, usual) for child in children[::2]}
        while any(child.is_running() for child in children):
            now = time.monotonic()
            for child in children:
                late = now - began > SECONDS
                if child.is_running() and (late or now > doomed.get(child, now)):
                    child.kill("late" if late else "killed")
            time.sleep(0.002)
        usual = 0.8 * usual + 0.2 * (time.monotonic() - began)
        for child in children:
            found[child.outcome if child.outcome in ("made", "cached", "killed") else "faulty"] += 1
            if child.outcome not in ("made", "cached", "killed"):
                faults.append(f"round {done}: {child.outcome}")
        done += 1
    return {"rounds": done, "seconds": time.monotonic() - start, **found, "faults": faults}


def _import_beforehand(work: Callable[[int], str]) -> None:
    """Imports what a child has imported in the end, so that others need not: a round takes a third as long."""

    def named(number: int) -> str:
        work(number)
        return " ".join(name for name in sys.modules if name.startswith(("eqfuse.", "egglog.")))

    child = Child(named, 0)
    while child.is_running():
        time.sleep(0.01)
    for name in child.outcome.split():
        importlib.import_module(name)


def _damage(folder: Path, chance: random.Random) -> None:
    """Changes one byte of a file, or cuts it."""
    files = sorted(path for path in folder.rglob("*.json"))
    if files:
        path = chance.choice(files)
        content = bytearray(path.read_bytes())
        if content and chance.random() < 0.5:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        else:
            del content[chance.randrange(len(content) + 1) :]
        path.write_bytes(content)


class Child:
    """A fork of this process, which has everything imported; it is the leader of a group with those that it starts."""

    def __init__(self, work: object, number: int) -> None:
        self.outcome = ""
        reading, writing = os.pipe()
        self.process = os.fork()
        if not self.process:
            os.setpgid(0, 0)
            text = "nothing"
            try:
                os.close(reading)
                text = work(number)  # type: ignore[operator]
            except BaseException:  # noqa: BLE001  (told to the parent)
                text = traceback.format_exc()
            finally:
                os.write(writing, text.encode()[-MOST:])
                os._exit(0)
        os.close(writing)
        self.reading = reading

    def is_running(self) -> bool:
        if self.outcome:
            return False
        if os.waitpid(self.process, os.WNOHANG)[0]:
            self._end("")
        return not self.outcome

    def kill(self, why: str) -> None:
        """Ends the child and what it has started, without a warning."""
        try:
            os.killpg(self.process, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self._end(why)

    def _end(self, why: str) -> None:
        ready, _, _ = select.select([self.reading], [], [], 0 if why else 1)
        text = os.read(self.reading, MOST).decode() if ready else ""
        os.close(self.reading)
        self.outcome = text or why or "it crashed"


def main(words: list[str]) -> int:
    count, seed = int(words[0]), int(words[1])
    limit = float(words[2]) if len(words) > 2 else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "EQFUSE_CACHE": "on", "EQFUSE_NATIVE": "off"}
        found = rounds(count, seed, Path(folder) / "eqfuse", limit)
    print(json.dumps(found))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
