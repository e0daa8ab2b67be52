"""What ``manage.py bench`` sets up to measure the running product."""
