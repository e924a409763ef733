"""How the two ends of a connection prove who they are."""
