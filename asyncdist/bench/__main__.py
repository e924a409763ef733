"""One rank process of a benchmark, ``python -m asyncdist.bench FOLDER RANK``. `launch` starts it."""

import sys

from asyncdist.bench.rank import run_rank

run_rank(sys.argv[1], sys.argv[2])
