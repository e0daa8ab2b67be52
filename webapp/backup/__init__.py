"""Backups of a site: a folder with its databases, keys and files, and their digests.

``create`` writes one while the site runs, ``manifest`` describes and verifies its contents, and
``restore`` restores it. ``sqlite`` and ``postgres`` contain the database-specific parts. Not
included: Redis, whose data hosts send again; logs; and attempt folders, which are on the hosts.
"""
