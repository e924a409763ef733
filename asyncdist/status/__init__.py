"""The live status of a job, for ``asyncdist top``: a port of each rank, and the viewer that finds one and asks it.

`port` answers for a rank, and `gathering` asks the other ranks on its behalf.
`discovery` finds the ports of a job at its store, and `viewer` asks whichever rank answers.
"""
