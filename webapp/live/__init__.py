"""Live updates: server-sent events outside Django."""
