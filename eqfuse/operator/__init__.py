"""A call of a kernel as one operator of torch, `eqfuse::call`, that compilers, exporters and transforms see.

A call on plain tensors runs at once, and is none of this. Where torch records what is called, or calls it on tensors that
hold no numbers or a batch of others, a kernel's call becomes the operator (`library.py`): its shapes are symbolic
(`shapes.py`), its derivative is the operator of the gradient's kernel (`derivative.py`), and its rule for `torch.vmap` is
the program with one more axis (`batch.py`). The operator names its kernel by content (`content.py`). Code that Inductor writes
(`written.py`) calls a site in its place, which knows what ran the call before (`site.py`).
"""
