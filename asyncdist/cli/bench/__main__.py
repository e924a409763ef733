"""One rank process of a benchmark, ``python -m asyncdist.cli.bench FOLDER RANK ADDRESS``. `launch` starts it."""

import sys

from asyncdist.cli.bench.rank import run_rank

run_rank(*sys.argv[1:4])
