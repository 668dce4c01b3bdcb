"""The command `eqfuse`. Errors that a user can cause are printed without a stack trace; exit status 2."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import eqfuse as eq
from eqfuse import logs
from eqfuse.errors import BindError, EqfuseError, VerificationError
from eqfuse.loops.plan import WAYS
from eqfuse.program_files import kernel_of, new, noted, numbers, read, shape_of, shapes_of, sizes_in
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import parse
from eqfuse.terms.registry import REGISTERED
from eqfuse.terms.types import program_dtypes
from eqfuse.verify.certificate import REQUESTED
from eqfuse.verify.note import float_note

PIPED_WIDTH = 150
"""Columns of output that does not go to a terminal: tables are wider than the 80 that rich assumes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, or 1 where a check failed, or 2 for an error of the user's, or 3 for a fault
    of eqfuse's own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["bench"]:  # its options are its own
        options = argparse.Namespace(command=_bench, words=words[1:])
    else:
        options = _parser().parse_args(words)
    command: Callable[[argparse.Namespace, Console], int] = options.command
    try:
        return command(options, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH))
    except EqfuseError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # noqa: BLE001  (said, or raised where EQFUSE_LOG asks for it)
        print(logs.fault(error), file=sys.stderr)
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eqfuse",
        description="Fuses reduction programs by equality saturation, verifies them, emits Triton.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace, Console], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        return command

    demo = add("demo", _demo, "softmax and causal attention on the CPU: what is derived, chosen and certain")
    demo.add_argument("--full", action="store_true", help="show every stage")

    text = "a page with an editor, served to this machine alone: merge, nest, plans, prices and source as a program is edited"
    playground = add("play", _play, text)
    playground.add_argument("file", metavar="FILE", nargs="?", help="the program that the editor begins with")
    playground.add_argument("--port", type=port, default=0, metavar="N", help="a free one by default")
    playground.add_argument(
        "--seconds", type=positive, default=60, metavar="S", help="of one compilation (60)"
    )
    playground.add_argument(
        "--memory", type=positive, default=4 << 30, metavar="BYTES", help="of one compilation (4 GiB)"
    )

    run = add("run", _run, "run a program, on random tensors or on those of an .npz file")
    _add_program(run)
    run.add_argument("--size", action="append", default=[], metavar="AXIS=N", help="size of an axis")
    run.add_argument(
        "--scalar", action="append", default=[], metavar="NAME=X", help="value of a run-time scalar"
    )
    run.add_argument("--inputs", type=Path, metavar="FILE.npz", help="tensors by name; the others are random")
    run.add_argument("--output", type=writable, metavar="FILE.npz", help="where to write the results")
    run.add_argument("--seed", type=seed, default=0, help="of the random tensors")
    run.add_argument("--prefer", choices=tuple(WAYS), help="force a schedule")
    run.add_argument("--device", default="cpu", help="where the tensors live: cpu (default) or cuda")

    emit = add(
        "emit", _emit, "print the source of a kernel, Triton or C++, or write files for another project"
    )
    _add_program(emit)
    emit.add_argument("--target", default="sm_90", help="sm_80, sm_90 (default), sm_100, h200 or gfx942")
    _add_sizes(emit)
    emit.add_argument("--prefer", choices=tuple(WAYS), help="force a schedule")
    text = "a file to write the source to, or a folder for a module with its gradient, its test and its derivation"
    emit.add_argument("--output", type=file_or_folder, metavar="FILE.py|FOLDER", help=text)

    explain = add(
        "explain", _explain, "print how the kernel of a program was derived, every step of it a rule"
    )
    _add_program(explain)
    explain.add_argument("--format", help="text (default), latex, html (the one of folders) or json")
    explain.add_argument(
        "--detail", default="short", help="short (default) or full: every step and condition"
    )
    explain.add_argument("--target", default="auto", help="auto (default: the CPU), or a target of emit")
    _add_sizes(explain)
    explain.add_argument("--prefer", choices=tuple(WAYS), help="force a schedule")
    text = (
        "write it there; a folder for a page of each program (*.eqf) of the folder FILE, and a list of them"
    )
    explain.add_argument("--output", type=file_or_folder, metavar="FILE|FOLDER", help=text)

    beginning = add("new", _new, "begin a file with a program, from a formula or one that ships")
    beginning.add_argument("file", metavar="FILE", help="it must not be there yet")
    source = beginning.add_mutually_exclusive_group()
    text = "an expression, as sum[j](x[i,j]*w[j]), or definitions with ; between them"
    source.add_argument("--formula", metavar="TEXT", help=text)
    source.add_argument(
        "--from", dest="name", metavar="NAME", help="of the gallery or of eqfuse.ops: rope, rms_norm"
    )

    watching = add(
        "watch", _watch, "print the merge, plans and errors of a program whenever its file changes"
    )
    _add_program(watching)
    watching.add_argument("--target", default="auto", help="auto (default: the CPU), or a target of emit")
    _add_sizes(watching)
    watching.add_argument("--prefer", choices=tuple(WAYS), help="force a schedule")

    text = "make all that calls of some sizes wait for, here or for a GPU that is not here, and say what kernels need"
    prepare = add("prepare", _prepare, text)
    _add_program(prepare)
    text = "auto (default: the GPU here, or the CPU), or a target of emit"
    prepare.add_argument("--target", default="auto", help=text)
    _add_sizes(prepare)
    prepare.add_argument("--prefer", choices=tuple(WAYS), help="force a schedule")

    verify = add("verify", _verify, "verify the kernel of a program, or that two programs are equivalent")
    _add_program(verify)
    verify.add_argument("--against", metavar="OTHER", help="a second program, compared with the first")
    verify.add_argument(
        "--bound", type=float, default=REQUESTED, metavar="P", help="probability of error to reach (2**-40)"
    )
    verify.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="CONDITION",
        help="a branch of which no trial has to take a side, as the refusal writes it; untaken: all of them",
    )
    verify.add_argument("--trials", type=int, default=16, metavar="N", help="trials drawn at a time (16)")

    add("bench", _bench, "measure every program of the papers (in a checkout): bench NAME, bench --help")
    doctor = add("doctor", _doctor, "versions, devices, and what works here")
    doctor.add_argument(
        "--measure",
        action="store_true",
        help="measure the CPU, for the cost model; kept in the cache's folder",
    )
    cache = add("cache", _cache, "what is kept between processes")
    actions = (
        "list; clear: delete all of it; pack: copy what serves here to FOLDER; verify: make it once more"
    )
    cache.add_argument("action", choices=("list", "clear", "pack", "verify"), help=actions)
    cache.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, help="of pack: for EQFUSE_CACHE_PATH"
    )
    rules = add("rules", _rules, "the rewrite rules, and with a program how often each of them matched")
    rules.add_argument("file", metavar="FILE", nargs="?", help="a program, or - for standard input")
    rules.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=X",
        help="value of a scalar that is known now",
    )
    add("reductions", _reductions, "the registered reductions: what each gives, and why")
    return parser


