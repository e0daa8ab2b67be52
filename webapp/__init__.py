"""The Django product: wizard, plans, jobs, hosts, history; the only package with a database."""
