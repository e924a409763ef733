"""The version of the package.

`asyncdist.__version__` repeats it and the store's status shows it. `groups.world` compares it between the ranks.
"""

VERSION = "0.1.0"
