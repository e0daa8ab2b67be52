"""The first page and the search: what needs a person, what runs, what to do next."""
