"""Benchmarks of eqfuse: the papers' programs (`workloads`), unfused torch (`eager`), and one report per `eqfuse bench`."""
