"""An endpoint whose answers llama.cpp writes, in a process of its own behind our door.

It runs in the environment ``llamacpp``, which has no torch: what is imported here has none.
"""
