"""Aggregates of data engines: states travel as Arrow records, and parts in any process give what one call on everything gives."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.extend.define import admit, forget

pa = pytest.importorskip("pyarrow")

COVARIANCE = "c[a,b] = sum[n]((x[n,a] - mean[n](x[n,a])) * (x[n,b] - mean[n](x[n,b]))) / N(n)"
LOGSUMEXP = "y[i] = logsumexp[n](x[n,i])"
TOPK = "k: axis[4]\nv[k], p[k] = topk[n,k](x[n])\nreturn v, p"
NEAREST = """
    u: f32[q,d]
    y: f32[n,d]
    D[q,n] = sum[d](sq(u[q,d] - y[n,d]))
    v[q] = min[n](D[q,n])
    p[q] = argmin[n](D[q,n])
    return v, p
    """
SKETCH = "b: axis[400]\nc[b] = sum[n](where(floor(log(x[n]) / 0.05) + 200 == b, 1, 0))\nreturn c"
MOMENTS = "m[a], v[a] = mean_var[n](x[n,a])"


@cache
def kernel(source: str) -> eq.Kernel:
    return eq.compile(source)


@pytest.fixture
def nearest_id() -> Iterator[None]:
    """A reduction of the user's: the label beside the least value."""
    eq.reduction(
        "label_of_least",
        args="x, e: i64",
        state="v, e",
        lift="x, e",
        identity="inf, 9223372036854775807",
        order="-v, -e",
        result="e",
        commutative=True,
    )
    yield
    forget("label_of_least")


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(x: np.ndarray[Any, Any]) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])


PARTS = [(0, 40), (40, 41), (41, 41), (41, 100)]
"""Places in the axis, one of them empty."""


def parts_of(length: int) -> list[tuple[int, int]]:
    return [(min(a, length), min(b, length)) for a, b in PARTS]


CASES = {"covariance": COVARIANCE, "log-sum-exp": LOGSUMEXP, "moments": MOMENTS}


def of_parts(aggregate: Any, x: np.ndarray[Any, Any], total: int | None = None) -> Any:
    parts = [aggregate.reduce(aggregate.zero(a, total), {"x": x[a:b]}) for a, b in parts_of(len(x))]
    first, second, third, fourth = (aggregate.to_bytes(part) for part in parts)
    return aggregate.finish(aggregate.merge(first, aggregate.merge(second, third, fourth)))


