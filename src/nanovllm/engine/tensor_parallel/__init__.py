"""Several ranks as one engine: rank 0 plans and samples, the others compute their part.

start.py     brings the ranks up: spawned here, or launched by torchrun on several hosts
channel.py   messages of any size between rank 0 and another one
worker.py    what a rank other than 0 does
ranks.py     rank 0's hold on the others: told what to do, watched, ended
leading.py   the runner of rank 0; cuda_leading.py the one on CUDA
"""
