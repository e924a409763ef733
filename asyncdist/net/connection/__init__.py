"""Channels: messages over one authenticated connection."""
