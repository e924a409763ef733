"""Run the command line with ``python -m asyncdist.cli``."""

from asyncdist.cli import main

if __name__ == "__main__":
    main(prog_name="asyncdist")
