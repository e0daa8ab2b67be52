"""What every app uses: the clock, identifiers, middleware, template tags."""
