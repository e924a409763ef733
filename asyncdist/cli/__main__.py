"""``python -m asyncdist.cli``: the same as ``asyncdist``."""

from asyncdist.cli import main

if __name__ == "__main__":
    main(prog_name="asyncdist")
