"""What is seen of a running world: the flight recorder and its dumps."""
