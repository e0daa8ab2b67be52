"""What runs before and around Django: the environment, the processes, the test stage.

Everything here uses the standard library only, because ``manage.py`` imports it with the
system's Python before any package is installed. Django is deliberately absent.
"""
