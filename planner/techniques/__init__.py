"""Registry of techniques: applicability, effect and source of each."""
