"""Programs as files: their text, the settings in their comments, and the programs that ship."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import eqfuse as eq
from eqfuse import compiler
from eqfuse.errors import BindError, EqfuseError
from eqfuse.terms.parser import parse

Number = int | float

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"
"""Programs from papers, in a checkout."""


def read(file: str) -> str:
    """The text of a file, `-` of standard input. Raises EqfuseError."""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise EqfuseError(
            f"cannot read {file!r}: {reason}", hint="FILE holds a program; - is standard input"
        ) from None


def numbers(settings: Sequence[str], flag: str) -> dict[str, Number]:
    """From `name=number` words; raises BindError."""
    found: dict[str, Number] = {}
    for word in settings:
        name, _, text = word.partition("=")
        try:
            found[name] = int(text) if flag == "--size" or text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            raise BindError(
                f"{flag} {word!r} is not a name and a number", hint=f"write {flag} j=128"
            ) from None
    return found


def sizes_in(settings: Sequence[str]) -> dict[str, int]:
    """From words `i=128` or `i=128,j=64`; raises BindError."""
    words = [word for setting in settings for word in setting.replace(",", " ").split()]
    return {name: int(value) for name, value in numbers(words, "--size").items()}


def noted(source: str, what: str) -> list[str]:
    """The settings of a line `# sizes: i=128 j=64` on top of a file."""
    found = (line.partition(f"# {what}:") for line in source.splitlines() if line.startswith("#"))
    return [word for head, mark, words in found if mark and not head for word in words.split()]


def kernel_of(
    source: str,
    target: str,
    sizes: Mapping[str, int],
    constants: Mapping[str, Number] | None = None,
    prefer: str | None = None,
) -> tuple[eq.Kernel, dict[str, int]]:
    """The kernel of a text for a target and sizes, and all sizes: it may say some in a comment, as the gallery's do. Raises
    EqfuseError, as `eqfuse.compile` does."""
    known = {**numbers(noted(source, "constants"), "--constant"), **(constants or {})}
    axes = compiler.nominal_extents(parse(source, scalars=known))
    every = {**sizes_in(noted(source, "sizes")), **sizes}
    kernel = eq.compile(
        source,
        scalars=known,
        target=target,
        prefer=prefer,
        sizes={axis: size for axis, size in every.items() if axis in axes or axis in sizes},
    )
    return kernel, every


def shipped() -> dict[str, str]:
    """The texts of the programs that ship, by name: those of the gallery in a checkout, and of `eqfuse.ops` as `ops.rms_norm`."""
    from eqfuse.ops import CATALOGUE  # models and torch's parts are for those who ask

    gallery = {file.stem: file.read_text(encoding="utf-8") for file in sorted(GALLERY.glob("*.eqf"))}
    return {
        **gallery,
        **{f"ops.{op.name}": f"# eqfuse.ops.{op.name}\n{op.text().strip()}\n" for op in CATALOGUE},
    }
