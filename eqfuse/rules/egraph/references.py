"""Which differences move a sum from the reference that another state has.

`sum((x - mean)^2)` over a longer part is made of what it was over the shorter one, moved by how much the mean has
changed since, which is little. It could as well be made of `sum((x - a)^2)`, where some state has x shifted by a: then it
is moved by all of `mean - a`, and what is left of two large sums has no digits. The e-graph has both forms, so extraction
charges a product with a difference of the second kind, where there is one of the first.
"""

from __future__ import annotations

from eqfuse.rules.egraph.encode import Encoder
from eqfuse.rules.egraph.saturate import Graph

WHOLE, PARTS = "AB", ("A", "B")


def foreign_moves(graph: Graph, encoder: Encoder) -> frozenset[int]:
    """The classes of the differences by which a value that a state has is moved from what it is not over a part, though
    it may be moved from what it is."""
    if not graph.facts["parallel_axis"]:
        return frozenset()
    before = {
        (graph.roots[term], graph.roots[start])
        for part in PARTS
        for value, start in encoder.terms.get(part, {}).items()
        if (term := encoder.terms[WHOLE].get(value)) and {term, start} <= graph.roots.keys()
    }
    rows = [(moved, start, (to, since)) for moved, start, _, to, since, *_ in graph.facts["parallel_axis"]]
    own = {(moved, by) for moved, start, by in rows if (moved, start) in before}
    restored, known = {moved for moved, _ in own}, {by for _, by in own}
    foreign = {by for moved, _, by in rows if moved in restored and by not in known}
    return frozenset(
        key
        for classes in (graph.classes, graph.retired)
        for key, nodes in classes.items()
        if any(node.head == "Delta" and node.args in foreign for node in nodes)
    )
