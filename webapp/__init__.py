"""The product as a web application.

``manage.py`` imports this package before any environment exists: keep it free of imports.
"""