@pytest.mark.parametrize("name", CASES)
def test_parts_give_what_a_call_gives(name: str) -> None:
    x = numbers(100, 3)
    found, wanted = of_parts(kernel(CASES[name]).aggregate, x), kernel(CASES[name])(x=x)
    for got, want in zip(np.atleast_1d(found), np.atleast_1d(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if name == "covariance":
        np.testing.assert_allclose(found, np.cov(x.T, bias=True), rtol=1e-5, atol=1e-6)


def test_the_greatest_and_their_positions() -> None:
    x = numbers(100)
    v, p = of_parts(kernel(TOPK).aggregate, x, 100)
    assert p.tolist() == np.argsort(-x, kind="stable")[:4].tolist()
    assert v.tolist() == x[p].tolist()
    few, places = of_parts(kernel(TOPK).aggregate, x[:3])  # 3 positions, 4 ranks
    wanted = kernel(TOPK)(x=x[:3])
    assert few.tolist() == wanted[0].tolist() and places.tolist() == wanted[1].tolist()


def test_a_sketch_of_quantiles() -> None:
    x = np.exp(numbers(20_000))
    aggregate = kernel(SKETCH).aggregate
    parts = [aggregate.reduce(aggregate.zero(), {"x": part}) for part in np.split(x, 8)]
    counts = aggregate.finish(aggregate.merge(*parts))
    assert counts.sum() == len(x)
    for share in (0.01, 0.5, 0.99):
        bucket = np.searchsorted(np.cumsum(counts), share * len(x))
        assert abs(np.exp((bucket - 199.5) * 0.05) / np.quantile(x, share) - 1) < 0.06


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_are_those_of_a_call(dtype: str) -> None:
    x = numbers(100, 3).astype(dtype)
    aggregate = kernel(LOGSUMEXP).aggregate
    state = aggregate.read(aggregate.reduce(aggregate.zero(), {"x": x}))
    assert {str(v.dtype) for v in state.values.values()} == {
        f"torch.{'float64' if dtype == 'float64' else 'float32'}"
    }
    found, wanted = of_parts(aggregate, x), kernel(LOGSUMEXP)(x=x)
    assert found.dtype == wanted.dtype == dtype
    np.testing.assert_allclose(
        found, wanted, rtol={"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    )


def test_parts_of_float64_are_merged_in_float64() -> None:
    x = numbers(100).astype(np.float64)
    for source in ("y = logsumexp[n](x[n])", "y = var[n](x[n])"):
        np.testing.assert_allclose(of_parts(kernel(source).aggregate, x), kernel(source)(x=x), rtol=1e-13)


def test_torch_in_torch_out() -> None:
    x = torch.from_numpy(numbers(100, 3))
    aggregate = kernel(LOGSUMEXP).aggregate
    found = aggregate.finish(
        aggregate.reduce(aggregate.reduce(aggregate.zero(), {"x": x[:30]}), {"x": x[30:]})
    )
    torch.testing.assert_close(found, x.logsumexp(0))


def test_a_record_is_the_state_of_the_stream_and_says_whose_it_is() -> None:
    k, x = kernel(LOGSUMEXP), numbers(100, 3)
    aggregate = k.aggregate
    state = k.update(k.init(7), x=x)
    record = aggregate.write(state)
    row = record.to_pylist()[0]
    assert (row["version"], row["program"]) == (eq.__version__, aggregate.program)
    assert (row["axis"], row["start"], row["stop"], row["total"]) == ("n", 7, 107, None)
    assert row["dtypes"] == [("x", "f32")]
    assert [(s["name"], s["dtype"], s["shape"], len(s["data"])) for s in row["states"]] == [
        ("max_n", "float32", [3], 12),
        ("sum_n", "float32", [3], 12),
    ]
    for form in (record, aggregate.to_bytes(record), pa.Table.from_batches([record])):
        back = aggregate.read(form)
        assert (back.start, back.stop, back.numpy, back.dtypes) == (7, 107, True, {"x": torch.float32})
        assert (
            state.values
            and back.values
            and all(torch.equal(v, back.values[n]) for n, v in state.values.items())
        )
    assert aggregate.read(aggregate.zero()).values is None
    np.testing.assert_array_equal(
        k.finish(k.update(aggregate.read(record), x=x)), k.finish(k.update(state, x=x))
    )


def test_tasks_may_run_again() -> None:
    aggregate, x = kernel(LOGSUMEXP).aggregate, numbers(100, 3)
    left, right = (aggregate.reduce(aggregate.zero(), {"x": part}) for part in (x[:50], x[50:]))
    before = aggregate.to_bytes(left)
    once, twice = (aggregate.to_bytes(aggregate.merge(left, right)) for _ in range(2))
    again = [aggregate.to_bytes(aggregate.reduce(left, {"x": x[50:]})) for _ in range(2)]
    assert once == twice and again[0] == again[1] and aggregate.to_bytes(left) == before


REMADE = """
import pickle, sys
aggregate, states = pickle.loads(open(sys.argv[1], "rb").read())
assert "eqfuse.kernel" in sys.modules
sys.stdout.buffer.write(pickle.dumps((aggregate.program, aggregate.finish(aggregate.merge(*states)))))
"""


def elsewhere(path: Path, aggregate: Any, *states: Any) -> Any:
    """The program's hash and what the states give, in a process that has nothing but the pickles."""
    path.write_bytes(pickle.dumps((aggregate, states)))
    command = [sys.executable, "-c", REMADE, str(path)]
    return pickle.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_another_process_compiles_the_program_with_its_reductions_and_rules(
    tmp_path: Path, nearest_id: None
) -> None:
    eq.reduction("root_mean_square", result="root(sum[j](sq(x)) / N(j))")
    source = "e[q] = label_of_least[n](abs(u[q] - x[n]), id[n])\nr[q] = root_mean_square[n](x[n] - u[q])"
    with eq.rules(without=["recentre-sum"]):
        k = eq.compile(f"id: i64[n]\n{source}\nreturn e, r")
    x, u, ids = numbers(60), numbers(5, seed=1), np.arange(60) * 3 + 2**40
    aggregate = k.aggregate.given(u=u)
    states = [
        aggregate.reduce(aggregate.zero(), {"x": x[at], "id": ids[at]}) for at in (slice(25), slice(25, 60))
    ]
    try:
        program, found = elsewhere(tmp_path / "pickle", aggregate, *states)
    finally:
        forget("root_mean_square")
    assert program == aggregate.program
    assert found[0].tolist() == ids[np.abs(u[:, None] - x).argmin(1)].tolist()
    np.testing.assert_allclose(found[1], np.sqrt(np.square(x - u[:, None]).mean(1)), rtol=1e-5)
    assert len(pickle.dumps(aggregate)) < 10_000
    admitted = next(each for each in aggregate.reductions if each.name == "label_of_least")
    forget("label_of_least")
    admit(admitted)


def test_nearest_neighbours_in_a_data_set_that_streams_from_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    points, queries = numbers(3000, 8), numbers(200, 8, seed=1)
    parquet.write_table(pa.table({"point": rows(points)}), tmp_path / "points", row_group_size=1000)
    aggregate = kernel(NEAREST).aggregate.given(u=queries)
    state = aggregate.zero()
    for batch in parquet.ParquetFile(tmp_path / "points").iter_batches(batch_size=700):
        state = aggregate.reduce(state, batch, columns={"y": "point"})
    v, p = aggregate.finish(state)
    distances = np.square(queries[:, None] - points).sum(-1)
    assert p.tolist() == distances.argmin(1).tolist()
    np.testing.assert_allclose(v, distances.min(1), rtol=1e-4)


def test_columns_of_tables() -> None:
    k, x, w = kernel("y[a] = sum[n](w[n] * x[a,n])"), numbers(60, 3), numbers(60, seed=1)
    aggregate = k.aggregate
    fixed = pa.table({"x": rows(x), "w": w})
    lists = pa.table({"x": pa.array(x.tolist(), pa.large_list(pa.float32())), "w": w})
    tensors = pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(x), "w": w})
    structs = pa.table({"row": fixed.to_struct_array()})
    for table, columns in ((fixed, None), (lists, None), (tensors, None), (structs, "row")):
        parts = pa.concat_tables([table.slice(0, 20), table.slice(20, 0), table.slice(20)])
        state = aggregate.reduce(
            aggregate.reduce(aggregate.zero(), parts, columns), table.slice(0, 0), columns
        )
        np.testing.assert_allclose(aggregate.finish(state), w @ x, rtol=1e-5)


def refused(call: Any) -> str:
    with pytest.raises(EqfuseError) as error:
        call()
    return str(error.value)


def test_tables_that_do_not_fit() -> None:
    aggregate, x = kernel("y[a] = sum[n](w[n] * x[a,n])").aggregate, [[1.0, 2.0], [3.0]]

    def reduced(columns: Any = None, **table: Any) -> str:
        return refused(lambda: aggregate.reduce(aggregate.zero(), pa.table(table), columns))

    assert (
        reduced(x=x, w=[1.0, 2.0])
        == "column 'x' has lists of different lengths\na tensor has rows of one length"
    )
    assert reduced(x=[[1.0], None], w=[1.0, 2.0]).startswith("column 'x' has missing values")
    assert reduced(x=[[1.0], [None]], w=[1.0, 2.0]).startswith("column 'x' has missing values")
    assert reduced(x=[[1.0]], ww=[1.0]) == "the table has no column 'w' for tensor 'w'\ndid you mean 'ww'?"
    assert (
        reduced(x=[[1.0]], v=[1.0], columns={"w": "u"})
        == "the table has no column 'u' for tensor 'w'\nit has x, v"
    )
    assert "dtype object" in reduced(x=[["a"]], w=[1.0])


def test_states_of_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate, other = kernel(LOGSUMEXP).aggregate, kernel(COVARIANCE).aggregate
    state = aggregate.reduce(aggregate.zero(), {"x": numbers(10, 3)})
    assert refused(lambda: other.finish(state)) == (
        f"the state is of program {aggregate.program[:12]}, and this is {other.program[:12]}\n"
        "merge and finish states with the aggregate that has made them"
    )
    nearest = kernel(NEAREST).aggregate
    queries = [nearest.given(u=numbers(2, 4, seed=seed)) for seed in (0, 1)]
    made = queries[0].reduce(queries[0].zero(), {"y": numbers(9, 4)})
    assert queries[0].finish(made)[1].shape == (2,)
    for wrong in (queries[1], nearest):
        assert refused(lambda wrong=wrong: wrong.merge(made, made)).startswith(
            "the state was made with another 'u'"
        )
    for nothing in (
        b"",
        b"no",
        aggregate.to_bytes(state)[:-60],
        None,
        pa.table({"version": [eq.__version__]}),
    ):
        assert "no state" in refused(lambda nothing=nothing: aggregate.finish(nothing))
    totals = [aggregate.zero(total=total) for total in (5, 6)]
    assert refused(lambda: aggregate.merge(*totals)).startswith("parts of one axis have the totals {5, 6}")
    monkeypatch.setattr(eq, "__version__", "9.9")
    assert refused(lambda: aggregate.merge(state, state)) == (
        "the state was made by eqfuse 0.1.0, and this is eqfuse 9.9\n"
        "use one version for all parts, or make the state again"
    )


def test_nothing_and_too_much() -> None:
    aggregate, x = kernel(LOGSUMEXP).aggregate, numbers(10, 3)
    assert refused(lambda: aggregate.finish(aggregate.zero())).startswith("nothing was streamed")
    assert aggregate.finish(aggregate.reduce(aggregate.zero(), {"x": x[:0]})).tolist() == [-np.inf] * 3
    part = aggregate.reduce(aggregate.zero(total=10), {"x": x[:5]})
    for count, parts in ((5, [part]), (15, [part] * 3)):
        assert refused(lambda parts=parts: aggregate.finish(aggregate.merge(*parts))) == (
            f"the state has seen {count} positions of 10\na part is missing, or was merged twice"
        )
    places = kernel(TOPK).aggregate
    part = places.reduce(places.zero(), {"x": x[:, 0]})
    assert refused(lambda: places.merge(part, part)).startswith("the left part ends at position 10")
    far = places.zero(2**31 - 3)
    assert refused(lambda: places.reduce(far, {"x": x[:, 0]})).startswith(
        "ranks tell 2147483647 positions apart"
    )
    assert refused(lambda: kernel("j: axis[k]\ny[i,j] = sum[k <= j](x[i,k])\nreturn y").aggregate).startswith(
        "a program of prefixes"
    )


@pytest.mark.parametrize("name", ["pyarrow", "dask", "ray"])
def test_a_package_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate = kernel(LOGSUMEXP).aggregate
    for module in (name, "ray.data.aggregate"):
        monkeypatch.setitem(sys.modules, module, None)
    call = {"pyarrow": aggregate.zero, "dask": lambda: aggregate.delayed([]), "ray": aggregate.ray}[name]
    message, hint = refused(call).split("\n")
    assert message.startswith(f"{name} cannot be imported") and hint == "pip install 'eqfuse[data]'"


def test_spark_by_its_interface() -> None:
    aggregate, x = kernel(COVARIANCE).aggregate, numbers(100, 3)
    spark = pickle.loads(pickle.dumps(aggregate.spark(columns="v", total=100)))
    parts = [spark.reduce(spark.zero(), pa.table({"v": rows(x[a:b])})) for a, b in PARTS]
    assert all(isinstance(part, bytes) for part in parts)
    state = spark.merge(
        spark.merge(parts[3], parts[2]), spark.merge(parts[0], spark.merge(spark.zero(), parts[1]))
    )
    np.testing.assert_allclose(spark.finish(state), np.cov(x.T, bias=True), rtol=1e-5, atol=1e-6)
    assert refused(kernel(TOPK).aggregate.spark) == (
        "the program reads positions, and Spark merges parts in any order\n"
        "have the position in a column, and reduce it with the values"
    )
    ordered = kernel("h = linear_recurrence[n](a[n], b[n])").aggregate
    assert refused(ordered.ray).startswith("the program depends on the order of positions, and Ray Data")


# -- Dask ------------------------------------------------------------------------------------------


def array(x: np.ndarray[Any, Any], *chunks: Any) -> Any:
    return pytest.importorskip("dask.array").from_array(x, chunks=chunks)


def reduction(*args: Any, **options: Any) -> Any:
    return pytest.importorskip("dask.array").reduction(*args, **options)


@pytest.mark.parametrize("split_every", [2, 4, 100])
def test_reductions_of_dask_arrays(split_every: int) -> None:
    x = numbers(100, 5)
    chunked = array(x, (7, 33, 0, 1, 59), (2, 3))
    aggregate = kernel(LOGSUMEXP).aggregate
    wanted = kernel(LOGSUMEXP)(x=x)
    for options in ({**aggregate.dask(), "axis": 0, "dtype": x.dtype}, aggregate.dask(axis=-2, like=chunked)):
        for keepdims in (False, True):
            made = reduction(chunked, **options, keepdims=keepdims, split_every=split_every)
            assert (made.shape, made.dtype) == ((1, 5) if keepdims else (5,), np.float32)
            found = made.compute(scheduler="sync")
            assert (found.shape, found.dtype) == (made.shape, made.dtype)
            np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-6)
    where = kernel("p[i] = argmax[n](x[n,i])")
    places = reduction(chunked, **where.aggregate.dask(axis=0, like=chunked), split_every=split_every)
    assert places.dtype == np.int64 and places.compute(scheduler="sync").tolist() == x.argmax(0).tolist()
    in_order = kernel("h[i] = linear_recurrence[n](0.5, x[n,i])")
    made = reduction(chunked, **in_order.aggregate.dask(axis=0, like=chunked), split_every=split_every)
    np.testing.assert_allclose(made.compute(scheduler="sync"), in_order(x=x), rtol=1e-5)


def test_a_single_chunk_and_no_positions() -> None:
    aggregate = kernel(LOGSUMEXP).aggregate
    for count in (5, 0):
        x = array(numbers(count, 3).astype(np.float64), -1, -1)
        made = reduction(x, **aggregate.dask(like=x, axis=0))
        found = made.compute(scheduler="sync")
        assert found.dtype == made.dtype == np.float64
        np.testing.assert_allclose(found, kernel(LOGSUMEXP)(x=x.compute()))


def test_what_da_reduction_cannot_be_given() -> None:
    x = array(numbers(100, 4), 10, 2)
    aggregate = kernel(LOGSUMEXP).aggregate
    for source in (COVARIANCE, MOMENTS, NEAREST):
        assert refused(kernel(source).aggregate.dask).startswith("da.reduction takes a streamed tensor")
    assert (
        refused(lambda: aggregate.dask(axis=1))
        == "the program reduces dimension 0 of 'x', not 1\ngive axis=0"
    )
    wrong = reduction(x, **aggregate.dask(), axis=1, dtype="f4")
    assert refused(lambda: wrong.compute(scheduler="sync")).startswith("the program reduces dimension 0")
    where = kernel("p[i] = argmax[n](x[n,i])").aggregate
    assert refused(where.dask).startswith(
        "the program reads positions, and a chunk does not say where it starts"
    )
    head = "x: f32[n,i]\n"
    sources = (
        f"{head}y[i] = sum[n](abs(x[n,i]) * i)",
        f"{head}j: axis[i]\ny[i] = sum[n](abs(x[n,i]) * sum[j](sq(x[n,j])))",
        f"{head}y[i] = sum[n](abs(x[n,i]) * x[n,0])",
        f"{head}y[i] = sum[n](abs(x[n,i]) * w[i])",
    )
    for source in sources:
        k = kernel(f"{source}\nreturn y")
        given = {"w": numbers(4, seed=1)} if "w[" in source else {}
        other = k.aggregate.given(**given)
        for like in (None, x):
            assert refused(lambda other=other, like=like: other.dask(like=like)).startswith(
                "the program reads along"
            )
        options = other.dask(axis=0, like=x.rechunk((10, 4)))
        made = reduction(x.rechunk((10, 4)), **options).compute(scheduler="sync")
        np.testing.assert_allclose(made, k(x=x.compute(), **given), rtol=1e-5)
        wrong = reduction(x, **options)
        assert refused(lambda wrong=wrong: wrong.compute(scheduler="sync")) == (
            "a chunk of 'x' has shape (10, 2), and the program reads along all of (100, 4)\n"
            "chunk it in dimension 0 alone"
        )
    assert "sizes of chunks" in refused(lambda: aggregate.dask(like=x[x[:, 0] > 0]))


def test_trees_of_delayed_chunks() -> None:
    dask = pytest.importorskip("dask")
    points, queries = numbers(103, 4), numbers(20, 4, seed=1)
    aggregate = kernel(NEAREST).aggregate.given(u=queries)
    ends = [0, 20, 20, 41, 60, 103]
    lengths = np.diff(ends)
    tables = [
        dask.delayed(lambda a, b: pa.table({"y": rows(points[a:b])}))(a, a + n)
        for a, n in zip(ends[:-1], lengths, strict=True)
    ]
    arrays = [{"y": dask.delayed(points[a : a + n])} for a, n in zip(ends[:-1], lengths, strict=True)]
    wanted = np.square(queries[:, None] - points).sum(-1).argmin(1).tolist()
    for chunks in (tables, arrays):
        made = aggregate.delayed(chunks, lengths=lengths, split_every=2)
        assert made.compute(scheduler="sync")[1].tolist() == wanted
    assert refused(lambda: aggregate.delayed(arrays)).startswith("the program reads positions")
    assert refused(lambda: aggregate.delayed(arrays, lengths=[1])).startswith(
        "there are 5 chunks and 1 lengths"
    )
    assert refused(lambda: aggregate.delayed(arrays, lengths, split_every=1)).startswith("split_every is 1")
    wrong = aggregate.delayed(arrays, [20, 0, 21, 20, 42])
    assert " positions, not " in refused(lambda: wrong.compute(scheduler="sync"))
    nothing = kernel(LOGSUMEXP).aggregate.delayed([])
    assert refused(lambda: nothing.compute(scheduler="sync")).startswith("nothing was streamed")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_processes_of_dask(client: Any) -> None:
    x = numbers(1000, 5)
    chunked = array(x, 50, (2, 3))
    made = reduction(chunked, **kernel(LOGSUMEXP).aggregate.dask(axis=0, like=chunked))
    np.testing.assert_allclose(client.compute(made).result(120), kernel(LOGSUMEXP)(x=x), rtol=1e-6)
    chunks = [{"x": x[a : a + 50]} for a in range(0, 1000, 50)]
    found = client.compute(kernel(COVARIANCE).aggregate.delayed(chunks, [50] * 20, split_every=3)).result(120)
    np.testing.assert_allclose(found, np.cov(x.T, bias=True), rtol=1e-5, atol=1e-6)


def killing(folder: Path, at: int, once: bool) -> Any:
    """A function of a chunk and its number that kills its process where that is `at`, the first time or always."""

    def passed(chunk: Any, number: int) -> Any:
        mark = folder / str(number)
        ran = int(mark.read_text()) + 1 if mark.exists() else 1
        mark.write_text(str(ran))
        if number == at and (ran == 1 or not once):
            os.kill(os.getpid(), signal.SIGKILL)
        return chunk

    return passed


@pytest.mark.slow
def test_a_worker_of_dask_is_killed(client: Any, tmp_path: Path) -> None:
    dask = pytest.importorskip("dask")
    x = numbers(1000, 5)
    for folder, source in ((tmp_path / "delayed", TOPK), (tmp_path / "array", LOGSUMEXP)):
        folder.mkdir()
        passed = killing(folder, 13, once=True)
        if source == TOPK:
            chunks = [{"x": dask.delayed(passed)(x[50 * n : 50 * n + 50, 0], n)} for n in range(20)]
            made = kernel(TOPK).aggregate.delayed(chunks, lengths=[50] * 20, split_every=2)
            v, p = client.compute(made).result(180)
            assert p.tolist() == np.argsort(-x[:, 0])[:4].tolist() and v.tolist() == x[p, 0].tolist()
        else:
            chunked = array(x, 50, -1).map_blocks(
                lambda part, block_info=None, passed=passed: passed(part, block_info[0]["chunk-location"][0]),
                dtype=x.dtype,
                meta=x[:0],
            )
            made = reduction(chunked, **kernel(LOGSUMEXP).aggregate.dask(axis=0, like=chunked))
            np.testing.assert_allclose(client.compute(made).result(180), kernel(LOGSUMEXP)(x=x), rtol=1e-6)
        runs = {int(mark.name): int(mark.read_text()) for mark in folder.iterdir()}
        assert set(runs) == set(range(20)) and runs[13] > 1


@pytest.mark.slow
def test_a_chunk_that_kills_every_worker_of_dask_is_an_error(client: Any, tmp_path: Path) -> None:
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    passed = killing(tmp_path, 2, once=False)
    chunks = [{"x": dask.delayed(passed)(numbers(10, 3), n)} for n in range(5)]
    with pytest.raises(distributed.KilledWorker):
        client.compute(kernel(LOGSUMEXP).aggregate.delayed(chunks, lengths=[10] * 5)).result(180)


# -- Ray -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'eqfuse[data]'")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def blocks(ray: Any, x: np.ndarray[Any, Any], size: int) -> Any:
    table = pa.table(
        {"x": rows(x), "z": x[:, 0], "number": np.arange(len(x)) // size, "id": np.arange(len(x))}
    )
    return ray.data.from_arrow([table.slice(at, size) for at in range(0, len(x), size)])


@pytest.mark.slow
def test_aggregates_of_ray(ray: Any, nearest_id: None) -> None:
    x = numbers(400, 5)
    data = blocks(ray, x, 50)
    found = data.aggregate(kernel(COVARIANCE).aggregate.ray(columns="x", total=400))["c"]
    np.testing.assert_allclose(found, np.cov(x.T, bias=True), rtol=1e-5, atol=1e-6)
    moments = data.aggregate(kernel(MOMENTS).aggregate.ray(name="moments"))["moments"]
    np.testing.assert_allclose(moments["v"], x.var(0), rtol=1e-5)
    variance = kernel("v = var[n](z[n])").aggregate.ray()
    groups = data.groupby("number").aggregate(variance, kernel(COVARIANCE).aggregate.ray("x")).take_all()
    for group in groups:
        part = x[50 * group["number"] :][:50]
        assert abs(group["v"] - part[:, 0].var()) < 1e-5
        np.testing.assert_allclose(group["c"], np.cov(part.T, bias=True), rtol=1e-4, atol=1e-6)
    assert len(groups) == 8
    queries = numbers(6, 5, seed=1)
    source = "y: f32[n,d]\nid: i64[n]\ne[q] = label_of_least[n](sum[d](sq(u[q,d] - y[n,d])), id[n])\nreturn e"
    nearest = eq.compile(source).aggregate.given(u=queries).ray(columns={"y": "x"})
    wanted = np.square(queries[:, None] - x).sum(-1).argmin(1).tolist()
    assert list(data.aggregate(nearest)["e"]) == wanted
    structs = data.map_batches(
        lambda t: pa.table({"row": t.select(["x", "id"]).rename_columns(["y", "id"]).to_struct_array()}),
        batch_format="pyarrow",
    )
    again = eq.compile(source).aggregate.given(u=queries).ray(columns="row")
    assert list(structs.aggregate(again)["e"]) == wanted
    with pytest.raises(Exception, match="the state has seen 400 positions of 399"):
        data.aggregate(kernel(COVARIANCE).aggregate.ray(columns="x", total=399))
    with pytest.raises(Exception, match="nothing was streamed"):
        data.filter(lambda row: False).aggregate(kernel(COVARIANCE).aggregate.ray(columns="x"))


@pytest.mark.slow
@pytest.mark.parametrize("once", [True, False])
def test_a_worker_of_ray_is_killed(ray: Any, tmp_path: Path, once: bool) -> None:
    x = numbers(400, 5)
    passed = killing(tmp_path, 3, once)
    data = blocks(ray, x, 50).map_batches(
        lambda table: passed(table, table["number"][0].as_py()),
        batch_format="pyarrow",
        batch_size=None,
        max_retries=3 if once else 0,
    )
    aggregate = kernel(COVARIANCE).aggregate.ray(columns="x", total=400)
    if once:
        np.testing.assert_allclose(
            data.aggregate(aggregate)["c"], np.cov(x.T, bias=True), rtol=1e-5, atol=1e-6
        )
        assert int((tmp_path / "3").read_text()) > 1
    else:
        with pytest.raises(Exception, match="died|crash|kill"):
            data.aggregate(aggregate)
