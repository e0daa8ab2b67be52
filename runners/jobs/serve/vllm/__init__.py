"""Endpoints served by vLLM: ``vllm serve`` as a child process on a loopback port.

It runs in the environment ``vllm``. We have never run it on a GPU: tests check its arguments
against vLLM's parser, and its metrics against its CPU build.
"""
