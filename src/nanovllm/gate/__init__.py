"""`nanovllm gate`: did this change make it slower? For any suite of pytest-benchmark.

`times` runs the benchmarks of a base revision and of a tree, interleaved, and compares them with
the variation that it measured meanwhile. `counts` compares exact numbers of work with a baseline
that is committed. Both fail closed: what did not run as it should is red. See docs/gates.md.
"""
