"""The live relay: server-sent events outside Django."""
