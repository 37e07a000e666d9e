"""`python -m nanovllm` is the `nanovllm` command."""

from nanovllm.cli import main

main()
