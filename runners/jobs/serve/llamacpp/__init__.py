"""Endpoints served by llama.cpp, in a process of its own behind our HTTP server.

It runs in the environment ``llamacpp``, which has no torch, so nothing here imports it.
"""
