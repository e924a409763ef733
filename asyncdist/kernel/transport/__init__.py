"""The contract between the engine and a transport, for hosts and for devices, and the registry of transports.

The engine and every transport import it.
"""
