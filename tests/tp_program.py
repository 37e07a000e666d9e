"""A program with an engine of two ranks, for tests that end it from outside.

Prints the ids of its ranks, a line at each piece of an endless stream, and one when Ctrl-C has
ended a stream and the engine has answered another request. The argument is a checkpoint.
"""

import sys

from tp_engines import pids

from nanovllm import LLM, SamplingParams

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def main(checkpoint: str) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=200) as llm:
        print(*pids(llm), flush=True)
        while True:
            try:
                for piece in llm.stream([1, 2, 3], ENDLESS):
                    print(piece.token_ids, flush=True)
            except KeyboardInterrupt:
                (output,) = llm.generate([1, 2, 3], SHORT, use_tqdm=False)
                print("interrupted,", output.finish_reason, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
