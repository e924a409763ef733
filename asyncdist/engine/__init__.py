"""What moves bytes: the progress engine, its drivers, the endpoint with its peers, operations and their work handles."""
