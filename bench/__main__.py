"""`python -m bench NAME`, which `eqfuse bench NAME` runs in a checkout."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.report import Options
from bench.runner import run
from eqfuse.cli import PIPED_WIDTH, seed, writable
from eqfuse.errors import EqfuseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status: 0, or 1 where something failed, or 2 for an error of the user's."""
    options = _parser().parse_args(arguments)
    chosen = Options(
        only=options.only,
        device=options.device,
        small=options.small,
        torch_compile=not options.no_torch_compile,
        memory=not options.no_memory,
        examples=options.examples,
        seed=options.seed,
        seconds=options.seconds,
        jobs=options.jobs,
        resume=options.resume,
        native=options.native,
        measured=options.measured,
        threads=options.threads,
        places=options.places,
        folder=options.folder,
    )
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    try:
        return run(options.name, chosen, output=options.output, console=console)
    except EqfuseError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _threads(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of threads, like 2,1")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eqfuse bench", description="Measures every program of the papers.")
    parser.add_argument(
        "name",
        metavar="NAME",
        help="workloads, compile, emit, explain, verify, errors, sweep, opinfo, kernelbench, scales, lemmas, audit, fuzz, pairs, grad, backward, training, models, "
        "mutants, attention, reductions, gluon, algebra, scans, chunks, shard, link, lengths, install, gallery or cpu",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="kernelbench: its checkout; install: its environments",
    )
    parser.add_argument("--only", metavar="PREFIX,...", help="only programs whose name or family starts so")
    parser.add_argument("--small", action="store_true", help="only the small sizes")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--output", type=writable, metavar="FILE.json", help="default: bench/results/NAME.json"
    )
    parser.add_argument(
        "--no-torch-compile", action="store_true", help="cpu, kernelbench: leave torch.compile out"
    )
    parser.add_argument("--no-memory", action="store_true", help="cpu: do not measure peak memory")
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="fuzz, pairs, scales, sweep: how many programs; opinfo: samples of each operator and dtype",
    )
    parser.add_argument("--seed", type=seed, default=0, help="fuzz, pairs, scales, sweep: of the programs")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="fuzz, pairs, scales, sweep: begin no batch after so long",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="workloads, fuzz, pairs, scales, sweep, opinfo, kernelbench, mutants: processes at once (default: one for each core that this one may use)",
    )
    parser.add_argument(
        "--places",
        type=int,
        default=0,
        metavar="N",
        help="mutants: places of a program where each is made (default: 2, the first and the last)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="fuzz, cpu: keep the batches and programs that are done"
    )
    parser.add_argument(
        "--threads",
        type=_threads,
        default=(),
        metavar="N,...",
        help="cpu: numbers of threads (default: one per core, and 1)",
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="fuzz: on the CPU, run compiled C++ as well; opinfo, kernelbench: run kernels",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE.json",
        help="attention, reductions: what bench.NAME wrote on a GPU",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
