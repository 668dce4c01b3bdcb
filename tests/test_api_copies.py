"""Kernels pickled, copied, and called from several threads at once."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from extend_kernels import registered

import eqfuse as eq
from eqfuse import compiler
from eqfuse.calls.regions import Regions
from eqfuse.extend.define import forget

pytestmark = pytest.mark.anew
"""Copies derive and plan for themselves, and threads at once."""

SOFTMAX = "e[i,j] = exp(x[i,j] - max[j](x[i,j]))\ny[i,j] = e[i,j] / sum[j](e[i,j])"
TWO = "m[i], v[i] = mean_var[j](x[i,j])\ny[i,j] = (x[i,j] - m[i]) * rsqrt(v[i] + c)\nreturn m, y"
ARGMAX = "y[i] = argmax[j](x[i,j])"
STREAMED = "y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])) * v[j])"
ARGUMENTS: dict[str, dict[str, Any]] = {
    SOFTMAX: {},
    TWO: {"c": 1e-5},
    ARGMAX: {},
    STREAMED: {"v": torch.linspace(-1, 1, 33)},
}


def tensors(rows: int = 5, columns: int = 33) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def equal(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b)) if isinstance(a, tuple) else torch.equal(a, b)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda kernel: pickle.loads(pickle.dumps(kernel)),
    "oldest protocol": lambda kernel: pickle.loads(pickle.dumps(kernel, protocol=0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("source", ARGUMENTS)
@pytest.mark.parametrize("made", COPIES)
@pytest.mark.slow(but=["pickle-e", "pickle-y[i] = sum"])
def test_a_copy_computes_the_same(source: str, made: str) -> None:
    kernel, given = eq.compile(source), ARGUMENTS[source]
    before = COPIES[made](kernel)
    wanted = kernel(x=tensors(), **given)
    after = COPIES[made](kernel)
    for other in (before, after, COPIES[made](after)):
        assert equal(other(x=tensors(), **given), wanted)
        assert other.plan == kernel.plan
        assert other.certificate.ok
        assert str(other.merge) == str(kernel.merge)
        assert other.triton == kernel.triton
    assert equal(after(x=tensors(7), **given), kernel(x=tensors(7), **given))


@pytest.mark.parametrize("made", COPIES)
@pytest.mark.slow(but=["pickle"])
def test_a_copy_of_what_was_used_in_every_way(
    made: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = eq.compile(STREAMED)
    x, v = tensors(), ARGUMENTS[STREAMED]["v"]
    kernel.tune(x=x, v=v, seconds=0.2, plans=2)
    state = kernel.update(kernel.init(), x=x, v=v)
    kernel.derivation.check()
    text = kernel.explain()
    other = COPIES[made](kernel)
    assert torch.equal(other(x=x, v=v), kernel(x=x, v=v))
    assert torch.equal(
        other.finish(other.update(state, x=x, v=v)), kernel.finish(kernel.update(state, x=x, v=v))
    )
    other.derivation.check()
    assert other.explain() == text


def test_a_copy_goes_its_own_way() -> None:
    kernel = eq.compile(SOFTMAX)
    other = copy.copy(kernel)
    other(x=tensors(300, 400))
    assert other.compiled.extents != kernel.compiled.extents
    kernel(x=tensors())
    assert other.compiled.extents == {"i": 300, "j": 400}


@pytest.mark.slow
def test_programs_as_deep_as_may_be_are_copied() -> None:
    steps = ["a0[i] = x[i]"] + [f"a{n}[i] = exp(tanh(a{n - 1}[i]) - c[i])" for n in range(1, 49)]
    kernel = eq.compile("\n".join([*steps, "y = sum[i](a48[i])"]), verify=False)
    x, c = torch.rand(8), torch.ones(8)
    for made in COPIES.values():
        assert torch.equal(made(kernel)(x=x, c=c), kernel(x=x, c=c))


def test_what_a_kernel_shows_and_raises_is_pickled_too() -> None:
    kernel = eq.compile(STREAMED)
    x, v = tensors(), ARGUMENTS[STREAMED]["v"]
    state = kernel.update(kernel.init(), x=x, v=v)
    for shown in (kernel.plan, kernel.plans(), kernel.merge, kernel.certificate, kernel.derivation):
        assert str(pickle.loads(pickle.dumps(shown))) == str(shown)
    pickle.loads(pickle.dumps(kernel.derivation)).check()
    assert torch.equal(kernel.finish(pickle.loads(pickle.dumps(state))), kernel.finish(state))
    with pytest.raises(eq.EqfuseError) as caught:
        eq.compile("y[i] = sum[j](x[i,j]) * z[q]")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is caught.type
    assert str(again) == str(caught.value) and again.hint == caught.value.hint


FIRST = {"state": "v, k", "lift": "x, j", "identity": "-inf, 2147483647", "order": "v, -k", "result": "v"}


@pytest.mark.slow
def test_another_process_gets_a_pickled_kernel(tmp_path: Path) -> None:
    with registered("foremost", **FIRST):
        kernels = [eq.compile(TWO, scalars={"c": 1e-5}), eq.compile("y[i] = foremost[j](x[i,j])")]
        wanted = [kernel(x=tensors()) for kernel in kernels]
        (tmp_path / "kernels").write_bytes(pickle.dumps(kernels))
    torch.save(tensors(), tmp_path / "x.pt")
    script = f"""
