"""What the engine is measured by: workloads, a recorder of steps, the roofline, peers, plots.

It uses the engine through its public API only. Nothing here is imported before `nanovllm bench`
or a test asks for it.
"""
