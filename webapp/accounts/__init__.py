"""Who may see and do what: teams, roles, memberships."""
