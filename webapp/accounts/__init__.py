"""Accounts and permissions: teams, roles, memberships, sessions, passwords, secrets."""
