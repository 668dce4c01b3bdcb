"""Benchmarks of eqfuse: the papers' programs (`workloads`), unfused torch (`eager`), and one report per `eqfuse bench`."""

import os

# What is measured is derived and verified then, and what is mutated must not be found, or kept.
os.environ.setdefault("EQFUSE_CACHE", "off")
