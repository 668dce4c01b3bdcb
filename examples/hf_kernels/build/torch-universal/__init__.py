# ruff: noqa: N999  (Hugging Face gives the folder its name)
"""Programs of eqfuse.ops as a universal kernel of Hugging Face `kernels`: functions, and layers that models are mapped to.

    from kernels import LocalLayerRepository, get_local_kernel, kernelize, use_kernel_mapping

    kernel = get_local_kernel(Path("examples/hf_kernels"))
    y, h = kernel.add_rms_norm(x, residual, w)

    norm = LocalLayerRepository(Path("examples/hf_kernels"), layer_name="RMSNorm")
    with use_kernel_mapping({"RMSNorm": {"cuda": norm, "cpu": norm}}):
        model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cuda")

The environment has eqfuse installed: metadata of kernels lists other dependencies alone.
"""

import torch
from torch import nn

from eqfuse import ops
from eqfuse.ops import *


class layers:
    """Layers without a state of their own: `forward` runs on the module that it is put into."""

    class RMSNorm(nn.Module):
        """Norms as transformers has them: weight: [d], and variance_epsilon; hidden_states: [..., d]."""

        can_torch_compile = True
        weight: torch.Tensor
        variance_epsilon: float

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = ops.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)
            return normed.to(hidden_states.dtype)

    class SiluAndMul(nn.Module):
        """silu of the first half of x: [..., 2 d] times the second."""

        can_torch_compile = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gated: torch.Tensor = ops.swiglu(x)
            return gated
