"""One rank process of a benchmark, ``python -m asyncdist.bench FOLDER RANK ADDRESS``. `launch` starts it."""

import sys

from asyncdist.bench.rank import run_rank

run_rank(*sys.argv[1:4])
