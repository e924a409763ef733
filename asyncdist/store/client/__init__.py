"""The store's clients: awaited, blocking, in-process and file-based. Users and `rendezvous` create them."""
