"""Training whose ranks take many steps of their own between two exchanges.

fragments        the parts of a model that are exchanged at different times (no communication)
outer_training   when a fragment is exchanged, by whom, and what happens if a member is lost
diloco           the public classes, awaited and blocking
"""
