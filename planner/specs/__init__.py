"""Request and response models of the planner: frozen, typed, convertible to and from JSON."""
