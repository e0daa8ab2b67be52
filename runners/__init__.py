"""What runs on a GPU host: agent, supervisor, job processes, and every shape on the wire.

No Django here: a host needs only Python, this package and a credential. torch and
transformers are imported below ``runners.jobs`` alone, always in a child process.
"""
