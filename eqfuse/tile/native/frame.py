"""What stands around the body of a kernel: its arguments, the memory of a thread, and where the blocks of an instance start."""

from __future__ import annotations

from eqfuse.terms.dtypes import BYTES
from eqfuse.tile.native.text import ELEMENTS, kept
from eqfuse.tile.native.whole import Whole


class Frame(Whole):
    """Lines before the body, which say what it has used."""

    def _head(self) -> None:
        for place, axis in enumerate(self.interface.axes):
            self.emit(f"const i64 {self._size(axis)} = sizes[{place}]; (void){self._size(axis)};")
        offset = 0
        for place, tensor in enumerate(self.interface.tensors):
            if tensor in self.used:
                element = ELEMENTS[self._dtype(tensor)]
                self.emit(f"{element}* const {self._tensor(tensor)} = ({element}*)tensors[{place}];")
                for dim in range(self.interface.ranks[tensor]):
                    unit = (tensor, dim) in self.interface.unit
                    value = "1" if unit else f"strides[{offset + 2 * dim}]"
                    self.emit(
                        f"const i64 {self._stride(tensor, dim)} = {value}; (void){self._stride(tensor, dim)};"
                    )
                    extent = self._extent(tensor, dim)
                    self.emit(f"const i64 {extent} = strides[{offset + 2 * dim + 1}]; (void){extent};")
            if tensor in self.streamed:
                extents = [self._extent(tensor, dim) for dim in range(self.interface.ranks[tensor])]
                element = f"(i64)sizeof *{self._tensor(tensor)}"
                sizes = f"{element} * {' * '.join(extents)}, {element} * {extents[-1]}"
                self.emit(f"const bool {self._past(tensor)} = streams({sizes});")
            offset += 2 * self.interface.ranks[tensor]
        counts = []
        for axis in self.kernel.grid:
            count = f"count_{self._c(axis)}"
            self.emit(
                f"const i64 {count} = ({self._size(self._axis(axis))} + {self._step(axis) - 1}) / {self._step(axis)};"
            )
            counts.append(count)
        self.emit(f"const i64 instances = {' * '.join(counts) or '1'};")
        self.emit("const i64 chunk = instances / (8 * threads) + 1; (void)chunk;")
        for axis, block in self.blocks.items():
            size = self._size(self._axis(axis))
            self.emit(f"const i64 most_{self._c(axis)} = {block.size or size}; (void)most_{self._c(axis)};")

    def _memory(self) -> list[str]:
        if not self.buffers:
            return []
        lines, sizes = [], []
        for buffer in self.buffers.values():
            count = " * ".join(f"most_{self._c(dim)}" for dim in buffer.dims) or "1"
            lines.append(
                f"    const i64 bytes_{buffer.name} = ({count} * {BYTES[kept(buffer.dtype)]} + 127) / 64 * 64;"
            )
            sizes.append(f"bytes_{buffer.name}")
        lines.append(f"    char* const scratch = thread_scratch.of({' + '.join(sizes)} + 64);")
        lines.append("    char* free_ = (char*)(((__UINTPTR_TYPE__)scratch + 63) / 64 * 64);")
        for buffer in self.buffers.values():
            element = ELEMENTS[kept(buffer.dtype)]
            lines.append(f"    {element}* {buffer.name} = ({element}*)free_; free_ += bytes_{buffer.name};")
        return lines

    def _starts(self) -> list[str]:
        lines = ["      i64 rest = instance; (void)rest;"]
        for place, axis in enumerate(self.kernel.grid, start=1):
            c, step = self._c(axis), self._step(axis)
            number = f"digit(rest, count_{c})" if place < len(self.kernel.grid) else "rest"
            lines.append(f"      const i64 start_{c} = {number} * {step};")
            lines.append(
                f"      const i64 length_{c} = least({step}, {self._size(self._axis(axis))} - start_{c}); (void)length_{c};"
            )
        for axis, block in self.blocks.items():
            if block.kind == "whole":
                c = self._c(axis)
                lines.append(
                    f"      const i64 start_{c} = 0, length_{c} = {self._size(self._axis(axis))}; (void)start_{c}; (void)length_{c};"
                )
        return lines
