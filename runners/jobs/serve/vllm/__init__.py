"""Endpoints served by vLLM: ``vllm serve`` as a child process on a loopback port.

It runs in the environment ``vllm``, on processors in ``vllm_cpu``. We have never run it on a GPU:
tests check its arguments against vLLM's parser; its build for processors has served from a site.
"""
