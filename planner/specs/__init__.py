"""The documents that go into the planner and come out of it: frozen, typed, JSON both ways."""
