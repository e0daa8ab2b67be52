"""An endpoint whose answers vLLM writes: ``vllm serve`` as a child on a loopback port.

It runs in the environment ``vllm``. Never run by us on a GPU: its arguments are held to its own
parser, and its figures to those of its build for processors.
"""
