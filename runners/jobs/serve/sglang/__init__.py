"""Endpoints served by SGLang: its own server as a child process on a loopback port.

It runs in the environment ``sglang``. We have never run it on a GPU: tests check its arguments
against SGLang's parser, and its metric names against SGLang's source.
"""
