"""The Django web application: wizard, plans, jobs, hosts, history; owns the database."""
