"""Code shared by all apps: clock, identifiers, middleware, template tags, commands."""
