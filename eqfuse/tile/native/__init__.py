"""Tile programs as C++ for CPUs.

plain.py      operands without alignments, and without the conditions that hold in clipped blocks
sums.py       sums of matrix products, as of a convolution, as one product
order.py      which dim stands inside which
tree.py       loops that operations share; what later loops read is kept in memory or computed again
ahead.py      which pass asks memory for what of the next block
context.py, tensors.py, folds.py, whole.py, printer.py      the tree as text
vectors.h, functions.h, calls.h                             what the text calls
products.h, products.py                                     matrix products, a library of their own
build.py      the system's compiler, and libraries that are kept
run.py        one library on torch tensors
host.py       C++ where it is there, else torch calls, and why
blocks.py     sizes of blocks for caches
rates.py      what `eqfuse doctor --measure` measures
memory.py     large outputs
"""