def seed(text: str) -> int:
    """Of random tensors, as an argument of a command."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: a number from 0 to 2**63 - 1")
    return int(text)


def positive(text: str) -> float:
    """A limit, as an argument of a command."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return found


def port(text: str) -> int:
    """A port, as an argument of a command."""
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)


def writable(file: str) -> Path:
    """Where results go; refused before anything is run for them."""
    path = Path(file)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{file!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {file!r}")
    return path


def file_or_folder(text: str) -> Path:
    """Where sources go: a folder that is there or has no suffix, else a file."""
    path = Path(text)
    writable(str(path / "kernel.py") if path.is_dir() else text)
    return path


def _add_program(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", metavar="FILE", help="a program in the language of docs/language.md, or - for standard input"
    )
    command.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="NAME=X",
        help="value of a scalar that is known now",
    )


def _add_sizes(command: argparse.ArgumentParser) -> None:
    text = "sizes that the plan is made for: i=128, or i=128,j=64 (those of the file's line `# sizes:`, else 256)"
    command.add_argument("--size", action="append", default=[], metavar="AXIS=N", help=text)


def _demo(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.demo import demo

    return demo(console, options.full)


def _play(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.play.compilation import Limits
    from eqfuse.play.server import play

    program = None if options.file is None else read(options.file)
    return play(program, options.port, Limits(options.seconds, int(options.memory)), console)


def _run(options: argparse.Namespace, console: Console) -> int:
    source = read(options.file)
    constants = numbers([*noted(source, "constants"), *options.constant], "--constant")
    sizes = sizes_in([*noted(source, "sizes"), *options.size])
    scalars = numbers([*noted(source, "scalars"), *options.scalar], "--scalar")
    program = parse(source, scalars=constants)
    inputs = _inputs(program, sizes, options)
    kernel = eq.compile(source, scalars=constants, prefer=options.prefer)
    unknown = {axis: size for axis, size in sizes.items() if not _given_by(program, axis)}
    values: dict[str, Any] = {**inputs, **scalars}
    result = kernel(**values, sizes=unknown)
    outputs = result if isinstance(result, tuple) else (result,)
    named = {output.name: value.cpu() for output, value in zip(program.returned, outputs, strict=True)}
    for name, value in named.items():
        console.print(f"{name}  {str(value.dtype).removeprefix('torch.')}{list(value.shape)}", markup=False)
        console.print(str(value), markup=False, highlight=False)
    console.print(
        f"schedule {kernel.plan.schedule}; certificate {'ok' if kernel.certificate.ok else 'FAILED'}"
    )
    if options.output:
        # numpy has no bfloat16 and no float8; float32 holds both exactly.
        np.savez(
            options.output, allow_pickle=False, **{name: _to_numpy(value) for name, value in named.items()}
        )
        console.print(f"written to {options.output}", markup=False)
    return 0


def _kernel(options: argparse.Namespace, source: str | None = None) -> tuple[eq.Kernel, dict[str, int]]:
    """The kernel of a program, the file's by default, for a target and sizes, and the sizes."""
    constants = numbers(options.constant, "--constant")
    text = read(options.file) if source is None else source
    return kernel_of(text, options.target, sizes_in(options.size), constants, options.prefer)


def _emit(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.vendor.files import name_of, write
    from eqfuse.vendor.module import triton_of

    kernel, sizes = _kernel(options)
    if options.output and (options.output.is_dir() or not options.output.suffix):
        stem = kernel.name if options.file == "-" else Path(options.file).stem
        files, why = write(kernel, sizes, options.output, name_of(stem))
        for file in files:
            console.print(f"written to {options.output / file}", markup=False, soft_wrap=True)
        if why:
            console.print(f"without a gradient: {why}", markup=False, soft_wrap=True)
        return 0
    source = kernel.cpp if kernel.compiled.device.kind == "cpu" else triton_of(kernel, sizes)
    if options.output:
        options.output.write_text(source, encoding="utf-8")
        console.print(f"written to {options.output}", markup=False)
    else:
        print(source)
    return 0


def _explain(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.explain.explanation import coloured

    if Path(options.file).is_dir():
        return _explain_folder(options, console)
    if options.output and options.output.is_dir():
        raise EqfuseError(f"{str(options.output)!r} is a folder", hint="name a file in it")
    kernel, _ = _kernel(options)
    form = options.format or "text"
    if options.output:
        options.output.write_text(kernel.explain(form, options.detail), encoding="utf-8")
        console.print(f"written to {options.output}", markup=False)
    elif form == "text":
        with kernel.derived.scope.entered():
            shown = coloured(kernel.report, kernel.derivation, options.detail)
        console.print(shown, soft_wrap=True)
    else:
        print(kernel.explain(form, options.detail))
    return 0


def _explain_folder(options: argparse.Namespace, console: Console) -> int:
    """Writes a page for each program of a folder, and one that lists them."""
    from eqfuse.explain.page import Entry, contents

    files = sorted(Path(options.file).glob("*.eqf"))
    if not files:
        raise EqfuseError(f"there is no program (*.eqf) in {options.file!r}")
    if options.format not in (None, "html"):
        raise EqfuseError(
            f"pages are HTML, not {options.format!r}", hint="explain one program, or leave --format out"
        )
    folder = options.output
    if folder is None or (folder.suffix and not folder.is_dir()):
        raise EqfuseError("programs of a folder are explained in a folder", hint="give --output FOLDER")
    folder.mkdir(exist_ok=True)
    entries = []
    for file in files:
        source = read(str(file))
        about = next((line[1:].strip() for line in source.splitlines() if line.startswith("#")), "")
        title = f"{file.stem}: {about}" if about and ":" not in about else file.stem
        try:
            kernel, _ = _kernel(options, source)
            text = kernel.explain("html", options.detail)
        except EqfuseError as error:
            entries.append(Entry(title, why=str(error).splitlines()[0]))
        else:
            (folder / f"{file.name}.html").write_text(text, encoding="utf-8")
            entries.append(Entry(title, f"{quote(file.name)}.html", str(kernel.plan).strip("<>")))
        console.print(f"{file.stem}: {entries[-1].why or entries[-1].plan}", markup=False, soft_wrap=True)
    index = folder / "index.html"
    index.write_text(contents(f"Programs of {Path(options.file).resolve().name}", entries), encoding="utf-8")
    console.print(f"written to {index}", markup=False, soft_wrap=True)
    return 1 if any(each.why for each in entries) else 0


def _new(options: argparse.Namespace, console: Console) -> int:
    return new(options.file, options.formula, options.name, console)


def _watch(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.watch import watch

    return watch(options.file, lambda source: _kernel(options, source)[0], console)


def _prepare(options: argparse.Namespace, console: Console) -> int:
    kernel, given = _kernel(options)
    device, program = kernel.compiled.device, kernel.program
    sizes = {**given, **kernel.compiled.extents}
    if device.kind == "gpu" and not torch.cuda.is_available():
        return _prepare_elsewhere(kernel, console)
    shapes = shapes_of(program, sizes)
    scalars = {name: sizes.get(name, 1) for name in program.integers}
    unknown = {axis: size for axis, size in sizes.items() if not _given_by(program, axis)}
    made = kernel.prepare({**shapes, **scalars}, sizes=unknown)
    what = f"{made} new binaries" if device.kind == "gpu" else kernel.plan.code or "compiled"
    console.print(f"{kernel!r}: {what}", markup=False, soft_wrap=True)
    return 0


def _prepare_elsewhere(kernel: eq.Kernel, console: Console) -> int:
    """Triton and Gluon for a GPU that torch does not see: the plan and its certificate are kept for it, binaries are not,
    for they are found by what Triton looks at in a call's tensors."""
    from eqfuse.tile.gluon.aot import compile_for_hopper
    from eqfuse.tile.triton.aot import TARGETS, compile_for

    device, sizes = kernel.compiled.device.name, kernel.compiled.extents
    target = device if device in TARGETS else "sm_90"
    has_roles = kernel.compiled.roles is not None
    source = kernel.gluon if has_roles else kernel.triton
    reports = compile_for(source, target, sizes=sizes)
    reports += [each.kernel for each in compile_for_hopper(source, sizes=sizes)] if has_roles else []
    table = Table(show_edge=False)
    for heading in ("kernel", "registers a thread", "spilled bytes", "shared bytes", "instructions"):
        table.add_column(heading)
    for report in reports:
        counts = (report.registers, report.spilled_bytes, report.shared_bytes)
        table.add_row(report.name, *map(str, counts), ", ".join(sorted(report.instructions)))
    console.print(table)
    shown = f"compiled for {target}, which torch does not see here; the plan and its certificate are kept for {device}"
    console.print(f"{kernel!r}: {shown}", markup=False, soft_wrap=True)
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    source, constants = read(options.file), numbers(options.constant, "--constant")
    chosen: dict[str, Any] = {"scalars": constants, "trials": options.trials, "bound": options.bound}
    chosen["allow"] = options.allow
    if options.against:
        other = read(options.against)
        certificate = eq.equivalent(source, other, **chosen)
        console.print(str(certificate), markup=False, highlight=False, soft_wrap=True)
        if certificate.ok:
            console.print(str(float_note(source, other, constants)), markup=False, highlight=False)
        return 0 if certificate.ok else 1
    try:
        certificate = eq.compile(source, verify="again", **chosen).certificate
    except VerificationError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(str(certificate), markup=False, highlight=False, soft_wrap=True)
    return 0


def _bench(options: argparse.Namespace, console: Console) -> int:
    """The benchmarks are a program beside the package, in a checkout of its source."""
    checkout = Path(__file__).parent.parent
    if not (checkout / "bench" / "__main__.py").is_file():
        raise EqfuseError(
            f"the benchmarks are not part of the installed package ({Path(__file__).parent})",
            hint="run `python -m bench NAME` in a checkout of the source, with what `pip install -e '.[bench]'` brings",
        )
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "bench", *options.words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def _doctor(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.doctor import doctor

    return doctor(console, measure=options.measure)


def _cache(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.cache import entries
    from eqfuse.cache.files import cache_home

    if (options.folder is None) == (options.action == "pack"):
        raise EqfuseError("pack takes a folder, and nothing else does", hint="eqfuse cache pack FOLDER")
    if options.action == "pack":
        return _pack(options.folder, console)
    if options.action == "verify":
        return _audit(console)
    try:
        home = cache_home()
    except OSError as error:
        raise EqfuseError(f"there is no cache: {error}", hint="set XDG_CACHE_HOME to a folder") from None
    if options.action == "clear":
        try:
            console.print(f"{entries.clear()} files deleted")
        except OSError as error:
            raise EqfuseError(f"the cache cannot be cleared: {error}", hint=f"delete {home}") from None
        return 0
    table = Table(show_edge=False)
    for heading in ("kind", "files", "KB", "what"):
        table.add_column(heading, overflow="fold")
    found = list(entries.usage())
    for kind in found:
        table.add_row(kind.kind, str(kind.files), str(kind.size // 1024), _plain(kind.what))
    console.print(table)
    files, size = sum(kind.files for kind in found), sum(kind.size for kind in found)
    console.print(f"{home}: {files} files, {size // 1024} KB", markup=False)
    return 0


def _pack(folder: Path, console: Console) -> int:
    from eqfuse import results

    try:
        copied, left = results.pack(folder)
    except OSError as error:
        raise EqfuseError(f"{folder} cannot be written: {error}", hint="give another folder") from None
    others = f"; {left} that no process here would use were left" if left else ""
    console.print(f"{copied} entries in {folder}, for EQFUSE_CACHE_PATH{others}", markup=False)
    return 0


def _audit(console: Console) -> int:
    """0 where every entry that is used is right."""
    from eqfuse.audit import audit

    right = whole = unused = wrong = 0
    for finding in audit():
        if finding.wrong:
            wrong += 1
            console.print(f"WRONG {finding.path}: {finding.wrong}", markup=False, soft_wrap=True)
        elif finding.fault:
            unused += 1
            console.print(f"unused {finding.path}: {finding.fault}", markup=False, soft_wrap=True)
        elif finding.again:
            right += 1
        else:
            whole += 1
    others = f"; {whole} other files as they were kept" if whole else ""
    console.print(f"{right} entries made once more and right, {wrong} wrong, {unused} unused{others}")
    return 1 if wrong else 0


def _rules(options: argparse.Namespace, console: Console) -> int:
    from eqfuse.rules.catalogue import EVERY
    from eqfuse.rules.rule import Rewrite

    counts: Mapping[str, int] | None = None
    if options.file is not None:
        constants = numbers(options.constant, "--constant")
        counts = eq.compile(read(options.file), scalars=constants, verify=False).rule_counts
    for ruleset in EVERY:
        table = Table(title=ruleset.name, title_justify="left", show_edge=False)
        for heading in ("rule", "says", "where", "why"):
            table.add_column(heading, overflow="fold")
        if counts is not None:
            table.add_column("matches", justify="right")
        for rule in ruleset.rules:
            says = f"{rule.left} = {rule.right}" if isinstance(rule, Rewrite) else rule.fact
            row = [rule.name, says, ", ".join(rule.when), rule.why]
            if counts is not None:
                row.append(str(counts.get(rule.name, 0)))
            table.add_row(*map(_plain, row))
        console.print(table)
    return 0


def _reductions(options: argparse.Namespace, console: Console) -> int:
    table = Table(show_edge=False)
    for heading in ("reduction", "gives", "why"):
        table.add_column(heading, overflow="fold")
    for each in REGISTERED.values():
        axes = "j, k" if each.is_ranked else "j"
        says = f"{each.name}[{axes}]({', '.join(each.args)})"
        table.add_row(*map(_plain, (says, ", ".join(each.results), each.why)))
    console.print(table)
    return 0


def _plain(text: str) -> str:
    """Text in which brackets are brackets, not rich's markup."""
    return text.replace("[", "\\[")


def _inputs(
    program: Program, sizes: Mapping[str, int], options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    given = _load(options.inputs)
    dtypes = program_dtypes(program)
    generator = torch.Generator().manual_seed(options.seed)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in program.tensors:
        if tensor.name in given:
            tensors[tensor.name] = given.pop(tensor.name)
            continue
        dtype = dtypes[tensor.name]
        if not TORCH_DTYPES[dtype].is_floating_point:
            hint = "give it with --inputs FILE.npz; random integers would mean nothing"
            raise BindError(f"{tensor.name!r} holds {dtype} values", hint=hint)
        shape = shape_of(program, tensor, sizes)
        try:
            tensors[tensor.name] = torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])
        except (RuntimeError, MemoryError):
            hint = "give smaller sizes"
            raise BindError(f"there is no memory for {tensor.name!r} of shape {shape}", hint=hint) from None
    if given:
        names = " ".join(tensor.name for tensor in program.tensors)
        raise BindError(f"the program has no tensor {next(iter(given))!r}", hint=f"tensors: {names}")
    place = _device(options.device)
    return {name: tensor.to(place) for name, tensor in tensors.items()}


def _device(name: str) -> torch.device:
    """A device that tensors can be on here. Raises BindError."""
    hint = "write cpu or cuda"
    try:
        place = torch.device(name)
    except RuntimeError:
        raise BindError(f"unknown device {name!r}", hint=hint) from None
    if place.type not in ("cpu", "cuda"):
        raise BindError(f"kernels do not run on {name!r}", hint=hint)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BindError(f"there is no {name!r} here", hint="eqfuse doctor shows what there is")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise BindError(f"there is no {name!r} here", hint=f"there are {torch.cuda.device_count()} devices")
    return place


def _given_by(program: Program, axis: str) -> bool:
    """Whether a tensor determines the extent of an axis."""
    return any(axis in tensor.axes for tensor in program.tensors)


def _load(path: Path | None) -> dict[str, torch.Tensor]:
    if path is None:
        return {}
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile):
            raise BindError(
                f"{str(path)!r} holds one array without a name",
                hint="write it with numpy.savez(file, x=array)",
            )
        with found as arrays:
            return {name: _tensor(name, arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or "it is empty"
        raise BindError(
            f"cannot read tensors from {str(path)!r}: {reason}", hint="write it with numpy.savez"
        ) from None


def _tensor(name: str, array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        hint = "write numbers, in the byte order of this machine"
        raise BindError(f"{name!r} is an array of {array.dtype}, not of numbers", hint=hint) from None


def _to_numpy(value: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    narrow = value.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = (value.float() if narrow else value).numpy()
    return array


if __name__ == "__main__":
    sys.exit(main())
