"""The benchmark of idle ranks: what a rank costs its host while it does nothing."""
