"""Derivations that were edited by hand: each is refused, and the refusal names a place and a reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cache, reduce
from operator import getitem
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import eqfuse as eq
from bench.workloads import WORKLOADS
from eqfuse.proof.check import known_rules

Data = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

PROGRAMS = ("softmax", "variance", "quant_gemm", "rmsnorm_quant")
EXAMPLES = 200


@cache
def text(name: str) -> str:
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    return eq.compile(
        workload.text(case), scalars=case.constants, target="cpu", verify=False
    ).derivation.to_json()


def chains(data: Data) -> Iterator[list[Any]]:
    """Every list of steps: of outputs and merges, and of the proofs of conditions."""
    yield from (output["steps"] for output in data["outputs"])
    for kernel in data["kernels"]:
        for group in kernel["groups"]:
            for state in group["states"]:
                yield from (m["steps"] for m in (state["update"], state["combine"]) if m)
    for _, _, premises in data["inferences"]:
        for premise in premises:
            if "chain" in premise:
                yield premise["chain"]
            yield from premise.get("moves", ())


def drop_step(data: Data, draw: Draw) -> None:
    chain = draw(st.sampled_from([c for c in chains(data) if c]))
    del chain[draw(st.integers(0, len(chain) - 1))]


def swap_steps(data: Data, draw: Draw) -> None:
    long = [c for c in chains(data) if len(c) > 1]
    assume(long)
    chain = draw(st.sampled_from(long))
    first, second = sorted(draw(st.permutations(range(len(chain))))[:2])
    assume(chain[first] != chain[second])
    chain[first], chain[second] = chain[second], chain[first]


def change_sign(data: Data, draw: Draw) -> None:
    """Negates a subterm of a term that a step leads to, or of a value that is run."""
    places: list[tuple[Any, Any]] = [(step, 4) for chain in chains(data) for step in chain]
    states = [s for k in data["kernels"] for g in k["groups"] for s in g["states"]]
    places += [(s[kind], "value") for s in states for kind in ("update", "combine") if s[kind]]
    holder, key = draw(st.sampled_from(places))
    holder[key] = negated(data["terms"], holder[key], draw)


def negated(terms: list[Any], root: int, draw: Draw) -> int:
    """The number of a new term: `root` with one subterm negated."""
    head, words, args = terms[root]
    if args and draw(st.booleans()):
        which = draw(st.integers(0, len(args) - 1))
        below = negated(terms, args[which], draw)
        terms.append([head, words, [below if i == which else a for i, a in enumerate(args)]])
    else:
        terms.append(["Neg", [], [root]])
    return len(terms) - 1


def remove_condition(data: Data, draw: Draw) -> None:
    conditioned = [premises for _, _, premises in data["inferences"] if premises]
    assume(conditioned)
    premises = draw(st.sampled_from(conditioned))
    del premises[draw(st.integers(0, len(premises) - 1))]


def rename_rule(data: Data, draw: Draw) -> None:
    inference = draw(st.sampled_from(data["inferences"]))
    name = draw(st.sampled_from([*sorted(known_rules()), "no-such-rule"]))
    assume(name != inference[0])
    inference[0] = name


def move_position(data: Data, draw: Draw) -> None:
    step = draw(st.sampled_from([step for chain in chains(data) for step in chain]))
    moved = draw(st.lists(st.integers(-1, 2), max_size=4))
    assume(moved != step[2])
    step[2] = moved


TAMPERING = (drop_step, swap_steps, change_sign, remove_condition, rename_rule, move_position)


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(st.sampled_from(PROGRAMS), st.sampled_from(TAMPERING), st.data())
@pytest.mark.slow
def test_a_tampered_derivation_is_refused(
    name: str, tamper: Callable[[Data, Draw], None], choice: st.DataObject
) -> None:
    data: Data = json.loads(text(name))
    tamper(data, choice.draw)
    verdict = eq.Derivation.from_json(json.dumps(data)).check()
    assert not verdict
    place, _, reason = verdict.why.partition(": ")
    assert place and reason
    if tamper in (remove_condition, rename_rule, move_position):
        assert place.startswith("step ") or "step " in place, verdict.why


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_not_tampered_with_is_accepted(name: str) -> None:
    assert eq.Derivation.from_json(text(name)).check()


def test_a_step_that_is_used_twice_is_refused() -> None:
    data = json.loads(text("softmax"))
    chain = max(chains(data), key=len)
    chain.insert(1, chain[0])
    assert not eq.Derivation.from_json(json.dumps(data)).check()


def test_a_schedule_that_does_not_exist_or_needs_a_merge_is_refused() -> None:
    data = json.loads(text("softmax"))
    (walked,) = data["kernels"][0]["walks"]
    walked["schedule"] = "sideways"
    verdict = eq.Derivation.from_json(json.dumps(data)).check()
    assert not verdict and "there is no schedule 'sideways'" in verdict.why
    data = json.loads(text("softmax"))
    (walked,) = data["kernels"][0]["walks"]
    walked["schedule"] = "split_k"
    (group,) = data["kernels"][0]["groups"]
    group["obstacles"] = ["x[i,c]: no rule"]
    for state in group["states"]:
        state["update"] = state["combine"] = None
    verdict = eq.Derivation.from_json(json.dumps(data)).check()
    assert not verdict and "as split_k without a merge" in verdict.why


def test_a_repair_that_is_left_out_is_refused() -> None:
    """The update without its factor: the sum of two parts that were shifted differently."""
    data = json.loads(text("softmax"))
    (state,) = (s for s in data["kernels"][0]["groups"][0]["states"] if s["name"] == "sum_c")
    head, _, args = data["terms"][state["update"]["value"]]
    assert head == "Add"
    data["terms"].append(["Local", ["sum_c"], []])
    fresh = next(a for a in args if data["terms"][a][0] == "Red")
    data["terms"].append(["Add", [], [len(data["terms"]) - 1, fresh]])
    state["update"]["value"] = len(data["terms"]) - 1
    verdict = eq.Derivation.from_json(json.dumps(data)).check()
    assert not verdict and verdict.why.startswith("update of sum_c in kernel1: what is run")


def states(data: Data) -> list[Data]:
    return [s for kernel in data["kernels"] for group in kernel["groups"] for s in group["states"]]


def verdict_of(data: Data) -> eq.Verdict:
    return eq.Derivation.from_json(json.dumps(data)).check()


@pytest.mark.parametrize("head", ["Finite", "Invertible"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_guard_around_a_whole_new_value_is_refused(name: str, head: str) -> None:
    for place in range(len(states(json.loads(text(name))))):
        for kind in ("update", "combine", "finish"):
            data = json.loads(text(name))
            state = states(data)[place]
            if state[kind] is None:
                continue
            holder, key = (state, kind) if kind == "finish" else (state[kind], "value")
            data["terms"].append([head, [], [holder[key]]])
            holder[key] = len(data["terms"]) - 1
            verdict = verdict_of(data)
            assert not verdict and "a guard is around" in verdict.why, (state["name"], kind)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_state_without_its_final_value_is_refused(name: str) -> None:
    finished = [n for n, state in enumerate(states(json.loads(text(name)))) if state["finish"] is not None]
    for place in finished:
        data = json.loads(text(name))
        states(data)[place]["finish"] = None
        verdict = verdict_of(data)
        assert not verdict and "where leaves are 0, infinite or masked" in verdict.why


def test_factors_of_what_is_run_in_another_order_are_refused() -> None:
    data = json.loads(text("rmsnorm_quant"))
    found = [state["update"] for state in states(data)]
    products = [merged for merged in found if data["terms"][merged["value"]][0] in ("Mul", "Add")]
    assert products
    for merged in products:
        head, words, args = data["terms"][merged["value"]]
        before = merged["value"]
        data["terms"].append([head, words, args[::-1]])
        merged["value"] = len(data["terms"]) - 1
        assert "what is run is not what the steps end at" in verdict_of(data).why
        data["terms"].pop()
        merged["value"] = before


def test_rows_that_nothing_refers_to_and_rows_that_are_there_twice_are_refused() -> None:
    data = json.loads(text("softmax"))
    data["terms"].append(["Leaf", ["unread"], []])
    assert f"nothing in it refers to terms[{len(data['terms']) - 1}]" in verdict_of(data).why
    data = json.loads(text("softmax"))
    data["inferences"].append(data["inferences"][0])
    with pytest.raises(eq.EqfuseError, match="is there twice"):
        verdict_of(data)


def test_temporaries_in_another_order_are_refused() -> None:
    data = json.loads(text("quant_gemm"))
    outputs = data["kernels"][0]["outputs"]
    assert len(outputs) > 1
    outputs.reverse()
    assert "not in the order of their numbers" in verdict_of(data).why


def test_what_stands_beside_the_steps_is_checked() -> None:
    def changed(change: Callable[[Data], object], name: str = "softmax") -> str:
        data = json.loads(text(name))
        change(data)
        return verdict_of(data).why

    def first_output(data: Data) -> Data:
        found: Data = data["kernels"][0]["outputs"][0]
        return found

    assert "other axes than the output" in changed(lambda data: first_output(data)["axes"].reverse())
    assert "casts are strict" in changed(lambda data: data["program"].update(strict_casts=True))
    assert "the name of kernel 1" in changed(lambda data: data["kernels"][0].update(name="kernel2"))
    assert "nothing reads the leaf" in changed(lambda data: data["kernels"][0]["leaves"].update(y=0))
    assert "auxiliary, and an output" in changed(lambda data: states(data)[0].update(auxiliary=True))
    assert "not auxiliary" in changed(lambda data: states(data)[3].update(auxiliary=False), "variance")


@pytest.mark.parametrize(
    "broken",
    [
        lambda good: good.replace('"gaps":[]', '"gaps":[],"gaps":[]'),
        lambda good: good.replace('"gaps":[]', '"gaps":[],"more":1'),
        lambda good: good.replace('"version":2', '"version":true'),
        lambda good: good.replace('"version":2', '"version":' + "9" * 6000),
        lambda good: "[" * 100_000,
        lambda good: '{"format":' * 100_000,
        lambda good: good.replace('"gaps":[]', '"gaps":' + "[" * 20_000 + "]" * 20_000),
        lambda good: "",
        lambda good: "null",
        lambda good: good[:-5],
    ],
)
def test_text_that_is_no_derivation_raises_an_error_of_eqfuse(broken: Callable[[str], str]) -> None:
    with pytest.raises(eq.EqfuseError):
        eq.Derivation.from_json(broken(text("softmax")))


JUNK = (
    None,
    True,
    -1,
    2**70,
    1.5,
    math.nan,
    "",
    "x[",
    "\ud800",
    "Num",
    [],
    [[]],
    {},
    {"a": 1},
    [0, True, [], 0, 0],
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value that is inside another."""
    parts = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, part in parts:
        yield (*place, key)
        yield from places(part, (*place, key))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_damaged_text_is_refused_by_an_error_of_eqfuse_or_by_the_checker(name: str) -> None:
    """A value anywhere becomes another one, or is left out, or the text is cut there."""
    good, random = text(name), Random(0)
    ways = list(places(json.loads(good)))
    for number in range(150):
        data = json.loads(good)
        *above, last = random.choice(ways)
        holder = reduce(getitem, above, data)
        if random.random() < 0.7:
            holder[last] = random.choice(JUNK)
        else:
            del holder[last]
        damaged = good[: random.randrange(len(good))] if number % 5 == 0 else json.dumps(data)
        try:
            again = eq.Derivation.from_json(damaged)
        except eq.EqfuseError:
            continue
        assert not again.check() or again.to_json() == good, damaged


def test_a_file_of_an_older_version_is_refused_as_one() -> None:
    with pytest.raises(
        eq.EqfuseError, match="this is version 1 of the format 'eqfuse derivation', not version 2"
    ):
        eq.Derivation.from_json(text("softmax").replace('"version":2', '"version":1'))


@pytest.mark.parametrize("head", ["Leaf", "Red", "Cast", "Apply1", "Num", "Local"])
def test_a_name_that_is_empty_is_refused(head: str) -> None:
    """Or the derivation is malformed: either way it is said."""
    for name in ("softmax", "quant_gemm"):
        data = json.loads(text(name))
        rows = [row for row in data["terms"] if row[0] == head]
        for row in rows[:3]:
            row[1][:] = [""] * len(row[1])
            try:
                assert not verdict_of(data)
            except eq.EqfuseError as error:
                assert "malformed" in str(error)
