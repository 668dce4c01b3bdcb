"""Making the kernel that a pass leaves: new values under fresh names, beside the statements that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace

from eqfuse.fast_dataclass import dataclass
from eqfuse.tile.names import Fresh
from eqfuse.tile.nodes import For, Kernel, Let, Op, Stmt, TileProgram, Value
from eqfuse.tile.walk import defined


def in_kernels(program: TileProgram, change: Callable[[Kernel], Kernel]) -> TileProgram:
    """The program with every kernel changed; the same object where none is."""
    kernels = tuple(map(change, program.kernels))
    same = all(new is old for new, old in zip(kernels, program.kernels, strict=True))
    return program if same else replace(program, kernels=kernels)


@dataclass
class Draft:
    """New values of one kernel: `first` are defined before all else, `after` right behind the definition of a value,
    by its name."""

    kernel: Kernel
    fresh: Fresh | None = None
    first: list[Let] = field(default_factory=list)
    after: dict[str, list[Let]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fresh = self.fresh or Fresh(value.name for value in defined(self.kernel.body))

    def new(self, wanted: str, dims: tuple[str, ...], dtype: str) -> Value:
        """A value of a name that the kernel has not: the wanted one, or that with a number after it."""
        return self._fresh.value(wanted, dims, dtype)

    def behind(self, value: Value, wanted: str, op: Op, like: Value | None = None) -> Value:
        """A new value, of the dims and dtype of `like` (of `value` by default), defined right behind `value`."""
        like = like or value
        made = self.new(wanted, like.dims, like.dtype)
        self.after.setdefault(value.name, []).append(Let(made, op))
        return made

    def kernel_of(self, body: Iterable[Stmt]) -> Kernel:
        """The kernel with this body and the new values where they belong."""
        return replace(self.kernel, body=(*self.first, *self._placed(body)))

    def _placed(self, body: Iterable[Stmt]) -> tuple[Stmt, ...]:
        placed: list[Stmt] = []
        for stmt in body:
            match stmt:
                case Let(value, _):
                    placed += (stmt, *self._placed(self.after.get(value.name, ())))
                case For():
                    placed.append(replace(stmt, body=self._placed(stmt.body)))
                case _:
                    placed.append(stmt)
        return tuple(placed)


def changed(body: Iterable[Stmt], change: Callable[[Let], Sequence[Stmt]]) -> tuple[Stmt, ...]:
    """A body with other statements in the place of every `Let`, those of loops included."""
    made: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Let():
                made += change(stmt)
            case For():
                made.append(replace(stmt, body=changed(stmt.body, change)))
            case _:
                made.append(stmt)
    return tuple(made)
