"""Runs, in a process that a nursery forks, what ``python`` runs with some arguments."""

import os
import runpy
import sys
import warnings


def run(test, folder, first, *arguments):
    """Run ``-c code``, ``-m module`` or the file of a program, with arguments, in a folder."""
    os.chdir(folder)
    warnings.filterwarnings("error", category=UserWarning, module="__main__")
    sys.argv[1:] = arguments
    if first == "-c":
        code, *sys.argv[1:] = arguments
        exec(code, vars(sys.modules["__main__"]))
    elif first == "-m":
        module, *sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = first
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")
    sys.exit()
