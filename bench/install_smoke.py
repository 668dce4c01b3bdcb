"""What an installation is asked to do, by `eqfuse bench install`: prints JSON with versions, and an error in one line for each thing that fails.

It runs in an environment of its own, with eqfuse and what that brings, and nothing of a checkout.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"


def compiles() -> None:
    import eqfuse as eq

    assert eq.compile(SOFTMAX, verify="again").certificate.ok


def calls() -> None:
    import torch

    import eqfuse as eq

    kernel = eq.compile(SOFTMAX, native="wait")
    for rows in (7, 64):
        x = torch.randn(rows, 130)
        assert torch.allclose(kernel(x=x), x.softmax(1), atol=1e-6)


def differentiates() -> None:
    import torch

    import eqfuse as eq

    kernel, x = eq.compile(SOFTMAX), torch.randn(5, 30, requires_grad=True)
    found, expected = (torch.autograd.grad(y.square().sum(), x)[0] for y in (kernel(x=x), x.softmax(1)))
    assert torch.allclose(found, expected, atol=1e-5)
    batched = torch.func.vmap(lambda row: kernel(x=row))(x.detach()[None])
    assert torch.allclose(batched[0], x.softmax(1), atol=1e-5)


def translates() -> None:
    import torch

    import eqfuse as eq

    x = torch.randn(5, 30)
    assert torch.allclose(eq.from_torch(lambda x: torch.softmax(x, 1), x)(x), torch.softmax(x, 1), atol=1e-6)


def is_traced() -> None:
    import torch

    import eqfuse as eq
    from eqfuse import ops

    kernel, x = eq.compile(SOFTMAX), torch.randn(5, 30)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = ops.rms_norm(kernel(x=x), torch.ones(30))
        return normed

    expected = torch.nn.functional.rms_norm(x.softmax(1), (30,), eps=1e-6)
    assert torch.allclose(model(x), expected, atol=1e-5)


def is_a_back_end() -> None:
    import torch

    import eqfuse as eq

    model = torch.compile(
        torch.nn.Softmax(-1), backend="eqfuse", options={"take": "always", "rest": "aot_eager"}
    )
    x = torch.randn(16, 300)
    assert torch.allclose(model(x), x.softmax(-1), atol=1e-6)
    assert len(eq.torch.report().taken) == 1


def emits() -> None:
    import eqfuse as eq

    assert "@triton.jit" in eq.compile(SOFTMAX, target="sm_90").triton


def makes_binaries() -> None:
    from eqfuse.cli import main

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
        program = Path(folder) / "softmax.eqf"
        program.write_text(SOFTMAX, encoding="utf-8")
        assert main(["prepare", str(program), "--target", "sm_90", "--size", "i=64,j=512"]) == 0
    assert "registers" in printed.getvalue()


def explains() -> None:
    import eqfuse as eq

    kernel = eq.compile(SOFTMAX)
    assert kernel.derivation.check()
    assert "<html" in kernel.explain(format="html")


def demonstrates() -> None:
    from eqfuse.cli import main

    with redirect_stdout(io.StringIO()) as printed:
        assert main(["demo"]) == 0
    assert "verified in" in printed.getvalue()


CHECKS: Mapping[str, Callable[[], None]] = {
    "compile": compiles,
    "call": calls,
    "gradient, vmap": differentiates,
    "from_torch": translates,
    "under torch.compile": is_traced,
    "back end": is_a_back_end,
    "emit": emits,
    "binaries of Triton": makes_binaries,
    "explain": explains,
    "demo": demonstrates,
}
"""What is asked, by what the table calls it."""


def failed(check: Callable[[], None]) -> str | None:
    """Why a check failed, in one line; None where it did not."""
    try:
        check()
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is what the installation lacks)
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'a wrong value'}"
    return None


def main() -> int:
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for name in ("torch", "triton", "egglog", "numpy", "sympy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    lacks = {name: why for name, check in CHECKS.items() if (why := failed(check)) is not None}
    print(json.dumps({"versions": versions, "lacks": lacks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
