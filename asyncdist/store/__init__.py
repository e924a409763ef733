"""The store: a key-value machine, its wire format, its server and its clients. Torch-free and quick to import."""
