"""Code that runs before and around Django: environment, processes, test suite.

It uses only the standard library, because ``manage.py`` imports it with the system's Python before
any package is installed.
"""
