"""Several engines as one: `LLM(..., data_parallel_size=n)`; see docs/data_parallel.md.

`llm.DataParallelLLM` is what a caller holds, `dispatcher` knows which request is where, `router`
chooses the replica, `replica` is the engine at the other end, and `actors` brings Ray in.
"""