import pickle, torch
from pathlib import Path
folder = Path({str(tmp_path)!r})
kernels = pickle.loads((folder / "kernels").read_bytes())
x = torch.load(folder / "x.pt")
torch.save([kernel(x=x) for kernel in kernels], folder / "y.pt")
for kernel in kernels:
    kernel(x=x.repeat(2, 3))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    for found, exact in zip(torch.load(tmp_path / "y.pt"), wanted, strict=True):
        assert equal(found, exact)


@pytest.mark.slow
def test_a_pickled_kernel_does_not_take_another_reduction_for_its_own() -> None:
    with registered("foremost", **FIRST):
        data = pickle.dumps(eq.compile("y[i] = foremost[j](x[i,j])"))
    with registered("foremost", **FIRST):
        assert pickle.loads(data)(x=tensors()).shape == (5,)
    hindmost = FIRST | {"identity": "inf, 2147483647", "order": "-v, -k"}
    with (
        registered("foremost", **hindmost),
        pytest.raises(eq.EqfuseError, match="'foremost' that is not the one"),
    ):
        pickle.loads(data)
    pickle.loads(data)
    forget("foremost")


@pytest.mark.parametrize("source", ARGUMENTS)
@pytest.mark.slow(but=["argmax"])
def test_threads_call_one_kernel_on_shapes_it_has_not_seen(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, given = eq.compile(source), ARGUMENTS[source]
    shapes = [(rows, 33) for rows in (1, 2, 3, 5, 70, 3000)]
    wanted = {shape: eq.compile(source)(x=tensors(*shape), **given) for shape in shapes}
    made: list[dict[str, int]] = []
    pipeline = compiler.pipeline

    def counted(derived: Any, extents: Any, *others: Any) -> Any:
        made.append(dict(extents))
        return pipeline(derived, extents, *others)

    monkeypatch.setattr(compiler, "pipeline", counted)
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        for shape in shapes[number % len(shapes) :] + shapes:
            assert equal(kernel(x=tensors(*shape), **given), wanted[shape])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    # Of the calls in a bucket the first that comes has its own sizes compiled, and only then those of the bucket, if at
    # all: one of the calls at least is the first of all, and nothing is compiled twice.
    of_rows = next(tensor.axes[0] for tensor in kernel.program.tensors if tensor.name == "x")
    regions = Regions(frozenset())
    buckets: dict[int, list[int]] = {}
    for extents in made:
        buckets.setdefault(regions.bucket(extents)[of_rows], []).append(extents[of_rows])
    assert made
    for bucket, (own, *further) in buckets.items():
        assert own in {rows for rows, _ in shapes}
        assert further in ([], [1 << bucket]) and further != [own]


def test_threads_look_at_a_kernel_while_others_call_it() -> None:
    kernel = eq.compile(STREAMED)
    x, v = tensors(40, 33), ARGUMENTS[STREAMED]["v"]
    wanted = kernel(x=x, v=v)

    def called() -> None:
        for rows in range(1, 40):
            assert torch.allclose(kernel(x=x[:rows], v=v), wanted[:rows], atol=1e-6)

    def shown() -> None:
        for _ in range(10):
            assert kernel.rule_counts and kernel.stats["ms"] and str(kernel.loops) and str(kernel.tile)
            assert kernel.certificate.ok
            pickle.dumps(kernel)

    def streamed() -> None:
        state = kernel.update(kernel.init(), x=x, v=v)
        assert torch.allclose(kernel.finish(state), wanted, atol=1e-6)
        kernel.derivation.check()

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work) for work in (called, shown, streamed) * 2]:
            future.result()


def test_read_only_arrays_in_threads_leave_the_filters_of_warnings_alone(
    recwarn: pytest.WarningsRecorder,
) -> None:
    import warnings

    kernel = eq.compile(SOFTMAX)
    x = tensors().numpy()
    x.flags.writeable = False
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: kernel(x=x), range(64)))
    assert warnings.filters == before
    assert not recwarn.list
